"""Find the obstacles to a CUDA graph of a training step: `make doctor STEP=my_step.py:build`.

The step runs a few times eagerly, under watch, and then in a graph. Each finding has the line of the user's code, the
evidence, and what to do. On a CPU the graph is a host graph, which refuses what a CUDA capture refuses.

    python -m common.your_step.doctor my_step.py:build

Exit status: 0 where nothing stands against a graph, 5 where it would train wrongly, 6 where it cannot be captured;
2 for a file that cannot be used.
"""

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.capture.pool import CaptureError
from common.config import mistakes_in_one_line
from common.files import write_text
from common.measuring import torch_settings
from common.your_step import on_host, parity, step_file, user_file
from common.your_step.eager import EagerSteps
from common.your_step.errors import explained
from common.your_step.findings import NOTE, STOPS, WRONG, Finding, ordered
from common.your_step.state import StepState
from common.your_step.train import GraphedForwardBackward, GraphedStep, eager_step
from common.your_step.uninitialised import filled_with_zeros
from common.your_step.watch import Watched

EQUAL = "trains as eager does"
# Between two eager trainings whose kernels are not deterministic; more is state that is not put back.
MOST_NOISE = 1e-2
_OF_OPTIMIZER = ("optimizer", "loss scaler", "learning rate")


@dataclass
class Diagnosis:
    """The findings, and how the graphs went.

    Attributes:
        findings: those that stop a capture come first.
        whole: the result of a graph of the whole step, in one line.
        without_optimizer: the same of a graph up to the optimizer.
        parts: the largest modules without a finding inside, with their share of the operators.
    """

    findings: list[Finding] = field(default_factory=list)
    whole: str = ""
    without_optimizer: str = ""
    parts: list[tuple[str, float]] = field(default_factory=list)

    def text(self) -> str:
        """Return the diagnosis as it is printed."""
        lines = [finding.text() for finding in self.findings] or ["Nothing stands against a graph."]
        lines += [f"graph of the whole step: {self.whole}", f"graph up to the optimizer: {self.without_optimizer}"]
        if self.parts and any(finding.level == STOPS and finding.module for finding in self.findings):
            parts = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in self.parts)
            lines.append(f"modules that can be captured, with their share of the step's operators: {parts}")
        return "\n".join(lines)


def diagnose(text: str, device: torch.device) -> Diagnosis:
    """Look at a step.

    Args:
        text: FILE.py:FUNCTION.
        device: that the step runs on.

    Raises:
        ValueError: the file cannot be used, or its step fails eagerly.
    """
    if device.type == "cuda":
        # cuBLAS is deterministic with it alone.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with filled_with_zeros():
        state = StepState(text, device, "doctor")
    with on_host.one_hot_as_on_gpu() if device.type == "cpu" else contextlib.nullcontext():
        return _diagnosed(state)


def _diagnosed(state: StepState) -> Diagnosis:
    eager = EagerSteps(state)
    found = Diagnosis(findings=list(eager.findings()), parts=_parts(state.modules, eager.first))
    is_known = any(finding.level == WRONG for finding in found.findings)
    obstacles = [finding for finding in found.findings if finding.level == STOPS]
    whole, without_optimizer = _tried(state, is_known or bool(eager.host_values()), obstacles)
    found.whole, found.without_optimizer = whole.text, without_optimizer.text
    if whole.is_equal:
        # Its numbers are eager's: what changes on the host does not matter.
        found.findings = [each for each in found.findings if each.level == NOTE or each.kind not in eager.suspects]
    elif whole.finding and not _is_explained(found.findings, whole.finding):
        found.findings += [whole.finding, *(eager.host_values() if whole.finding.level == WRONG else [])]
    found.findings = ordered(found.findings)
    return found


def _tried(state, changes_host, obstacles):
    """The outcomes of a graph of the whole step and of one up to the optimizer."""
    is_gpu = state.device.type == "cuda"
    stops = [finding for finding in obstacles if finding.kind not in _OF_OPTIMIZER]
    # On a GPU a capture that fails keeps its memory and may spoil the process.
    whole, part = (GraphedStep, obstacles if is_gpu else []), (GraphedForwardBackward, stops if is_gpu else [])
    with torch_settings.deterministic_kernels():
        trial = Trial(state, changes_host)
        outcomes = [trial.of(*each) for each in (whole, part)]
    if any("deterministic" in outcome.text for outcome in outcomes):
        # An operator has no deterministic kernel: two eager trainings say how much is noise.
        trial = Trial(state, changes_host, is_exact=False)
        outcomes = [trial.of(*each) for each in (whole, part)]
    return outcomes


def _is_explained(findings, of_graph):
    """Say whether a failed capture, or wrong numbers, have their cause among the findings."""
    levels = {finding.level for finding in findings}
    return of_graph.kind != "wrong copy" and (of_graph.level in levels or STOPS in levels)


# ------------------------------------------------------------------------------------------------
# Graphs


@dataclass(frozen=True)
class Outcome:
    """The result of one graph.

    Attributes:
        text: the result in one line.
        is_equal: the graph trained as eager does.
        finding: the failure, else None.
    """

    text: str
    is_equal: bool = False
    finding: Finding | None = None


