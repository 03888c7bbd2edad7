"""Figures of runs: their style, and those of the front page."""
