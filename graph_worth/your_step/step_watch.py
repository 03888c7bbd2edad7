"""One eager step under watch: its operators, and each call that no graph can hold, with the user's line.

The rules are those of host graphs (capture/host_graph_rules.py). A host graph stops at the first call that it
refuses; here every one is noted and the step goes on.
"""

import concurrent.futures
import contextlib
import ctypes
import re
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_worth.capture import asking
from graph_worth.capture import host_graph_rules as rules
from graph_worth.capture.asking import answering
from graph_worth.capture.host_tensors import HostTensors, one_hot_as_on_gpu
from graph_worth.capture.side_streams import StreamWatch
from graph_worth.measuring import operator_table
from graph_worth.measuring.module_parts import hooked, named_parts
from graph_worth.parallel.host_messages import is_distributed
from graph_worth.snapshot import storage_id, storage_of
from graph_worth.your_step.parts import tensors_in
from graph_worth.your_step.place import Place, place_of_call, place_of_thread
from graph_worth.your_step.record import (
    A_CUDA_OPERATION,
    BY_TABLE,
    COPIES_TO_HOST,
    PINS,
    WAITS,
    Operator,
    RefusedCall,
    Watched,
)

# The host may fill memory of up to so many bytes without an operator.
_MOST_HASHED = 1 << 24
# They write all of their first argument and read none of it.
_FILLS = {f"aten::{name}_" for name in ("copy", "zero", "fill", "normal", "uniform", "random", "bernoulli")}
_FILLS |= {"aten::exponential_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
# Their shapes depend on values; an index does where it is a mask.
_OF_VALUES = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "__getitem__", "__setitem__")
_LOADER, _OURS = torch.utils.data.__path__[0], (asking.__file__, __file__)
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


def _calls_of_gpu() -> list:
    """(owner, name, reason) of the calls that only a GPU knows, beside those of host graphs."""
    if not torch.cuda.is_available():
        return []
    stream, event = torch.cuda.Stream, torch.cuda.Event
    return [
        (torch.cuda, "synchronize", WAITS),
        *((stream, name, WAITS) for name in ("synchronize", "query")),
        *((event, name, WAITS) for name in ("synchronize", "query", "elapsed_time")),
        (torch.Tensor, "pin_memory", PINS),
    ]


@dataclass(frozen=True)
class Beside:
    """Work that may go on beside a step.

    Attributes:
        threads: those of the user's that may draw random numbers meanwhile.
        contents: of the step before, see `Watched`.
        known: storages whose contents are not looked at.
    """

    threads: Sequence[threading.Thread] = ()
    contents: Mapping[int, int] = field(default_factory=dict)
    known: Collection[int | None] = ()


def watch(step, batch, modules, is_capturing=True, beside: Beside | None = None) -> Watched:
    """Make one step eagerly and note what it does, with the running parts of modules.

    A step that asks whether the current stream captures gets `is_capturing`: what a capture would do counts.
    """
    watcher = _Watcher(beside or Beside())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_noting_calls(watcher, rules.PATCHED + _calls_of_gpu()))
        stack.enter_context(answering(is_capturing, watcher.asked))
        for owner, name in ((threading.Thread, "start"), (concurrent.futures.ThreadPoolExecutor, "submit")):
            stack.enter_context(mock.patch.object(owner, name, watcher.noted(getattr(owner, name), "threads")))
        load = torch.optim.Optimizer.load_state_dict
        stack.enter_context(mock.patch.object(torch.optim.Optimizer, load.__name__, watcher.noted(load, "loads")))
        stack.enter_context(watcher.streams)
        stack.enter_context(hooked(named_parts(modules), watcher.left, watcher.stack.append))
        stack.enter_context(one_hot_as_on_gpu() if not torch.cuda.is_available() else contextlib.nullcontext())
        with _Functions(watcher), _Operators(watcher):
            step(batch)
    watcher.found.unjoined = watcher.streams.unjoined()
    for address in watcher.found.contents.keys() & watcher.found.written.keys():
        watcher.found.contents[address] = _hash(watcher.found.kept[address])
    return watcher.found


