"""Find the obstacles to a CUDA graph of a training step: `make doctor STEP=my_step.py:build`.

The step runs a few times eagerly, under watch, and then in a graph. Each finding has the line of the user's code, the
evidence, and what to do. On a CPU the graph is a host graph, which refuses what a CUDA capture refuses.

    python -m graph_worth.your_step.doctor my_step.py:build

Exit status: 0 where nothing stands against a graph, 5 where it would train wrongly, 6 where it cannot be captured;
2 for a file that cannot be used.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from graph_worth.capture.asking import answering
from graph_worth.capture.host_tensors import one_hot_as_on_gpu
from graph_worth.config import end_with_supervisor, mistakes_in_one_line
from graph_worth.files import write_text
from graph_worth.machine.memory import explain_oom
from graph_worth.made_variant import Capture, complete_variant
from graph_worth.measuring import parity, torch_settings
from graph_worth.measuring.module_parts import shown
from graph_worth.parallel.host_messages import is_distributed
from graph_worth.script.session import process_group
from graph_worth.text import lines
from graph_worth.your_step import rank_decisions, step_file, user_file
from graph_worth.your_step.eager import AWARE, EagerSteps
from graph_worth.your_step.findings import MAY, NOTE, REMEDIES, STOPS, WRONG, Finding, ordered
from graph_worth.your_step.graphs import GraphedForwardBackward, GraphedStep, Mine
from graph_worth.your_step.modules import GraphedModules
from graph_worth.your_step.state import StepState
from graph_worth.your_step.trial import Outcome, Trial, course_of
from graph_worth.your_step.uninitialised import Filled

# Steps of a diagnosis, roughly.
NUM_STEPS_IN_ALL = 80
# Of a capture that trains otherwise: the batch that it may have kept, and how many eager steps its maker made first.
MOST_BATCHES_TRIED, MOST_STEPS_BEFORE_CAPTURE = 8, 12
# Of a diagnosis, for programs.
FACTS = ("status", "whole_is_right", "has_mine", "is_capture_aware", "suspects")
# Of these a note remains where the whole step of a user trains as eager does.
_HARMLESS = ("not handed over", "thread")
_OF_OPTIMIZER = ("optimizer", "loss scaler", "learning rate")


@dataclass(frozen=True)
class Graph:
    """A graph to try.

    Attributes:
        make: make(state) captures it.
        outside: kinds of findings that concern what it leaves eager.
    """

    title: str
    make: Callable
    outside: tuple[str, ...] = ()


def making(kind):
    """Return make(state) of a class of captures, which is called with (state, capture)."""

    def make(state):
        capture = Capture(strategy="", state=state, device=state.device)
        return complete_variant(kind(state, capture), capture)

    return make


WHOLE = Graph("graph of the whole step", making(GraphedStep))
UP_TO_OPTIMIZER = Graph("graph up to the optimizer", making(GraphedForwardBackward), _OF_OPTIMIZER)
# What stands against one of the whole step lies in no module that it captures.
MODULES = Graph("graphs of modules", making(GraphedModules), tuple(REMEDIES))
# What stands against our captures need not stand against the user's own.
MINE = Graph("your capture", making(Mine), tuple(REMEDIES))


@dataclass
class Diagnosis:
    """The findings, and how the graphs went.

    Attributes:
        outcomes: title of each graph -> its result in one line.
        whole_is_right: a graph of the whole step trains as eager does.
        has_mine: the file hands over a capture of its own.
        is_capture_aware: it does otherwise while a stream captures, and trains as well.
        suspects: what may be the cause where other steps than those of the diagnosis train wrongly, in words.
        names: path of a module -> name to print, where it is another one.
    """

    findings: list[Finding] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    whole_is_right: bool = False
    has_mine: bool = False
    is_capture_aware: bool = False
    suspects: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Exit status: 6 where the step cannot be captured, 5 where a graph would train wrongly, else 0."""
        levels = {finding.level for finding in self.findings}
        return 6 if STOPS in levels else 5 if levels & {WRONG, MAY} else 0

    def text(self) -> str:
        """Return the diagnosis as it is printed."""
        stands = any(finding.level != NOTE for finding in self.findings)
        nothing = "Nothing stands against a graph."
        if any(finding.kind == "control flow" for finding in self.findings):
            nothing = "These steps can be in a graph, but a branch may change."
        elif self.outcomes.get(WHOLE.title, "").startswith("not possible"):
            nothing = "Eager steps show nothing that stands against a graph; none was tried."
        lines = [] if stands else [nothing]
        lines += [finding.text(self.names) for finding in self.findings]
        lines += [f"{title}: {text}" for title, text in self.outcomes.items()]
        return "\n".join(lines)


