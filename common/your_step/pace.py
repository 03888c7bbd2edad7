"""The pace of an eager step on a GPU: the host's time to issue it beside the GPU's busy time, before any graph."""

import itertools
import statistics
from types import SimpleNamespace

from common.measuring import block, trace
from common.your_step.config import LEAST_GAIN

NUM_STEPS = 3


def text(issue_ms: float, busy_ms: float) -> str:
    """Return whether a step is bound by its launches, and what a graph may gain, which is an estimate.

    Args:
        issue_ms: the host's time to issue an eager step.
        busy_ms: the GPU's time to work on it.
    """
    times = f"the host issues an eager step in {issue_ms:.3g} ms, the GPU is busy for {busy_ms:.3g} ms"
    if issue_ms < LEAST_GAIN * busy_ms:
        return f"not launch-bound: {times}, so a graph has little to remove"
    return f"launch-bound: {times}, so a graph may gain up to {issue_ms / busy_ms:.2f}x"


def measured(state) -> str:
    """Return the pace of a step in words; "" on a CPU, and where no kernel was seen. The state is at its start then."""
    if state.device.type != "cuda":
        return ""
    index = itertools.count()
    state.reset()
    # Layers are marked, so that the launch queue can be drained there.
    variant = SimpleNamespace(step=state.marked_train)
    for _ in range(NUM_STEPS):
        variant.step(next(index))
    times = [block.issue_ms_of(variant, next(index), state.device) or 0.0 for _ in range(NUM_STEPS)]

    def run_steps(count):
        for _ in range(count):
            variant.step(next(index))

    profile = trace.profile(run_steps, NUM_STEPS, num_heat_steps=NUM_STEPS)
    busy_ms = trace.facts(profile.events, NUM_STEPS)["busy_ms"]
    state.reset()
    return text(statistics.median(times), busy_ms) if busy_ms else ""
