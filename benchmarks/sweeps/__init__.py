"""Sweeps: which value to measure next, the points on disk, and their table."""
