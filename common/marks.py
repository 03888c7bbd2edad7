"""Marks and sections: places in a step that only their own pass looks at (see common/passes.py)."""

import contextlib

_mark = None
_open_section = None
_open_inner_section = None
_nothing = contextlib.nullcontext()


def mark(tensor=None) -> None:
    """A place, at most some 800 launches after the last one, where the issue pass may drain the GPU's queue.

    tensor: the place in the backward pass where its gradient is ready is one as well.
    """
    if _mark is not None:
        _mark()
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda gradient: _mark() if _mark is not None else None)


def section(name: str):
    """A context for a named part of the step: events in the section pass, a range in a profile, else nothing.

    Outside of these it costs 0.15 us of host time. Parts are phases of a microbatch, not layers.
    """
    return _nothing if _open_section is None else _open_section(name)


def gradient_section(name: str, output, given) -> None:
    """A part of a section "backward" to come: from where the gradient of `output` is ready to where that of `given` is.

    output, given: tensors, output made from given. Autograd enters and leaves it. There is none without gradients, and
    none in a profile, whose sections do not overlap.
    """
    if _open_inner_section is None or not (output.requires_grad and given.requires_grad):
        return
    context = _open_inner_section(name)

    def enter(gradient):
        context.__enter__()

    def leave(gradient):
        context.__exit__(None, None, None)

    output.register_hook(enter)
    given.register_hook(leave)


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
def opening_sections(function, inner: bool = False):
    """Within it, `function(name)` makes the context of each section, with `inner` of parts of sections as well."""
    global _open_section, _open_inner_section
    _open_section, _open_inner_section = function, function if inner else None
    try:
        yield
    finally:
        _open_section = _open_inner_section = None
