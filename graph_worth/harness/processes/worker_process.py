"""A worker process: start it, tell it what to do, notice when it dies or hangs, end it.

The worker is a training script (`python -m gpt3.train --worker SOCKET`, see measuring/worker.py), on several GPUs under
torchrun. It runs under supervisor.py, so nothing that it started outlives this process.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from graph_worth.harness.command import Mistake
from graph_worth.harness.processes import launch, supervisor
from graph_worth.measuring.channel import Channel, Closed

START_LIMIT_S = 180.0
POLL_S = 0.5
# How often a call of long silence is told of.
WAITING_S = 10.0
# What torchrun prints of the rank that ended first, and what the others see of it.
DEAD_RANK = re.compile(r"Root Cause.*?\n\s*rank\s*: (\d+) .*?\n\s*exitcode\s*: (-?\d+) ", re.DOTALL)
STOPPED_TORCHRUN = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
LOST_PEER = re.compile(r"[Cc]onnection (reset|closed)|remote process exited|Broken pipe")
# No program sends itself one of these by mistake: perhaps somebody else did, or the system had no memory left.
FROM_OUTSIDE = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL}
RANKS_END_S = 10.0
# How often this process was stopped and has gone on.
_stops = 0


def _note_stop(*_) -> None:
    global _stops
    _stops += 1


class WorkerEnded(RuntimeError):
    """The worker is gone; the text says why.

    Args:
        kind: of `facts.Raised`: "error" or "timeout", or what it said while it built its state.
        reason: in one line.
        exit_status: of its process, where that ended by itself.
        signal: that ended it or one of its ranks, or None.
        is_answer: it said so itself, and another worker would say the same.
    """

    def __init__(
        self,
        kind: str,
        reason: str,
        exit_status: int | None = None,
        signal: int | None = None,
        is_answer: bool = False,
    ):
        super().__init__(reason if exit_status is None else f"{reason} (exit status {exit_status})")
        self.kind, self.reason, self.exit_status, self.signal = kind, reason, exit_status, signal
        # 2: the script did not take its arguments, or said that they cannot run on this machine.
        self.is_refusal = exit_status == 2
        self.is_answer = is_answer or self.is_refusal
        self.is_from_outside = signal in FROM_OUTSIDE


class WorkerProcess:
    """One worker process, from its start to `end`. It starts at once; the first call waits until it answers.

    Args:
        command: words that start the script; the socket's path is appended as --worker.
        environment: of the worker.
        log: file that gets what the worker prints.
    """

    def __init__(self, command: list[str], environment: dict, log: Path):
        self.log, self.start_s = log, time.monotonic()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCONT, _note_stop)
        # A launcher has to end what it started on other machines, so it is asked first.
        asks = command[0] != sys.executable
        self._has_ranks = "torch.distributed.run" in command
        self._patience_s = supervisor.TERMINATE_S + (supervisor.ASK_S if asks else 0.0)
        # Its supervisor removes the folder also where this process is killed, so it is there before the folder is.
        where = os.path.abspath(os.environ.get(launch.SOCKET_DIR) or tempfile.gettempdir())
        self._folder = Path(where, f"worker-{secrets.token_hex(4)}")
        self._log_start = log.stat().st_size if log.exists() else 0
        self._channel: Channel | None = None
        words, options = [*command, "--worker", str(self._folder / "s")], {"stderr": subprocess.STDOUT}
        with open(log, "ab") as file:
            self._process = supervisor.start(words, asks, self._folder, stdout=file, env=environment, **options)
        try:
            self._listener = _listening(self._folder)
        except Mistake:
            supervisor.end(self._process, self._patience_s)
            raise

    def wait(self) -> float:
        """Wait until it answers, and return the seconds that this took."""
        start_s = time.monotonic()
        while self._channel is None:
            with contextlib.suppress(TimeoutError):
                self._channel = Channel(self._listener.accept()[0])
                self._listener.close()
                break
            self._require_alive()
            if time.monotonic() - start_s > START_LIMIT_S:
                raise WorkerEnded("timeout", f"the worker did not answer within {START_LIMIT_S:g} s of its start")
        return time.monotonic() - start_s

    def call(self, command: dict, limit_s: float, waiting: Callable[[float], None] | None = None) -> dict:
        """Send a command and wait for its answer; WorkerEnded where it died, or sent nothing for limit_s.

        `waiting` gets the seconds so far, every WAITING_S until the worker has made the variant or answered.

        Returns:
            The last message, whose "say" is "done" or "failed". Where the worker marked the begin and the end of timed
            steps, "parent_s" is the time between the two by the clock of this process, "whole_s" that of the call, and
            "was_stopped" whether this process was stopped meanwhile, so that it did not see when they came. A rank that
            has lost another one gives the end of that one as its reason; WorkerEnded where a signal ended it.
        """
        self.wait()
        assert self._channel is not None, "it has answered"
        marks: dict[str, float] = {}
        stops = seen = _stops
        waits = 1
        try:
            sent_s = heard_s = time.monotonic()
            self._channel.send(command)
            while True:
                message, now_s = self._channel.receive(POLL_S), time.monotonic()
                if message is None:
                    self._require_alive()
                    if waiting and "made" not in marks and now_s - sent_s >= waits * WAITING_S:
                        waiting(now_s - sent_s)
                        waits += 1
                    if seen != _stops:
                        # A user's Ctrl-Z is no silence of the worker.
                        seen, heard_s = _stops, now_s
                    if now_s - heard_s > limit_s:
                        self._process.terminate()
                        raise WorkerEnded("timeout", f"no answer for {limit_s:g} s in {command['do']}")
                    continue
                heard_s = now_s
                if message["say"] in ("done", "failed"):
                    if {"timed_begin", "timed_end"} <= set(marks):
                        message["parent_s"] = round(marks["timed_end"] - marks["timed_begin"], 5)
                        message["whole_s"] = round(now_s - sent_s, 5)
                        message["was_stopped"] = _stops != stops
                    if message["say"] == "failed" and message["fatal"] and self._has_ranks:
                        self._explain(message)
                    return message
                marks[message["say"]] = now_s
        except Closed:
            # Its supervisor needs a moment to see that it ended, and to tell how.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self._require_alive()
            raise WorkerEnded("error", "the worker closed its line") from None

    def _explain(self, message) -> None:
        """Give the end of a dead rank as the reason of a rank that lost it; WorkerEnded where a signal ended it."""
        reason, number = self._dead_rank()
        if number is not None:
            raise WorkerEnded("error", reason, signal=number)
        if reason and LOST_PEER.search(message["reason"]):
            message["reason"] = reason

    def _require_alive(self):
        status = self._process.poll()
        if status is None:
            return
        if status > 128 or status < 0:
            number = status - 128 if status > 128 else -status
            more = ", perhaps out of host memory" if number == signal.SIGKILL else ""
            raise WorkerEnded(
                "error", f"the worker was ended by {supervisor.name_of_signal(number)}{more}", signal=number
            )
        reason, ended_by = self._dead_rank()
        if ended_by is not None:
            raise WorkerEnded("error", reason, signal=ended_by)
        reason = reason or _last_line(self.log, self._log_start)
        raise WorkerEnded("error", reason or "the worker ended", exit_status=status)

    def _dead_rank(self) -> tuple[str, int | None]:
        """Return how the first of several ranks ended, as torchrun reports it at the end, and the signal that ended it.

        The text is "" where torchrun says nothing.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(RANKS_END_S)
        text = _text(self.log, self._log_start)
        stops, matches = STOPPED_TORCHRUN.findall(text), DEAD_RANK.findall(text)
        if stops:
            return f"torchrun was ended by {supervisor.name_of_signal(int(stops[-1]))}", int(stops[-1])
        if not matches:
            return "", None
        rank, status = matches[-1][0], int(matches[-1][1])
        if status < 0:
            return f"rank {rank} was ended by {supervisor.name_of_signal(-status)}", -status
        if status == 1:
            return "", None
        # With 2 a script has named a mistake.
        mistakes = _said(text) if status == 2 else []
        return mistakes[-1] if mistakes else f"rank {rank} ended with exit status {status}", None

    def end(self, is_at_once: bool = False) -> None:
        """Hang up, and end what does not end by itself; with `is_at_once` in the middle of a block, too."""
        if self._channel is not None:
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if is_at_once else 20)
        try:
            supervisor.end(self._process, self._patience_s)
        finally:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _listening(folder: Path) -> socket.socket:
    """Make a folder, and return a socket that listens at s in it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder.mkdir(mode=0o700)
        listener.bind(str(folder / "s"))
        listener.listen(1)
        listener.settimeout(POLL_S)
    except OSError as error:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        name = launch.SOCKET_DIR if os.environ.get(launch.SOCKET_DIR) else "TMPDIR"
        # The path of a socket has at most 107 bytes.
        why = error.strerror or error
        raise Mistake(f"{name}: no socket in {folder.parent} ({why}): take another folder") from None
    return listener


def _last_line(log: Path, start: int) -> str:
    """The last line that a script said of itself after byte `start` of a log, else the last line of all, or ""."""
    text = _text(log, start)
    # Below it stands what torchrun prints of a rank that failed, which says nothing of why.
    lines = _said(text) or [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1][-400:] if lines else ""


def _text(log: Path, start: int) -> str:
    with open(log, "rb") as file:
        file.seek(start)
        return file.read(2**20).decode(errors="replace")


def _said(text: str) -> list[str]:
    """The lines of a log that a script said of itself."""
    return re.findall(r"^python -m [\w.]+: (.*?)\s*$", text, re.MULTILINE)
