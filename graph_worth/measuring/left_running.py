"""Threads of Python, and processes of this one and its children, that work on beside the training.

A graph that leaves some running would have them work in the blocks of others. A process that lost its parent becomes a
child of this one (`adopt_orphans`), so a process cannot hide by having its parent end.
"""

import contextlib
import ctypes
import sys
import threading
import time
from pathlib import Path

# A thread or process that ends has so long for it.
PATIENCE_S = 0.2
PR_SET_CHILD_SUBREAPER = 36
# Helpers of Python and torch, which stay for all.
HELPERS = ("multiprocessing.resource_tracker", "compile_worker")


def adopt_orphans() -> None:
    """Let processes whose parent ends, and that this one or a child had started, become children of this one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def threads() -> set[threading.Thread]:
    """Return Python's threads, but for those of installed packages, which start them when they like, and of pools."""
    python_threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    codes = [(thread, getattr(thread, "_target", None) or type(thread).run) for thread in python_threads]
    return {thread for thread, code in codes if not _is_installed(code)}


def _is_installed(code) -> bool:
    name = getattr(code, "__module__", None) or ""
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return "-packages/" in path or name.startswith("concurrent.")


def processes() -> set[int]:
    """Return the children of this process that run, but for `HELPERS`."""
    pids = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile, and so may a child; some kernels list no children.
        with contextlib.suppress(OSError):
            pids |= {int(word) for word in (task / "children").read_text().split() if _is_running(int(word))}
    return pids


def _is_running(pid) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return state not in "ZX" and not any(helper in words for helper in HELPERS)


class Before:
    """Threads and processes that ran before a command, to tell afterwards which were left running."""

    def __init__(self):
        self._threads, self._processes = threads(), processes()

    def left(self) -> str:
        """Return what runs that did not before, in a line, or "".

        The training may start threads and processes in its first steps, and others in their place at a reset: their
        number counts.
        """
        end_s = time.monotonic() + PATIENCE_S
        new = threads() - self._threads
        for thread in new:
            thread.join(max(0.0, end_s - time.monotonic()))
        while len(processes()) > len(self._processes) and time.monotonic() < end_s:
            time.sleep(0.01)
        count, names = len(threads()) - len(self._threads), ", ".join(sorted(thread.name for thread in new))
        if count > 0:
            return f"left {count} threads running: {names}"
        started = sorted(processes() - self._processes)
        if len(processes()) > len(self._processes):
            return f"left {len(started)} processes running: {', '.join(map(_name_of, started))}"
        return ""


def _name_of(pid) -> str:
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} ({pid})"
    except OSError:
        return str(pid)
