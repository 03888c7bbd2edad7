"""Variants: what a script makes them with, and what they may do."""

import contextlib
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graph_worth.capture.pool import CaptureError, Pool
from graph_worth.machine import memory

# The memory that eager steps take: torch's own, or the graphs' pool where both do not fit (measuring/worker.py).
eager_memory: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


class Unsupported(RuntimeError):
    """This variant cannot run here; the message says what is missing. Status `unsupported`, not a failure."""


class Refused(ValueError):
    """A training cannot be built so; the message names the flag. By hand a mistake of the user's, exit status 2."""


# A ValueError is a user's mistake that only building could show; its message names the flag.
STATUSES = {
    Unsupported: "unsupported",
    torch.OutOfMemoryError: "oom",
    CaptureError: "capture_failed",
    FloatingPointError: "numerics_failed",
    ValueError: "failed",
}


def status_of(error: Exception, device: torch.device) -> tuple[str | None, str]:
    """Return (status, message) of what ended a run; the status is None where only a traceback tells enough."""
    status = next((name for kind, name in STATUSES.items() if isinstance(error, kind)), None)
    if status is None:
        return None, f"{type(error).__name__}: {str(error)[:300]}"
    return status, memory.explain_oom(error, device) if status == "oom" else str(error)


def synchronize():
    """Wait for all work on the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(kw_only=True)
class Capture:
    """Facts of a variant's capture: the strategy in words, the pools of its graphs, and the fields that `timed` fills.

    Wall seconds; memory: "warmup", "compile" or "capture" -> what `memory.noted` says, on a GPU; report:
    what the file of a run holds of it besides, as JSON has it. state, device: of the training.
    """

    strategy: str
    state: Any = None
    device: Any = None
    pools: list = field(default_factory=list)
    memory: dict = field(default_factory=dict)
    warmup_s: float = 0.0
    compile_s: float = 0.0
    capture_s: float = 0.0
    report: dict = field(default_factory=dict)

    def pool(self, **options) -> Pool:
        """Return a new pool (`graph_worth.capture.pool.Pool`), whose graphs and replays count as the variant's."""
        self.pools.append(Pool(self.device, **options))
        return self.pools[-1]

    def warm_up(self, step, num_steps: int = 3) -> None:
        """Make eager steps on the capture stream, on the first batches.

        Libraries initialise and choose their kernels in them, caches and optimizer state come to exist. Nothing of that
        may happen for the first time in a capture. step: step(state, index).
        """
        inputs = getattr(self.state, "inputs", None)
        if inputs is not None and hasattr(inputs, "reset"):
            inputs.reset()
        with eager_memory(), self.timed("warmup_s"):
            for index in range(num_steps):
                step(self.state, index)

    def capturing(self):
        """Count the seconds and the memory of a block as the capture's."""
        return self.timed("capture_s")

    @contextlib.contextmanager
    def timed(self, name: str):
        """Add the wall seconds of the block, device work included, to warmup_s, compile_s or capture_s; note memory."""
        synchronize()
        start = time.perf_counter()
        with memory.noted(self.memory.setdefault(name.removesuffix("_s"), {})):
            yield
        synchronize()
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    @property
    def num_replays(self) -> int:
        """Graph replays of all pools since their capture."""
        return sum(pool.num_replays for pool in self.pools)


def complete_variant(variant: Any, capture: Capture, replays: int | None = 0) -> Any:
    """Give an object of a script the rest of a `MadeVariant`, and a close that releases the pools of its capture.

    Args:
        variant: has `step`, and may have `replays_of` and `close`; it is returned.
        capture: with which it was made.
        replays: of each step, where it has no `replays_of`.
    """
    if not hasattr(variant, "capture"):
        variant.capture = capture
    if not hasattr(variant, "replays_of"):
        variant.replays_of = lambda index: replays or 0
    class_close: Any = getattr(type(variant), "close", None)
    # Without a cycle of references, so that a variant's tensors are freed with it.
    this: Any = weakref.ref(variant) if class_close else None

    def close():
        result = class_close(this()) if class_close else None
        for pool in capture.pools:
            pool.release()
        return result

    variant.close = close
    return variant


def enter(variant) -> None:
    """Make ready for steps of the variant."""
    if hasattr(variant, "enter"):
        variant.enter()


def leave(variant) -> None:
    """Make ready for steps of any other variant."""
    if hasattr(variant, "leave"):
        variant.leave()


@contextlib.contextmanager
def entered(variant):
    """Within it, steps are the variant's."""
    enter(variant)
    try:
        yield
    finally:
        leave(variant)


@contextlib.contextmanager
def left(variant):
    """Within it, steps are those of other variants, though the variant was entered."""
    leave(variant)
    try:
        yield
    finally:
        enter(variant)


class MadeVariant(Protocol):
    """One way to run a training step, made from a state; it may raise Unsupported, CaptureError or ValueError.

    One that changes the state or torch for its steps, as torch.compile replaces functions of the model, has `enter` and
    `leave` as well: its constructor leaves everything as eager needs it, and variants alternate on one state. One that
    runs some steps again in another way, as where a fixed buffer was too small, has `counted`: "steps" since the last
    call, how many were "reruns", and "rerun_ms", their mean or None.
    """

    capture: Capture

    def step(self, index: int) -> None:
        """Train on batch `index`."""

    def replays_of(self, index: int) -> int:
        """Graph replays that step `index` must make; one by default."""
        return 1

    def close(self) -> None:
        """Release the graphs."""
