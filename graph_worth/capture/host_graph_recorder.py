"""Records a host graph: the operators that a function runs, and the storages that they read and write."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from graph_worth.capture import host_graph_rules as rules
from graph_worth.capture.asking import answering
from graph_worth.capture.dispatch_modes import without_compiler
from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.host_graph_memory import View
from graph_worth.capture.host_tensors import HostTensors, one_hot_as_on_gpu


@dataclass
class Call:
    """One operator to run again. `leaves` are its flattened arguments, tensors replaced by their View.

    structure: of the arguments; None where `leaves` are the positional arguments and there are no others.
    """

    func: torch._ops.OpOverload
    line: str
    leaves: list
    structure: TreeSpec | None
    grad_enabled: bool
    results: list

    def arguments(self, leaves: list) -> tuple:
        """Positional and named arguments, made of `leaves`."""
        return (leaves, {}) if self.structure is None else tree_unflatten(leaves, self.structure)

    def written(self) -> set[int]:
        """Addresses of the storages that the operator's schema marks as written."""
        if not self.func._schema.is_mutable:
            return set()
        args, kwargs = self.arguments(self.leaves)
        arguments = self.func._schema.arguments
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        return {
            leaf.storage
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
            for leaf in tree_leaves(values[argument.name])
            if isinstance(leaf, View)
        }


@contextlib.contextmanager
def replaying():
    """Run recorded operators in this block: below autograd, with a grad mode that is put back after it."""
    grad_enabled, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    # The casts of a capture under autocast were recorded; they must not be made twice.
    torch.set_autocast_enabled("cpu", False)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch._C._set_grad_enabled(grad_enabled)
        torch.set_autocast_enabled("cpu", autocast)


def copy_results(results, value) -> None:
    """Copy an operator's result, a tensor or a nest of them, into the tensors recorded for it (None: not new)."""
    values = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    for result, tensor in zip(results, values, strict=True):
        if result is not None:
            result.copy_(tensor)


class _FunctionMode(TorchFunctionMode):
    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.see(func, args, kwargs or {})


@without_compiler
class _DispatchMode(TorchDispatchMode):
    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self.see(func, args, kwargs or {})


_recording = None
# What a capture replaces in torch is replaced for all threads.
_one_capture = threading.RLock()


def refuse_inside_capture(name: str, what: str) -> None:
    """Raise CaptureError if a capture of this thread is running. That capture then fails, too."""
    if _recording is not None and _recording.thread == threading.get_ident():
        _recording.fail(name, what)