def diagnose(text: str, device: torch.device, before_mine: Callable = lambda diagnosis: None) -> Diagnosis:
    """Look at the step that FILE.py:FUNCTION names.

    before_mine: gets the diagnosis so far before the user's own capture is tried, which may end this process.

    Raises:
        ValueError: the file cannot be used, or its step fails eagerly.
    """
    if device.type == "cuda":
        # cuBLAS is deterministic with it alone.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        with Filled(0.0):
            state = StepState(text, device, "the doctor")
        if torch.get_num_threads() < threads:
            _choose_threads(state, threads)
        return _diagnosed(state, before_mine)
    finally:
        torch.set_num_threads(threads)


def _diagnosed(state: StepState, before_mine: Callable) -> Diagnosis:
    seconds = NUM_STEPS_IN_ALL * state.step_s
    if seconds > 60 and os.environ.get("RANK", "0") == "0":
        takes = f"a step takes {state.step_s:.1f} s, and the doctor makes {NUM_STEPS_IN_ALL}"
        print(f"{takes}: about {seconds:.0f} s", flush=True)
    diagnosis = _without_mine(state)
    if state.make_mine is not None:
        diagnosis.has_mine = True
        before_mine(diagnosis)
        outcome = of_mine(state)
        diagnosis.outcomes[MINE.title] = outcome.text
        diagnosis.findings = ordered([*diagnosis.findings, *([outcome.finding] if outcome.finding else [])])
    return diagnosis


def _choose_threads(state: StepState, most: int) -> None:
    """Keep to few threads where more are slower: on busy cores the threads of small operators wait for one another."""
    seconds = {}
    for count in (torch.get_num_threads(), most):
        torch.set_num_threads(count)
        state.train(0)
        start = time.monotonic()
        state.train(1)
        seconds[count] = time.monotonic() - start
    best = min(seconds, key=seconds.__getitem__)
    torch.set_num_threads(best)
    state.step_s = seconds[best]
    state.reset()


def _without_mine(state) -> Diagnosis:
    with one_hot_as_on_gpu() if state.device.type == "cpu" else contextlib.nullcontext():
        eager = EagerSteps(state)
        diagnosis = Diagnosis(findings=list(eager.findings()), names=shown(state.modules))
        if is_distributed():
            diagnosis.findings = rank_decisions.merged(diagnosis.findings) + rank_decisions.parting(state, eager.first)
        is_known = any(finding.level == WRONG for finding in diagnosis.findings)
        aware = {finding.level for finding in diagnosis.findings if finding.kind == AWARE}
        diagnosis.is_capture_aware = aware == {NOTE}
        trial = Trial(state, rank_decisions.first(is_known or bool(eager.host_values())), aware <= {NOTE})
        outcomes = _tried(trial, diagnosis.findings, WHOLE, UP_TO_OPTIMIZER)
        failed = [outcome.finding for outcome in outcomes if outcome.finding]
        diagnosis.outcomes = {WHOLE.title: outcomes[0].text, UP_TO_OPTIMIZER.title: outcomes[1].text}
        is_stopped = any(finding.level == STOPS for finding in [*diagnosis.findings, *failed[:1]])
        # A GPU may be spoiled by a capture that failed.
        is_spoiled = bool(failed) and state.device.type == "cuda"
        if is_stopped and not is_spoiled and not is_distributed():
            (parts,) = _tried(trial, diagnosis.findings, MODULES)
            diagnosis.outcomes[MODULES.title] = f"{parts.text}: {parts.captured}" if parts.is_equal else parts.text
    levels = {finding.level for finding in diagnosis.findings}
    diagnosis.whole_is_right = outcomes[0].is_equal
    if diagnosis.whole_is_right:
        # Its numbers are eager's: what changes on the host does not matter, but for draws, which have agreed by chance,
        # and tensors that the step binds anew, as a metric's sums, which no loss shows.
        suspects = [finding for finding in diagnosis.findings if finding.level == WRONG]
        diagnosis.suspects = [f"{finding.where}: {finding.kind}: {finding.evidence}" for finding in suspects]
        levels_of = {"python random": MAY, "kept tensor": MAY} | dict.fromkeys(_HARMLESS, NOTE)
        diagnosis.findings = [
            replace(finding, level=levels_of.get(finding.kind, WRONG)) if finding.level == WRONG else finding
            for finding in diagnosis.findings
            if finding.level in (NOTE, STOPS) or finding.kind in _HARMLESS or finding.kind not in eager.suspects
        ]
    elif failed and (failed[0].kind == "wrong copy" or levels.isdisjoint((failed[0].level, STOPS))):
        # The findings do not explain it.
        diagnosis.findings.append(failed[0])
        diagnosis.findings += rank_decisions.merged(eager.host_values()) if failed[0].level == WRONG else []
    diagnosis.findings = ordered(diagnosis.findings)
    if not diagnosis.whole_is_right and outcomes[1].is_equal:
        diagnosis.findings = [
            _with_eager_optimizer(finding) if finding.kind in _OF_OPTIMIZER else finding
            for finding in diagnosis.findings
        ]
    return diagnosis


