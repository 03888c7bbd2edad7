"""Parity: does a training compute the numbers of another one from the same start, and where do the two part first?

Equal hashes of the state say that all bits are equal. Where they differ, losses say how far two trainings part, and
copies of the state, where there is memory for them, which tensor parts. No torch here: it judges run files, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A difference counts from so many times that of two trainings of the reference.
SCATTER_FACTOR = 2.0
# Losses are floats of float32 tensors: two that differ by less are equal.
_LOSS_ROUNDING = 1e-6
# Less than the rounding of a tensor's largest value: an operator may take another way while it is recorded.
_ROUNDING = 2.0**-23


def require_finite(losses: Sequence[float]) -> None:
    """FloatingPointError where a loss is NaN or infinite."""
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {index}")


@dataclass(frozen=True)
class ParityOfRuns:
    """Differences between two courses of training.

    Attributes:
        is_bitwise: all hashes are equal.
        deviation: the largest relative difference of their losses; None where they cannot be compared.
        step: the first step whose hashes differ.
    """

    is_bitwise: bool
    deviation: float | None
    step: int = 0

    def is_within(self, allowed: float) -> bool:
        """Return whether the losses differ by no more than is allowed; without an allowance only equal bits do."""
        return self.is_bitwise or (allowed > 0 and self.deviation is not None and self.deviation <= allowed)

    def __str__(self) -> str:
        if self.is_bitwise:
            return "bitwise"
        return "no losses" if self.deviation is None else amount(self.deviation) if self.deviation else "equal losses"


def amount(share: float) -> str:
    """Return a relative difference as it is printed: 0.0e+00 says nothing."""
    return f"{share:.1e}" if share else "nothing"


def agreement(course, reference) -> ParityOfRuns:
    """Return how near two courses of a run file are."""
    pairs = list(zip(course.hashes, reference.hashes, strict=False))
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), 0)
    is_bitwise = course.hashes == reference.hashes and len(course.hashes) > 0
    return ParityOfRuns(is_bitwise, loss_deviation(course.losses, reference.losses), first)


def loss_deviation(losses: Sequence[float | None], reference: Sequence[float | None]) -> float | None:
    """Return the largest relative difference of two rows of losses; None where they cannot be compared, as if empty."""
    pairs = [(a, b) for a, b in zip(losses, reference, strict=False) if a is not None and b is not None]
    if not len(losses) == len(reference) == len(pairs):
        return None
    return max((_loss_difference(*pair) for pair in pairs), default=None)


def first_loss(losses: Sequence[float], reference: Sequence[float], allowed: float) -> int | None:
    """Return the first step whose losses differ by more than is allowed, relative to the reference's."""
    pairs = enumerate(zip(losses, reference, strict=True))
    return next((index for index, pair in pairs if _loss_difference(*pair) > allowed), None)


def scatter(first, second) -> float:
    """Return the largest difference of the copies of two courses, relative to each tensor's largest value."""
    return max((_step_scatter(first, second, index) for index in first.copies), default=0.0)


def _step_scatter(first, second, index) -> float:
    pairs = zip(first.copies.get(index, ()), second.copies.get(index, ()), strict=True)
    return max((_tensor_difference(a, b) for a, b in pairs), default=0.0)


def difference(eager, again, course, rounded=None) -> str:
    """Return the first step and tensor, or loss, by which a course leaves two eager ones, in words, or "".

    It has to differ by more than these two do. The doctor, measure and graphed judge by it.

    Args:
        eager: the first eager course.
        again: another one from the same start.
        course: it is judged.
        rounded: an eager one that one rounding has moved at its start, for a course whose kernels may round otherwise:
            up to each step it may differ by as much.
    """
    allowed = max(SCATTER_FACTOR * scatter(eager, again), _ROUNDING)
    for index, loss in enumerate(eager.losses):
        if rounded is not None:
            moved = max(_step_scatter(eager, rounded, index), _loss_difference(rounded.losses[index], loss))
            allowed = max(allowed, SCATTER_FACTOR * moved)
        tensors = zip(eager.names, eager.copies.get(index, ()), course.copies.get(index, ()), strict=False)
        for name, a, b in tensors:
            share = _tensor_difference(a, b)
            if share > allowed:
                words = f"by {share:.1e} of its largest value" if share < math.inf else "in NaN or infinite values"
                return f"{name} differs from eager's after step {index}, {words}"
        if _loss_difference(course.losses[index], loss) > max(allowed, _LOSS_ROUNDING):
            return f"the loss of step {index} is {course.losses[index]:.7g}, eager's {loss:.7g}"
    return ""


def _loss_difference(loss: float, reference: float) -> float:
    share = 0.0 if loss == reference else abs(loss - reference) / max(abs(reference), 1e-30)
    return math.inf if math.isnan(share) else share


def _tensor_difference(a, b) -> float:
    # Most tensors are equal, and a model has a thousand of them.
    if a.equal(b):
        return 0.0
    a, b = a.double(), b.double()
    if not (a.isfinite().all() and b.isfinite().all()):
        return 0.0 if a.nan_to_num().equal(b.nan_to_num()) else math.inf
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
