"""What stands against a graph of a step: `make doctor STEP=my_step.py:build`.

The step runs a few times eagerly, under watch, and then in a graph. Each finding has the line of the user's code, what
was seen there, and what to do. On a CPU the graph is a host graph, which refuses what a CUDA capture refuses.

    python -m common.your_step.doctor my_step.py:build

Exit status: 0 where nothing stands against a graph, 5 where it would train wrongly, 6 where it cannot be captured;
2 for a file that cannot be used.
"""

import sys
from dataclasses import dataclass, field

import torch

from common.capture.pool import CaptureError
from common.config import mistakes_in_one_line
from common.measuring import torch_settings
from common.your_step import host_values, step_file
from common.your_step.errors import explained
from common.your_step.findings import NOTE, SLOW, STOPS, WRONG, Finding, ordered
from common.your_step.state import StepState
from common.your_step.train import GraphedForwardBackward, GraphedStep, eager_step
from common.your_step.watch import Place, Watched, watch

FEW_SHAPES = 4
PARITY_STEPS = 8
# The words of the rules of host graphs -> kind of finding.
_KINDS = (
    ("reads a value", "host read"),
    ("reads the lengths", "host read"),
    ("shape that depends", "shape from values"),
    ("makes a tensor from host data", "host data"),
    ("random state", "random state"),
    ("moves a tensor's memory", "moved memory"),
    ("collective", "collective"),
)


