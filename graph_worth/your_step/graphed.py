"""`graphed`: a training step that becomes CUDA graphs, one for each shape of batch, and is compared with eager.

    from graph_worth import graphed, one_stream

    one_stream()                                  # the program's first line
    step = graphed(step, [model, optimizer])      # step(batch) -> loss, the whole eager step
    for batch in loader:
        loss = step(batch)

The first calls of a shape are eager training steps. The next one captures, which runs nothing on a GPU, and replays
once. Before each replay guards.py looks whether the host still holds what the graph holds. The first replays are
compared with the eager step from the same state, and the caller gets eager's result and eager's state.
"""

import contextlib
import functools
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten

from graph_worth.capture.asking import answering
from graph_worth.capture.errors import explained
from graph_worth.capture.pool import CaptureError, Pool
from graph_worth.measuring import parity
from graph_worth.measuring.torch_settings import deterministic_kernels
from graph_worth.parallel.host_messages import is_distributed, of_all_ranks
from graph_worth.snapshot import Snapshot
from graph_worth.your_step import host_values
from graph_worth.your_step.eager import MOST_PRICE
from graph_worth.your_step.guards import Guards, parts_of
from graph_worth.your_step.libraries import with_library
from graph_worth.your_step.parts import loss_of, register_nests, tensors_in
from graph_worth.your_step.place import is_noted, is_users_file, place_of_call
from graph_worth.your_step.rank_decisions import first
from graph_worth.your_step.state import DDP_WARM_STEPS, WARM_STEPS
from graph_worth.your_step.step_graph import StepGraph, kept_result, leaves_of
from graph_worth.your_step.trial import MOST_NOISE, _noting_other_kernels
from graph_worth.your_step.user_lines import Source, last_part, names_used

DOCTOR = "More lines: graph-worth doctor FILE.py:build"
# Eager steps beside which a replay is judged that differs.
NUM_AGAIN = 3
_PLAIN = (bool, int, float, str, type(None))
_SCHEDULE = -1
_TWO_STREAMS = (
    "this program works on the default stream, and graphs need another one: replays beside it are up to 9 % "
    "slower where kernels take 4 us. Call graph_worth.one_stream() in the program's first line"
)


@dataclass
class _Shape:
    """Batches of one shape: the eager calls and the compared replays that were made, and the graph."""

    signature: tuple
    structure: Any
    num_warm: int = 0
    num_verified: int = 0
    graph: StepGraph | None = None
    guards: Guards | None = None
    # Plain values as the last call began; from the capture on those that `check="always"` looks at.
    values: dict = field(default_factory=dict)
    # What names were bound to at the capture, which the graph may read.
    bound: list = field(default_factory=list)
    # Functions that bind names which the step binds anew, and the graph's tensors: results as those that it returns.
    binds: dict = field(default_factory=dict)


