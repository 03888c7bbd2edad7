"""Memory of a run: four numbers, never one, and what an out-of-memory error said.

After a capture, replays allocate nothing, so a peak that is reset after warm-up makes graphs look far
smaller than they are. Peaks here are over the life of the process; the graph pools and the driver's own
view (graph executables, NCCL, modules: what the allocator cannot see) stand beside them.
"""

import contextlib
import gc
import re
import resource
import sys
from pathlib import Path

import torch


class Peaks:
    """Peaks over the process's life, without those of a part that only the measurement needs (`set_aside`)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.allocated = self.reserved = 0

    @contextlib.contextmanager
    def set_aside(self):
        """What the block allocates does not count; it leaves an allocator whose cache is empty."""
        if self.device.type == "cuda":
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self.device))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        yield
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def account(device: torch.device, pools, peaks: Peaks) -> dict:
    """The record's `memory` object, in bytes. pools: the `common.capture.Pool`s of the run."""
    pool_bytes = sum(pool.bytes() for pool in pools)
    if device.type == "cpu":
        return {
            "peak_allocated_bytes": _peak_resident_bytes(),
            "peak_reserved_bytes": None,
            "graph_pool_bytes": pool_bytes,
            "device_used_bytes": None,
        }
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": max(peaks.allocated, torch.cuda.max_memory_allocated(device)),
        "peak_reserved_bytes": max(peaks.reserved, torch.cuda.max_memory_reserved(device)),
        "graph_pool_bytes": pool_bytes,
        "device_used_bytes": total - free,
    }


def _peak_resident_bytes() -> int:
    """Of this program alone: on Linux getrusage's peak is that of the starting process where that was larger."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def allocator_events(device: torch.device) -> dict:
    """How often the allocator had to free its cache and try again: a run with retries is not a fair one."""
    if device.type == "cpu":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {"num_alloc_retries": stats["num_alloc_retries"], "num_ooms": stats["num_ooms"]}


def free_bytes(device: torch.device) -> int | None:
    """Bytes that the driver has free on the GPU; None on the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def require_batch(batch: int, need_bytes: int, device: torch.device) -> None:
    """OutOfMemoryError where a step needs more than is free on the GPU; nothing is asked on the CPU."""
    free = free_bytes(device)
    if free is not None and need_bytes > free:
        raise torch.OutOfMemoryError(f"--batch {batch} needs {need_bytes:,} bytes, {free:,} are free: lower --batch")


def explain_oom(error: Exception, device: torch.device) -> str:
    """One line with the bytes asked for and the bytes free, from torch's out-of-memory error."""
    asked = re.search(r"allocate ([\d.]+ (?:[KMG]iB|bytes))", str(error))
    free = re.search(r"of which ([\d.]+ (?:[KMG]iB|bytes)) is free", str(error))
    if asked and free:
        return f"out of memory: asked for {asked[1]}, {free[1]} free"
    left = free_bytes(device)
    tail = f", {left / 2**30:.2f} GiB free" if left is not None else ""
    return f"out of memory: {(str(error) or type(error).__name__).splitlines()[0][:200]}{tail}"


def gib(num_bytes: float | None) -> str:
    """`12.34 GiB`, or `-` for None."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
