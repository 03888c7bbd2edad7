"""Values on the host that a step may change, and tensors that it may bind anew. A replay leaves both as they are.

Looked at is what the step reaches: its closure, the globals that it names, attributes and items of all these, six deep,
the functions among them and what they reach, the classes, and the modules that were handed over.
"""

import argparse
import contextlib
import enum
import functools
import itertools
import numbers
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from graph_worth.your_step.place import is_users_file

# Longer lists are known by their length.
MOST_ITEMS = 1024
_PLAIN = (bool, int, float, str, type(None), bytes, enum.Enum, numbers.Number)
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_KEPT = (list, tuple, dict, deque)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)
_ENTERED_OTHERWISE = (type, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.ModuleType)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# Steps from the step to what is looked at, and objects and functions that are entered.
_MOST_DEPTH, _MOST_OBJECTS = 6, 10_000
_MODULE_OWN = set(vars(torch.nn.Module())) | {"training"}


def _draws(source, device) -> bool:
    return not isinstance(source, torch.Generator) or source.device.type != device.type


def _state_of(source):
    if isinstance(source, torch.Generator):
        return source.get_state().numpy().tobytes()
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, Iterator):
        frame = getattr(source, "gi_frame", None)
        plain = [value for value in frame.f_locals.values() if isinstance(value, _PLAIN)] if frame else ()
        return repr(source), operator.length_hint(source, -1), frame and frame.f_lasti, *plain
    bits = getattr(source, "bit_generator", getattr(source, "_bit_generator", source))
    return repr(getattr(bits, "state", None))


@contextlib.contextmanager
def noting_unseeded():
    """Yield a list, which has the names of the sources of random numbers that were drawn from and never seeded.

    torch's own begin with one seed in each process.
    """
    names: list[str] = []
    seeded: set[str] = set()

    def noting(name, original):
        def seed(*args, **kwargs):
            if args or kwargs:
                seeded.add(name)
            elif original.__name__ == "default_rng":
                names.append(name)
            return original(*args, **kwargs)

        return seed

    before = random_states()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(random, "seed", noting("random", random.seed)))
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        for name in ("seed", "default_rng") if numpy_random else ():
            note = noting("numpy.random", getattr(numpy_random, name))
            stack.enter_context(mock.patch.object(numpy_random, name, note))
        yield names
    after = random_states()
    names += [name for name, state in before.items() if after[name] != state and name not in seeded]


class Moving:
    """Plain values on the host that a step changes, such as a count of steps in a dict, to be put back.

    Made before the first step. `note` after each step finds out which have changed, `keep` remembers their values, and
    `put_back` sets these again.

    Args:
        step, owned: as `build` returns them.
        has_tensors: `now` has the tensors that names are bound to, too.
    """

    def __init__(self, step, owned: list, has_tensors: bool = False):
        self._step, self._owned, self._has_tensors = step, owned, has_tensors
        self._before = Reachable(step, owned).values
        self._kept: list[tuple[Callable, object]] = []
        self.names: list[str] = []

    def note(self) -> None:
        """Add the names of the values that have changed since this was made or noted."""
        values, before = Reachable(self._step, self._owned).values, self._before
        changed = [name for name in values if name in before and before[name] != values[name]]
        self.names += [name for name in changed if name not in self.names and not name.startswith("len(")]
        self._before = values

    def keep_before(self, step: Callable[[], object]) -> None:
        """Make a step, and remember the values from before it of what it changes."""
        before = Reachable(self._step, self._owned)
        step()
        self.note()
        names = [name for name in self.names if name in before.puts and name in before.values]
        self._kept = [(before.puts[name], before.values[name]) for name in names]

    def keep(self) -> None:
        """Remember the values as they are now."""
        self._kept = self.now()

    def now(self) -> list[tuple[Callable, object]]:
        """Return the functions that set these values, and the values as they are now."""
        reachable = Reachable(self._step, self._owned)
        values = [(name, reachable.values.get(name)) for name in self.names if name in reachable.values]
        values += reachable.tensors.items() if self._has_tensors else ()
        return [(reachable.puts[name], value) for name, value in values if name in reachable.puts]

    def put_back(self, values: list[tuple[Callable, object]] | None = None) -> None:
        """Set them to their values at `keep`, or to those that `now` gave."""
        for put, value in self._kept if values is None else values:
            # A list may be shorter now, and a class may refuse a value.
            with contextlib.suppress(Exception):
                put(value)