class Trial:
    """Graphs of a step beside two eager trainings.

    Args:
        state: of the step.
        changes_host: the step changes what a reset does not put back, so that trainings differ for that reason.
        is_exact: kernels give the same bits each time.
    """

    def __init__(self, state: StepState, changes_host: bool, is_exact: bool = True):
        self.state, self._changes_host, self._is_exact = state, changes_host, is_exact
        self.names = [name for name, _ in state.snapshot.tensors]
        self._eager: list[parity.Course] = []

    def of(self, make, obstacles: list[Finding]) -> Outcome:
        """Return how a variant goes.

        Args:
            make: its class, as GraphedStep.
            obstacles: findings for which it is not tried.
        """
        state = self.state
        if obstacles:
            return Outcome(f"not tried: {obstacles[0].kind} at {obstacles[0].where}")
        try:
            variant = make(state)
        except CaptureError as error:
            return self._failed(error, STOPS)
        except RuntimeError as error:
            return Outcome(f"not possible: {str(error).splitlines()[0]}")
        finally:
            state.reset()
        try:
            return self._judged(variant)
        except CaptureError as error:
            return self._failed(error, WRONG)
        finally:
            variant.close()
            state.reset()

    def _failed(self, error, level) -> Outcome:
        cause, remedy = explained(str(error))
        finding = Finding(
            "capture", level, _place_in(str(error)), f"{cause or error}" + (f"; {remedy}" if remedy else "")
        )
        return Outcome(f"failed: {cause or str(error)}", finding=finding)

    def _judged(self, variant) -> Outcome:
        state = self.state
        if not self._eager:
            self._eager = [parity.course(state, lambda index: eager_step(state, index)) for _ in range(2)]
        eager, again = self._eager
        unlike = parity.difference(eager, eager, again, self.names)
        if unlike and (self._is_exact or parity.scatter(eager, again) > MOST_NOISE):
            evidence = f"two eager trainings from one start differ: {unlike.text}"
            return Outcome(evidence, finding=Finding("not repeatable", WRONG, str(state.path), evidence))
        differs = parity.difference(eager, again, parity.course(state, variant.step), self.names)
        if not differs:
            return Outcome(EQUAL, is_equal=True)
        copied = None
        if not self._changes_host:
            copied = parity.difference(eager, again, parity.course(state, parity.through_copies(state)), self.names)
        if copied:
            evidence = f"the step itself trains otherwise on a copy of its batch: {copied.text}"
            return Outcome(
                f"wrong numbers: {evidence}", finding=Finding("wrong copy", WRONG, str(state.path), evidence)
            )
        text = differs.text + self._module(type(variant), differs.step)
        return Outcome(f"wrong numbers: {text}", finding=Finding("wrong numbers", WRONG, str(state.path), text))

    def _module(self, make, step) -> str:
        """The module whose outputs differ first in the first step that differs, in words."""
        state = self.state
        original = state.step
        # Outputs that are kept lie where nothing else does: so this is a graph of its own, of the step that differs.
        with parity.Outputs(state.modules) as outputs:
            state.step = outputs.kept_of(original)
            try:
                eager = self._outputs_after(step, lambda index: eager_step(state, index), outputs)
                variant = make(state)
                try:
                    graph = [] if len(variant.graphs) > 1 else self._outputs_after(step, variant.step, outputs)
                finally:
                    variant.close()
            except (CaptureError, torch.OutOfMemoryError):
                return ""
            finally:
                state.step = original
        if not graph:
            return ""
        name = parity.first_module(eager, graph)
        return f"; the outputs of {name} differ first" if name else "; the outputs of all modules are eager's there"

    def _outputs_after(self, step, make_step, outputs):
        self.state.reset()
        for index in range(step + 1):
            make_step(index)
        return outputs.copies()


def _place_in(message):
    """file:line in a message, or an empty text."""
    words = [word.strip("()") for word in message.replace(" cannot ", " ").split()]
    return next((word for word in words if ".py:" in word), "the step")


# ------------------------------------------------------------------------------------------------
# Parts


def _parts(modules, watched: Watched) -> list[tuple[str, float]]:
    """The largest modules in which nothing was refused, with the share of the forward's operators inside of them."""
    bad = {refused.place.module for refused in watched.refused if refused.place.module}
    inside = [operator.place.module for operator in watched.operators if operator.place.module]
    total = len(inside) or 1
    found: list[tuple[str, float]] = []
    for module in modules:
        _collect("", module, bad, inside, total, found)
    return found


def _collect(path, module, bad, inside, total, found):
    own = [name for name in inside if not path or name == path or name.startswith(f"{path}.")]
    if not own:
        return
    if path and not any(name == path or name.startswith(f"{path}.") for name in bad):
        found.append((path, len(own) / total))
        return
    for name, child in module.named_children():
        _collect(f"{path}.{name}" if path else name, child, bad, inside, total, found)


def _of_users_file(text: str, device: torch.device) -> Diagnosis:
    """`diagnose`, where an error of a later step of the user's file is a ValueError with its line."""
    try:
        return diagnose(text, device)
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        place = user_file.where(error, step_file.split(text)[0])
        if ":" not in place:
            raise
        raise ValueError(f"{place}: the step raised {user_file.said(error)}") from error


def main(argv=None) -> int:
    """Print the diagnosis of the step that the command line names; return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with mistakes_in_one_line("common.your_step", "doctor"):
        if len(words) not in (1, 2):
            raise ValueError(f"takes {step_file.FORM}, and a file for its text")
        torch_settings.prepare(device)
        found = _of_users_file(words[0], device)
    print(found.text())
    if len(words) > 1:
        write_text(Path(words[1]), found.text())
    levels = {finding.level for finding in found.findings}
    return 6 if STOPS in levels else 5 if WRONG in levels else 0


if __name__ == "__main__":
    sys.exit(main())
