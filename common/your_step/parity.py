"""Compare training under a graph with eager training: the first step and tensor that differ.

One more training tells causes apart: the step runs eagerly on the copies of batches that a graph reads. If that
training differs from eager as well, the copies are wrong, and not the capture.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.your_step.parts import copy_batch, static_copy
from common.your_step.state import StepState

# Of each training that is compared with another.
NUM_STEPS = 8
# Of all memory, for copies of the state.
MOST_SHARE = 0.25
# Trainings whose copies are kept at the same time.
NUM_COURSES = 4
# Losses are floats of float32 tensors: two that differ by less are equal.
_LOSS_SCATTER = 1e-6
# Less than the rounding of a tensor's largest value: an operator may take another way while it is recorded.
_ROUNDING = torch.finfo(torch.float32).eps


@dataclass
class Course:
    """A training from the start: losses, and copies of the state after those steps for which there is memory."""

    losses: list[float]
    states: dict[int, list[torch.Tensor]]


def course(state: StepState, make_step: Callable[[int], None]) -> Course:
    """Train from the start; make_step(index) trains on a batch."""
    state.reset()
    kept, device = _kept(state)
    states = {}
    for index in range(NUM_STEPS):
        make_step(index)
        if index in kept:
            states[index] = [tensor.detach().to(device, copy=True) for _, tensor in state.snapshot.tensors]
    return Course(state.read_losses(NUM_STEPS), states)


def _kept(state) -> tuple[list[int], torch.device]:
    """The last steps for whose copies there is memory, at least the very last one, and the device of these copies."""
    size = NUM_COURSES * sum(tensor.nbytes for _, tensor in state.snapshot.tensors)
    is_gpu = state.device.type == "cuda"
    total = (
        torch.cuda.mem_get_info(state.device)[1] if is_gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    count = int(MOST_SHARE * total // max(size, 1))
    steps = list(range(NUM_STEPS))[-max(1, count) :]
    return steps, state.device if count else torch.device("cpu")


def scatter(eager: Course, again: Course) -> float:
    """Return the largest difference of two trainings, relative to each tensor's largest value."""
    states = zip(eager.states.values(), again.states.values(), strict=True)
    return max((_relative(a, b) for x, y in states for a, b in zip(x, y, strict=True)), default=0.0)


def difference(eager: Course, again: Course, other: Course, names: list[str]) -> str:
    """Return the first step and tensor, or loss, by which another training leaves two eager ones, in words, or "".

    It has to differ by more than these two do. names are the tensors'.
    """
    allowed = max(2 * scatter(eager, again), _ROUNDING)
    for index, loss in enumerate(eager.losses):
        for name, a, b in zip(names, eager.states.get(index, ()), other.states.get(index, ()), strict=False):
            if not torch.equal(a, b) and _relative(a, b) > allowed:
                return f"{name} differs from eager's after step {index}, by {_relative(a, b):.1e} of its largest value"
        own = other.losses[index]
        if loss != own and not abs(loss - own) <= max(allowed, _LOSS_SCATTER) * max(abs(loss), 1e-30):
            return f"the loss of step {index} is {own:.7g}, eager's {loss:.7g}"
    return ""


def through_copies(state: StepState) -> Callable[[int], None]:
    """Return a step that runs eagerly on the copies of batches that a graph would read."""
    copies: dict[int, object] = {}

    def make_step(index):
        kind = state.batch_class(index)
        if kind not in copies:
            copies[kind] = static_copy(state.batch(index), state.device)
        copy_batch(copies[kind], state.batch(index))
        state.keep_loss(index, state.step(copies[kind]))

    return make_step


def _relative(a, b) -> float:
    # Most tensors are equal, and a model has a thousand of them.
    if torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    if not (a.isfinite().all() and b.isfinite().all()):
        return 0.0 if torch.equal(a.nan_to_num(), b.nan_to_num()) else float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