def random_states() -> dict:
    """Return the states of Python's and NumPy's random numbers."""
    states = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = hash((name, keys.tobytes(), *rest))
    return states


@functools.lru_cache(maxsize=4096)
def _names_in(code):
    """Names that a function and those inside of it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _names_in(constant)
    return names


class Reachable:
    """The host state that a step can reach through closures, globals, attributes and items, as it is now.

    Objects and functions of the user's files are entered, and objects of libraries that these hold.

    Args:
        step, owned: as `build` returns them.

    Attributes:
        values: plain values by name, and the lengths of containers.
        tensors: by name, but for parameters.
        sources: sources of random numbers by name.
        puts: functions that set values and tensors that can be set.
        holders: (name, module or optimizer) of those that were not handed over.
        codes: code of the functions that were entered.
    """

    def __init__(self, step, owned: list):
        self.values: dict = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.puts: dict[str, Callable] = {}
        self.sources: dict = {}
        self.holders: list[tuple] = []
        self.codes: list[types.CodeType] = []
        modules = [holder for holder in owned if isinstance(holder, torch.nn.Module)]
        # Optimizers have their own looks, and modules come last.
        self._entered = {id(part) for module in modules for part in module.modules()}
        self._entered |= {id(holder) for holder in owned if isinstance(holder, torch.optim.Optimizer)}
        self._waiting: deque = deque()
        self._scope: object = None
        self._visit("" if isinstance(step, _CALLED) else "self", step, None, _MOST_DEPTH)
        self._enter_waiting()
        for index, module in enumerate(modules):
            for path, part in module.named_modules():
                self._enter_module(path or f"model {index}", part, _MOST_DEPTH)
        self._enter_waiting()

    def states(self, device: torch.device) -> dict:
        """Return the states of random numbers by name; of torch's generators those that draw on the host for a GPU."""
        sources = {name: source for name, source in self.sources.items() if _draws(source, device)}
        return random_states() | {name: hash(_state_of(source)) for name, source in sources.items()}

    def not_handed_over(self):
        """Yield (words, tensor) of the modules and optimizers that were not handed over."""
        for name, holder in self.holders:
            if isinstance(holder, torch.nn.Module):
                for path, tensor in [*holder.named_parameters(), *holder.named_buffers()]:
                    yield f"{name}.{path}", tensor
            else:
                values = [value for state in holder.state.values() for value in state.values()]
                yield from ((f"the state of {name}", value) for value in values if isinstance(value, torch.Tensor))

    def holder_of(self, name: str):
        """Return the object of which a value is an attribute, else None."""
        put = self.puts.get(name)
        return put.args[0] if isinstance(put, functools.partial) and put.func is setattr else None

    def _visit(self, name, value, put, depth):
        """Add a value, and let what it holds wait, `depth` steps down."""
        kind = type(value).__module__
        is_iterator = kind in ("builtins", "itertools") and isinstance(value, Iterator)
        if is_iterator or isinstance(value, (random.Random, torch.Generator)) or kind.startswith("numpy.random"):
            self.sources[name] = value
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self.tensors[name] = value
                self.puts.setdefault(name, put) if put is not None else None
        elif isinstance(value, _PLAIN):
            self.values[name] = value
            if put is not None:
                self.puts[name] = put
        elif hasattr(value, "tolist") and getattr(value, "size", MOST_ITEMS + 1) <= MOST_ITEMS:
            self.values[name] = value.tolist()
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__func__, None, depth)
            self._visit(name or "self", value.__self__, None, depth)
        elif isinstance(value, (staticmethod, classmethod, property)):
            self._visit(name, getattr(value, "__func__", getattr(value, "fget", None)), None, depth)
        else:
            if isinstance(value, _CONTAINERS):
                self.values[f"len({name})"] = len(value)
            if depth and id(value) not in self._entered and len(self._entered) < _MOST_OBJECTS:
                self._entered.add(id(value))
                self._waiting.append((name, value, depth - 1))

    def _enter_waiting(self):
        while self._waiting:
            self._enter(*self._waiting.popleft())

    def _enter(self, name, value, depth):
        if isinstance(value, types.FunctionType):
            self._enter_function(name, value, depth)
        elif isinstance(value, type):
            self._entered.discard(id(value))
            self._enter_class(value, depth)
        elif isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            self.holders.append((name, value))
            for path, part in value.named_modules() if isinstance(value, torch.nn.Module) else ():
                self._enter_module(f"{name}.{path}".rstrip("."), part, depth)
        elif isinstance(value, functools.partial):
            names = getattr(getattr(value.func, "__code__", None), "co_varnames", ())
            names = names[isinstance(value.func, types.MethodType) :][: len(value.args)]
            arguments = itertools.zip_longest(names, value.args, fillvalue="")
            for key, part in [("", value.func), *arguments, *value.keywords.items()]:
                self._visit(f"{name}.{key}".strip("."), part, None, depth)
        elif isinstance(value, (list, tuple, dict, deque)) and len(value) <= MOST_ITEMS:
            for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
                put_child = None if isinstance(value, tuple) else functools.partial(value.__setitem__, key)
                self._visit(f"{name}[{key!r}]", child, put_child, depth)
        children = attributes_of(value)
        if children or is_users_class(type(value)):
            self._enter_class(type(value), depth)
            is_deep = is_users_class(type(value)) or isinstance(value, _NAMESPACES) or name == "self"
            depth = depth if is_deep else min(depth, 1)
            for key, child in children.items():
                self._visit(f"{name}.{key}", child, functools.partial(setattr, value, key), depth)

    def _enter_module(self, name, module, depth):
        self._enter_class(type(module), depth)
        for key, value in list(vars(module).items()):
            if key not in _MODULE_OWN:
                self._visit(f"{name}.{key}", value, functools.partial(setattr, module, key), depth)
        # Buffers are handed over; which tensor is one may change.
        for key, value in module.named_buffers(recurse=False):
            self.tensors[f"{name}.{key}"] = value

    def _enter_function(self, name, function, depth):
        if hasattr(function, "__wrapped__"):
            self._visit(name, function.__wrapped__, None, depth)
        code, scope = function.__code__, function.__globals__
        if not is_users_file(code.co_filename):
            return
        self.codes.append(code)
        start = f"{name}." if name else ""
        # Names of the step's file go without their module's.
        self._scope = self._scope or scope
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                self._visit(start + key, cell.cell_contents, functools.partial(setattr, cell, "cell_contents"), depth)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for key, value in [*zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
            self._visit(start + key, value, None, depth)
        for key, value in vars(function).items():
            self._visit(f"{name or 'step'}.{key}", value, functools.partial(setattr, function, key), depth)
        start = "" if scope is self._scope else f"{scope.get('__name__')}."
        for key in sorted(_names_in(code)):
            if key in scope and not isinstance(scope[key], types.ModuleType):
                self._visit(start + key, scope[key], functools.partial(scope.__setitem__, key), depth)
            # Also that which the function imports itself.
            module = scope.get(key, sys.modules.get(key))
            if isinstance(module, types.ModuleType) and is_users_file(getattr(module, "__file__", None) or ""):
                for inner in sorted(_names_in(code) & vars(module).keys()):
                    put = functools.partial(setattr, module, inner)
                    self._visit(f"{module.__name__}.{inner}", getattr(module, inner), put, depth)

    def _enter_class(self, kind, depth):
        """Add plain attributes of a class, such as a counter that its objects share, and its functions."""
        for base in kind.__mro__:
            if id(base) in self._entered or f"{base.__module__}.".startswith(("torch.", "builtins.")):
                continue
            self._entered.add(id(base))
            kinds = (*_PLAIN, *_KEPT, *_FUNCTIONS) if is_users_class(base) else _PLAIN
            for key, value in list(vars(base).items()):
                if isinstance(value, kinds) and (isinstance(value, _FUNCTIONS) or not key.startswith("__")):
                    self._visit(f"{base.__name__}.{key}", value, functools.partial(setattr, base, key), depth)


def is_users_class(kind: type) -> bool:
    """Return whether a class stands in a file of the user's."""
    module = sys.modules.get(kind.__module__)
    is_python = kind.__module__ in sys.builtin_module_names and kind.__module__ != "__main__"
    return not is_python and is_users_file(getattr(module, "__file__", None) or "")


def attributes_of(value) -> dict:
    """Return the attributes of an object of the user's or of a library, or of a plain namespace; else {}."""
    kind = type(value)
    name = kind.__module__.partition(".")[0]
    if isinstance(value, _ENTERED_OTHERWISE) or name == "torch":
        return {}
    if name in sys.stdlib_module_names and name != "__main__" and not isinstance(value, _NAMESPACES):
        return {}
    named = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    slots = [key for keys in named for key in ([keys] if isinstance(keys, str) else keys)]
    return {key: getattr(value, key) for key in slots if hasattr(value, key)} | getattr(value, "__dict__", {})
