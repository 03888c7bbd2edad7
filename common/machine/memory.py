"""Memory of the GPU: what is free, and what an out-of-memory error said."""

import re

import torch


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
