"""The memory that a graph of the whole step will need, foretold from an eager step, beside what is free on the GPU."""

import torch

from common.machine.memory import gib
from common.your_step.findings import STOPS, Finding


def peak_of(state, index: int) -> int | None:
    """Make the step of a batch; return the bytes that it takes beside what was there before, None on a CPU."""
    if state.device.type != "cuda":
        return None
    state.reset()
    # In a capture gradients that are made anew lie in the graph's memory.
    for module in state.modules if state.binds_gradients else ():
        module.zero_grad(set_to_none=True)
    batch = state.batch(index)
    torch.cuda.reset_peak_memory_stats(state.device)
    before = torch.cuda.memory_allocated(state.device)
    state.step(batch)
    return torch.cuda.max_memory_allocated(state.device) - before


def predicted(state, peak_bytes: int | None) -> tuple[str, list[Finding]]:
    """Return a line on the graph's memory, and the finding where it will not fit; ("", []) on a CPU."""
    if peak_bytes is None:
        return "", []
    # What torch has cached it gives back before the first capture.
    cached = torch.cuda.memory_reserved(state.device) - torch.cuda.memory_allocated(state.device)
    return beside_free(peak_bytes, torch.cuda.mem_get_info(state.device)[0] + cached, str(state.path))


def beside_free(need_bytes: int, free_bytes: int, where: str) -> tuple[str, list[Finding]]:
    """Return (line, findings) for the bytes that a graph will need and those that are free, torch's cache included."""
    text = f"a graph of the whole step will keep about {gib(need_bytes)}, {gib(free_bytes)} are free"
    return f"memory: {text}", [Finding("memory", STOPS, where, text)] if need_bytes > free_bytes else []
