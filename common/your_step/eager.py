"""Findings from eager steps, before any graph: calls that no graph can hold, and changes from step to step.

A graph repeats its operators with the numbers and addresses of the capture. So steps of one shape are compared with one
another, operator by operator: another operator, another number, or another address from outside of the step is what a
replay gets wrong.
"""

import itertools
import os

import torch

from common.machine.allocator import has_expandable_segments, nccl_registers
from common.training.snapshot import storage_id
from common.your_step import compare, host_values, memory, ranks, user_file
from common.your_step.findings import NOTE, SLOW, STOPS, WRONG, Finding
from common.your_step.parts import tensors_in
from common.your_step.source import Source
from common.your_step.state import StepState
from common.your_step.uninitialised import read_before_written
from common.your_step.watch import A_CUDA_OPERATION, Watched, watch

NUM_STEPS = 5
FEW_SHAPES = 4
MOST_CALLERS = 4
# Words of torch's warnings, which have no class of their own -> kind of finding.
_WARNINGS = (("AccumulateGrad node's stream does not match", "gradient stream"),)


class EagerSteps:
    """Eager steps under watch, and what the host held before and after each.

    Args:
        state: of the step. It is at its start afterwards, but for what was not handed over.
    """

    # Kinds that are harmless where a graph's numbers are eager's.
    suspects = ("host value", "kept tensor", "python random", "control flow", "gradient", "not handed over", "thread")

    def __init__(self, state: StepState):
        self.state, self.source = state, Source(state.path)
        # Batches of one shape, so that operators can be compared; one more for what asks whether a stream captures.
        same = (index for index in itertools.count() if state.batch_class(index) == state.batch_class(0))
        self.batches = list(itertools.islice(same, NUM_STEPS + 1))
        state.reset()
        self.watched: list[Watched] = []
        self.values: list[dict] = []
        self.tensors: list[dict] = []
        self.random: list[dict] = []
        self.gradients: list[dict[str, int | None]] = []
        self.homes: list[set] = []
        self.rates: list[list] = []
        self.trained: list[dict[str, bool]] = []
        self._look()
        for index in self.batches[:NUM_STEPS]:
            self.watched.append(self._step(index))
            self._look()
        self.of_batches = set(map(storage_id, tensors_in(state.batches)))
        self.capturing, self.objection = None, ""
        if ranks.first(self.first.asked_capturing is not None):
            try:
                self.capturing = self._step(self.batches[-1], is_capturing=True)
            except ValueError as error:
                self.objection = str(error)
        self.unwritten = read_before_written(state, self.batches[0])
        self.peak_bytes = memory.peak_of(state, self.batches[0])
        state.reset()

    @property
    def first(self) -> Watched:
        """The first step."""
        return self.watched[0]

    def _step(self, index, is_capturing=False) -> Watched:
        state = self.state
        try:
            return watch(state.step, state.batch(index), state.modules, is_capturing)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            where = user_file.where(error, state.path)
            raise ValueError(f"{where}: the step raised {user_file.said(error)}") from error

    def _look(self):
        values, tensors = host_values.look(self.state.step, self.state.owned)
        self.values.append(values)
        self.tensors.append(tensors)
        self.random.append(host_values.random_states())
        self.gradients.append({name: _address(parameter.grad) for name, parameter in self._parameters()})
        self.homes.append({storage_id(parameter) for _, parameter in self._parameters()})
        self.trained.append({name: parameter.requires_grad for name, parameter in self._parameters()})
        self.rates.append([_number(group.get("lr")) for group in self._groups()])

    def _groups(self):
        return [group for optimizer in self.state.optimizers for group in optimizer.param_groups]

    def _parameters(self):
        return [(name, p) for module in self.state.modules for name, p in module.named_parameters()]

    def findings(self):
        """Yield the findings; those of the kinds in `suspects` count where a graph's numbers are not eager's."""
        yield from self._refused()
        yield from self._streams()
        yield from self._copies()
        yield from self._random()
        yield from self._differences()
        yield from self._branches()
        yield from self._optimizers()
        yield from self._batches()
        yield from self._not_handed_over()
        yield from self._surroundings()
        if self.unwritten:
            place, evidence = self.unwritten
            yield Finding("uninitialised memory", WRONG, place.own, evidence, place.module)

    # --- one step

    def _refused(self):
        # A blocking copy waits, which is said of the copy, or does not matter: a graph has its batch on the GPU.
        batch = self._batch_storages()
        copied = {place.line for place, storage, pinned in self.first.copies if storage in batch or not pinned}
        for refused in self.first.refused:
            if refused.name == A_CUDA_OPERATION and refused.place.line in copied:
                continue
            place, evidence = refused.place, f"{compare.short(refused.name)} {refused.reason}"
            if place.through:
                evidence = f"{compare.short(refused.name)} in torch's {place.through} reads a number on the host"
                kind = "learning rate" if place.through == "schedule" else place.through
                yield Finding(kind, STOPS, self._made_at(place), evidence)
                continue
            if place.line != place.own:
                evidence += f" (at {place.line})"
            if place.callers:
                evidence += f", called from {', '.join(place.callers[:MOST_CALLERS])}"
            yield Finding(refused.kind, STOPS, place.own, evidence, place.module)
        for text, place in self.first.warned:
            kinds = [kind for words, kind in _WARNINGS if words in text]
            if kinds:
                yield Finding(kinds[0], STOPS, place.own, text.split(". ")[0])

    def _made_at(self, place):
        """The line that makes the optimizer or scaler, since it has to change; else the line that calls it."""
        scalers = ("GradScaler",) if place.through == "loss scaler" else ()
        line = self.source.made(*(scalers or {type(each).__name__ for each in self.state.optimizers}))
        return self.source.at(line) if line else place.own

    def _batch_storages(self):
        return set(map(storage_id, tensors_in(self.state.batch(self.batches[0]))))

    def _streams(self):
        for text, place in self.first.unjoined:
            yield Finding("side stream", STOPS, place.own, text, place.module)
        for place in self.first.threads:
            evidence = "work of another thread: it is no part of a graph, and a replay does not start it"
            yield Finding("thread", WRONG, place.own, evidence, place.module)

    def _copies(self):
        batch = self._batch_storages()
        for place, storage, pinned in self.first.copies:
            if pinned:
                continue
            if storage in batch:
                evidence = "the batch is copied from unpinned memory inside of the step, while the host waits"
                yield Finding("unpinned copy", SLOW, place.own, evidence, place.module)
            else:
                evidence = "copies from unpinned memory: refused in a capture, and read again by each replay before"
                yield Finding("unpinned copy", STOPS, place.own, evidence, place.module)
        own = [torch.default_generator, *getattr(torch.cuda, "default_generators", ())]
        # Each look at a generator may give another Python object of it.
        known = {_identity(generator) for generator in [*self.state.snapshot.generators, *own]}
        for generator, place in self.first.generators.values():
            if _identity(generator) not in known:
                yield Finding("unknown generator", STOPS, place.own, "draws from a generator of its own", place.module)

    # --- one step beside another

    def _random(self):
        for name, state in self.random[0].items():
            if state != self.random[-1].get(name):
                evidence = f"the step draws from {name}: every replay would have the numbers of the capture"
                yield Finding("python random", WRONG, self.source.at(self.source.draws(name)), evidence)

    def _differences(self):
        found: dict[tuple[str, str], Finding] = {}
        if self.objection and not any(group.get("capturable") is False for group in self._groups()):
            evidence = f"while a stream captures, {self.objection}"
            found["objection", ""] = Finding("capture-aware code", STOPS, str(self.state.path), evidence)
        for index, other in enumerate(self.watched[1:], 1):
            for finding in self._compared(index, other):
                found.setdefault((finding.kind, finding.where), finding)
        if self.capturing is not None:
            different = compare.first_difference(self.first.operators, self.capturing.operators)
            if different:
                evidence = "while a stream captures, " + compare.told(*different)
                place = compare.place(*different)
                found["", ""] = Finding("capture-aware code", WRONG, place.own, evidence, place.module)
        yield from found.values()

    def _compared(self, index, other):
        """Compare the first step and a later one."""
        different = compare.first_difference(self.first.operators, other.operators)
        gone = [name for name, a in self.gradients[0].items() if (a is None) != (self.gradients[index][name] is None)]
        frozen = next((name for name, is_on in self.trained[0].items() if is_on != self.trained[index].get(name)), "")
        if different and frozen:
            line = self.source.made("requires_grad_") or self.source.changed("requires_grad")
            evidence = f"{frozen} is trained in one step and frozen in another{self._changing()}"
            yield Finding("control flow", WRONG, self.source.at(line), evidence)
        elif different and gone:
            place = compare.place(*different)
            evidence = f"the gradient of {gone[0]} is None before one step and not before another: taken over or added"
            evidence += self._changing()
            yield Finding("gradient", WRONG, place.own, evidence, place.module)
        elif different and not self._is_refused(*different):
            place = compare.place(*different)
            evidence = "of two steps of one shape, " + compare.told(*different) + self._changing()
            yield Finding("control flow", WRONG, place.own, evidence, place.module)
        numbers: set[tuple] = set()
        storages = self.of_batches | other.from_host | other.exchanged
        for mine, theirs in zip(self.first.operators, other.operators, strict=False):
            if (mine.name, mine.shapes) != (theirs.name, theirs.shapes):
                return
            pairs = zip(mine.numbers, theirs.numbers, strict=False)
            pair = next((pair for pair in pairs if not compare.equal(*pair)), None)
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
        lines = {each.place.own for each in (mine, theirs) if each}
        return any(refused.place.own in lines for refused in self.first.refused)

    def _number_differs(self, mine, a, b):
        evidence, place = f"{compare.short(mine.name)} gets {a!r} in one step and {b!r} in another", mine.place
        if place.through == "schedule":
            yield Finding("learning rate", WRONG, self._made_at(place), f"a schedule works on the host: {evidence}")
        elif place.through != "optimizer":
            yield Finding("host value", WRONG, place.own, evidence + self._changing(), place.module)
        elif self.rates[0] == self.rates[-1] and not any(each.place.through for each in self.first.refused):
            yield Finding("host value", WRONG, place.own, f"in torch's optimizer {evidence}" + self._changing())

    def _address_differs(self, storage, index, operator):
        """A tensor from before the step that lies elsewhere in the next one."""
        made = self.watched[index - 1].made.get(storage)
        place = made or operator.place
        if storage in self.homes[index] & self.homes[0]:
            evidence = f"{compare.short(operator.name)} reads one parameter in one step and another one in another"
            return Finding("control flow", WRONG, operator.place.own, evidence + self._changing(), place.module)
        if storage in self.homes[index]:
            evidence = f"a parameter that {compare.short(operator.name)} reads lies elsewhere after each step"
            return Finding("moved memory", WRONG, place.own, evidence, place.module)
        if storage in self.gradients[index].values():
            evidence = "gradients are bound anew: a replay goes on with those of the capture"
            return Finding("gradient", WRONG, place.own, evidence, place.module)
        name = next((name for name, each in self.tensors[index].items() if storage_id(each) == storage), None)
        line = self.source.changed(name) if name else None
        evidence = f"{name or 'a tensor'} is another tensor after each step, and {compare.short(operator.name)} at "
        evidence += f"{operator.place.own} reads it: a replay reads that of the capture"
        return Finding("kept tensor", WRONG, self.source.at(line) if line else place.own, evidence, place.module)

    def _changing(self):
        """The plain values on the host that the steps changed, and where, as words after a finding's evidence."""
        before, after = self.values[0], self.values[-1]
        names = [name for name in before if name in after and before[name] != after[name]]
        words = []
        for name in names[:3]:
            line = self.source.changed(name)
            at = f" at {self.source.at(line)}" if line else ""
            words.append(f"{name} goes from {before[name]!r} to {after[name]!r}{at}"[:200])
        return f" (on the host {', '.join(words)})" if words else ""

    def _branches(self):
        """Branches on what changes on the host, be they taken in these steps or not."""
        before, after = self.values[0], self.values[-1]
        for name in sorted(before.keys() & after.keys()):
            for line in self.source.branches(name) if before[name] != after[name] else ():
                evidence = f"a branch on {name}, which changes on the host: a replay does what the capture did"
                yield Finding("control flow", NOTE, self.source.at(line), evidence)

    def host_values(self) -> list[Finding]:
        """Return what changes on the host, for wrong numbers that nothing else explains."""
        before, after = self.values[0], self.values[-1]
        found = []
        for name in sorted(before.keys() & after.keys()):
            if before[name] != after[name]:
                evidence = f"{name} went from {before[name]!r} to {after[name]!r}; a replay leaves it"
                found.append(Finding("host value", WRONG, self.source.at(self.source.changed(name)), evidence))
        for name, tensor in self.tensors[-1].items():
            old = self.tensors[-2].get(name)
            if old is not None and old is not tensor:
                evidence = f"{name} is another tensor after each step: a replay fills that of the capture"
                found.append(Finding("kept tensor", WRONG, self.source.at(self.source.changed(name)), evidence))
        return found

    # --- what was handed over

    def _optimizers(self):
        for optimizer in self.state.optimizers:
            on_host = any(group.get("capturable") is False for group in optimizer.param_groups)
            if self.state.device.type == "cuda" and on_host:
                name = type(optimizer).__name__
                evidence = f"{name} counts its steps on the host: capturable is False"
                yield Finding("optimizer", STOPS, self.source.at(self.source.made(name)), evidence)
        scheduled = [each for each in self.state.owned if hasattr(each, "get_last_lr")]
        if self.rates[-1] and None not in self.rates[-1] and (scheduled or self.rates[0] != self.rates[-1]):
            names = {type(each).__name__ for each in self.state.optimizers}
            what = type(scheduled[0]).__name__ if scheduled else "the step"
            evidence = f"{what} changes lr, a number on the host: a graph of the whole step keeps that of the capture"
            yield Finding("learning rate", WRONG, self.source.at(self.source.made(*names)), evidence)

    def _batches(self):
        number = len(set(self.state.classes))
        if number > FEW_SHAPES:
            evidence = f"{number} shapes in {len(self.state.batches)} batches, and each needs a graph and its memory"
            yield Finding("shapes of batches", SLOW, self.source.at(self.source.changed("batches")), evidence)

    def _not_handed_over(self):
        """Find tensors that steps write and that a reset does not put back."""
        known = {storage_id(tensor) for _, tensor in self.state.snapshot.tensors}
        known |= {address for gradients in self.gradients for address in gradients.values()}
        known |= {address for homes in self.homes for address in homes}
        known |= {address for watched in self.watched for address in watched.exchanged}
        # Put back through load_state_dict, as a loss scaler's.
        own = [each for holder in self.state.owned if hasattr(holder, "__dict__") for each in vars(holder).values()]
        known |= {storage_id(each) for each in own if isinstance(each, torch.Tensor)}
        names = {storage_id(tensor): name for name, tensor in self.tensors[-1].items()}
        names |= {
            storage_id(tensor): f"{name}.{path}"
            for name, module in host_values.modules_not_handed_over(self.state.step, self.state.owned)
            for path, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        states = host_values.states_not_handed_over(self.state.step, self.state.owned)
        names |= {storage_id(tensor): words for words, tensor in states}
        places: dict[str, str] = {}
        for watched in self.watched:
            for storage, place in watched.written.items():
                if storage not in known:
                    name = "its batch" if storage in self.of_batches else names.get(storage, "a tensor from before it")
                    places.setdefault(place.own, name)
        for where, name in places.items():
            yield Finding("not handed over", WRONG, where, f"the step writes {name}, and nothing puts it back")

    def _surroundings(self):
        kind = self.state.device.type
        if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            evidence = "autocast was on before the step, with its cache: a graph reads casts of weights from before it"
            yield Finding("autocast cache", WRONG, self.source.at(self.source.made("autocast")), evidence)
        trained = [name for name, parameter in self._parameters() if parameter.requires_grad]
        names = [name for name in trained if not any(gradients[name] for gradients in self.gradients)]
        if names and len(names) < len(trained):
            evidence = f"{len(names)} parameters never have a gradient, {names[0]} among them"
            yield Finding("unused parameter", NOTE, self.source.at(None), evidence)
        moves = has_expandable_segments(os.environ) and nccl_registers(os.environ)
        if moves and torch.distributed.is_initialized():
            evidence = "expandable segments, while NCCL registers the memory of graphs"
            yield Finding("settings", NOTE, "the environment", evidence)
        for each in self.state.modules:
            if isinstance(each, torch.nn.parallel.DistributedDataParallel):
                line = self.source.at(self.source.made("DistributedDataParallel", "DDP"))
                yield Finding("data parallel", NOTE, line, "DDP prepares itself in its first ten steps")


def _number(rate) -> float | None:
    """A learning rate that is a number on the host; None for a tensor."""
    return None if isinstance(rate, torch.Tensor) else rate


def _identity(generator) -> int:
    return generator._cdata


def _address(tensor) -> int | None:
    return None if tensor is None else storage_id(tensor)
