"""Commands that the harness starts and waits for, each under a supervisor that ends all that they started."""

import os
import signal
import subprocess
from pathlib import Path

from benchmarks import ROOT
from benchmarks.processes import supervisor


def run_logged(command: list[str], log: Path, limit_s: float, environment: dict) -> int | None:
    """Run a command that may start others on other machines, and that ends them on SIGTERM.

    Args:
        command: words, run in the repository's root.
        log: file that its output is appended to.
        limit_s: seconds after which it is ended.
        environment: of the command.

    Returns:
        The exit status, 128 + n where signal n ended it; None where it was ended at its limit.
    """
    with open(log, "ab") as file:
        process = start(command, asks=True, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process, supervisor.TERMINATE_S + supervisor.ASK_S)


def start(command: list[str], asks: bool, **options) -> subprocess.Popen:
    """Start a command under a supervisor, in the repository's root.

    Args:
        command: words.
        asks: the command gets a SIGTERM and time before it is killed.
        options: of subprocess.Popen.
    """
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
