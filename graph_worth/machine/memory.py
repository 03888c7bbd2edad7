"""Memory of the GPU: what is free, what a piece of code takes, and what an out-of-memory error said."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes that the driver has free on the GPU; None on the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def require_batch(batch: int, need_bytes: int, device: torch.device) -> None:
    """Raise OutOfMemoryError if a step needs more memory than is free on the GPU. A CPU is not checked."""
    free = free_bytes(device)
    if free is not None and need_bytes > free:
        raise torch.OutOfMemoryError(f"--batch {batch} needs {need_bytes:,} bytes, {free:,} are free: lower --batch")


def explain_oom(error: Exception, device: torch.device) -> str:
    """One line with the bytes asked for and the bytes free, from torch's out-of-memory error."""
    requested = re.search(r"allocate ([\d.]+ (?:[KMG]iB|bytes))", str(error))
    free = re.search(r"of which ([\d.]+ (?:[KMG]iB|bytes)) is free", str(error))
    if requested and free:
        return f"out of memory: asked for {requested[1]}, {free[1]} free"
    left = free_bytes(device)
    tail = f", {left / 2**30:.2f} GiB free" if left is not None else ""
    return f"out of memory: {(str(error) or type(error).__name__).splitlines()[0][:200]}{tail}"


@contextlib.contextmanager
def noted(facts: dict[str, dict[str, int]]) -> Iterator[None]:
    """Put bytes of torch's allocator into `facts`, on a GPU: "before", "peak" and "after", "allocated" and "reserved".

    Of several blocks noted in one place: before the first, the largest peak, after the last.
    """
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    facts.setdefault("before", {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()})
    yield
    facts["after"] = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    peak, before = facts.setdefault("peak", {}), facts["before"]
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    for name, now in peaks.items():
        peak[name] = max(peak.get(name, before[name]), now)


def reserved_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator has taken from the GPU; on the CPU the resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gib(num_bytes: float | None) -> str:
    """`12.34 GiB`, or `-` for None."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
