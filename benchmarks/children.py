"""Child processes as the harness sees them: run one with a limit and a log, keep the host busy meanwhile."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT, supervisor
from benchmarks.importer import Importer

WATCH_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a child ended: exit status (128 + n for signal n), whether it was killed at its limit, wall seconds.

    modules: of a child that an importer forked, what it had imported of `importer.AT_TIMES`.
    """

    exit_status: int
    timed_out: bool
    seconds: float
    modules: tuple | None = None

    def describe(self) -> str:
        if self.exit_status == 128 + signal.SIGKILL:
            return "killed by signal 9, perhaps out of host memory"
        if self.exit_status > 128:
            return f"killed by signal {self.exit_status - 128}"
        return f"exit status {self.exit_status}"


def run_child(
    command: list[str],
    *,
    log: Path,
    limit_s: float,
    environment: dict,
    is_remote: bool = False,
    watch: Callable[[], None] | None = None,
    importer: Importer | None = None,
) -> Outcome:
    """Run command in the repository's root under a supervisor, its output appended to `log`.

    After limit_s seconds the command and everything it started is killed. An exception here, Ctrl-C
    included, ends it too before it goes on. is_remote: the command starts others on other machines and
    ends them on SIGTERM. watch() is called every WATCH_S seconds while it runs. importer: forks the command, if it can.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if importer:
        importer.begin()
    start = time.monotonic()
    process = importer and importer.start(command, environment, log)
    is_forked = process is not None
    if not is_forked:
        with open(log, "ab") as file:
            process = _start(command, is_remote, stdout=file, stderr=subprocess.STDOUT, env=environment)
    timed_out = False
    try:
        while not timed_out:
            left_s = max(0.0, start + limit_s - time.monotonic())
            try:
                process.wait(min(left_s, WATCH_S) if watch else left_s)
                break
            except subprocess.TimeoutExpired:
                timed_out = time.monotonic() >= start + limit_s
            if watch:
                watch()
    finally:
        _end(process, supervisor.TERMINATE_S + (supervisor.ASK_S if is_remote else 0.0))
    seconds = time.monotonic() - start
    return Outcome(process.returncode, timed_out, seconds, process.modules or () if is_forked else None)


def run_shown(command: list[str]) -> int:
    """Run a command of the harness under a supervisor, its output shown; its exit status. It ends when this does."""
    process = _start(command, asks=True)
    try:
        return process.wait()
    finally:
        # The command asks its own children in turn.
        _end(process, supervisor.TERMINATE_S + 2 * supervisor.ASK_S)


def _start(command, asks, **more):
    words = supervisor.command_of(command, asks)
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True, **more)


def _end(process, patience_s):
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def waiting_passively(environment: dict) -> dict:
    """`environment` for a run on the CPU: OpenMP threads without work sleep, unless it says already how they wait.

    By default they spin, which takes the cores from whatever else runs on the host. OMP_WAIT_POLICY is OpenMP's own
    variable; GOMP_SPINCOUNT (libgomp, in PyTorch's wheels) and KMP_BLOCKTIME (LLVM's and Intel's) say the same.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return environment
    return environment | {"OMP_WAIT_POLICY": "passive"}


def last_lines(log: Path, num_lines: int = 3, limit: int = 400) -> str:
    """The end of a log as one line of text, for a record's message; of what a script says of itself the last line."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    # Below it stands what torchrun prints of a rank that failed, which says nothing of why.
    said = [line for line in lines if re.match(r"python -m \w+\.train: ", line)]
    if said:
        return said[-1][-limit:]
    # Records of earlier attempts tell nothing that their files do not.
    lines = [line for line in lines if line and not line.startswith("{")]
    return " | ".join(lines[-num_lines:])[-limit:]


class HostLoad:
    """num_processes busy processes for as long as the `with` block lasts; they end with this process too."""

    # Looks at its parent now and then, so that it ends however the parent ended.
    BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"

    def __init__(self, num_processes: int):
        self.num_processes = num_processes
        self.processes = []

    def __enter__(self):
        try:
            for _ in range(self.num_processes):
                self.processes.append(subprocess.Popen([sys.executable, "-S", "-c", self.BUSY], start_new_session=True))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []
