"""Graphs of a step, each beside two eager trainings from the same start: equal, wrong, or not to be captured."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common import variant as variants
from common.capture.errors import explained
from common.capture.pool import CaptureError
from common.your_step import parity, ranks
from common.your_step.findings import STOPS, WRONG, Finding
from common.your_step.parts import has_several_ranks
from common.your_step.state import StepState, lacks_deterministic_kernel

EQUAL = "trains as eager does"
# Between two eager trainings whose kernels are not deterministic; more is state that is not put back.
MOST_NOISE = 1e-2


@dataclass(frozen=True)
class Outcome:
    """The result of one graph.

    Attributes:
        text: the result in one line.
        is_equal: the graph trained as eager does.
        finding: the failure, else None.
        lacks_kernel: an operator has no deterministic kernel.
    """

    text: str
    is_equal: bool = False
    finding: Finding | None = None
    lacks_kernel: bool = False


class Trial:
    """Graphs of a step beside two eager trainings.

    Args:
        changes_host: the step changes what a reset does not put back, so that trainings differ for that reason.
        is_exact: kernels give the same bits each time.
        reference: the eager step of an index; the state's own unless told.
    """

    def __init__(
        self,
        state: StepState,
        changes_host: bool,
        is_exact: bool = True,
        reference: Callable[[int], None] | None = None,
    ):
        self.state, self._changes_host, self._is_exact = state, changes_host, is_exact
        self._reference = reference or state.train
        self.names = [name for name, _ in state.snapshot.tensors]
        self._eager: list[parity.Course] = []

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
        except (RuntimeError, ValueError) as error:
            text = f"not possible: {str(error).splitlines()[0]}"
            failed = Outcome(text, lacks_kernel=lacks_deterministic_kernel(error))
        finally:
            state.reset()
        failed = ranks.first(failed)
        if failed:
            if variant is not None:
                variant.close()
            return failed
        try:
            variants.enter(variant)
            return self._judged(make, variant)
        except (CaptureError, torch.OutOfMemoryError) as error:
            return self._failed(error, WRONG)
        finally:
            variants.leave(variant)
            variant.close()
            state.reset()

    def _failed(self, error, level) -> Outcome:
        is_full = isinstance(error, torch.OutOfMemoryError)
        said = variants.status_of(error, self.state.device)[1] if is_full else str(error)
        reason, place = (error.reason, error.place) if isinstance(error, CaptureError) else ("", "")
        cause, remedy = explained(said, reason)
        evidence = (said if is_full else cause or said) + (f"; {remedy}" if remedy else "")
        evidence += "".join(f"; CUDA's log: {line}" for line in getattr(error, "log", ()))
        kind, level = ("memory", STOPS) if is_full else ("capture", level)
        finding = Finding(kind, level, place or "the step", evidence)
        text = f"failed: {said if is_full else cause or said}"
        return Outcome(text, finding=finding, lacks_kernel=lacks_deterministic_kernel(error))

    def _judged(self, make, variant) -> Outcome:
        if not self._eager:
            variants.leave(variant)
            self._eager = [parity.course(self.state, self._reference) for _ in range(2)]
            variants.enter(variant)
        eager, again = self._eager
        said = ""
        if not all(map(math.isfinite, eager.losses)):
            count = len(self.state.batches)
            losses = [(f"warm-up step {i}, of batch {i % count},", x) for i, x in enumerate(self.state.warm_losses)]
            losses += [(f"step {i}", x) for i, x in enumerate(eager.losses)]
            said = next(f"eager's loss of {step} is {x}" for step, x in losses if not math.isfinite(x))
        said = ranks.first(said)
        if said:
            return self._wrong("not finite", f"{said}: nothing is compared", "")
        unlike = parity.difference(eager, eager, again, self.names)
        if not self._is_exact and parity.scatter(eager, again) <= MOST_NOISE:
            unlike = None
        unlike = ranks.first(unlike)
        if unlike:
            return self._wrong("not repeatable", f"two eager trainings from one start differ: {unlike.text}", "")
        differs = self._difference(variant.step)
        if not differs:
            return self._judged_with_filled_memory(variant)
        cause = ""
        if not self._changes_host:
            copied = self._difference(parity.through_copies(self.state))
            if copied:
                return self._wrong(
                    "wrong copy", f"the step itself trains otherwise on a copy of its batch: {copied.text}"
                )
            cause = "; run eagerly on the same copies of its batches the step is right, so the capture is at fault"
        return self._wrong("wrong numbers", differs.text + self._module(make, differs.step) + cause)

    def _judged_with_filled_memory(self, variant) -> Outcome:
        def step(index):
            variant.step(index)
            for pool in variant.capture.pools:
                pool.fill_free_memory()

        differs = self._difference(step)
        if not differs:
            return Outcome(EQUAL, is_equal=True)
        evidence = "replays read memory of the graph that is free between them, or that they have not written: with it "
        return self._wrong("uninitialised memory", f"{evidence}filled, {differs.text}; the capture is at fault")

    def _difference(self, step):
        eager, again = self._eager
        return ranks.first(parity.difference(eager, again, parity.course(self.state, step), self.names))

    def _wrong(self, kind, evidence, prefix="wrong numbers: "):
        return Outcome(prefix + evidence, finding=Finding(kind, WRONG, str(self.state.path), evidence))

    def _module(self, make, step) -> str:
        """The module whose outputs differ first in the first step that differs, in words."""
        state = self.state
        if not isinstance(state, StepState) or has_several_ranks():
            return ""  # a variant of a model does not call state.step, and one rank alone makes no steps
        # Outputs that are kept lie where nothing else does: so this is a graph of its own, of the step that differs.
        with parity.keeping_outputs(state) as kept:
            try:
                eager = self._outputs_after(step, state.train, kept)
                variant = make(state)
                try:
                    # Those of a capture of the user's own are not known.
                    is_one = len(getattr(variant, "graphs", ())) == 1
                    graph = self._outputs_after(step, variant.step, kept) if is_one else []
                finally:
                    variant.close()
            except (CaptureError, torch.OutOfMemoryError):
                return ""
        if not graph:
            return ""
        name = parity.first_module(eager, graph)
        return f"; the outputs of {name} differ first" if name else "; the outputs of all modules are eager's there"

    def _outputs_after(self, step, make_step, kept):
        self.state.reset()
        for index in range(step + 1):
            make_step(index)
        return [(name, [tensor.detach().clone() for tensor in tensors]) for name, tensors in kept]
