"""The parts of modules by their paths: hooks around each forward, and ranges of torch's profilers with their names."""

import contextlib
import functools
from collections.abc import Callable, Iterable

import torch

# Begins the name of a range in which a part runs.
MODULE = "module "


def is_inside(name: str, path: str) -> bool:
    """Return whether a module is the one at a path, "" for a whole model, or lies inside of it."""
    return not path or name == path or name.startswith(f"{path}.")


def named_parts(modules: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Return (path, module) of all modules inside of these."""
    return [(name, part) for module in modules for name, part in module.named_modules() if name]


def shown(modules: list[torch.nn.Module]) -> dict[str, str]:
    """Return path -> name to print of the parts whose path ends in a number, as those of a Sequential: 0 (Linear)."""
    return {path: f"{path} ({type(part).__name__})" for path, part in named_parts(modules) if path[-1].isdigit()}


@contextlib.contextmanager
def hooked(named: Iterable[tuple[str, torch.nn.Module]], after: Callable, before: Callable | None = None):
    """Within it, before(name) and after(name, module, args, kwargs, output) are called around each forward."""
    handles: list = []
    try:
        for name, module in named:
            if before is not None:
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: before(name)))
            handles.append(module.register_forward_hook(functools.partial(after, name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def naming_modules(modules):
    """Within it, torch's profilers record which module runs."""
    opened: list = []

    def enter(name):
        opened.append(torch.profiler.record_function(MODULE + name))
        opened[-1].__enter__()

    def leave(*_):
        opened.pop().__exit__(None, None, None)

    return hooked(named_parts(modules), leave, enter)
