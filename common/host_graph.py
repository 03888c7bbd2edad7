"""Host graphs: the stand-in for CUDA graphs on a machine without a GPU.

A capture runs a function once for real and records the ATen operators that it runs, forward, backward and
optimizer; a replay runs them again, in order, on the same storages. It is a test bed and slower than eager: what
a CUDA capture refuses is refused here, and what a CUDA replay gets wrong goes wrong here, visibly.

    pool = HostPool()
    graph, y = pool.capture(lambda: layer(x), static_inputs=(x,))
    x.copy_(new_input); graph.replay()            # y now holds layer(new_input)

Graphs of one pool share fate. On a GPU a graph may use memory that was free when it was captured, so before a
replay every storage of the other graphs that was free then is filled with NaN (integers: 0x5A bytes, booleans:
true), and those that were freed during the capture are filled after it.

What cannot be seen, and is frozen into the graph or missed:
- Python: attributes that are bound anew, control flow, numbers, `data_ptr()`, reads of a generator's own state.
  A parameter whose old storage lives on elsewhere is read where it was; name it in `static_inputs` to see that.
- Devices: all is on the host, so a missing `.to(device)` or a copy from unpinned memory passes.
- What is not an operator: NumPy and C++ code that hold a tensor's memory, and code compiled by torch.compile.
  torch's DDP reduces from C++ hooks; use common/collectives.
Refused although CUDA could: F.one_hot, whose host kernel reads the largest value, and x[mask] = number in the
backward of a custom autograd.Function (masked_fill_ goes).
"""

import contextlib
import os
import sys
import threading
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class CaptureError(RuntimeError):
    """What no graph can hold, or a replay that would not be right; names the operator and the user's file:line."""


# ------------------------------------------------------------------------------------------------
# What may not be captured

_READS = "reads a value on the host, a CUDA capture cannot wait for it"
_SHAPE = "has a shape that depends on values, a graph's shapes are fixed"
_NEW = "makes a tensor from host data: make it before the capture and copy into it"
_RANDOM = "reads or sets the random state on the host: do it before the capture"
_RESIZES = "moves a tensor's memory, a graph's addresses are fixed"
_COLLECTIVE = "is a collective of torch.distributed: use common/collectives"

# Seen as calls of the Python API, before or instead of an operator.
_CONVERSIONS = ("item", "__bool__", "__int__", "__index__", "__float__", "__complex__", "__format__")
_FORBIDDEN_FUNCTIONS = {
    **{getattr(torch.Tensor, name): (f"Tensor.{name}", _READS) for name in _CONVERSIONS},
    torch.equal: ("torch.equal", _READS),
    torch.allclose: ("torch.allclose", _READS),
}
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)

_FORBIDDEN_OPERATORS = {
    "aten::_local_scalar_dense": _READS,
    "aten::item": _READS,
    "aten::is_nonzero": _READS,
    "aten::equal": _READS,
    "aten::allclose": _READS,
    "aten::_pack_padded_sequence": "reads the lengths on the host, its shape depends on them",
    "aten::lift_fresh": _NEW,
    "aten::resize_": _RESIZES,
    "aten::resize_as_": _RESIZES,
    "aten::set_": _RESIZES,
}

# Replaced in their modules or classes while a capture runs: no operator, and the function mode is off inside of
# a function that it has seen, such as torch.autograd.grad with the Python code of a custom backward.
_READERS = ("tolist", "numpy", "__array__", "__dlpack__", "__repr__")
_RANDOM_NAMES = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
_PATCHED = [
    *((torch.Tensor, name, _READS) for name in _READERS),
    *((module, name, _RANDOM) for module in (torch, torch.random) for name in _RANDOM_NAMES),
    *((module, "to_dlpack", _READS) for module in (torch, torch.utils.dlpack)),
    (torch, "frombuffer", _NEW),
]

# Their results hold nothing until a later operator writes it.
_ALLOCATION_NAMES = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_ALLOCATIONS = {f"aten::{name}" for name in _ALLOCATION_NAMES}

# They change the shape that a tensor object has, not what is in memory.
_IN_PLACE_VIEWS = {f"aten::{name}" for name in ("as_strided_", "detach_", "squeeze_", "t_", "transpose_", "unsqueeze_")}


