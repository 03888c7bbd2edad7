"""One eager step under watch: its operators, and each call that no graph can hold, with the user's line.

The rules are those of host graphs (common/capture/host_graph_rules.py). A host graph stops at the first call that it
refuses; here every one is noted and the step goes on.
"""

import os
import sys
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.capture import host_graph_rules as rules

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_AMP = os.path.join(_TORCH, "amp") + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Place:
    """Where a call comes from.

    Attributes:
        line: file:line of the innermost frame outside of torch.
        own: file:line of the innermost frame outside of all installed packages, or the same.
        through: "optimizer" or "loss scaler" where the call comes from one of torch's.
        module: path of the innermost module that is running.
    """

    line: str
    own: str
    through: str = ""
    module: str = ""


@dataclass(frozen=True)
class Refused:
    """A call that no graph can hold: its name, the reason in the words of the rules, and its place."""

    name: str
    reason: str
    place: Place


@dataclass
class Watched:
    """What a step did.

    Attributes:
        operators: (name, shapes of the tensors that it gave, place) of each, in order.
        refused: calls that no graph can hold.
        generators: those that operators drew from, besides torch's own, with the place of the first call.
        copies: places of copies from unpinned memory of the host to the GPU.
        loss: what the step returned.
    """

    operators: list[tuple[str, tuple, Place]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    generators: dict[int, tuple[torch.Generator, Place]] = field(default_factory=dict)
    copies: list[Place] = field(default_factory=list)
    loss: object = None


def watch(step, batch, modules) -> Watched:
    """Make one step eagerly and note what it does.

    Args:
        step: step(batch).
        batch: of the step.
        modules: those whose running parts are to be named.
    """
    watcher = _Watcher(modules)
    originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in rules.PATCHED]
    try:
        for owner, name, reason in rules.PATCHED:
            setattr(owner, name, watcher.noting(getattr(owner, name), f"{owner.__name__}.{name}", reason))
        with watcher.hooks(), _Functions(watcher), _Operators(watcher):
            watcher.found.loss = step(batch)
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
    return watcher.found


class _Watcher:
    def __init__(self, modules):
        self.found, self.stack, self.modules, self.is_inside = Watched(), [], modules, False

    def hooks(self):
        return _ModuleStack(self.modules, self.stack)

    def place(self) -> Place:
        line = own = through = ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(_OPTIM):
                through = through or "optimizer"
            elif path.startswith(_AMP):
                through = "loss scaler" if "grad_scaler" in path else through
            elif not path.startswith((_TORCH, _HERE)) and os.sep in path:
                line = line or f"{path}:{frame.f_lineno}"
                if not any(part in path for part in _PACKAGES):
                    own = f"{path}:{frame.f_lineno}"
                    break
            frame = frame.f_back
        return Place(line or "unknown line", own or line or "unknown line", through, ".".join(self.stack[-1:]))

    def refuse(self, name, reason):
        self.found.refused.append(Refused(str(name), reason, self.place()))

    def noting(self, original, name, reason):
        def note(*args, **kwargs):
            if self.is_inside:
                return original(*args, **kwargs)
            self.refuse(name, reason)
            self.is_inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self.is_inside = False

        return note


class _Functions(TorchFunctionMode):
    def __init__(self, watcher):
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func, types, args=(), kwargs=None):
        watcher = self.watcher
        if func in rules.FORBIDDEN_FUNCTIONS and not watcher.is_inside:
            watcher.refuse(*rules.FORBIDDEN_FUNCTIONS[func])
            watcher.is_inside = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                watcher.is_inside = False
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, watcher):
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, watcher = kwargs or {}, self.watcher
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        place, found = watcher.place(), watcher.found
        reason = rules.reason_against(func, args, kwargs)
        if reason and not watcher.is_inside and not _fills_with_number(func, args, place):
            watcher.refuse(func, reason)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                found.generators.setdefault(id(leaf), (leaf, place))
        result = func(*args, **kwargs)
        if _is_unpinned_copy(func, args, result):
            found.copies.append(place)
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        found.operators.append((str(func), shapes, place))
        return result


def _fills_with_number(func, args, place):
    """Whether a number goes into a tensor by x[...] = 1.0: a fill, for which the GPU waits for nothing."""
    if func._schema.name != "aten::lift_fresh" or args[0].dim():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__setitem__":
            return True
        frame = frame.f_back
    return False


def _is_unpinned_copy(func, args, result):
    name = func._schema.name
    if name == "aten::_to_copy":
        source, target = args[0], result
    elif name == "aten::copy_":
        target, source = args[0], args[1]
    else:
        return False
    return target.is_cuda and source.device.type == "cpu" and source.dim() > 0 and not source.is_pinned()


class _ModuleStack:
    """The names of the modules whose forward runs, kept by hooks."""

    def __init__(self, modules, stack):
        self._handles, self._stack = [], stack
        self._named = [(name, module) for each in modules for name, module in each.named_modules()]

    def __enter__(self):
        for name, module in self._named:
            if name:
                self._handles.append(module.register_forward_pre_hook(self._push(name)))
                self._handles.append(module.register_forward_hook(self._pop))
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()

    def _push(self, name):
        return lambda module, args: self._stack.append(name)

    def _pop(self, module, args, output):
        if self._stack:
            self._stack.pop()
