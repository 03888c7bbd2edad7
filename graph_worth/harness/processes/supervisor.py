"""The process between the harness and a command: it ends all that the command started, however it ends itself.

    python -m graph_worth.harness.processes.supervisor PARENT_PID [--ask] [--remove FOLDER] -- COMMAND...

It adopts every process that the command starts. torchrun gives each worker a session of its own, which a signal to a
process group does not reach. It ends all of them when the command ends, when it is told to stop, or when PARENT_PID is
gone, even by kill -9. With --ask the command gets a SIGTERM and time to end first, because only the command can reach
the processes that it started on other machines. FOLDER is removed at last. Exit status: the command's, 128 + n where
signal n ended it, 127 where it cannot be started.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from graph_worth.folders import ROOT, START, SUPERVISOR

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TERMINATE_S = 15.0
# Slurm's srun waits for KillWait (30 s unless a site sets it) and two seconds more.
ASK_S = 45.0


class _Stop(Exception):
    pass


def start(command: list[str], asks: bool, folder: Path | None = None, **options) -> subprocess.Popen:
    """Start a command under a supervisor, in the repository's root.

    asks: it gets a SIGTERM and ASK_S to end first. folder: of the command, which does not outlive it.
    """
    more = ["--ask"] * asks + (["--remove", str(folder)] if folder else [])
    words = [sys.executable, str(START), "graph_worth.harness.processes.supervisor", str(os.getpid())]
    words += [*more, "--", *command]
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


def name_of_signal(number: int) -> str:
    """Return the name of a signal, or its number."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def run_logged(command: list[str], log: Path, limit_s: float, environment: dict) -> int | None:
    """Run a command that may start others on other machines, and that ends them on SIGTERM; append its output to `log`.

    Returns:
        The exit status, 128 + n where signal n ended it; None where it was ended after limit_s.
    """
    with open(log, "ab") as file:
        process = start(command, asks=True, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process, TERMINATE_S + ASK_S)


def set_parent_death_signal(number: int) -> None:
    """Let the kernel send signal `number` to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep `number` processes busy for as long as the block lasts. They end when the calling thread ends, too."""
    command, parent = [sys.executable, "-I", "-S", "-c", "while True: pass"], os.getpid()

    def end_with_parent():
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children, grandchildren and so on of `pid`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The second field, the name in parentheses, may itself hold spaces and parentheses.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    pids = children.get(pid, [])
    for descendant in pids:
        pids += children.get(descendant, [])
    return pids


def supervise(parent_pid: int, command: list[str], asks: bool) -> int:
    """Run a command, end all that it started, also when the process parent_pid ends, and return its exit status."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    set_parent_death_signal(signal.SIGTERM)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = None
    try:
        # The parent may have gone before prctl could ask for the signal.
        if os.getppid() != parent_pid or stopped:
            raise _Stop
        number = signal.SIGTERM if asks else signal.SIGKILL
        # This process has one thread, so no lock is held across the fork.
        start = lambda: set_parent_death_signal(number)  # noqa: E731
        # A launcher's command runs on other machines, too.
        environment = os.environ if asks else os.environ | {SUPERVISOR: str(os.getpid())}
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=start, env=environment)
        # A signal before this line would have found no process to end.
        signal.signal(signal.SIGTERM, _raise_stop)
        if stopped:
            raise _Stop
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


if __name__ == "__main__":
    arguments, words = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    try:
        sys.exit(supervise(int(arguments[0]), words, "--ask" in arguments))
    finally:
        if "--remove" in arguments:
            shutil.rmtree(arguments[-1], ignore_errors=True)
