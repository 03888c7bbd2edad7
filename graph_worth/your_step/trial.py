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
from torch.nn.modules.module import register_module_forward_pre_hook

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
    """Yield a list that gets a line for each operator within it that has no deterministic kernel.

    torch warns of all but cuDNN's recurrent layers, whose kernels are deterministic with a variable alone.
    """
    messages: list[str] = []

    def note(module, _):
        if isinstance(module, torch.nn.RNNBase) and torch_settings.WORKSPACE not in os.environ:
            messages.extend("cuDNN" for weight in module.parameters() if torch.backends.cudnn.is_acceptable(weight))

    hook = register_module_forward_pre_hook(note)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield messages
    finally:
        hook.remove()
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


def once_rounded(state: StepState) -> Callable[[int], None]:
    """Return a step that runs eagerly, from parameters that one rounding has moved."""

    def step(index):
        if index == 0:
            with torch.no_grad():
                for parameter in filter(torch.is_floating_point, state.snapshot.parameters):
                    parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
        state.train(index)

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
        # Eager steps from parameters that one rounding has moved, for a variant whose kernels may round otherwise.
        self._rounded: Course | None = None

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

    def apart(self, variant) -> str | None:
        """Return how the training of a variant that was entered leaves eager's: see `graph_worth.contract.Training`."""
        finding = fault.finding if (fault := self._fault(variant)) else None
        return "" if finding is None else finding.evidence if finding.kind in ("wrong numbers", "wrong copy") else None

    def _fault(self, variant) -> Outcome | None:
        """The outcome of a variant that does not train as eager does."""
        if not self._eager:
            with variants.left(variant), _noting_other_kernels() as others:
                self._eager = [self._course(self.state.train) for _ in range(2)]
            self._is_exact = not others
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
        trained, self._rounded = self._course(variant.step), None
        differs = self._difference(trained)
        if not differs or self._changes_host:
            return self._wrong("wrong numbers", differs) if differs else None
        # Graphs of modules get no copies of batches.
        copied = eager
        with variants.left(variant):
            if not getattr(variant, "may_round", False):
                copied = self._course(through_copies(self.state))
            if copied is eager or self._difference(copied):
                self._rounded = self._course(once_rounded(self.state))
        on_copy = self._difference(copied)
        if on_copy:
            return self._wrong("wrong copy", f"the step itself trains otherwise on a copy of its batch: {on_copy}")
        differs = self._difference(trained)
        cause = "; run eagerly on the same copies of its batches the step is right, so the capture is at fault"
        return self._wrong("wrong numbers", differs + cause * (copied is not eager)) if differs else None

    def _judged(self, variant) -> Outcome:
        fault = self._fault(variant)
        if fault:
            return fault

        def step(index):
            variant.step(index)
            for pool in variant.capture.pools:
                pool.fill_free_memory()

        differs = self._difference(self._course(step))
        if not differs:
            return Outcome(EQUAL, is_equal=True, captured=variant.capture.strategy)
        evidence = "replays read memory of the graph that is free between them, or that they have not written: with it "
        return self._wrong("uninitialised memory", f"{evidence}filled, {differs}; the capture is at fault")

    def _difference(self, trained: Course) -> str:
        eager, again = self._eager
        return rank_decisions.first(parity.difference(eager, again, trained, self._rounded))

    def _course(self, step):
        with answering() if self._as_captured else contextlib.nullcontext():
            return course_of(self.state, step)

    def _wrong(self, kind, evidence, prefix="wrong numbers: "):
        return Outcome(prefix + evidence, finding=Finding(kind, WRONG, str(self.state.path), evidence))