def _reason(func, args, kwargs) -> str | None:
    """Why a graph cannot hold this call of an operator, or None."""
    name = func._schema.name
    if name in _FORBIDDEN_OPERATORS:
        return _FORBIDDEN_OPERATORS[name]
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        return _COLLECTIVE
    if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # One number stored through a mask is a masked_fill on the GPU, which waits for nothing.
        fills = name != "aten::index" and args[2].dim() == 0
        return _SHAPE if masked and not fills else None
    if name == "aten::repeat_interleave":
        return None if kwargs.get("output_size") is not None else _SHAPE
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        return _READS
    return _SHAPE if torch.Tag.dynamic_output_shape in tags else None


# contextlib runs torch's context managers.
_INVISIBLE = (__file__, contextlib.__file__, os.path.dirname(torch.__file__) + os.sep)


def _user_line() -> str:
    """file:line of the innermost frame that is neither in torch nor here."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_INVISIBLE):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


# ------------------------------------------------------------------------------------------------
# Storages


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as its place in a storage, hashable. `storage` is the address of the StorageImpl."""

    storage: int
    offset: int
    shape: tuple
    stride: tuple
    dtype: torch.dtype

    def over(self, storage) -> torch.Tensor:
        """A plain tensor of this view, with a version counter of its own: replays are not seen by autograd."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


# Private, and the only way to see saved tensors of autograd. Without it every storage counts as held, and only
# graphs that were captured later are filled.
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _wrapper_references() -> int:
    """References that the Python object of a storage itself holds once it was made; differs between versions."""
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    return _use_count(address) - 1 if _use_count else 0


_WRAPPER_REFERENCES = _wrapper_references()


class _Owned:
    """A storage that a graph of the pool produced. The pool refers to it by the tensors in here and no others."""

    def __init__(self, storage, dtype, constant):
        self.address = storage._cdata
        self.num_bytes = storage.nbytes()
        self.owner = None
        self.poisoned = False
        self.constant = constant
        # All bits set is NaN in every IEEE format and in the FP8 formats with NaN.
        self._pattern = 0xFF if dtype.is_floating_point or dtype.is_complex else 1 if dtype is torch.bool else 0x5A
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.num_bytes,), (1,))
        self._tensors = {}

    def tensor(self, view: _View) -> torch.Tensor:
        if view not in self._tensors:
            self._tensors[view] = view.over(self._bytes.untyped_storage())
        return self._tensors[view]

    def held_outside(self) -> bool:
        """Whether someone other than the pool keeps it: a user's tensor, or one that autograd saved."""
        if _use_count is None:
            return True
        return _use_count(self.address) > 1 + len(self._tensors) + _WRAPPER_REFERENCES

    def poison(self) -> None:
        if not (self.poisoned or self.constant):
            self._bytes.fill_(self._pattern)
            self.poisoned = True


class _External:
    """A storage from outside the pool, not kept alive: read through its bare address after a check."""

    def __init__(self, storage, operator, line):
        self._reference = StorageWeakRef(storage)
        self._pointer = storage.data_ptr()
        self._reader = f"{operator} at {line}"
        # Owns no memory, so that the owner's memory is freed when the owner drops it.
        self._shell = torch._C._construct_storage_from_data_pointer(self._pointer, storage.device, storage.nbytes())
        self._tensors = {}

    def tensor(self, view: _View) -> torch.Tensor:
        if view not in self._tensors:
            self._tensors[view] = view.over(self._shell)
        return self._tensors[view]

    def check(self) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            raise CaptureError(
                f"{self._reader} reads a tensor that is gone: its memory was freed after the capture "
                "(an input or parameter was replaced, copy into it instead)"
            )
        if storage.data_ptr() != self._pointer:
            raise CaptureError(f"{self._reader} reads a tensor whose memory moved after the capture (resize_, .data)")


