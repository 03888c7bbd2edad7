"""The pace of an eager step on a GPU: the host's time to issue it beside the GPU's busy time, before any graph."""

import itertools
import statistics
from dataclasses import dataclass

from common.measuring import block, trace
from common.your_step.config import LEAST_GAIN
from common.your_step.state import StepState

NUM_STEPS = 3


@dataclass(frozen=True)
class Pace:
    """Times of an eager step: the host issues it in issue_ms, the GPU works for busy_ms."""

    issue_ms: float
    busy_ms: float

    def text(self) -> str:
        """Return whether the step is bound by its launches, and what a graph may gain, which is an estimate."""
        times = f"the host issues an eager step in {self.issue_ms:.3g} ms, the GPU is busy for {self.busy_ms:.3g} ms"
        if self.issue_ms < LEAST_GAIN * self.busy_ms:
            return f"not launch-bound: {times}, so a graph has little to remove"
        return f"launch-bound: {times}, so a graph may gain up to {self.issue_ms / self.busy_ms:.2f}x"


def measured(state) -> Pace | None:
    """Return the pace of a step; None on a CPU, and where no kernel was seen.

    Args:
        state: a StepState, or that of a model. It is put back to its start.
    """
    if state.device.type != "cuda":
        return None
    index = itertools.count()
    state.reset()
    variant = _Eager(state)
    for _ in range(NUM_STEPS):
        variant.step(next(index))
    times = [block.issue_ms_of(variant, next(index), state.device) or 0.0 for _ in range(NUM_STEPS)]

    def run_steps(count):
        for _ in range(count):
            variant.step(next(index))

    profile = trace.profile(run_steps, NUM_STEPS, num_heat_steps=NUM_STEPS)
    busy_ms = trace.facts(profile.events, NUM_STEPS)["busy_ms"]
    state.reset()
    return Pace(statistics.median(times), busy_ms) if busy_ms else None


class _Eager:
    """The step as it is; the layers of a user's step are marked, so that the launch queue can be drained there."""

    def __init__(self, state):
        self._state = state

    def step(self, index: int) -> None:
        """Train on batch `index`."""
        self._state.marked_train(index) if isinstance(self._state, StepState) else self._state.train(index)
