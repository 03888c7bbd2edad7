"""Figures of runs: their style, the launch roofline, and the steps of several ranks."""
