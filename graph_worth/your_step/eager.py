"""Findings from eager steps, before any graph: calls that no graph can hold, and changes from step to step.

A graph repeats its operators with the numbers and addresses of the capture. So steps of one shape are compared with one
another, operator by operator: another operator, another number, or another address from outside of the step is what a
replay gets wrong.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import torch

from graph_worth.capture import host_graph_rules as rules
from graph_worth.capture.asking import answering
from graph_worth.capture.errors import explained
from graph_worth.measuring import course, operator_table, parity, torch_settings
from graph_worth.snapshot import storage_id
from graph_worth.your_step import compare, handed_over, host_values, rank_decisions
from graph_worth.your_step.findings import NOTE, SLOW, STOPS, WRONG, Finding
from graph_worth.your_step.libraries import NOTES, argument_for, library_of
from graph_worth.your_step.parts import tensors_in
from graph_worth.your_step.place import STEPPED, Place
from graph_worth.your_step.reads import hidden_reads
from graph_worth.your_step.record import A_CUDA_OPERATION, BY_TABLE, KINDS, Watched
from graph_worth.your_step.state import StepState, errors_with_lines
from graph_worth.your_step.step_watch import Beside, watch
from graph_worth.your_step.uninitialised import read_before_written
from graph_worth.your_step.user_lines import Source

NUM_STEPS = 5
# Whose steps run with memory filled with NaN.
MOST_BATCHES = 8
MOST_CALLERS = 4
AWARE = "capture-aware code"
# Steps with and without a capture's answer, and how far their losses may part.
NUM_LOSSES, MOST_PRICE = 8, 1e-2
# What to do about calls of these parts of torch, and for this reason.
_REMEDIES = {
    "checkpoint": "checkpoint(..., preserve_rng_state=False) where it draws no random numbers, else leave it eager: "
    "graph_modules",
    "distribution": "torch.distributions.Distribution.set_default_validate_args(False), in build",
    BY_TABLE: "compute it outside of the step, or leave its module eager: graph_modules",
    rules.LENGTHS: "pad and mask: a padded batch, and a loss that leaves the padding out, need no packed sequence",
}
_MADE_PART_OF_BATCH = "make it part of the batch, which is copied before each replay"
_AS_CAPTURED = "nothing to do: a graph is compared with eager steps that do what a capture does"
_OTHER_OPTIMIZER = "LBFGS asks the host in each of its iterations: only another optimizer can be captured"
_MICROBATCHES = "make all microbatches of an update in one step, without accumulate()"
_COPY = "write into the old tensor: old.copy_(new)"
# Words of warnings of torch, which have no classes of their own.
_SLOW_PATH = "Unable to hit fast path of CUDAGraphs"
_GRADIENT_STREAM = "AccumulateGrad node's stream does not match"


class EagerSteps:
    """Eager steps under watch, and what the host held before and after each.

    The state is at its start afterwards, but for what was not handed over.
    """

    # Kinds that are harmless where a graph's numbers are eager's.
    suspects = ("host value", "control flow", "gradient", "not handed over", "thread")

    def __init__(self, state: StepState):
        self.state, self.source = state, Source(state.path)
        self.has_lbfgs = any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in state.optimizers)
        # Batches of one shape, so that operators can be compared; one more for a step that is told of no capture.
        same = (index for index in itertools.count() if state.batch_class(index) == state.batch_class(0))
        self.batches = list(itertools.islice(same, NUM_STEPS + 1))
        state.reset()
        self.watched: list[Watched] = []
        self.of_state = {storage_id(tensor) for _, tensor in state.snapshot.tensors}
        self.looks = [self._look()]
        # Code that asks whether a stream captures is told so, unless it raises then.
        self.objection = ""
        try:
            self.watched = [self._step(self.batches[0])]
        except ValueError as error:
            self.objection = str(error)
        self.objection = rank_decisions.first(self.objection)
        if self.objection:
            state.reset()
            self.watched = [self._step(self.batches[0])]
        self.looks.append(self._look())
        for index in self.batches[1:NUM_STEPS]:
            self.watched.append(self._step(index))
            self.looks.append(self._look())
        before, after = self.looks[0].values, self.looks[-1].values
        # Name of a plain value on the host that the steps changed -> (value before them, value after them).
        self.changes = {
            name: (before[name], after[name]) for name in before if name in after and before[name] != after[name]
        }
        self.of_batches = set(map(storage_id, tensors_in(state.batches)))
        self.plain: Watched | None = None
        if rank_decisions.first(self.first.asked_capturing is not None) and not self.objection:
            self.plain = self._step(self.batches[-1], is_capturing=False)
        state.reset()
        seen = {refused.place.own for refused in self.first.refused} | self.first.of_host
        with self.told():
            self.first.refused += [read for read in hidden_reads(state, self.batches[0]) if read.place.own not in seen]
        # One batch of each shape first; all ranks make as many steps.
        firsts = {kind: index for index, kind in reversed(list(enumerate(state.classes)))}
        unlike = list(dict.fromkeys([*firsts.values(), *range(len(state.batches))]))
        with self.told():
            self.unwritten = read_before_written(state, rank_decisions.first(unlike[:MOST_BATCHES]))
        state.reset()

    @property
    def first(self) -> Watched:
        """The first step."""
        return self.watched[0]

    def told(self):
        """Return a context in which the step gets the answers that it would get in a capture."""
        return answering(not self.objection)

    def _step(self, index, is_capturing=True) -> Watched:
        contents = self.watched[-1].contents if self.watched else {}
        beside = Beside(self.state.threads, contents, self.of_state)
        with errors_with_lines(self.state.path):
            answer = is_capturing and not self.objection
            return watch(self.state.step, self.state.batch(index), self.state.modules, answer, beside)

    def _look(self) -> SimpleNamespace:
        reachable = host_values.Reachable(self.state.step, self.state.owned)
        named = [(name, p) for module in self.state.modules for name, p in module.named_parameters()]
        rates = [group.get("lr") for group in self._groups()]
        return SimpleNamespace(
            values=reachable.values,
            tensors=reachable.tensors,
            random=reachable.states(self.state.device),
            gradients={name: None if p.grad is None else storage_id(p.grad) for name, p in named},
            homes={storage_id(p) for _, p in named},
            trained={name: p.requires_grad for name, p in named},
            of_optimizers={
                storage_id(tensor)
                for optimizer in self.state.optimizers
                for kept in optimizer.state.values()
                for tensor in tensors_in(kept)
            },
            # Those that are numbers on the host.
            rates=[None if isinstance(rate, torch.Tensor) else rate for rate in rates],
        )

    def _groups(self):
        return [group for optimizer in self.state.optimizers for group in optimizer.param_groups]

    def findings(self):
        """Yield the findings; those of the kinds in `suspects` count where a graph's numbers are not eager's."""
        yield from self._refused()
        yield from self._streams()
        yield from self._copies()
        yield from self._random()
        yield from self._differences()
        yield from self._branches()
        yield from handed_over.findings(self)
        if self.unwritten:
            yield _at(self.unwritten[0], "uninitialised memory", WRONG, self.unwritten[1])

    # --- one step

    def _refused(self):
        # A blocking copy waits, which is said of the copy, or does not matter: a graph has its batch on the GPU.
        batch = self._batch_storages()
        copied = {place.line for place, storage, pinned in self.first.copies if storage in batch or not pinned}
        for refused in self.first.refused:
            if refused.name == A_CUDA_OPERATION and refused.place.line in copied:
                continue
            place, evidence = refused.place, f"{compare.short(refused.name)} {refused.reason}"
            if place.through in STEPPED:
                evidence = f"{compare.short(refused.name)} in torch's {place.through} reads a number on the host"
                kind = "learning rate" if place.through == "schedule" else place.through
                remedy = _OTHER_OPTIMIZER if self.has_lbfgs and kind == "optimizer" else ""
                yield Finding(kind, STOPS, self._made_at(place), evidence, remedy=remedy)
                continue
            if refused.reason == BY_TABLE:
                evidence += f": it {operator_table.rows()[refused.name, 'forward'].text}"
            if place.line != place.own:
                evidence += f" (in {library_of(place.line) or 'a package'}, at {place.line})"
            if place.callers:
                evidence += f", called from {', '.join(place.callers[:MOST_CALLERS])}"
            instead = operator_table.instead_of(refused.name)
            remedy = f"a graph holds {instead} in its place" if instead else _REMEDIES.get(refused.reason, "")
            remedy = argument_for(place) or _REMEDIES.get(place.through, remedy)
            finding = _at(place, KINDS[refused.reason], STOPS, evidence, remedy)
            yield replace(finding, is_hidden=refused.is_hidden)
        for text, place in self.first.warned:
            if _GRADIENT_STREAM in text:
                yield Finding("gradient stream", STOPS, place.own, text.split(". ")[0])
            elif _SLOW_PATH in text:
                yield Finding("compiled graphs", SLOW, place.own, explained(text)[0], remedy=explained(text)[1])

    def _made_at(self, place):
        """The line that makes the optimizer or scaler, since it has to change; else the line that calls it."""
        scalers = ("GradScaler",) if place.through == "loss scaler" else ()
        line = self.source.made(*(scalers or self.state.optimizer_names()))
        return self.source.at(line) if line else place.own

    def _batch_storages(self):
        return set(map(storage_id, tensors_in(self.state.batch(self.batches[0]))))

    def _streams(self):
        for text, place in self.first.unjoined:
            yield _at(place, "side stream", STOPS, text)
        for place in self.first.threads:
            evidence = "work of another thread: it is no part of a graph, and a replay does not start it"
            yield _at(place, "thread", WRONG, evidence)
        for place in dict.fromkeys(place for watched in self.watched for place in watched.drawing):
            evidence = "a thread of build's draws random numbers from torch's generator while the step runs"
            yield replace(_at(place, "thread", STOPS, evidence), where=self.source.draws_near(place.own))

    def _copies(self):
        batch = self._batch_storages()
        exchanged = set().union(*(watched.exchanged for watched in self.watched))
        refilled = [pair for watched in self.watched for pair in watched.refilled.items() if pair[0] not in exchanged]
        for place in dict.fromkeys(place for _, place in refilled):
            evidence = (
                "the host fills this memory between two steps, past torch: a replay has the copy, not the filling"
            )
            yield _at(place, "host value", WRONG, evidence, _MADE_PART_OF_BATCH)
        for place, storage, pinned in self.first.copies:
            if storage in batch and not pinned:
                evidence = "the batch is copied from unpinned memory inside of the step, while the host waits"
                yield _at(place, "unpinned copy", SLOW, evidence)
            elif not pinned:
                evidence = "copies from unpinned memory: refused in a capture, and read again by each replay before"
                yield _at(place, "unpinned copy", STOPS, evidence)
        default_generators = [torch.default_generator, *getattr(torch.cuda, "default_generators", ())]
        # Each look at a generator may give another Python object of it.
        known = {_identity(generator) for generator in [*self.state.snapshot.generators, *default_generators]}
        for generator, place in self.first.generators.values():
            if _identity(generator) not in known:
                yield _at(place, "unknown generator", STOPS, "draws from a generator of its own")

    # --- one step beside another

    def _random(self):
        # Imports of libraries draw, too.
        line = self.source.draws(self.state.unseeded) if self.state.unseeded else None
        if line:
            evidence = f"build draws from {self.state.unseeded}, which nothing has seeded: it gives other data in "
            evidence += "another process"
            yield Finding("unseeded data", NOTE, self.source.at(line), evidence)
        for name, state in self.looks[0].random.items():
            if state != self.looks[-1].random.get(name):
                evidence = f"the step draws from {name}: every replay would have the numbers of the capture"
                yield Finding("python random", WRONG, self.source.at(self.source.draws(name)), evidence)

    def _differences(self):
        findings: dict[tuple[str, str], Finding] = {}
        if self.objection:
            evidence = f"while a stream captures, {self.objection}"
            findings["objection", ""] = Finding(AWARE, STOPS, str(self.state.path), evidence)
        for index, later_step in enumerate(self.watched[1:], 1):
            for finding in self._compared(index, later_step):
                findings.setdefault((finding.kind, finding.where), finding)
        different = compare.first_difference(self.plain.operators, self.first.operators) if self.plain else None
        if rank_decisions.first(different is not None):
            finding = self._otherwise_in_capture(different)
            findings |= {("", ""): finding} if finding else {}
        yield from findings.values()

    def _otherwise_in_capture(self, different) -> Finding | None:
        """A step that does something else where it is told that a stream captures, and what that changes."""
        losses = []
        for answer in (False, True):
            with answering(answer), torch_settings.deterministic_kernels(where_there_are=True):
                losses.append(course.course(self.state, self.state.train, NUM_LOSSES).losses)
        deviation = parity.loss_deviation(losses[1], losses[0])
        assert deviation is not None, "as many losses of both"
        if not (different and self.plain):
            return None
        (plain, captured), place = different, compare.place(*different)
        writes = [set(watched.written) & self.of_state for watched in (self.plain, self.first)]
        names = [compare.short(operator.name) if operator else "nothing" for operator in (plain, captured)]
        evidence = f"at {place.line} a step runs {names[0]}, and while a stream captures {names[1]}"
        if deviation > MOST_PRICE:
            return _at(place, AWARE, WRONG, f"{evidence}: the losses of {NUM_LOSSES} steps differ by {deviation:.1e}")
        if writes[0] != writes[1]:
            return _at(place, AWARE, WRONG, f"{evidence}: other tensors of the state are written")
        price = f"differ by {deviation:.1e}" if deviation else "are equal"
        evidence += f": the losses of {NUM_LOSSES} steps {price}"
        return _at(place, AWARE, NOTE, evidence, argument_for(place, NOTES) or _AS_CAPTURED)

    def _compared(self, index, later_step):
        """Compare the first step and a later one."""
        different = compare.first_difference(self.first.operators, later_step.operators)
        start, now = self.looks[0], self.looks[index]
        gone = [name for name, a in start.gradients.items() if (a is None) != (now.gradients[name] is None)]
        frozen = next((name for name, is_on in start.trained.items() if is_on != now.trained.get(name)), "")
        if different and frozen:
            line = self.source.made("requires_grad_") or self.source.changed("requires_grad")
            evidence = f"{frozen} is trained in one step and frozen in another{self.changing()}"
            yield Finding("control flow", WRONG, self.source.at(line), evidence)
        elif different and gone:
            evidence = f"the gradient of {gone[0]} is None before one step and not before another: taken over or added"
            yield _at(compare.place(*different), "gradient", WRONG, evidence + self.changing())
        elif different and not self._is_refused(*different):
            evidence = "of two steps of one shape, " + compare.told(*different) + self.changing()
            is_of_accelerate = any(name.endswith(".sync_gradients") for name in self.changes)
            remedy = _MICROBATCHES if is_of_accelerate else ""
            yield _at(compare.place(*different), "control flow", WRONG, evidence, remedy)
        numbers: set[tuple] = set()
        storages = self.of_batches | later_step.from_host | later_step.exchanged
        # Of another parameter than in the first step; and LBFGS, against which enough is found, binds its state anew.
        storages |= now.of_optimizers if self.has_lbfgs else now.of_optimizers & start.of_optimizers
        for mine, theirs in zip(self.first.operators, later_step.operators, strict=False):
            if (mine.name, mine.shapes) != (theirs.name, theirs.shapes):
                return
            pairs = zip(mine.numbers, theirs.numbers, strict=False)
            # A NaN is equal to a NaN.
            pair = next(((a, b) for a, b in pairs if a != b and repr(a) != repr(b)), None)
            # A number comes again in the backward pass; its first operator is the one to name.
            if pair and pair not in numbers:
                numbers.add(pair)
                yield from self._number_differs(mine, *pair)
            pairs = zip(mine.outside, theirs.outside, strict=False)
            changed = {b for a, b in pairs if a and b and a != b} - storages
            storages |= changed
            yield from (self._address_differs(storage, index, theirs) for storage in changed)

    def _is_refused(self, mine, theirs):
        """Say whether steps part in a call that no graph can hold anyway."""
        lines = {operator.place.own for operator in (mine, theirs) if operator}
        return any(refused.place.own in lines for refused in self.first.refused)

    def _number_differs(self, mine, a, b):
        through = STEPPED.intersection(refused.place.through for refused in self.first.refused)
        evidence, place = f"{compare.short(mine.name)} gets {a!r} in one step and {b!r} in another", mine.place
        if place.through == "schedule":
            yield Finding("learning rate", WRONG, self._made_at(place), f"a schedule works on the host: {evidence}")
        elif place.through != "optimizer":
            yield _at(place, "host value", WRONG, evidence + self.changing())
        elif self.looks[0].rates == self.looks[-1].rates and not through:
            yield Finding("host value", WRONG, place.own, f"in torch's optimizer {evidence}" + self.changing())

    def _address_differs(self, storage, index, operator):
        """A tensor from before the step that lies elsewhere in the next one."""
        place = self.watched[index - 1].made.get(storage) or operator.place
        look = self.looks[index]
        if storage in look.homes & self.looks[0].homes:
            evidence = f"{compare.short(operator.name)} reads one parameter in one step and another one in another"
            return Finding("control flow", WRONG, operator.place.own, evidence + self.changing(), place.module)
        if storage in look.homes:
            evidence = f"a parameter that {compare.short(operator.name)} reads lies elsewhere after each step"
            line = self.source.changed("data")
            finding = _at(place, "moved memory", WRONG, evidence, _COPY)
            return replace(finding, where=self.source.at(line)) if line else finding
        if storage in look.gradients.values():
            evidence = "gradients are bound anew: a replay goes on with those of the capture"
            return _at(place, "gradient", WRONG, evidence)
        if storage in look.of_optimizers:
            before = self.watched[:index]
            loads = [load for watched in before for load in watched.loads]
            place = next((watched.made[storage] for watched in reversed(before) if storage in watched.made), place)
            evidence = (
                f"{compare.short(operator.name)} at {operator.place.own} reads a state of the optimizer that lies "
            )
            evidence += "elsewhere after a step: a replay goes on with that of the capture"
            return _at(loads[-1] if loads else place, "moved memory", WRONG, evidence, _COPY)
        name = next((name for name, tensor in look.tensors.items() if storage_id(tensor) == storage), None)
        line = self.source.changed(name) if name else None
        evidence = f"{name or 'a tensor'} is another tensor after each step, and {compare.short(operator.name)} at "
        evidence += f"{operator.place.own} reads it: a replay reads that of the capture"
        where = self.source.at(line) if line else place.own
        return replace(_at(place, "kept tensor", WRONG, evidence), where=where)

    def changing(self):
        """The plain values on the host that the steps changed, and where, as words after a finding's evidence."""
        words = []
        for name, (before, after) in itertools.islice(self.changes.items(), 3):
            line = self.source.changed(name)
            at = f" at {self.source.at(line)}" if line else ""
            words.append(f"{name} goes from {before!r} to {after!r}{at}"[:200])
        return f" (on the host {', '.join(words)})" if words else ""

    def _branches(self):
        """Branches on what changes on the host, be they taken in these steps or not."""
        for name in sorted(self.changes):
            for line in self.source.branches(name):
                evidence = f"a branch on {name}, which changes on the host: a replay does what the capture did"
                yield Finding("control flow", NOTE, self.source.at(line), evidence)

    def host_values(self) -> list[Finding]:
        """Return what changes on the host, for wrong numbers that nothing else explains."""
        findings = []
        for name, (before, after) in sorted(self.changes.items()):
            evidence = f"{name} went from {before!r} to {after!r}; a replay leaves it"
            findings.append(Finding("host value", WRONG, self.source.at(self.source.changed(name)), evidence))
        for name, tensor in self.looks[-1].tensors.items():
            if self.looks[-2].tensors.get(name, tensor) is not tensor:
                evidence = f"{name} is another tensor after each step: a replay fills that of the capture"
                findings.append(Finding("kept tensor", WRONG, self.source.at(self.source.changed(name)), evidence))
        return findings


def _identity(generator) -> int:
    return generator._cdata


def _at(place: Place, kind: str, level: str, evidence: str, remedy: str = "") -> Finding:
    return Finding(kind, level, place.own, evidence, place.module, remedy or argument_for(place))
