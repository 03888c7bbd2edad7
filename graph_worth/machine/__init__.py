"""Facts of a run's machine and source: GPU, host, memory, versions, commit. Observed, never set."""
