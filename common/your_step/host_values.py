"""Values on the host that a step may change, and tensors that it may bind anew. A replay leaves both as they are.

Looked at are the attributes of the modules and of other objects that were handed over, what the step function holds in
its closure, its own attributes, and the globals of its file.
"""

import random
import sys
from collections import deque

import torch

# Longer lists are known by their length.
MOST_ITEMS = 32
_PLAIN = (bool, int, float, str, type(None))
_MODULE_OWN = set(vars(torch.nn.Module())) | {"training"}


def look(step, owned: list) -> tuple[dict, dict]:
    """Return (name -> plain value, name -> tensor) of what the step can reach."""
    values: dict = {}
    tensors: dict = {}
    for name, each in _roots(step):
        _visit(name, each, values, tensors, depth=2)
    for index, module in enumerate(each for each in owned if isinstance(each, torch.nn.Module)):
        for path, part in module.named_modules():
            for key, value in vars(part).items():
                if key not in _MODULE_OWN:
                    _visit(f"{path or f'model {index}'}.{key}", value, values, tensors, depth=1)
            # Buffers are handed over; which tensor is one may change.
            tensors |= {f"{path}.{key}".lstrip("."): value for key, value in part.named_buffers(recurse=False)}
    return values, tensors


def not_handed_over(step, owned: list):
    """Yield (words, tensor) of the modules and optimizers that the step reaches and that were not handed over."""
    known = {id(part) for each in owned if isinstance(each, torch.nn.Module) for part in each.modules()}
    known |= {id(each) for each in owned}
    for name, each in _roots(step):
        if isinstance(each, torch.nn.Module) and id(each) not in known:
            for path, tensor in [*each.named_parameters(), *each.named_buffers()]:
                yield f"{name}.{path}", tensor
        elif isinstance(each, torch.optim.Optimizer) and id(each) not in known:
            values = [value for state in each.state.values() for value in state.values()]
            yield from ((f"the state of {name}", value) for value in values if isinstance(value, torch.Tensor))


def random_states() -> dict:
    """Return the states of Python's and NumPy's random numbers."""
    states = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = hash((name, keys.tobytes(), *rest))
    return states


def _roots(step):
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue  # not bound yet
        names = _names_in(code)
        for name, value in function.__globals__.items():
            if name in names:
                yield name, value
        yield from ((f"step.{name}", value) for name, value in vars(function).items())
    holder = getattr(step, "__self__", None) if code is not None else step
    if holder is not None and not isinstance(holder, torch.nn.Module):
        yield from ((f"self.{name}", value) for name, value in vars(holder).items())


def _names_in(code):
    """Names that a function and those inside of it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _names_in(constant)
    return names


def _visit(name, each, values, tensors, depth):
    if isinstance(each, torch.Tensor):
        if not isinstance(each, torch.nn.Parameter):
            tensors[name] = each
    elif isinstance(each, _PLAIN):
        values[name] = each
    elif isinstance(each, (list, tuple, set, dict, deque)) and type(each).__module__ in ("builtins", "collections"):
        values[f"len({name})"] = len(each)
        if depth and len(each) <= MOST_ITEMS and not isinstance(each, set):
            items = each.items() if isinstance(each, dict) else enumerate(each)
            for key, value in list(items):
                _visit(f"{name}[{key!r}]", value, values, tensors, depth - 1)
    elif depth and _is_users(each):
        for key, value in list(vars(each).items()):
            _visit(f"{name}.{key}", value, values, tensors, depth - 1)


def _is_users(each):
    """Say whether it is an object of the user's own class, or a plain namespace."""
    kind = type(each)
    known = isinstance(each, (type, torch.nn.Module, torch.optim.Optimizer, torch.Generator)) or callable(each)
    return hasattr(each, "__dict__") and not known and not kind.__module__.startswith(("torch.", "builtins"))
