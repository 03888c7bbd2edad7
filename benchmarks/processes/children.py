"""Commands that the harness starts and waits for, each under a supervisor that ends all that they started."""

import os
import signal
import subprocess

from benchmarks import ROOT
from benchmarks.processes import supervisor


def start(command: list[str], asks: bool, **options) -> subprocess.Popen:
    """Start a command under a supervisor, in the repository's root. `asks`: it gets a SIGTERM before it is killed."""
    words = supervisor.command_of(command, asks)
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True, **options)


def end(process: subprocess.Popen, patience_s: float) -> None:
    """End a command that `start` started, with SIGTERM, then with SIGKILL after `patience_s` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
