"""Marks and sections: places in a step that somebody may look at, and that cost next to nothing where nobody does."""

import contextlib

_mark = None
_open_section = None
_nothing = contextlib.nullcontext()


def mark(tensor=None) -> None:
    """A place, at most some 800 launches after the last one, where the GPU's queue may be drained to time the host.

    tensor: also marks the point in the backward pass where the gradient of this tensor is ready.
    """
    if _mark is not None:
        _mark()
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda gradient: _mark() if _mark is not None else None)


def is_watched() -> bool:
    """Return whether somebody watches the marks of this step."""
    return _mark is not None


def section(name: str):
    """A context for a named part of the step: a range in a profile, else nothing.

    Outside of a profile it costs 0.15 us of host time. Parts are phases of a microbatch, not layers.
    """
    return _nothing if _open_section is None else _open_section(name)


@contextlib.contextmanager
def watching_marks(function):
    """Within it, `function()` is called at each mark."""
    global _mark
    _mark = function
    try:
        yield
    finally:
        _mark = None


@contextlib.contextmanager
def opening_sections(function):
    """Within it, `function(name)` makes the context of each section."""
    global _open_section
    _open_section = function
    try:
        yield
    finally:
        _open_section = None
