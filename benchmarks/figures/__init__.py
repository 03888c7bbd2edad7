"""Figures of runs: their style, the choice of runs, those of the front page and those of each model."""
