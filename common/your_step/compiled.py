"""torch.compile of a step's modules, left out where it takes too long."""

import contextlib
import signal

import torch

from common.variant import Capture, Compiled, Unsupported
from common.your_step.state import StepState


class _TooLong(BaseException):
    """No Exception: the compiler catches those."""


@contextlib.contextmanager
def deadline(limit_s: float):
    """Interrupt a block of the main thread that takes more than limit_s seconds (0: no limit), which is Unsupported."""
    if not limit_s:
        yield
        return

    def stop(number, frame):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _TooLong:
        raise Unsupported(
            f"torch.compile takes more than {limit_s:g} s; --variants=eager,reduce_overhead waits for it"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class CompiledModules(Compiled):
    """torch.compile of the forward of each module that was handed over. It draws eager's numbers, to be compared."""

    def __init__(self, state: StepState, step, capture: Capture):
        if not state.modules:
            raise Unsupported("no module was handed over, so there is nothing to compile")
        self._limit_s = state.compile_limit_s
        functions = [(module, "forward") for module in state.modules]
        options = {"fullgraph": False, "options": {"fallback_random": True}}
        super().__init__(state, step, functions, "the modules", mode="reduce-overhead", capture=capture, **options)

    def compile_steps(self) -> None:
        """Make eager steps until nothing is compiled any more."""
        try:
            with deadline(self._limit_s):
                super().compile_steps()
        except Unsupported:
            # Processes that still compile would take the cores of steps that are timed.
            from torch._inductor.async_compile import shutdown_compile_workers

            shutdown_compile_workers()
            torch._dynamo.reset()
            raise
