"""A lock for each GPU, so that two benchmarks never measure on the same GPU.

    with gpu_locks(gpus.uuids, "gpt3/bench") as others:
        others                 the benchmarks on other GPUs of this host, as text

A lock is an abstract Unix socket that is named after the GPU. Only one process can have it, of any user. It is gone
when that process ends, also by kill -9, and no child inherits it. Containers see each other's locks only where they
share the host's network. A run on a CPU holds no lock.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

LOCK, OWNER = "graph-worth lock ", "graph-worth owner "


class GpuBusy(RuntimeError):
    """Another benchmark runs on the GPU; the message names the GPU, that benchmark and its process."""


@contextlib.contextmanager
def gpu_locks(uuids: Sequence[str], name: str) -> Iterator[list[str]]:
    """Hold GPUs as long as the block lasts, and yield the texts of other benchmarks on GPUs of this host.

    uuids: GPU-... of each GPU, empty on the CPU. name: what runs, as in gpt3/bench.
    """
    others = _owners()
    with contextlib.ExitStack() as stack:
        for uuid in sorted(set(uuids)):
            try:
                stack.enter_context(_bound(LOCK + uuid))
            except OSError:
                owner = next((text for text in others if uuid in text), "another benchmark")
                raise GpuBusy(f"{uuid} is in use by {owner}: wait for it, or take another GPU") from None
            # A name of a socket has at most 107 bytes.
            stack.enter_context(_bound(f"{OWNER}{name[:30]} on {uuid[:40]}, process {os.getpid()}"))
        yield others


def num_others() -> int:
    """Number of processes that hold GPUs of this host for a benchmark, without this one."""
    processes = {text.rpartition("process ")[2] for text in _owners()}
    return len(processes - {str(os.getpid())})


def _bound(name):
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.bind(f"\0{name}")
    except OSError:
        bound.close()
        raise
    return bound


def _owners() -> list[str]:
    """The texts of all benchmarks that hold a GPU, from the list of sockets, where an abstract name begins with @."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return sorted(line.partition(f"@{OWNER}")[2] for line in lines if f"@{OWNER}" in line)