def _with_eager_optimizer(finding: Finding) -> Finding:
    rest = re.split("[,;] or leave ", finding.remedy or REMEDIES[finding.kind])[0]
    return replace(finding, remedy=f"leave it eager: graph_fwd_bwd, which trains as eager does here; or {rest}")


def _tried(trial: Trial, findings, *graphs: Graph) -> list[Outcome]:
    """The outcomes of graphs."""
    # On a GPU a capture that fails keeps its memory and may spoil the process.
    on_gpu = trial.state.device.type == "cuda"
    stops = [finding for finding in findings if finding.level == STOPS and (on_gpu or finding.is_hidden)]
    with torch_settings.deterministic_kernels(where_there_are=True):
        return [trial.of(graph.make, [stop for stop in stops if stop.kind not in graph.outside]) for graph in graphs]


def of_mine(state: StepState) -> Outcome:
    """Return how the user's own capture goes; where it trains otherwise, the cause if it is a known one."""
    (outcome,) = _tried(Trial(state, changes_host=False), [], MINE)
    if outcome.is_equal:
        return outcome
    if outcome.finding is None and state.device.type == "cpu":
        return outcome
    evidence, level = (outcome.finding.evidence, outcome.finding.level) if outcome.finding else (outcome.text, STOPS)
    if level == WRONG:
        # The finding stands without its cause, too.
        with torch_settings.deterministic_kernels(), contextlib.suppress(Exception), answering():
            cause = _cause_of_mine(state)
            evidence = f"{cause}; {evidence}" if cause else evidence
    code = getattr(state.make_mine, "__code__", None)
    line = f":{code.co_firstlineno}" if code else ""
    text = "trains otherwise, see above" if level == WRONG else "cannot be captured, see above"
    return replace(outcome, text=text, finding=Finding("your capture", level, f"{state.path}{line}", evidence))


def _cause_of_mine(state: StepState) -> str:
    """Train eagerly as a capture does that makes a known mistake: one that gives the same numbers is the cause."""
    variant = MINE.make(state)
    try:
        mine = course_of(state, variant.step)
    finally:
        variant.close()

    def is_like(make_step):
        # Of all ranks, or they would make other steps.
        return not rank_decisions.first(parity.difference(mine, mine, course_of(state, make_step)))

    def frozen(values):
        def step(index):
            state.snapshot.put_numbers_back()
            state.moving.put_back(values)
            state.train(index)

        return step

    for number in range(min(len(state.batches), MOST_BATCHES_TRIED)):
        if is_like(lambda index, number=number: state.keep_loss(index, state.step(state.batch(number)))):
            return f"it trains on batch {number} whatever batch it is given: copy each into the tensors that it reads"
    state.reset()
    after_steps = [state.moving.now()]
    for index in range(MOST_STEPS_BEFORE_CAPTURE):
        state.train(index)
        after_steps.append(state.moving.now())
    words = f" ({', '.join(state.moving.names[:3])})" if state.moving.names else ""
    if any(is_like(frozen(values)) for values in after_steps):
        return f"it goes on with the numbers on the host of its capture{words}"
    return ""


def main(argv=None) -> int:
    """Print the diagnosis of the step that the command line names; return the exit status.

    Under torchrun rank 0 prints, and every rank returns 0: torchrun would tell of another one as of a crash.
    """
    words = sys.argv[1:] if argv is None else argv
    end_with_supervisor()
    with mistakes_in_one_line(os.environ.get(step_file.PROG, "python -m graph_worth.your_step.doctor")):
        if len(words) not in (1, 2):
            raise ValueError(f"takes {step_file.FORM}, and a file for its text")
        path, _ = step_file.split(words[0])
        with process_group() as (device, rank, world_size):
            try:
                torch_settings.prepare(device)
                if rank == 0:
                    print("looks at the step eagerly and in graphs, which takes some steps of each", flush=True)
                with user_file.exits_are_errors():
                    names = words[1:] if rank == 0 else []
                    diagnosis = diagnose(words[0], device, lambda diagnosis: _write(diagnosis, names))
                if rank == 0:
                    print(lines(diagnosis.text()))
                    _write(diagnosis, names)
            except torch.OutOfMemoryError as error:
                text = f"the doctor has too little memory beside the step: {explain_oom(error, device)}"
                print(text, file=sys.stderr)
                return 1
            except ValueError:
                raise
            except (Exception, SystemExit) as error:
                # An error of a later step of the user's file.
                place = user_file.where(error, path)
                if ":" not in place:
                    raise
                raise ValueError(f"{place}: the step raised {user_file.said(error)}") from error
    return diagnosis.status if world_size == 1 else 0


def _write(diagnosis: Diagnosis, names: list[str]) -> None:
    """Write a diagnosis to a file, and what programs want of it beside it."""
    for name in names:
        try:
            write_text(Path(name), diagnosis.text())
            facts = {key: getattr(diagnosis, key) for key in FACTS}
            write_text(Path(f"{name}.json"), json.dumps(facts))
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
