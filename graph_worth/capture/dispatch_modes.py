"""Modes that see operators, in processes that compile nothing."""

import sys

from torch.utils._python_dispatch import TorchDispatchMode


def without_compiler(mode: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """Let a mode, with its own `__torch_dispatch__`, see its first operator without an import of the compiler.

    That takes over a second. torch wraps `__torch_dispatch__` of every mode, so that its compiler leaves that code
    alone. The wrapper imports the compiler when it is first called. Where nothing has imported it, nothing is compiled,
    and the mode's own code runs.
    """
    wrapped = mode.__torch_dispatch__
    unwrapped = getattr(wrapped, "__wrapped__", wrapped)

    def dispatch(self, func, types, args=(), kwargs=None):
        if "torch._dynamo" in sys.modules:
            mode.__torch_dispatch__ = wrapped  # type: ignore[method-assign]
            return wrapped(self, func, types, args, kwargs)
        return unwrapped(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return mode
