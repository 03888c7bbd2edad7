"""A worker process: start it, tell it what to do, notice when it dies or hangs, end it.

The worker is a training script (`python -m gpt3.train --worker SOCKET`, see common/measuring/worker.py), on several
GPUs under torchrun. It runs under benchmarks/processes/supervisor.py, so nothing that it started outlives this process.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command import Mistake
from benchmarks.processes import children, launch, supervisor
from common.measuring.channel import Channel, Closed

START_LIMIT_S = 180.0
POLL_S = 0.5


class WorkerEnded(RuntimeError):
    """The worker is gone. status: "failed" or "timeout"; the text says why."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason

    @property
    def is_refusal(self) -> bool:
        """Return whether the script did not take its arguments, or said that they cannot run on this machine."""
        return "(exit status 2)" in self.reason

    @property
    def was_killed(self) -> bool:
        """Return whether signal 9 ended the worker; a program cannot send it to itself by mistake."""
        return "SIGKILL" in self.reason


class Worker:
    """One worker process, from its start to `end`.

    Args:
        command: words that start the script; the socket's path is appended as --worker.
        environment: of the worker.
        log: file that gets what the worker prints.

    Raises:
        WorkerEnded: it ended, or did not answer within START_LIMIT_S.
        Mistake: GRAPH_SOCKET_DIR, or TMPDIR, names no folder for sockets.
    """

    def __init__(self, command: list[str], environment: dict, log: Path):
        self.log, self.start_s = log, time.monotonic()
        # A launcher has to end what it started on other machines, so it is asked first.
        asks = command[0] != sys.executable
        self._patience_s = supervisor.TERMINATE_S + (supervisor.ASK_S if asks else 0.0)
        self._folder, listener = _listening()
        self._log_start = log.stat().st_size if log.exists() else 0
        words = [*command, "--worker", str(self._folder / "s")]
        with open(log, "ab") as file, listener:
            self._process = children.start(words, asks, stdout=file, stderr=subprocess.STDOUT, env=environment)
            try:
                self._channel = self._accepted(listener)
            except BaseException:
                self._end_process()
                raise
        self.ready_s = time.monotonic() - self.start_s

    def _accepted(self, listener) -> Channel:
        while time.monotonic() - self.start_s < START_LIMIT_S:
            with contextlib.suppress(TimeoutError):
                return Channel(listener.accept()[0])
            self._require_alive()
        raise WorkerEnded("timeout", f"the worker did not answer within {START_LIMIT_S:g} s of its start")

    def call(self, command: dict, limit_s: float) -> dict:
        """Send a command and wait for its answer.

        Args:
            command: an object with "do".
            limit_s: longest time between two messages of the worker.

        Returns:
            The last message, whose "say" is "done" or "failed". Where the worker marked the begin and the end of timed
            steps, "parent_s" is the time between the two by the clock of this process.

        Raises:
            WorkerEnded: it died, or sent nothing for limit_s.
        """
        marks: dict[str, float] = {}
        try:
            self._channel.send(command)
            heard_s = time.monotonic()
            while True:
                message, now_s = self._channel.receive(POLL_S), time.monotonic()
                if message is None:
                    self._require_alive()
                    if now_s - heard_s > limit_s:
                        self._process.terminate()
                        raise WorkerEnded("timeout", f"no answer for {limit_s:g} s in {command['do']}")
                    continue
                heard_s = now_s
                if message["say"] in ("done", "failed"):
                    if {"timed_begin", "timed_end"} <= set(marks):
                        message["parent_s"] = round(marks["timed_end"] - marks["timed_begin"], 5)
                    return message
                marks[message["say"]] = now_s
        except Closed:
            # Its supervisor needs a moment to see that it ended, and to tell how.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self._require_alive()
            raise WorkerEnded("failed", "the worker closed its line") from None

    def _require_alive(self):
        status = self._process.poll()
        if status is not None:
            raise WorkerEnded("failed", self._described(status))

    def _described(self, status):
        if status > 128 or status < 0:
            number = status - 128 if status > 128 else -status
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            more = ", perhaps out of host memory" if number == signal.SIGKILL else ""
            return f"the worker was ended by {name}{more}"
        said = _last_line(self.log, self._log_start)
        return f"{said} (exit status {status})" if said else f"the worker ended with exit status {status}"

    def end(self) -> None:
        """Hang up, and end what does not end by itself."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._end_process()

    def _end_process(self):
        try:
            children.end(self._process, self._patience_s)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _listening():
    """A new folder, and a socket that listens at s in it."""
    folder = Path(tempfile.mkdtemp(prefix="worker-", dir=os.environ.get(launch.SOCKET_DIR)))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(folder / "s"))
        listener.listen(1)
        listener.settimeout(POLL_S)
    except OSError as error:
        listener.close()
        folder.rmdir()
        name = launch.SOCKET_DIR if os.environ.get(launch.SOCKET_DIR) else "TMPDIR"
        # The path of a socket has at most 107 bytes.
        why = error.strerror or error
        raise Mistake(f"{name}: no socket in {folder.parent} ({why}): take another folder") from None
    return folder, listener


def _last_line(log: Path, start: int) -> str:
    """The last line that a script said of itself after byte `start` of a log, else the last line of all, or ""."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read(2**20).decode(errors="replace").splitlines()]
    # Below it stands what torchrun prints of a rank that failed, which says nothing of why.
    said = [line for line in lines if re.match(r"python -m [\w.]+\.train: ", line)]
    found = said or [line for line in lines if line and not line.startswith("{")]
    return found[-1][-400:] if found else ""
