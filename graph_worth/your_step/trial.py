"""Graphs of a step, each beside two eager trainings from the same start: equal, wrong, or not to be captured."""

import contextlib
import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graph_worth import made_variant as variants
from graph_worth.capture.asking import answering
from graph_worth.capture.errors import explained
from graph_worth.capture.pool import CaptureError
from graph_worth.measuring import course, parity, torch_settings
from graph_worth.measuring.course import Course
from graph_worth.your_step import rank_decisions
from graph_worth.your_step.findings import STOPS, WRONG, Finding
from graph_worth.your_step.parts import copy_batch, static_copy
from graph_worth.your_step.state import StepState

EQUAL = "trains as eager does"
# Between two eager trainings whose kernels are not deterministic; more is state that is not put back.
MOST_NOISE = 1e-2
# Of each training that is compared with another.
NUM_STEPS = 8
# Of all memory, for copies of the state, and trainings whose copies are kept at the same time.
MOST_SHARE, NUM_COURSES = 0.25, 4


@contextlib.contextmanager
def _noting_other_kernels():
    """Yield a list that gets the warnings of operators within it that have no deterministic kernel."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield messages
    texts = [str(warning.message) for warning in seen]
    messages += [text for text in texts if re.match(torch_settings.OTHER_KERNEL, text)]


def course_of(state: StepState, step: Callable[[int], None]) -> Course:
    """Train from the start, and copy the state after the last steps: all for whose copies there is memory, or one."""
    size = NUM_COURSES * sum(tensor.nbytes for _, tensor in state.named_state())
    is_gpu = state.device.type == "cuda"
    total = (
        torch.cuda.mem_get_info(state.device)[1] if is_gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    count = int(MOST_SHARE * total // max(size, 1))
    copied = range(NUM_STEPS)[-max(1, count) :]
    return course.course(state, step, NUM_STEPS, copied=copied, device=state.device if count else "cpu")


def through_copies(state: StepState) -> Callable[[int], None]:
    """Return a step that runs eagerly on the copies of batches that a graph would read.

    If that training differs from eager, too, the copies are wrong, and not the capture.
    """
    copies: dict[int, object] = {}

    def step(index):
        kind = state.batch_class(index)
        if kind not in copies:
            copies[kind] = static_copy(state.batch(index), state.device)
        copy_batch(copies[kind], state.batch(index))
        state.keep_loss(index, state.step(copies[kind]))

    return step


@dataclass(frozen=True)
class Outcome:
    """The result of one graph.

    Attributes:
        text: the result in one line.
        is_equal: the graph trained as eager does.
        captured: the part of the step that was captured, in words, where it is equal.
        finding: the failure, else None.
    """

    text: str
    is_equal: bool = False
    captured: str = ""
    finding: Finding | None = None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class Trial:
    """Graphs of a step beside two eager trainings.

    Args:
        changes_host: the step changes what a reset does not put back, so that trainings differ for that reason.
        as_captured: eager steps do what they do in a capture, where they ask.
    """

    def __init__(self, state: StepState, changes_host: bool, as_captured: bool = True):
        self.state, self._changes_host, self._as_captured = state, changes_host, as_captured
        self._eager: list[Course] = []

    def of(self, make, obstacles: list[Finding]) -> Outcome:
        """Return how a variant goes that make(state) captures, unless obstacles are known."""
        state = self.state
        if obstacles:
            return Outcome(f"not tried: {obstacles[0].kind} at {obstacles[0].where}")
        variant: Any = None
        failed = None
        try:
            variant = make(state)
        except (CaptureError, torch.OutOfMemoryError) as error:
            failed = self._failed(error, STOPS)
        except Exception as error:
            failed = Outcome(f"not possible: {_first_line(error)}")
        finally:
            state.reset()
        failed = rank_decisions.first(failed)
        if failed:
            if variant is not None:
                variant.close()
            return failed
        try:
            variants.enter(variant)
            return self._judged(variant)
        except (CaptureError, torch.OutOfMemoryError) as error:
            return self._failed(error, WRONG)
        except Exception as error:
            if not self._eager:
                raise  # the step itself fails
            return Outcome(f"failed: {_first_line(error)}")
        finally:
            variants.leave(variant)
            variant.close()
            state.reset()

    def _failed(self, error, level) -> Outcome:
        is_full = isinstance(error, torch.OutOfMemoryError)
        message = variants.status_of(error, self.state.device)[1] if is_full else str(error)
        reason, place = (error.reason, error.place) if isinstance(error, CaptureError) else ("", "")
        cause, remedy = explained(message, reason)
        evidence = (message if is_full else cause or message) + (f"; {remedy}" if remedy else "")
        evidence += "".join(f"; CUDA's log: {line}" for line in getattr(error, "log", ()))
        kind, level = ("memory", STOPS) if is_full else ("capture", level)
        finding = Finding(kind, level, place or "the step", evidence)
        text = f"failed: {message if is_full else cause or message}"
        return Outcome(text, finding=finding)

    def _judged(self, variant) -> Outcome:
        if not self._eager:
            variants.leave(variant)
            with _noting_other_kernels() as others:
                self._eager = [self._course(self.state.train) for _ in range(2)]
            self._is_exact = not others
            variants.enter(variant)
        eager, again = self._eager
        fault = ""
        if not all(map(math.isfinite, eager.losses)):
            count = len(self.state.batches)
            losses = [(f"warm-up step {i}, of batch {i % count},", x) for i, x in enumerate(self.state.warm_losses)]
            losses += [(f"step {i}", x) for i, x in enumerate(eager.losses)]
            fault = next(f"eager's loss of {step} is {x}" for step, x in losses if not math.isfinite(x))
        fault = rank_decisions.first(fault)
        if fault:
            return self._wrong("not finite", f"{fault}: nothing is compared", "")
        unlike = parity.difference(eager, eager, again)
        if not self._is_exact and parity.scatter(eager, again) <= MOST_NOISE:
            unlike = ""
        unlike = rank_decisions.first(unlike)
        if unlike:
            return self._wrong("not repeatable", f"two eager trainings from one start differ: {unlike}", "")
        differs = self._difference(variant.step)
        if not differs:
            return self._judged_with_filled_memory(variant)
        cause = ""
        if not self._changes_host:
            copied = self._difference(through_copies(self.state))
            if copied:
                return self._wrong("wrong copy", f"the step itself trains otherwise on a copy of its batch: {copied}")
            cause = "; run eagerly on the same copies of its batches the step is right, so the capture is at fault"
        return self._wrong("wrong numbers", differs + cause)

    def _judged_with_filled_memory(self, variant) -> Outcome:
        def step(index):
            variant.step(index)
            for pool in variant.capture.pools:
                pool.fill_free_memory()

        differs = self._difference(step)
        if not differs:
            return Outcome(EQUAL, is_equal=True, captured=variant.capture.strategy)
        evidence = "replays read memory of the graph that is free between them, or that they have not written: with it "
        return self._wrong("uninitialised memory", f"{evidence}filled, {differs}; the capture is at fault")

    def _difference(self, step):
        eager, again = self._eager
        return rank_decisions.first(parity.difference(eager, again, self._course(step)))

    def _course(self, step):
        with answering() if self._as_captured else contextlib.nullcontext():
            return course_of(self.state, step)

    def _wrong(self, kind, evidence, prefix="wrong numbers: "):
        return Outcome(prefix + evidence, finding=Finding(kind, WRONG, str(self.state.path), evidence))