def _signature(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr()


# ------------------------------------------------------------------------------------------------
# Recording


@dataclass
class _Call:
    """One operator to run again. `leaves` are its flattened arguments, tensors replaced by their _View."""

    func: torch._ops.OpOverload
    line: str
    leaves: list
    structure: object
    grad_enabled: bool
    results: list


class _FunctionMode(TorchFunctionMode):
    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.recorder.function(func, args, kwargs or {})


class _DispatchMode(TorchDispatchMode):
    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self.recorder.operator(func, args, kwargs or {})


_recording = None


class _Recorder:
    """Runs a function under both modes. Nothing in the pool changes until the whole capture is built."""

    def __init__(self, owned, generators):
        self.owned = owned
        self.generators = generators
        self.calls = []
        self.produced = {}
        self.read = {}
        self.storages = {}
        self.error = None
        self.thread = threading.get_ident()
        self.in_operator = False
        self.stores_number = False
        self.last_line = "the start of the capture"
        self.states = self._random_states()

    def run(self, fn):
        global _recording
        if _recording is not None:
            _recording.fail("HostPool.capture", "runs inside another capture")
        originals = [(place, name, vars(place).get(name)) for place, name, _ in _PATCHED]
        _recording = self
        try:
            for place, name, reason in _PATCHED:
                setattr(place, name, self._refusing(getattr(place, name), f"{place.__name__}.{name}", reason))
            with _FunctionMode(self), _DispatchMode(self):
                result = fn()
            self._check_random_states("the end of the capture")
        except Exception as error:
            if self.error is None or error is self.error:
                raise
            raise self.error from error
        finally:
            _recording = None
            for place, name, original in originals:
                if original is None:
                    delattr(place, name)
                else:
                    setattr(place, name, original)
        # Code that catches RuntimeError does not turn a broken capture into a good one.
        if self.error is not None:
            raise self.error
        return result

    def fail(self, name, reason, line=None):
        error = CaptureError(f"{name} at {line or _user_line()} cannot be captured: it {reason}")
        self.error = self.error or error
        raise error

    def function(self, func, args, kwargs):
        if func in _FORBIDDEN_FUNCTIONS:
            self.fail(*_FORBIDDEN_FUNCTIONS[func])
        if func in _SPLITS and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args[1:], kwargs))):
            self.fail("torch.tensor_split", _SHAPE)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], (int, float, complex)):
            self.stores_number = True
            try:
                return func(*args, **kwargs)
            finally:
                self.stores_number = False
        return func(*args, **kwargs)

    def operator(self, func, args, kwargs):
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        line = _user_line()
        self._check_random_states(line)
        number = self.stores_number and func._schema.name == "aten::lift_fresh" and args[0].dim() == 0
        reason = None if number else _reason(func, args, kwargs)
        if reason:
            self.fail(func, reason, line)
        leaves, structure = tree_flatten((args, kwargs))
        known = [generator._cdata for generator in self.generators]
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf._cdata not in known:
                self.fail(func, "draws from a generator that is unknown to the pool: call register_generator", line)
        self.in_operator = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.in_operator = False
        self.last_line = line
        self.states = self._random_states()
        if number:
            self.produced[self._view(result, func, line).storage] = (result.dtype, True)
        else:
            self._record(func, line, leaves, structure, result)
        return result

    def _record(self, func, line, leaves, structure, result):
        # After the call, because an out= argument may have got its size in it.
        leaves = [self._view(leaf, func, line) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        num_tensors, fresh, results = 0, set(), []
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                results.append(None)
                continue
            num_tensors += 1
            address = self._storage(leaf, func, line)._cdata
            if address not in self.storages and address not in self.owned:
                fresh.add(address)
                self.produced[address] = (leaf.dtype, False)
            view = self._view(leaf, func, line)
            results.append(view if address in fresh else None)
        name = func._schema.name
        if name in _ALLOCATIONS or name in _IN_PLACE_VIEWS or torch.Tag.inplace_view in func.tags:
            return
        # A view, or a question about shape or type. Other libraries' operators may act on the world outside.
        if not (func._schema.is_mutable or fresh) and (num_tensors or func.namespace == "aten"):
            return
        for leaf in leaves:
            if isinstance(leaf, _View) and leaf.storage not in self.owned and leaf.storage not in self.produced:
                self.read.setdefault(leaf.storage, (func, line))
        self.calls.append(_Call(func, line, leaves, structure, torch.is_grad_enabled(), results if fresh else []))

    def _storage(self, tensor, func, line) -> torch.UntypedStorage:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            self.fail(func, "works on a tensor that is sparse, packed or lazily conjugated", line)
        return tensor.untyped_storage()

    def _view(self, tensor, func, line) -> _View:
        storage = self._storage(tensor, func, line)
        if storage._cdata not in self.owned:
            # Kept until the graph is built, so that no other storage gets its address.
            self.storages.setdefault(storage._cdata, storage)
        return _View(storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _random_states(self):
        return [generator.get_state() for generator in self.generators]

    def _check_random_states(self, line):
        if not all(map(torch.equal, self.states, self._random_states())):
            self.fail("Generator.manual_seed or set_state", f"{_RANDOM} (set since {self.last_line})", line)

    def _refusing(self, original, name, reason):
        def refuse(*args, **kwargs):
            if self.in_operator or threading.get_ident() != self.thread:
                return original(*args, **kwargs)
            self.fail(name, reason)

        return refuse


# ------------------------------------------------------------------------------------------------
# Graphs and their pool


class HostGraph:
    """A recorded run. Made by `HostPool.capture`."""

    def __init__(self, pool, recorder, static_inputs, owned):
        self.num_replays = 0
        self._pool = pool
        self._static = static_inputs
        self._owned = list(owned.values())
        for storage in self._owned:
            storage.owner = self
        self._externals = {}
        for address, (operator, line) in recorder.read.items():
            self._externals[address] = _External(recorder.storages[address], operator, line)
        self._places = pool._owned | owned | self._externals
        self._spent = False
        self._free_before = []
        self._freed_after = []
        self._lines = [(str(call.func), call.line) for call in recorder.calls]
        # The grad mode is set where it changes: under another one nn.LSTM would leave out what backward reads.
        self._runs = []
        written = {storage.address: storage for storage in self._owned}
        for call in recorder.calls:
            if not self._runs or self._runs[-1][0] != call.grad_enabled:
                self._runs.append((call.grad_enabled, []))
            args, kwargs = tree_unflatten([self._tensor(leaf) for leaf in call.leaves], call.structure)
            results = [self._tensor(view) for view in call.results]
            self._runs[-1][1].append((call.func, args, kwargs, results))
            for address in _written_by(call):
                if address in pool._owned:
                    written[address] = pool._owned[address]
        self._written = list(written.values())
        self._writers = list({id(storage.owner): storage.owner for storage in self._written}.values())
        del self._places

    def _tensor(self, leaf):
        return self._places[leaf.storage].tensor(leaf) if isinstance(leaf, _View) else leaf

    def replay(self) -> None:
        """Run the operators again. Raises CaptureError when that would not compute what was captured."""
        if self._pool is None:
            raise CaptureError("replay of a graph that was released")
        if _recording is not None:
            _recording.fail("HostGraph.replay", "runs inside a capture")
        self._check()
        autocast = torch.is_autocast_enabled("cpu")
        grad_enabled = torch.is_grad_enabled()
        # The casts of a capture under autocast were recorded; they must not be made twice.
        torch.set_autocast_enabled("cpu", False)
        num_done = 0
        try:
            with torch._C._AutoDispatchBelowAutograd():
                self._poison_others()
                for mode, calls in self._runs:
                    torch._C._set_grad_enabled(mode)
                    for func, args, kwargs, results in calls:
                        value = func(*args, **kwargs)
                        if results:
                            _copy(results, value)
                        num_done += 1
                for storage in self._freed_after:
                    storage.poison()
        except Exception as error:
            if num_done == len(self._lines):
                raise
            operator, line = self._lines[num_done]
            raise CaptureError(f"{operator} at {line} failed at replay: {error}") from error
        finally:
            torch._C._set_grad_enabled(grad_enabled)
            torch.set_autocast_enabled("cpu", autocast)
        self.num_replays += 1

    def nodes(self) -> dict[str, int]:
        """{"operator": number of operators that one replay runs}."""
        return {"operator": len(self._lines)}

    def operators(self) -> list[str]:
        """Names of the operators in the order of a replay, such as aten.addmm.default."""
        return [operator for operator, _ in self._lines]

    def release(self) -> None:
        """Give the storages back; those of the tensors that fn returned live as long as these do."""
        if self._pool is not None:
            self._pool._forget(self)
        self._pool = None
        self._static = []
        self._runs, self._externals = [], {}
        self._owned, self._written, self._writers, self._free_before, self._freed_after = [], [], [], [], []

    def _check(self):
        for index, (tensor, captured) in enumerate(self._static):
            now = _signature(tensor)
            if now != captured:
                names = ("shape", "stride", "dtype", "data_ptr")
                changes = [f"{name} {a} -> {b}" for name, a, b in zip(names, captured, now, strict=True) if a != b]
                raise CaptureError(f"static input {index} is not as captured: {', '.join(changes)}")
        for external in self._externals.values():
            external.check()

    def _poison_others(self):
        for graph in self._pool._later(self):
            if not graph._spent:
                for storage in graph._owned:
                    storage.poison()
                graph._spent = True
        for storage in self._free_before:
            storage.poison()
        for storage in self._written:
            storage.poisoned = False
        for graph in self._writers:
            graph._spent = False


def _written_by(call) -> set[int]:
    """Addresses of the storages that the schema marks as written."""
    args, kwargs = tree_unflatten(call.leaves, call.structure)
    values = dict(zip((argument.name for argument in call.func._schema.arguments), args, strict=False)) | kwargs
    return {
        leaf.storage
        for argument in call.func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
        for leaf in tree_leaves(values[argument.name])
        if isinstance(leaf, _View)
    }


def _copy(results, value):
    """Copy an operator's result, a tensor or a nest of them, into the tensors recorded for it (None: not new)."""
    values = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    for result, tensor in zip(results, values, strict=True):
        if result is not None:
            result.copy_(tensor)


class HostPool:
    """Graphs that share fate: they are replayed in the order of their capture."""

    def __init__(self):
        self._graphs = []
        self._owned = {}
        self._generators = [torch.default_generator]

    def register_generator(self, generator: torch.Generator) -> None:
        """Allow `generator` in captures from now on; every replay draws from it. The default one always is allowed."""
        self._generators.append(generator)

    def capture(self, fn, static_inputs=()):
        """Run fn() once, recording, and return (HostGraph, what fn returned).

        The returned tensors stay, their contents are overwritten by each replay. static_inputs: tensors that are
        overwritten in place before replays, kept alive until release; each replay checks that shape, stride, dtype
        and address are those of the capture. Raises CaptureError for what a graph cannot hold; then, as after an
        error of fn itself, the pool is as before, though fn's own effects stand.
        """
        static_inputs = [(tensor, _signature(tensor)) for tensor in static_inputs]
        held = [storage for storage in self._owned.values() if storage.held_outside()]
        free = [storage for storage in self._owned.values() if not storage.held_outside()]
        recorder = _Recorder(self._owned, self._generators)
        result = recorder.run(fn)
        # Tensors made under inference mode could not be written outside of it.
        with torch.inference_mode(False):
            owned = {address: _Owned(recorder.storages[address], *kind) for address, kind in recorder.produced.items()}
            graph = HostGraph(self, recorder, static_inputs, owned)
        graph._free_before = free
        graph._freed_after = [storage for storage in held if not storage.held_outside()]
        self._owned |= owned
        self._graphs.append(graph)
        return graph, result

    def bytes(self) -> int:
        """Bytes of the storages that the graphs produced, each once."""
        return sum(storage.num_bytes for storage in self._owned.values())

    def release(self) -> None:
        """Release all graphs."""
        for graph in list(self._graphs):
            graph.release()

    def _later(self, graph):
        return self._graphs[self._graphs.index(graph) + 1 :]

    def _forget(self, graph):
        self._graphs.remove(graph)
        for other in self._graphs:
            other._free_before = [storage for storage in other._free_before if storage.owner is not graph]
            other._freed_after = [storage for storage in other._freed_after if storage.owner is not graph]
        self._owned = {address: storage for address, storage in self._owned.items() if storage.owner is not graph}
