"""The answer to code that asks whether a stream captures: libraries skip reads on the host where it is yes.

Transformers' mask code, for one, asks `torch.cuda.is_current_stream_capturing()`. Without a capture it looks at the
mask's values, and in a capture it does not.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

# It only refuses an optimizer whose capturable is False, of which findings tell.
_OPTIM = os.path.join(os.path.dirname(torch.__file__), "optim") + os.sep


@contextlib.contextmanager
def answering(answer: bool | None = True, note: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within it code that asks whether a stream captures gets this answer, whatever name it knows the question by.

    Args:
        answer: True within steps that do what a capture would do; None for the true one.
        note: called at each question.
    """
    original, stream_class, is_on = torch.cuda.is_current_stream_capturing, torch.cuda.Stream, True
    of_stream = getattr(stream_class, "is_capturing", None)

    def asked(truly):
        # A module that was imported meanwhile may keep this function.
        if not is_on or sys._getframe(2).f_code.co_filename.startswith(_OPTIM):
            return truly()
        note()
        return truly() if answer is None else answer

    def is_current_stream_capturing():
        return asked(original)

    modules = hash(tuple(map(id, list(sys.modules.values()))))
    places = [place for place in _places(original, modules) if place[0].get(place[1]) is place[2]]
    with contextlib.ExitStack() as stack:
        for scope, name, value in places:
            scope[name] = is_current_stream_capturing
            stack.callback(scope.__setitem__, name, value)
        if of_stream is not None:
            method = lambda stream: asked(functools.partial(of_stream, stream))  # noqa: E731
            stack.enter_context(mock.patch.object(stream_class, "is_capturing", method))
        try:
            yield
        finally:
            is_on = False


@functools.lru_cache(maxsize=4)
def _places(question, modules) -> list[tuple[dict, str, Callable]]:
    """Namespaces of modules that know the question, with its name there; modules: a hash of which are imported."""
    questions = {id(question), id(torch.cuda.graphs.is_current_stream_capturing)}
    safe = "safe_is_current_stream_capturing"  # torchrl's, which asks on machines with a GPU alone
    scopes = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    return [
        (scope, name, value)
        for scope in scopes
        for name, value in list(scope.items())
        if id(value) in questions or name == safe
    ]
