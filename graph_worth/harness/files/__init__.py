"""Runs on disk: the run file, the run that is being measured, and all runs of a folder as rows."""
