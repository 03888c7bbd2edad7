"""Processes of the harness: workers, launchers, locks, and the GPUs of this machine."""