class graphed:
    """A step as graphs. It is called as the step itself, and the tensors that it returns are yours to keep.

    It is not thread-safe, and works on one device. With several ranks all see the same shapes in the same order.

    Args:
        step: step(batch), the whole training step, from zero_grad to the optimizer's step.
        owned: what training changes, as `build` returns it: modules, optimizers, schedules, scalers, tensors,
            generators, and nests of these.
        shapes: the most shapes of batches, each of which is a graph.
        verify: replays of a shape that are compared with eager; 0 where the step cannot be called twice on a batch.
        on_refusal: "eager" goes on without graphs, and warns once.
        cpu: without a GPU the step stays eager, or "host_graph" stands in, for tests.
        check: "always" looks at the numbers in closures and attributes before each replay, too.
        warm_up: eager calls of a shape before its capture; None: 3, or 11 with DistributedDataParallel.

    Attributes:
        eager: the step as it was handed over.
        refusal: the reason why it runs eagerly from now on, or "".
        pool: where the graphs have their memory; None before the first capture.

    Raises:
        CaptureError: by a call, before the replay: a graph cannot hold the step, or would train otherwise.
        ValueError: a batch has no tensor, or an object that training changes cannot be copied.
    """

    def __init__(  # noqa: PLR0913
        self,
        step,
        owned,
        *,
        shapes: int = 8,
        verify: int = 3,
        on_refusal: Literal["raise", "eager"] = "raise",
        cpu: Literal["eager", "host_graph"] = "eager",
        check: Literal["numbers", "always"] = "numbers",
        warm_up: int | None = None,
    ):
        options = {"on_refusal": (on_refusal, "raise", "eager"), "cpu": (cpu, "eager", "host_graph")}
        for name, (value, *known) in (options | {"check": (check, "numbers", "always")}).items():
            if value not in known:
                raise ValueError(f"graphed({name}={value!r}): takes {known[0]!r} or {known[1]!r}")
        least = {"shapes": (shapes, 1), "verify": (verify, 0), "warm_up": (1 if warm_up is None else warm_up, 1)}
        for name, (number, least_number) in least.items():
            if number < least_number:
                raise ValueError(f"graphed({name}={number!r}): takes {least_number} or more")
        self.eager, self._parts = step, list(parts_of(owned))
        parts = self._parts
        self._most_shapes, self._num_verified = shapes, verify
        self._is_forgiving, self._looks_always = on_refusal == "eager", check == "always"
        self._modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        has_ddp = any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in self._modules)
        self._num_warm = warm_up or (DDP_WARM_STEPS if has_ddp else WARM_STEPS)
        self._optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        parameters += [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        tensors = [*self._parameters, *tensors_in(parts)]
        self.device = tensors[0].device if tensors else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._generators = [p for p in parts if isinstance(p, torch.Generator) and p.device.type == self.device.type]
        self._moving = host_values.Moving(step, parts, has_tensors=True)
        # Values on the host that change, with the object that has them as attributes; sources that the step draws from;
        # what guards find in it; code that runs in it, with the ids of first arguments and their classes.
        self._changes: dict[str, tuple] = {}
        self._drawn: set[str] = set()
        self._difference = ""
        self._codes: dict = {}
        self._source = functools.cache(lambda path: Source(Path(path)))
        # Tensors that it writes and that were not handed over.
        self._written: dict[int, torch.Tensor] = {}
        self._warned: set[str] = set()
        # Optimizers that stepped in the step by identity, and _SCHEDULE where a schedule did.
        self._stepped: dict[int, Any] = {}
        self._stream: Any = None
        self._past_replays, self.refusal = 0, ""
        self._forget()
        # A ValueError where an object cannot be copied.
        self._snapshot(has_tensors=False)
        if self.device.type == "cpu" and cpu == "eager":
            self.refusal = "the step runs on a CPU, which has no graphs"
            self._warn(f"{self.refusal}: it stays eager")

    def _forget(self):
        self.pool: Pool | None = None
        self._shapes: dict[tuple, list[_Shape]] = {}
        self._error: CaptureError | None = None
        # Gradients that the graphs write where they lie, and whether eager steps have bound others.
        self._gradients: dict[int, torch.Tensor] = {}
        self._has_eager_gradients = False

    @property
    def shapes(self) -> list[tuple]:
        """Shapes, dtypes and strides, and values that are no tensors, of the batches that have a graph."""
        return [shape.signature for alike in self._shapes.values() for shape in alike if shape.graph is not None]

    @property
    def replays(self) -> int:
        """Replays so far, those that were compared as well."""
        return self._past_replays + (self.pool.num_replays if self.pool else 0)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool in which the graphs of all shapes have their memory."""
        return self.pool.bytes() if self.pool else 0

    def release(self) -> None:
        """Drop the graphs and their memory, as before a process group ends. Later calls warm up and capture anew."""
        if self.pool is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._past_replays += self.pool.num_replays
            self._drop_gradients()
            self.pool.release()
        self._forget()

    def __reduce_ex__(self, protocol):
        raise TypeError("a graphed step cannot be copied or saved: copy the model, and call graphed on the copy")

    # --- calls

    def __call__(self, batch):
        """Train on a batch, and return what the step returns, with tensors that later steps leave alone."""
        if self.refusal:
            return kept_result(self.eager(batch))
        if self._error is not None:
            raise self._error
        with self._on_stream():
            result = self._step(batch)
        return kept_result(result)

    def capture(self, batch) -> None:
        """Capture the shape of a batch before training. What its warm-up changes is put back.

        State that an optimizer makes in its first step is zero afterwards.
        """
        if self.refusal:
            return
        with self._on_stream():
            start, values = self._snapshot(self._not_owned(self._look())), self._moving.now()
            known = {id(tensor) for _, tensor in start.tensors}
            try:
                shape = self._shape_of(batch)
                while shape.num_warm < self._num_warm:
                    self._warm(shape, batch)
                if shape.graph is None:
                    self._capture(shape, batch)
            except CaptureError as error:
                self.refuse(error)
            finally:
                for _, tensor in self._snapshot().tensors:
                    if id(tensor) not in known:
                        tensor.detach().zero_()
                start.restore()
                self._moving.put_back(values)

    def _step(self, batch):
        try:
            shape = self._shape_of(batch)
        except CaptureError as error:
            if not self._is_forgiving:
                raise
            self._warn(f"{error}: such batches stay eager")
            self._has_eager_gradients = True
            return self.eager(batch)
        if shape.num_warm < self._num_warm:
            return self._warm(shape, batch)
        try:
            if shape.graph is None:
                self._capture(shape, batch)
        except CaptureError as error:
            self.refuse(error)
            return self.eager(batch)
        try:
            self._check(shape)
        except CaptureError as error:
            # Nothing has run: who puts it back, as by train(), goes on.
            if self._is_forgiving:
                self.refuse(error)
                return self.eager(batch)
            raise
        if self._has_eager_gradients:
            self._drop_gradients()
        if shape.num_verified < self._num_verified:
            return self._verified(shape, batch)
        return self._replay(shape, batch)

    def _replay(self, shape, batch):
        try:
            result = shape.graph.replay(batch)
        except CaptureError as error:
            raise self._refusal_of(error) from None
        self._moving.put_back([(put, tensor.detach().clone()) for put, tensor in shape.binds.values()])
        return result

    @contextlib.contextmanager
    def _on_stream(self):
        """Work on the current stream, or on one of our own beside the default one."""
        current = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if current is None or current != torch.cuda.default_stream(self.device):
            yield
            return
        if self._stream is None:
            self._warn(_TWO_STREAMS)
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _shape_of(self, batch) -> _Shape:
        for look in (lambda _: None, register_nests):
            look(batch)
            leaves, structure = tree_flatten(batch)
            signature = tuple((x.shape, x.dtype, x.stride()) if torch.is_tensor(x) else _value_of(x) for x in leaves)
            for shape in self._shapes.get(signature, ()):
                if shape.structure == structure:
                    return shape
        if not tensors_in(leaves):
            raise ValueError("graphed: the batch has no tensor; a batch is a tensor or a nest of tensors")
        for leaf in leaves:
            if not torch.is_tensor(leaf) and tensors_in(leaves_of(leaf)):
                words = f"graphed: the batch has a {type(leaf).__name__}, whose tensors a graph would keep"
                raise ValueError(f"{words}: make it a dict or a dataclass")
        number = sum(map(len, self._shapes.values()))
        if number >= self._most_shapes:
            words = ", ".join(str(list(leaf.shape)) if torch.is_tensor(leaf) else _number_of(leaf) for leaf in leaves)
            words = f"a batch of {words} has shape {number + 1}, and shapes={number}: pad batches to fewer lengths, "
            raise self._refusal_of(words + "make numbers tensors, drop_last=True, or raise shapes=")
        shape = _Shape(signature, structure)
        self._shapes.setdefault(signature, []).append(shape)
        return shape

    # --- warm-up and capture

    def _warm(self, shape, batch):
        """Make an eager step, and note what it changes on the host."""
        every = of_all_ranks((str(shape.signature), shape.num_warm)) if is_distributed() else []
        if len(set(every)) > 1:
            raise self._refusal_of("ranks see batches of other shapes, or in another order: let all see the same")
        before = self._look(shape)
        states = self._states(before)
        versions = [(tensor, tensor._version) for tensor in self._not_owned(before)]
        guards = Guards(self._parts)
        # A compiler in the first call would be slow.
        calls = _calls(self._codes) if shape.num_warm or self._num_warm == 1 else contextlib.nullcontext()
        with _added_gradients(self._parameters) as added, _steps_of() as stepped, calls:
            result = self.eager(batch)
        shape.num_warm += 1
        self._has_eager_gradients = True
        self._moving.note()
        self._written |= {id(tensor): tensor for tensor, version in versions if tensor._version != version}
        if shape.num_warm > 1 or self._num_warm == 1:
            # A first step may make what later ones use.
            self._difference = self._difference or guards.difference()
            after = self._states(self._look())
            self._drawn |= {name for name, state in states.items() if after.get(name, state) != state}
        for code in before.codes if sys.getprofile() is not None else ():
            # Under another profiler nobody sees which code runs.
            _note(self._codes, code, None)
        self._stepped |= stepped
        if added:
            words = "the step adds to gradients from before it, where a replay begins anew: begin it with zero_grad()"
            self.refuse(self._refusal_of(words))
        return result

    def _look(self, shape=None) -> host_values.Reachable:
        """Return what the step reaches, and note what is not as it was when the last call of the shape began."""
        reached = host_values.Reachable(self.eager, self._parts)
        if shape is not None:
            is_late = shape.num_warm > 1 or shape.num_warm == self._num_warm
            for name, old in shape.values.items() if is_late else ():
                if reached.values.get(name, old) != old:
                    self._changes[name] = old, reached.values[name], reached.holder_of(name)
            shape.values = reached.values
        return reached

    def _states(self, reached) -> dict:
        states = reached.states(self.device)
        if self.device.type != "cpu":
            states["torch's generator of the host"] = torch.get_rng_state().tolist()
        return states

    def _not_owned(self, reached) -> list[torch.Tensor]:
        """Return the tensors that the step reaches and that were not handed over."""
        tensors = [*(tensor for _, tensor in reached.not_handed_over()), *reached.tensors.values()]
        owned = set(map(id, self._parts)) | {id(buffer) for module in self._modules for buffer in module.buffers()}
        return list({id(t): t for t in tensors if id(t) not in owned and not t.is_inference()}.values())

    def _read_at(self, name, holder) -> str:
        """Return FILE:LINE of code that ran in the step and reads a value, or ""; of libraries' code, its self's."""
        word, (start, *_) = last_part(name), name.removeprefix("len(").rpartition(".")
        if word in getattr(type(holder), "__constants__", ()):
            # Such as the rate of a Dropout, which code of torch's reads.
            return f"a {type(holder).__name__}"
        parts = [change.removeprefix("len(").rpartition(".") for change in self._changes]
        changing = {tail for begin, _, tail in parts if begin == start}
        for code, firsts in self._codes.items():
            is_its = id(holder) in firsts
            is_there = word in names_used(code) or word in (*code.co_varnames, *code.co_consts)
            if is_there and (is_its or is_users_file(code.co_filename)):
                source = self._source(code.co_filename)
                line = source.reads(name, code, is_its or holder is None or not firsts, changing)
                if line:
                    return source.at(line)
        return ""

    def _snapshot(self, tensors=(), has_tensors=True) -> Snapshot:
        """Return a copy of all that the step changes."""
        others = {id(tensor): tensor for tensor in [*self._written.values(), *tensors]}
        return Snapshot([*self._parts, *others.values()], self.device, has_tensors)

    def _require_still(self):
        """Refuse what the step changes on the host, and code reads: a replay does neither."""
        for optimizer in self._optimizers:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            is_stepped = self._stepped.keys() & {id(optimizer), id(getattr(optimizer, "optimizer", None))}
            if not is_stepped and any(parameter.grad is not None for parameter in parameters):
                words = f"{type(optimizer).__name__} was handed over and makes no step in the step, which leaves it "
                raise self._refusal_of(f"{words}gradients: the step is all from zero_grad() to optimizer.step()")
        if _SCHEDULE in self._stepped:
            raise self._refusal_of(
                "a schedule steps inside of the step, which a replay leaves out: step it after the call"
            )
        held = {id(value) for part in self._parts for value in getattr(part, "__dict__", {}).values()}
        held |= set(map(id, self._parts))
        for optimizer in self._stepped.values():
            if id(optimizer) not in held:
                words = f"{type(optimizer).__name__} steps in the step and was not handed over"
                raise self._refusal_of(f"{words}: graphed(step, [..., optimizer])")
        if self._difference:
            raise self._refusal_of(f"in a step {self._difference.removeprefix('since the capture ')}")
        # Where a compiler has inlined it, or another profiler was on, the code was not seen running.
        parts = [part for module in self._modules for part in module.modules()]
        for code, holder in [(_code_of(self.eager), None), *((_code_of(type(part).forward), part) for part in parts)]:
            if code and is_noted(code.co_filename):
                _note(self._codes, code, holder)
        codes = [code for code in self._codes if is_users_file(code.co_filename)]
        for code in codes:
            line = self._source(code.co_filename).draws_next(code) if "next" in names_used(code) else None
            if line:
                words = "the step draws from an iterator, and a replay draws nothing: hand over what it gives"
                raise self._refusal_of(words, f"{code.co_filename}:{line}")
        for name in sorted(self._drawn):
            sources = map(self._source, dict.fromkeys(code.co_filename for code in codes))
            place = next((source.at(line) for source in sources if (line := source.draws(name))), "")
            place = place or self._read_at(name, None)
            raise self._refusal_of(f"the step draws from {name}: each replay would have the capture's numbers", place)
        for name, (old, new, holder) in self._changes.items():
            place = self._read_at(name, holder)
            if place:
                words = f"{name} goes from {old!r} to {new!r} between steps, and is read here: a replay keeps one value"
                raise self._refusal_of(words, place)

    def _capture(self, shape, batch):
        before = self._look(shape)
        self._require_still()
        if self.pool is None:
            self.pool = Pool(self.device)
            for generator in self._generators:
                self.pool.register_generator(generator)
        values, gradients = self._moving.now(), [(parameter, parameter.grad) for parameter in self._parameters]
        is_host = self.device.type == "cpu"
        # A host graph runs what it captures.
        start, guards = self._snapshot(has_tensors=is_host), Guards(self._parts)
        random_state = torch.get_rng_state() if is_host else torch.cuda.get_rng_state(self.device)
        failed = None
        # Casts of weights that were made before would be missing from the graph.
        torch.clear_autocast_cache()
        try:
            shape.graph = StepGraph(self.pool, self.eager, batch, self.device)
        except Exception as error:
            failed = self._refusal_of(error)
        torch.clear_autocast_cache()
        after = self._look()
        shape.binds = {
            name: (after.puts[name], tensor)
            for name, tensor in after.tensors.items()
            if name in after.puts and before.tensors.get(name, tensor) is not tensor
        }
        self._moving.put_back(values)
        start.put_numbers_back()
        words = guards.difference()
        if words:
            guards.put_back()
            failed = failed or self._refusal_of(f"in the step {words.removeprefix('since the capture ')}")
        for parameter, gradient in gradients:
            if failed:
                parameter.grad = gradient
            elif gradient is not None and parameter.grad is gradient:
                self._gradients[id(gradient)] = gradient
        self._has_eager_gradients = True
        if is_host:
            start.restore()
        elif failed:
            # A capture that failed leaves torch's generator as in a capture.
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
            generator.set_state(random_state)
        failed = first(failed)
        if failed:
            shape.graph = None
            raise failed
        shape.guards, shape.bound = Guards(self._parts), values
        reached = self._look() if self._looks_always else before
        read = [name for name in reached.values if self._looks_always and self._read_at(name, reached.holder_of(name))]
        shape.values = {name: reached.values[name] for name in read}

    # --- before a replay, and after it

    def _check(self, shape):
        """Look whether the host still holds what the graph holds."""
        try:
            shape.guards.check()
        except CaptureError as error:
            raise self._refusal_of(error) from None
        values = self._look().values if shape.values else {}
        for name, value in shape.values.items():
            if values.get(name, value) != value:
                words = f"{name} was {value!r} at the capture and is {values[name]!r}, and a replay keeps {value!r}"
                raise self._refusal_of(f"{words}: make it a tensor on the device")

    def _verified(self, shape, batch):
        """Replay, put the state back and make the step eagerly: the caller gets eager's result and eager's state."""
        count = self._num_copies()
        if count < 3:
            words = "the losses of replays alone are" if count else "no replay is"
            self._warn(f"there is no memory for copies of the state: {words} compared with eager")
        if not count:
            shape.num_verified = self._num_verified
            return self._replay(shape, batch)
        start, values = self._snapshot(), self._moving.now()
        questions: list[str] = []

        def course(step, num=1):
            start.restore()
            self._moving.put_back(values)
            versions, losses = [tensor._version for _, tensor in start.tensors], []
            for _ in range(num):
                result = step(batch)
                loss = loss_of(result)
                is_scalar = isinstance(loss, (int, float)) or (torch.is_tensor(loss) and loss.numel() == 1)
                losses.append(float(torch.as_tensor(loss).detach()) if is_scalar else 0.0)
            written = [tensor._version != version for (_, tensor), version in zip(start.tensors, versions, strict=True)]
            leaves, tensors = leaves_of(result), self._look().tensors if shape.binds else {}
            named = start.tensors + [(f"result {i}", leaf) for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
            named += [(f"{name}, which the step binds anew,", tensors[name]) for name in shape.binds if name in tensors]
            return result, SimpleNamespace(
                losses=losses,
                names=[name for name, _ in named],
                copies={0: [tensor.detach().clone() for _, tensor in named]} if count == 3 else {},
                written=written,
                numbers=[leaf.shape if torch.is_tensor(leaf) else _number_of(leaf) for leaf in leaves],
            )

        def as_captured(batch):
            with answering(note=lambda: questions.append(with_library(place_of_call()))):
                return self.eager(batch)

        if shape.num_verified == self._num_verified - 1 and self.pool is not None:
            self.pool.fill_free_memory()
        try:
            _, replayed = course(lambda batch: self._replay(shape, batch))
        except CaptureError as error:
            start.restore()
            self.refuse(error)
            return self.eager(batch)
        result, eager = course(as_captured)
        differs = first(parity.difference(eager, eager, replayed))
        if first(eager.numbers != replayed.numbers):
            differs = f"it returns {replayed.numbers}, and the eager step {eager.numbers}"
        elif differs:
            result, again = course(as_captured)
            differs = first(parity.difference(eager, again, replayed))
            unlike = first(parity.difference(eager, eager, again))
            if unlike:
                # Kernels may give other bits each time, but for deterministic ones.
                with deterministic_kernels(where_there_are=True), _noting_other_kernels() as others:
                    (_, one), (result, another) = course(as_captured), course(as_captured)
                is_hidden = bool(parity.difference(one, one, another)) and not others
                is_hidden = first(is_hidden or parity.scatter(eager, again) > MOST_NOISE)
                for _ in range(NUM_AGAIN if differs and not is_hidden else 0):
                    result, again = course(as_captured)
                    differs = differs and first(parity.difference(eager, again, replayed))
                words = f"two eager steps from one state differ, as where not all was handed over: {unlike}"
                differs = words if is_hidden else differs
        if not differs and first(questions) and not shape.num_verified:
            result, plain = course(self.eager)
            words = first(parity.difference(plain, plain, eager))
            if words:
                # As the doctor judges it: other kernels change bits, and no loss by much.
                several = [course(step, NUM_AGAIN)[1].losses for step in (as_captured, self.eager)]
                deviation = parity.loss_deviation(*several) or 0.0
                is_other = plain.written != eager.written or deviation > MOST_PRICE
                result, _ = course(self.eager)
                words = f"code at {first(questions)[0]} does something else while a stream captures: {words}"
                if first(is_other):
                    differs = words
                else:
                    self._warn(f"{words}; the graph does so, too")
        shape.num_verified += 1
        self._has_eager_gradients = True
        if differs:
            words = f"replay {shape.num_verified} of this shape does not train as the eager step does: {differs}"
            self.refuse(self._refusal_of(words))
        return result

    def _num_copies(self) -> int:
        """Return 3 where the state fits thrice beside itself, 1 where it fits once, else 0; alike on all ranks."""
        if self.device.type == "cpu":
            return 3
        states = [list(part.state.values()) for part in self._parts if isinstance(part, torch.optim.Optimizer)]
        size = sum(tensor.nbytes for tensor in [*self._parameters, *tensors_in(states)])
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) - self.pool_bytes
        return min(of_all_ranks(3 if 3.3 * size < free else int(1.1 * size < free)))

    # --- refusals

    def _refusal_of(self, error, place="") -> CaptureError:
        """Return the error, or one of these words, with a place and the doctor's command."""
        code, reason = _code_of(self.eager), getattr(error, "reason", "")
        place = place or getattr(error, "place", "")
        if ":" not in place:
            # As of work that was not joined, which shows at the capture's end.
            place = f"{code.co_filename}:{code.co_firstlineno}" if code else "the step"
        words = next(iter(str(error).splitlines()), "")
        if isinstance(error, Exception) and not isinstance(error, CaptureError):
            words = f"in the capture the step raised {type(error).__name__}: {words}"
        words = "; ".join(filter(None, (words, *(explained(words, reason) if isinstance(error, Exception) else ()))))
        words = words if place in words else f"{words} (at {place})"
        return CaptureError(f"{words}. {DOCTOR}", reason, place, getattr(error, "log", ()))

    def refuse(self, error: CaptureError) -> None:
        """Raise the error, now and in later calls, or go on eagerly and say so once."""
        error = error if error.place else self._refusal_of(error)
        if not self._is_forgiving:
            self._error = error
            raise error
        self.release()
        self.refusal = str(error)
        self._warn(f"from now on the step runs eagerly: {error}")

    def _warn(self, words):
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(f"graphed: {words}", stacklevel=4)

    def _drop_gradients(self):
        """Unbind gradients of eager steps, which a replay does not write."""
        for parameter in self._parameters:
            if id(parameter.grad) not in self._gradients:
                parameter.grad = None
        self._has_eager_gradients = False


def _value_of(leaf):
    """Return what tells a value in a batch from others: all numbers of an array, of an object its parts."""
    if isinstance(leaf, _PLAIN):
        return repr(leaf)
    if hasattr(leaf, "tobytes"):
        return type(leaf).__name__, getattr(leaf, "shape", ()), hash(leaf.tobytes())
    parts = [part for part in leaves_of(leaf) if not torch.is_tensor(part)]
    return repr(leaf) if any(part is leaf for part in parts) else (type(leaf).__name__, *map(_value_of, parts))


def _number_of(leaf) -> str:
    """Return what a result has beside tensors, as text; of objects the class."""
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def _code_of(function):
    """Return the code of a function, a method or an object that can be called; None where there is none."""
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def _note(codes, code, first):
    """Note that the code of a function runs, with the ids of its first argument and of the classes of this."""
    codes.setdefault(code, set()).update(map(id, (first, *type(first).__mro__)) if first is not None else ())


@contextlib.contextmanager
def _calls(codes):
    """Note in `codes` the functions that run in the block, but Python's, torch's and ours."""

    def note(frame, event, _):
        if event == "call" and is_noted((code := frame.f_code).co_filename):
            _note(codes, code, frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None)

    for_new = threading.getprofile()
    if sys.getprofile() is not None:
        yield
        return
    # Backward passes of a GPU have a thread; Python knows it from 3.12 on.
    set_profile = getattr(threading, "setprofile_all_threads", sys.setprofile)
    set_profile(note)
    try:
        yield
    finally:
        set_profile(None)
        threading.setprofile(for_new)


@contextlib.contextmanager
def _steps_of():
    """Yield a dict of the optimizers, by identity, that step in the block, with _SCHEDULE where a schedule does."""
    stepped: dict[int, Any] = {}
    original = torch.optim.lr_scheduler.LRScheduler.step

    def note(schedule, *args, **kwargs):
        stepped[_SCHEDULE] = schedule
        return original(schedule, *args, **kwargs)

    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.update({id(optimizer): optimizer}))
    try:
        with mock.patch.object(torch.optim.lr_scheduler.LRScheduler, "step", note):
            yield stepped
    finally:
        handle.remove()


@contextlib.contextmanager
def _added_gradients(parameters):
    """Yield a list of the parameters to whose gradients from before the block a backward pass in it adds."""
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is not None]
    before = {id(parameter): (parameter.grad, parameter.grad._version) for parameter in trained}
    added: list[torch.Tensor] = []

    def look(parameter, _):
        gradient, version = before.pop(id(parameter), (None, 0))
        # Kernels that fill many tensors with zeros count no version.
        if gradient is not None and parameter.grad is gradient and gradient._version == version and gradient.any():
            added.append(parameter)

    with contextlib.ExitStack() as stack:
        for parameter in trained:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            stack.callback(node.register_prehook(functools.partial(look, parameter)).remove)
        yield added