@dataclass
class Diagnosis:
    """What the doctor found.

    Attributes:
        findings: what stops a capture first.
        whole, without_optimizer: how the capture of the step went, in one line each.
        parts: the largest modules without a finding inside of them, with their share of the operators.
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
    state = StepState(text, device, "doctor")
    seen = _Eager(state)
    found = Diagnosis(findings=list(seen.findings()))
    found.parts = _parts(state.modules, seen.first)
    with torch_settings.deterministic_kernels():
        found.whole, graph_findings, is_equal = _graphed(state, GraphedStep)
        if is_equal:
            # Its numbers are eager's: what changes on the host does not matter.
            found.findings = [finding for finding in found.findings if finding.kind not in seen.suspects]
        found.findings += graph_findings if not _is_explained(found.findings, graph_findings) else []
        found.without_optimizer, _, _ = _graphed(state, GraphedForwardBackward)
    found.findings = ordered(found.findings)
    return found


def _is_explained(findings, graph_findings):
    """Whether a failed capture, or wrong numbers, have their cause among the findings."""
    levels = {finding.level for finding in findings}
    return all(finding.level in levels or STOPS in levels for finding in graph_findings)


# ------------------------------------------------------------------------------------------------
# Eager steps under watch


class _Eager:
    """Three eager steps under watch, and what the host held before and after each."""

    # Kinds that are harmless where a graph's numbers are eager's.
    suspects = ("host value", "kept tensor", "python random", "control flow", "gradient")

    def __init__(self, state: StepState):
        self.state = state
        classes = state.classes
        # Batches of one shape, so that operators can be compared: the first, and the next one of its shape.
        same = [index for index in range(2 * len(classes)) if state.batch_class(index) == classes[0]]
        self.steps = [same[0], same[1 % len(same)], same[0]]
        state.reset()
        self.watched: list[Watched] = []
        self.values: list[dict] = []
        self.tensors: list[dict] = []
        self.random: list[dict] = []
        self.versions: list[dict] = []
        self.rates = [self._learning_rates()]
        self.gradients: list[dict] = []
        self._look()
        for index in self.steps:
            self.watched.append(watch(state.step, state.batch(index), state.modules))
            self._look()
            self.rates.append(self._learning_rates())

    @property
    def first(self) -> Watched:
        return self.watched[0]

    def _look(self):
        values, tensors = host_values.look(self.state.step, self.state.owned)
        self.values.append(values)
        self.tensors.append(tensors)
        self.versions.append({name: tensor._version for name, tensor in tensors.items()})
        self.random.append(host_values.random_states())
        self.gradients.append({name: _address(p.grad) for name, p in self._parameters()})

    def _parameters(self):
        return [(name, p) for module in self.state.modules for name, p in module.named_parameters()]

    def _learning_rates(self):
        return [group["lr"] for optimizer in self.state.optimizers for group in optimizer.param_groups]

    def findings(self):
        yield from self._refused()
        yield from self._control_flow()
        yield from self._host()
        yield from self._optimizers()
        yield from self._gradients()
        yield from self._batches()
        yield from self._not_handed_over()
        known = {id(generator) for generator in self.state.snapshot.generators}
        defaults = {id(torch.default_generator)}
        defaults |= {id(generator) for generator in getattr(torch.cuda, "default_generators", ())}
        for generator, place in self.first.generators.values():
            if id(generator) not in known | defaults:
                yield Finding("unknown generator", WRONG, place.own, "draws from a generator of its own", place.module)
        for place in self.first.copies:
            evidence = "copies from unpinned memory of the host to the GPU inside of the step"
            yield Finding("unpinned copy", SLOW, place.own, evidence, place.module)

    def _refused(self):
        for refused in self.first.refused:
            place, evidence = refused.place, f"{_short(refused.name)} {refused.reason}"
            if place.through:
                evidence = f"{_short(refused.name)} in torch's {place.through} reads a number on the host"
                yield Finding(place.through, STOPS, place.own, evidence)
                continue
            kind = next((kind for words, kind in _KINDS if words in refused.reason), "host read")
            if place.line != place.own:
                evidence += f" (at {place.line})"
            yield Finding(kind, STOPS, place.own, evidence, place.module)

    def _control_flow(self):
        """The first operator in which two steps of one shape differ."""
        for other in self.watched[1:]:
            a, b = self.first.operators, other.operators
            for mine, theirs in zip(a, b, strict=False):
                if mine[:2] != theirs[:2]:
                    yield self._differs(mine, theirs)
                    return
            if len(a) != len(b):
                longer = a if len(a) > len(b) else b
                yield self._differs(longer[min(len(a), len(b))], None)
                return

    def _differs(self, mine, theirs):
        name, shapes, place = mine
        if theirs is None:
            evidence = f"one step goes on with {_short(name)}, another of the same shape ends before"
        elif name != theirs[0]:
            evidence = f"one step runs {_short(name)} here, another of the same shape {_short(theirs[0])}"
        else:
            evidence = f"{_short(name)} gives shape {list(shapes)} in one step and {list(theirs[1])} in another"
        return Finding("control flow", WRONG, place.own, evidence, place.module)

    def _host(self):
        before, after = self.values[0], self.values[-1]
        for name in sorted(before.keys() & after.keys()):
            if before[name] != after[name]:
                evidence = f"{name} went from {before[name]!r} to {after[name]!r} in three steps"
                yield Finding("host value", WRONG, self._line_of(name), f"{evidence}; a replay leaves it")
        for name, state in self.random[0].items():
            if state != self.random[-1].get(name):
                evidence = f"the step draws from {name}: every replay would have the numbers of the capture"
                yield Finding("python random", WRONG, self._line_of(name), evidence)
        for name, tensor in self.tensors[-1].items():
            old = self.tensors[-2].get(name)
            if old is not None and old is not tensor:
                evidence = f"{name} is another tensor after each step: a replay fills the one of the capture"
                yield Finding("kept tensor", WRONG, self._line_of(name), evidence)

    def _line_of(self, name):
        """The last line of the user's file that has the name's last part, beside an assignment where there is one."""
        word = name.removeprefix("len(").rstrip(")").split("[")[0].split(".")[-1]
        lines = self.state.path.read_text(errors="replace").splitlines()
        hits = [number for number, line in enumerate(lines, 1) if word in line and not line.lstrip().startswith("#")]
        changed = [n for n in hits if _changes(lines[n - 1], word)]
        inside = [n for n in changed if lines[n - 1].startswith((" ", "\t"))]
        line = (inside or changed or hits or [0])[-1]
        return f"{self.state.path}:{line}" if line else str(self.state.path)

    def _optimizers(self):
        scheduled = [each for each in self.state.owned if hasattr(each, "get_last_lr")]
        for optimizer in self.state.optimizers:
            for group in optimizer.param_groups:
                if self.state.device.type == "cuda" and group.get("capturable") is False:
                    name = type(optimizer).__name__
                    evidence = f"{name} counts its steps on the host: capturable is False"
                    yield Finding("optimizer", STOPS, self._line_of(name), evidence)
                    break
        numbers = [rate for rate in self.rates[-1] if not isinstance(rate, torch.Tensor)]
        if numbers and (scheduled or self.rates[0] != self.rates[-1]):
            what = type(scheduled[0]).__name__ if scheduled else "the step"
            evidence = f"{what} changes lr, a number on the host: a graph of the whole step keeps that of the capture"
            yield Finding("learning rate", WRONG, self._line_of("lr"), evidence)

    def _gradients(self):
        """Gradients that go on from one step to the next, and change their place."""
        last, before = self.gradients[-1], self.gradients[-2]
        names = [name for name in last if before.get(name) and last[name] and last[name] != before[name]]
        kept = any(name.startswith("aten.zero_") or "_foreach_zero_" in name for name, _, _ in self.first.operators)
        if names and kept:
            evidence = f"the gradient of {names[0]} lies elsewhere after each step"
            yield Finding("gradient", WRONG, self._line_of("zero_grad"), evidence)

    def _batches(self):
        number = len(set(self.state.classes))
        if number > FEW_SHAPES:
            evidence = f"{number} shapes in {len(self.state.batches)} batches, and each needs a graph"
            yield Finding("shapes of batches", NOTE, self._line_of("batches"), evidence)

    def _not_handed_over(self):
        known = {id(tensor) for _, tensor in self.state.snapshot.tensors}
        for name, version in self.versions[-1].items():
            tensor, before = self.tensors[-1][name], self.versions[0].get(name)
            same = self.tensors[0].get(name) is tensor
            if same and before is not None and version != before and id(tensor) not in known:
                yield Finding("not handed over", WRONG, self._line_of(name), f"the step writes {name}")
        for name, each in host_values.not_handed_over(self.state.step, self.state.owned):
            if isinstance(each, torch.optim.Optimizer) or any(p.requires_grad for p in each.parameters()):
                yield Finding("not handed over", WRONG, self._line_of(name), f"{name}, a {type(each).__name__}")


_CHANGES = (".append(", ".add(", ".pop(", ".update(", "random.", ".extend(", "next(")


def _changes(line, word):
    """Whether a line of code assigns to a name or calls what changes it."""
    left, equals, right = line.partition("=")
    return (bool(equals) and word in left and not right.startswith("=")) or any(sign in line for sign in _CHANGES)


def _short(name):
    return str(name).removesuffix(".default").replace("aten::", "aten.")


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()


# ------------------------------------------------------------------------------------------------
# Graphs


def _graphed(state, make) -> tuple[str, list[Finding], bool]:
    """(how a graph went in one line, findings, whether it trained as eager does)."""
    try:
        variant = make(state)
    except CaptureError as error:
        cause, remedy = explained(str(error))
        state.reset()
        place, text = _place_in(str(error)), f"failed: {cause or str(error)}"
        finding = Finding("capture", STOPS, place, f"{cause or error}" + (f"; {remedy}" if remedy else ""))
        return text, [finding], False
    except RuntimeError as error:
        state.reset()
        return f"not possible: {str(error).splitlines()[0]}", [], False
    try:
        eager, again, graph = (_course(state, each) for each in (None, None, variant))
    finally:
        variant.close()
        state.reset()
    unlike = _difference(eager, eager, again, state.snapshot.tensors)
    if unlike:
        evidence = f"two eager trainings from one start differ: {unlike}"
        return evidence, [Finding("not repeatable", WRONG, str(state.path), evidence)], False
    difference = _difference(eager, again, graph, state.snapshot.tensors)
    if not difference:
        return "trains as eager does", [], True
    return f"wrong numbers: {difference}", [Finding("wrong numbers", WRONG, str(state.path), difference)], False


def _course(state, variant):
    """(losses, copies of the state after each step) from the start."""
    state.reset()
    states = []
    for index in range(PARITY_STEPS):
        if variant is None:
            eager_step(state, index)
        else:
            variant.step(index)
        states.append([tensor.detach().clone() for tensor in (tensor for _, tensor in state.snapshot.tensors)])
    return state.read_losses(PARITY_STEPS), states


def _difference(eager, again, graph, named) -> str:
    """The first step and tensor in which a graph's training leaves eager's, in words, or ""."""
    scatter = _largest(eager, again)
    for index, (wanted, found) in enumerate(zip(eager[1], graph[1], strict=True)):
        for (name, _), a, b in zip(named, wanted, found, strict=True):
            if torch.equal(a, b) or _relative(a, b) <= 2 * scatter:
                continue
            return f"{name} differs from eager's after step {index}, by {_relative(a, b):.1e} of its largest value"
    for index, (a, b) in enumerate(zip(eager[0], graph[0], strict=True)):
        if a != b and abs(a - b) > max(2 * scatter, 1e-6) * max(abs(a), 1e-30):
            return f"the loss of step {index} is {b:.7g}, eager's {a:.7g}"
    return ""


def _largest(eager, again):
    pairs = [(a, b) for x, y in zip(eager[1], again[1], strict=True) for a, b in zip(x, y, strict=True)]
    return max((_relative(a, b) for a, b in pairs), default=0.0)


def _relative(a, b) -> float:
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    if not (a.isfinite().all() and b.isfinite().all()):
        return 0.0 if torch.equal(a.nan_to_num(), b.nan_to_num()) else float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def _place_in(message):
    """file:line in a message, or an empty text."""
    words = [word.strip("()") for word in message.replace(" cannot ", " ").split()]
    return next((word for word in words if ".py:" in word), "the step")


# ------------------------------------------------------------------------------------------------
# Parts


def _parts(modules, watched: Watched) -> list[tuple[str, float]]:
    """The largest modules in which nothing was refused, with the share of the forward's operators inside of them."""
    bad = {place.module for place in _places(watched) if place.module}
    inside = [place.module for _, _, place in watched.operators if place.module]
    total = len(inside) or 1
    found: list[tuple[str, float]] = []
    for module in modules:
        _collect("", module, bad, inside, total, found)
    return found


def _places(watched) -> list[Place]:
    return [refused.place for refused in watched.refused]


def _collect(path, module, bad, inside, total, found):
    own = [name for name in inside if not path or name == path or name.startswith(f"{path}.")]
    if not own:
        return
    if path and not any(name == path or name.startswith(f"{path}.") for name in bad):
        found.append((path, len(own) / total))
        return
    for name, child in module.named_children():
        _collect(f"{path}.{name}" if path else name, child, bad, inside, total, found)


def main(argv=None) -> int:
    """Print the diagnosis of the step that the command line names; return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with mistakes_in_one_line("common.your_step", "doctor"):
        if len(words) != 1:
            raise ValueError(f"takes one word, {step_file.FORM}")
        torch_settings.prepare(device)
        found = diagnose(words[0], device)
    print(found.text())
    levels = {finding.level for finding in found.findings}
    return 6 if STOPS in levels else 5 if WRONG in levels else 0


if __name__ == "__main__":
    sys.exit(main())