class Recorder:
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
        self.host: Any = HostTensors(self.fail)
        self.last_line = "the start of the capture"
        self.states = self._random_states()

    def run(self, fn):
        """Run fn() once, recording it, and return what it returned; CaptureError for what a graph cannot hold."""
        refuse_inside_capture("HostPool.capture", "runs inside another capture")
        with _one_capture:
            return self._run(fn)

    def _run(self, fn):
        global _recording
        _recording = self
        try:
            with contextlib.ExitStack() as stack:
                for owner, name, reason in rules.PATCHED:
                    refuse = self._refusing(getattr(owner, name), f"{owner.__name__}.{name}", reason)
                    stack.enter_context(mock.patch.object(owner, name, refuse))
                with answering(), one_hot_as_on_gpu(), _FunctionMode(self.function), _DispatchMode(self.operator):
                    result = fn()
                self._check_random_states("the end of the capture")
        except Exception as error:
            if self.error is None or error is self.error:
                raise
            raise self.error from error
        finally:
            # A cycle of references would keep the storages.
            _recording = self.host = None
        # Code that catches RuntimeError does not turn a broken capture into a good one.
        if self.error is not None:
            raise self.error
        return result

    def fail(self, name, reason, line=None, more=""):
        """Raise a CaptureError that names the call, its line and the reason; the capture fails with the first one."""
        line = line or rules.user_line()
        error = CaptureError(f"{name} at {line} cannot be captured: it {reason}{more}", reason, line)
        self.error = self.error or error
        raise error

    def function(self, func, args, kwargs):
        """Run a function of torch's Python API, or refuse it."""
        if func in rules.FORBIDDEN_FUNCTIONS and not self.host.are_host(args):
            self.fail(*rules.FORBIDDEN_FUNCTIONS[func])
        if func in rules.SPLITS and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args[1:], kwargs))):
            self.fail("torch.tensor_split", rules.SHAPE)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], (int, float, complex)):
            self.stores_number = True
            try:
                return func(*args, **kwargs)
            finally:
                self.stores_number = False
        with self.host.calling(func, args, kwargs):
            return func(*args, **kwargs)

    def operator(self, func, args, kwargs):
        """Run an operator and record it, or refuse it."""
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        line = rules.user_line()
        self._check_random_states(line)
        number = self.stores_number and func._schema.name == "aten::lift_fresh" and args[0].dim() == 0
        makes, of_host = self.host.makes(func), self.host.are_host(tree_leaves((args, kwargs)))
        reason = None if number or makes else rules.reason_against(func, args, kwargs)
        if reason and not (of_host and reason in rules.NO_MATTER_ON_HOST):
            self.fail(func, reason, line)
        # Most calls have no nests, and a tree of their arguments would take as long again.
        has_nests = kwargs or any(isinstance(argument, tuple | list | dict) for argument in args)
        leaves, structure = tree_flatten((args, kwargs)) if has_nests else (list(args), None)
        known = [generator._cdata for generator in self.generators]
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf._cdata not in known:  # type: ignore[attr-defined]
                self.fail(func, rules.UNKNOWN_GENERATOR, line)
        self.host.before(leaves)
        self.in_operator = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.in_operator = False
        self.last_line = line
        self.states = self._random_states()
        self.host.after(func, leaves, result, *((func, rules.NEW, line) if self.host.in_factory else ()))
        # A replay repeats no work of the host, but for its draws from the generator that it shares with the device.
        if number or makes or (of_host and torch.Tag.nondeterministic_seeded not in func.tags):
            for tensor in filter(torch.is_tensor, tree_leaves(result)):
                self.produced[self._view(tensor, func, line).storage] = (tensor.dtype, True)
        else:
            self._record(func, line, leaves, structure, result)
        return result

    def _record(self, func, line, leaves, structure, result):
        # After the call, because an out= argument may have got its size in it.
        leaves = [self._view(leaf, func, line) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        num_tensors = 0
        fresh: set[int] = set()
        results: list[View | None] = []
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
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
        if name in rules.ALLOCATIONS or name in rules.IN_PLACE_VIEWS or torch.Tag.inplace_view in func.tags:
            return
        # A view, or a question about shape or type. Other libraries' operators may act on the world outside.
        if not (func._schema.is_mutable or fresh) and (num_tensors or func.namespace == "aten"):
            return
        for leaf in leaves:
            if isinstance(leaf, View) and leaf.storage not in self.owned and leaf.storage not in self.produced:
                self.read.setdefault(leaf.storage, (func, line))
        self.calls.append(Call(func, line, leaves, structure, torch.is_grad_enabled(), results if fresh else []))

    def _storage(self, tensor, func, line) -> torch.UntypedStorage:
        # A zero tensor, the gradient of torch.sgn, has no memory.
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            self.fail(func, "works on a tensor that is sparse, packed, lazily conjugated or zero without memory", line)
        return tensor.untyped_storage()

    def _view(self, tensor, func, line) -> View:
        storage = self._storage(tensor, func, line)
        if storage._cdata not in self.owned:
            # Kept until the graph is built, so that no other storage gets its address.
            self.storages.setdefault(storage._cdata, storage)
        return View(storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _random_states(self):
        return [generator.get_state() for generator in self.generators]

    def _check_random_states(self, line):
        if not all(map(torch.equal, self.states, self._random_states())):
            since = f" (set since {self.last_line})"
            self.fail("Generator.manual_seed or set_state", rules.RANDOM, line, since)

    def _refusing(self, original, name, reason):
        def refuse(*args, **kwargs):
            is_for_host = reason in rules.NO_MATTER_ON_HOST and self.host.are_host(args)
            if self.in_operator or is_for_host or threading.get_ident() != self.thread:
                return original(*args, **kwargs)
            self.fail(name, reason)

        return refuse
