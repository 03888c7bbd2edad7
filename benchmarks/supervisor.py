"""The process between the harness and a command: it ends all that the command started, however it ends itself.

    python -m benchmarks.supervisor PARENT_PID [--ask] -- COMMAND...

It adopts whatever the command starts (torchrun gives each worker a session of its own, which a signal to a process
group does not reach) and ends all of it when the command ends, when it is told to stop, or when PARENT_PID is gone,
even by kill -9. With --ask the command gets a SIGTERM and time to end first: what it started on other machines, only it
can reach. Exit status: the command's, 128 + n where signal n ended it, 127 where it cannot be started.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERMINATE_S = 15.0
# Slurm's srun waits for KillWait (30 s unless a site sets it) and two seconds more.
ASK_S = 45.0


class _Stop(Exception):
    pass


def command_of(command: list[str], asks: bool = False) -> list[str]:
    """`command` under a supervisor of this process."""
    ask = ["--ask"] if asks else []
    return [sys.executable, "-m", "benchmarks.supervisor", str(os.getpid()), *ask, "--", *command]


def supervise(parent_pid: int, start: Callable, asks: bool) -> int:
    """Wait for the process that start() gives, a Popen or what has wait() and terminate(); its exit status."""
    signal.signal(signal.SIGTERM, _raise_stop)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = None
    try:
        # The parent may have gone before prctl could ask to be told.
        if os.getppid() != parent_pid:
            raise _Stop
        process = start()
        status = process.wait()
    except _Stop:
        status = -signal.SIGTERM
    except OSError as error:
        print(f"cannot start {error.filename}: {error.strerror}")
        return 127
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if asks and process is not None:
            _ask_to_end(process)
        _end_descendants()
    return status if status >= 0 else 128 - status


def end_with_parent(parent_pid: int, number: int) -> None:
    """This process gets signal `number` when its parent ends, and ends at once where that is not parent_pid."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _raise_stop(signum, frame):
    raise _Stop


def _ask_to_end(process):
    process.terminate()
    try:
        process.wait(ASK_S)
    except subprocess.TimeoutExpired:
        print(f"still there {ASK_S:g} s after SIGTERM: {process.args[0]}", flush=True)


def _end_descendants():
    deadline = time.monotonic() + TERMINATE_S / 2
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Process ids of all children, grandchildren and so on of `pid`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The second field, the name in parentheses, may itself hold spaces and parentheses.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = children.get(pid, [])
    for each in found:
        found += children.get(each, [])
    return found


def main() -> int:
    own, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    asks = "--ask" in own
    prctl, last_signal = ctypes.CDLL(None).prctl, signal.SIGTERM if asks else signal.SIGKILL
    start = functools.partial(
        subprocess.Popen,
        command,
        start_new_session=True,
        # One thread only here, so nothing can hold a lock across the fork.
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, last_signal, 0, 0, 0),
    )
    return supervise(int(own[0]), start, asks)


if __name__ == "__main__":
    sys.exit(main())