@contextlib.contextmanager
def _noting_calls(watcher, patched):
    """Within it, calls and the warnings of torch's synchronisations are noted. patched: as those of host graphs."""
    with contextlib.ExitStack() as stack:
        for owner, name, reason in patched:
            note = watcher.noting(getattr(owner, name), f"{owner.__name__}.{name}", reason)
            stack.enter_context(mock.patch.object(owner, name, note))
        stack.enter_context(warnings_shown(watcher.warned))
        yield


@contextlib.contextmanager
def warnings_shown(show):
    """Within it, show(message, ...) gets every warning, and torch warns of each wait for the GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = show
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        yield


@contextlib.contextmanager
def reads_noted():
    """Yield a record of the calls within it that read on the host; it needs no function of the step, and no mode.

    So it may begin in one call and end in another, and no compiled code is compiled again.
    """
    watcher = _Watcher(Beside())
    patched = rules.PATCHED + _calls_of_gpu() + [(torch.Tensor, name, rules.READS) for name in rules.CONVERSIONS]
    patched += [(torch, name, rules.READS) for name in ("equal", "allclose")]
    owners = (torch, torch.Tensor)
    patched += [(owner, name, rules.SHAPE) for owner in owners for name in _OF_VALUES if hasattr(owner, name)]
    patched = [call for call in patched if call[2] in (rules.READS, rules.SHAPE, WAITS)]
    with _noting_calls(watcher, patched), answering(None, watcher.asks):
        yield watcher.found


class _Watcher:
    def __init__(self, beside):
        self.found, self.stack = Watched(), []
        self.threads, self.contents, self.known = beside.threads, beside.contents, beside.known
        self.states = self.random_states()
        # Inside of a call that was noted.
        self.is_inside = self.stores_number = False
        # Code that asks whether a stream captures, and may skip reads then.
        self.asking: set = set()
        refused = self.found.refused
        self.host = HostTensors(lambda *call: refused.append(RefusedCall(*call)))
        self.streams = StreamWatch() if torch.cuda.is_available() else StreamWatch(None)

    def left(self, *_):
        if self.stack:
            self.stack.pop()

    def place(self, has_callers=False) -> Place:
        return place_of_call(".".join(self.stack[-1:]), has_callers)

    def refuse(self, name, reason):
        codes = {frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))}
        is_in_loader = any(code.co_filename.startswith(_LOADER) for code in codes)
        why_not = "in the loader" if is_in_loader else "in a capture" if codes & self.asking else ""
        self.found.refused.append(RefusedCall(str(name), reason, self.place(has_callers=True), why_not=why_not))

    def asks(self):
        """Note the function that asks whether a stream captures, not such as `is_tracing`, which ask for others."""
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]
        outside = (code for code in codes if not code.co_filename.startswith(_OURS))
        self.asking.add(next((code for code in outside if not re.search("captur|trac", code.co_name)), None))

    def look_up(self, name, count):
        """Refuse a function by the table of operators, unless more than reads was refused after the first `count`."""
        is_more = any(refused.reason != rules.READS for refused in self.found.refused[count:])
        if operator_table.is_refused(name) and not (self.is_inside or is_more):
            self.found.refused[count:] = [RefusedCall(name, BY_TABLE, self.place(has_callers=True), is_hidden=True)]

    @contextlib.contextmanager
    def flagged(self, **flags):
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(before)

    def random_states(self):
        generators = [torch.default_generator, *getattr(torch.cuda, "default_generators", ())] if self.threads else []
        return [_hash(generator.get_state().untyped_storage()) for generator in generators]

    def look_for_draws(self):
        if self.states != self.random_states():
            places = [place_of_thread(thread) for thread in self.threads if thread.is_alive()]
            self.found.drawing += [place for place in places if place not in self.found.drawing]

    def look_at_contents(self, tensor, address, place):
        """Note memory of the host that was filled since the last step, by NumPy for one."""
        storage = storage_of(tensor)
        if storage is None or storage.device.type != "cpu" or storage.nbytes() > _MOST_HASHED:
            return
        if address in self.known:
            return
        self.found.contents[address] = _hash(storage)
        if self.contents.get(address) not in (None, self.found.contents[address]):
            self.found.refilled[address] = place

    def noting(self, original, name, reason):
        def note(*args, **kwargs):
            is_plain_index = name.endswith("item__") and not _has_mask(args)
            if self.is_inside or is_plain_index or self.is_for_host(reason, args):
                return original(*args, **kwargs)
            if threading.get_ident() in {thread.ident for thread in self.threads}:
                self.found.threads.append(self.place())
                return original(*args, **kwargs)
            self.refuse(name, reason)
            with self.flagged(is_inside=True):
                return original(*args, **kwargs)

        return note

    def is_for_host(self, reason, values) -> bool:
        """Say whether a call reads nothing but tensors of the host beside a GPU, for which nothing waits."""
        if reason not in rules.NO_MATTER_ON_HOST:
            return False
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        is_beside_gpu = bool(tensors) and torch.cuda.is_available() and not any(tensor.is_cuda for tensor in tensors)
        if not is_beside_gpu and self.host.are_host(tensors):
            self.found.of_host.add(self.place().own)
            return True
        return is_beside_gpu

    def noted(self, original, name):
        def note(*args, **kwargs):
            getattr(self.found, name).append(self.place())
            return original(*args, **kwargs)

        return note

    def asked(self):
        self.found.asked_capturing = self.found.asked_capturing or self.place()

    def warned(self, message, category, filename, lineno, file=None, line=None):
        text = str(message)
        # torch's set_sync_debug_mode warns in words alone.
        if "synchronizing CUDA operation" in text:
            place = self.place(has_callers=True)
            if all(refused.place.line != place.line for refused in self.found.refused):
                self.found.refused.append(RefusedCall(A_CUDA_OPERATION, WAITS, place))
        else:
            self.found.warned.append((text, self.place()))


class _Functions(TorchFunctionMode):
    def __init__(self, watcher):
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func, types, args=(), kwargs=None):
        watcher, count = self.watcher, len(self.watcher.found.refused)
        if func in rules.FORBIDDEN_FUNCTIONS:
            return watcher.noting(func, *rules.FORBIDDEN_FUNCTIONS[func])(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        is_store = func is torch.Tensor.__setitem__ and isinstance(args[2], (int, float, complex))
        stores = watcher.flagged(stores_number=True) if is_store else contextlib.nullcontext()
        with stores, watcher.host.calling(func, args, kwargs):
            result = func(*args, **kwargs)
        watcher.look_up(getattr(func, "__name__", ""), count)
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, watcher):
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        watcher = self.watcher
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        place, record = watcher.place(), watcher.found
        watcher.streams.launched(place)
        leaves = tree_leaves((args, kwargs))
        is_exchange = is_collective(str(func))
        reason = rules.reason_against(func, args, kwargs)
        if is_exchange and (is_distributed() or any(map(_is_cuda, leaves))):
            reason = None  # NCCL's are captured, and several ranks of a CPU stand for GPUs
        if func is torch.ops.aten.set_.source_Storage and storage_id(args[0]) in record.made:
            reason = None  # a view that this step makes, as cuDNN's LSTM does of its weights
        # A number that goes into a tensor is a fill, for which the GPU waits for nothing.
        is_fill = watcher.stores_number and func._schema.name == "aten::lift_fresh" and args[0].dim() == 0
        makes = watcher.host.makes(func)
        if reason and not (watcher.is_inside or is_fill or makes or watcher.is_for_host(reason, leaves)):
            watcher.refuse(func, reason)
        watcher.host.before(leaves)
        # Gloo ends some collectives with an operator on a tensor of its own.
        follows = bool(record.operators) and is_collective(record.operators[-1].name) and not any(map(_is_cuda, leaves))
        for leaf in leaves:
            if (is_exchange or follows or func.namespace == "fsdp") and isinstance(leaf, torch.Tensor):
                record.exchanged.add(storage_id(leaf))
            if isinstance(leaf, torch.Generator):
                record.generators.setdefault(id(leaf), (leaf, place))
        given = tensors_in(leaves)
        for tensor in given:
            address = storage_id(tensor)
            if address is not None and address not in record.made and address not in record.kept:
                watcher.look_at_contents(tensor, address, place)
                if _is_rewritten(tensor, func, args, kwargs):
                    record.rewritten.add(address)
        outside = tuple(_outside(tensor, record) for tensor in given)
        if func._schema.name == "aten::lift_fresh":
            record.from_host.add(storage_id(args[0]))
        for tensor in () if is_exchange else written(func, args, kwargs):
            address = storage_id(tensor)
            if address is not None and address not in record.made:
                record.written.setdefault(address, place)
        watcher.look_for_draws()
        result = func(*args, **kwargs)
        watcher.states = watcher.random_states()
        call = (str(func), rules.NEW, watcher.place(has_callers=True)) if watcher.host.in_factory else ()
        watcher.host.after(func, leaves, result, *call)
        self._note_copy(func, args, result, place)
        tensors, taken = tensors_in(result), {storage_id(tensor) for tensor in given}
        for tensor in tensors:
            address = storage_id(tensor)
            # Not a view: this operator has made the storage, if perhaps where an earlier one was.
            if address is not None and address not in record.kept and address not in taken:
                record.made[address] = place
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, (int, float, complex)))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        record.operators.append(Operator(str(func), shapes, numbers, outside, place))
        return result

    def _note_copy(self, func, args, result, place):
        name = func._schema.name
        if name not in ("aten::_to_copy", "aten::copy_") or self.watcher.is_inside:
            return
        source, target = (args[0], result) if name == "aten::_to_copy" else (args[1], args[0])
        if target.is_cuda and source.device.type == "cpu" and source.dim():
            self.watcher.found.copies.append((place, storage_id(source), source.is_pinned()))
        elif source.is_cuda and target.device.type == "cpu" and not target.is_pinned():
            self.watcher.found.refused.append(RefusedCall(str(func), COPIES_TO_HOST, place))


def is_collective(name: str) -> bool:
    """Return whether an operator, such as c10d.allreduce_.default, is a collective."""
    return name.partition(".")[0] in _COLLECTIVES


def _has_mask(args) -> bool:
    """Say whether the index of Tensor.__getitem__, or of __setitem__ of more than a number, is or has a mask."""
    parts = args[1] if isinstance(args[1], tuple) else args[1:2]
    is_fill = len(args) > 2 and not isinstance(args[2], torch.Tensor)
    return not is_fill and any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def _is_cuda(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def written(func, args, kwargs) -> list[torch.Tensor]:
    """Return the tensors that an operator writes, by its schema."""
    if not func._schema.is_mutable:
        return []
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    aliases = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return tensors_in([values.get(name) for name, alias in aliases if alias is not None and alias.is_write])


def _is_rewritten(tensor, func, args, kwargs) -> bool:
    """Say whether an operator writes all of a tensor's memory and reads none of it."""
    storage = storage_of(tensor)
    if storage is None or not func._schema.is_mutable or tensor.nbytes != storage.nbytes():
        return False
    if func._schema.name in _FILLS:
        written = args[:1]
    else:
        written = [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_out]
    return any(target is tensor for target in tensors_in(written))


def _hash(storage) -> int:
    """A hash of memory of the host."""
    return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())) if storage.nbytes() else 0


def _outside(tensor, record) -> int | None:
    address = storage_id(tensor)
    if address is None or address in record.made:
        return None
    record.kept.setdefault(address, storage_of(tensor))
    return address
