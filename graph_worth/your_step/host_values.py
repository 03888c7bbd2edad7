"""Values on the host that a step may change, and tensors that it may bind anew. A replay leaves both as they are.

Looked at are the attributes of the modules and of other objects that were handed over, what the step function holds in
its closure, its own attributes, the globals of its file, and plain attributes of the classes of all these.
"""

import contextlib
import functools
import random
import sys
from collections import deque
from collections.abc import Callable
from unittest import mock

import torch

# Longer lists are known by their length.
MOST_ITEMS = 1024
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, set, dict, deque)
_MODULE_OWN = set(vars(torch.nn.Module())) | {"training"}


def look(step, owned: list, device: torch.device) -> tuple[dict, dict, dict]:
    """Return (name -> plain value, name -> tensor, name -> state of random numbers) of what the step can reach.

    Generators of torch count that draw on the host, beside a GPU.
    """
    reachable = _find(step, owned)
    states = {name: hash(_state_of(source)) for name, source in reachable.sources.items() if _draws(source, device)}
    return reachable.values, reachable.tensors, random_states() | states


def _draws(source, device) -> bool:
    return not isinstance(source, torch.Generator) or source.device.type != device.type


def _state_of(source):
    if isinstance(source, torch.Generator):
        return source.get_state().numpy().tobytes()
    if isinstance(source, random.Random):
        return source.getstate()
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
        self._before = _find(step, owned).values
        self._kept: list[tuple[Callable, object]] = []
        self.names: list[str] = []

    def note(self) -> None:
        """Add the names of the values that have changed since this was made or noted."""
        values, before = _find(self._step, self._owned).values, self._before
        changed = [name for name in values if name in before and before[name] != values[name]]
        self.names += [name for name in changed if name not in self.names and not name.startswith("len(")]
        self._before = values

    def keep_before(self, step: Callable[[], object]) -> None:
        """Make a step, and remember the values from before it of what it changes."""
        before = _find(self._step, self._owned)
        step()
        self.note()
        names = [name for name in self.names if name in before.puts and name in before.values]
        self._kept = [(before.puts[name], before.values[name]) for name in names]

    def keep(self) -> None:
        """Remember the values as they are now."""
        self._kept = self.now()

    def now(self) -> list[tuple[Callable, object]]:
        """Return the functions that set these values, and the values as they are now."""
        reachable = _find(self._step, self._owned)
        values = [(name, reachable.values.get(name)) for name in self.names if name in reachable.values]
        values += reachable.tensors.items() if self._has_tensors else ()
        return [(reachable.puts[name], value) for name, value in values if name in reachable.puts]

    def put_back(self, values: list[tuple[Callable, object]] | None = None) -> None:
        """Set them to their values at `keep`, or to those that `now` gave."""
        for put, value in self._kept if values is None else values:
            # A list may be shorter now, and a class may refuse a value.
            with contextlib.suppress(Exception):
                put(value)


def not_handed_over(step, owned: list):
    """Yield (words, tensor) of the modules and optimizers that the step reaches and that were not handed over."""
    known = {id(part) for module in owned if isinstance(module, torch.nn.Module) for part in module.modules()}
    known |= {id(holder) for holder in owned}
    for name, root, _ in _roots(step):
        if isinstance(root, torch.nn.Module) and id(root) not in known:
            for path, tensor in [*root.named_parameters(), *root.named_buffers()]:
                yield f"{name}.{path}", tensor
        elif isinstance(root, torch.optim.Optimizer) and id(root) not in known:
            values = [value for state in root.state.values() for value in state.values()]
            yield from ((f"the state of {name}", value) for value in values if isinstance(value, torch.Tensor))


def random_states() -> dict:
    """Return the states of Python's and NumPy's random numbers."""
    states = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = hash((name, keys.tobytes(), *rest))
    return states


def _find(step, owned) -> "_Found":
    reachable = _Found()
    for name, root, put in _roots(step):
        reachable.visit(name, root, put, depth=2)
    reachable.visit_class(type(getattr(step, "__self__", step)))
    for index, module in enumerate(holder for holder in owned if isinstance(holder, torch.nn.Module)):
        for path, part in module.named_modules():
            reachable.visit_class(type(part))
            for key, value in vars(part).items():
                if key not in _MODULE_OWN:
                    name = f"{path or f'model {index}'}.{key}"
                    reachable.visit(name, value, functools.partial(setattr, part, key), depth=1)
            # Buffers are handed over; which tensor is one may change.
            for key, value in part.named_buffers(recurse=False):
                reachable.tensors[f"{path}.{key}".lstrip(".")] = value
    return reachable


def _roots(step):
    """Yield (name, value, function that sets it) of the step's closure, globals and own attributes."""
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            except ValueError:
                continue  # not bound yet
        names, scope = _names_in(code), function.__globals__
        for name, value in scope.items():
            if name in names:
                yield name, value, functools.partial(scope.__setitem__, name)
        for name, value in vars(function).items():
            yield f"step.{name}", value, functools.partial(setattr, function, name)
    holder = getattr(step, "__self__", None) if code is not None else step
    if holder is not None and not isinstance(holder, torch.nn.Module):
        for name, value in vars(holder).items():
            yield f"self.{name}", value, functools.partial(setattr, holder, name)


def _names_in(code):
    """Names that a function and those inside of it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _names_in(constant)
    return names


class _Found:
    """Values, tensors and sources of random numbers by name, and the functions that set those values that can be."""

    def __init__(self):
        self.values: dict = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.puts: dict[str, Callable] = {}
        self.sources: dict = {}

    def visit(self, name, value, put, depth):
        """Add a value and what it holds, `depth` steps down."""
        if isinstance(value, (random.Random, torch.Generator)) or type(value).__module__.startswith("numpy.random"):
            self.sources[name] = value
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self.tensors[name] = value
                self.puts.setdefault(name, put) if put is not None else None
        elif isinstance(value, _PLAIN):
            self.values[name] = value
            if put is not None:
                self.puts[name] = put
        elif isinstance(value, _CONTAINERS) and type(value).__module__ in ("builtins", "collections"):
            self.values[f"len({name})"] = len(value)
            if depth and len(value) <= MOST_ITEMS and not isinstance(value, set):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, child in list(items):
                    put_child = None if isinstance(value, tuple) else functools.partial(value.__setitem__, key)
                    self.visit(f"{name}[{key!r}]", child, put_child, depth - 1)
        elif isinstance(value, type):
            self.visit_class(value)
        elif depth and _is_users(value):
            self.visit_class(type(value))
            for key, child in list(vars(value).items()):
                self.visit(f"{name}.{key}", child, functools.partial(setattr, value, key), depth - 1)

    def visit_class(self, kind):
        """Add the plain attributes of a class, such as a counter that its objects share, unless it is torch's."""
        for base in kind.__mro__:
            for key, value in list(vars(base).items()):
                is_torchs = f"{base.__module__}.".startswith(("torch.", "builtins."))
                if isinstance(value, _PLAIN) and not key.startswith("__") and not is_torchs:
                    self.visit(f"{base.__name__}.{key}", value, functools.partial(setattr, base, key), depth=0)


def _is_users(value):
    """Say whether it is an object of the user's own class, or a plain namespace."""
    kind = type(value)
    known = isinstance(value, (type, torch.nn.Module, torch.optim.Optimizer, torch.Generator)) or callable(value)
    return hasattr(value, "__dict__") and not known and not kind.__module__.startswith(("torch.", "builtins"))
