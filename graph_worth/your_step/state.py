"""The state of a step that somebody hands over: its batches, what it changes, and the losses that it gave."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from graph_worth import made_variant as variants
from graph_worth.capture.pool import CaptureError
from graph_worth.measuring import marks
from graph_worth.parallel.host_messages import is_distributed
from graph_worth.snapshot import Snapshot
from graph_worth.your_step import host_values, step_file, user_file
from graph_worth.your_step.parts import changing_values, loss_of, signature_of, tensors_in, without

# Optimizers make their state in their first step. All variants train from the state after these.
WARM_STEPS = 3
# DistributedDataParallel orders its buckets and its logging in its first ten steps.
DDP_WARM_STEPS = 11
MOST_CLASSES = 16
NUM_LOSSES = 4096


class StepState:
    """The state of the step that FILE.py:FUNCTION names; messages name the program.

    Raises:
        ValueError: the file cannot be used, its step raises, or gives no loss.
    """

    # Seconds after which torch.compile is given up; 0: none.
    compile_limit_s = 0.0
    # The reason, once it was given up.
    gave_up_compiling = ""

    def __init__(self, text: str, device: torch.device, prog: str, size: int = 0):
        self.text, self.device = text, device
        self.path = step_file.split(text)[0].resolve()
        with user_file.watchdog(prog):
            threads = set(threading.enumerate())
            with host_values.noting_unseeded() as unseeded:
                handed = user_file.load(text, device, size)
            # A source of random numbers on the host that gives other data in each process, or "".
            self.unseeded = next(iter(unseeded), "")
            self.step, self.batches, self.owned = handed.step, handed.batches, handed.owned
            self.make_mine = handed.make_mine
            self.modules = [module for module in self.owned if isinstance(module, torch.nn.Module)]
            self.optimizers = [optimizer for optimizer in self.owned if isinstance(optimizer, torch.optim.Optimizer)]
            # The first statistics that have seen a batch, or "".
            named = [(name, buffer) for module in self.modules for name, buffer in module.named_buffers()]
            seen = (name for name, buffer in named if name.endswith("num_batches_tracked") and int(buffer) > 0)
            self.moved_by_build = next(seen, "")
            self.losses: dict[int, torch.Tensor | float] = {}
            has_ddp = any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in self.modules)
            # Counts and rates in dicts, closures and objects, which no object of torch holds.
            self.moving = host_values.Moving(self.step, self.owned)
            self.moving_of_mine: host_values.Moving | None = None
            for index in range(DDP_WARM_STEPS if has_ddp else WARM_STEPS):
                start = time.monotonic()
                self.train(index)
                variants.synchronize()
                # Seconds of the last of these steps.
                self.step_s = time.monotonic() - start
                self.moving.note()
        # Those that build or the first steps have started, and that go on.
        self.threads = [thread for thread in threading.enumerate() if thread not in threads]
        # Before the snapshot, so that a start that is broken already is told from a step that breaks.
        self.warm_losses = [float(loss) for loss in self.losses.values()]
        self.snapshot = Snapshot(self.owned, device)
        self.moving.keep()
        self.layers = _layers(self.modules)
        # Names of values in batches, such as indices and names of files, that the step does not read.
        self.unread = [] if is_distributed() else [name for name in changing_values(self.batches) if self._skips(name)]
        signatures = [signature_of(batch, self.unread) for batch in self.batches]
        known = list(dict.fromkeys(signatures))
        if len(known) > MOST_CLASSES:
            text = f"{self.path.name}: its batches have {len(known)} shapes, and a graph has one: pad them to at most "
            names = ", ".join(name for name in changing_values(self.batches) if name not in self.unread)
            raise ValueError(f"{text}{MOST_CLASSES}" + (f", and make {names} a tensor on the GPU" if names else ""))
        self.classes = [known.index(signature) for signature in signatures]
        # Steps after which the shapes come again.
        self.period = len(self.classes)

    def _skips(self, name: str) -> bool:
        """Say whether a step without a value of its batch gives the loss that it gives with it."""
        losses = []
        for batch in (self.batches[0], without(self.batches[0], name)):
            self.reset()
            try:
                self.keep_loss(0, self.step(batch))
            except Exception:
                break
            losses += self.results(1)
        self.reset()
        return len(losses) == 2 and losses[0] == losses[1]

    def optimizer_names(self) -> set[str]:
        """Return the names of the optimizers' classes, and of those that a library has wrapped."""
        wrapped = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]
        return {type(optimizer).__name__ for optimizer in [*self.optimizers, *wrapped]}

    def batch(self, index: int):
        """Return the batch of a step; they come in turn."""
        return self.batches[index % len(self.batches)]

    def train(self, index: int) -> None:
        """Train on batch `index` as the file does."""
        with errors_with_lines(self.path):
            loss = self.step(self.batch(index))
        self.keep_loss(index, loss)

    def marked_train(self, index: int) -> None:
        """Train on batch `index`; where somebody watches the marks of the step, its layers are marked."""
        hooks = marked(self.layers) if marks.is_watched() else []
        self.train(index)
        for hook in hooks:
            hook.remove()

    def captured_mine(self) -> tuple[Callable, list]:
        """Let the file capture its step; return mine(batch) -> loss, and (parameter, gradient) after the capture.

        The state is put back, and so is at each reset what mine moves on the host.

        Raises:
            ValueError: the capture raises, or gives no step.
        """
        assert self.make_mine is not None, "asked where the file hands over a capture"
        self.reset()
        with errors_with_lines(self.path, "mine"):
            mine = self.make_mine()
        if not callable(mine):
            raise ValueError(f"{self.path.name}: mine() returned a {type(mine).__name__}; it has to return a step")
        variants.synchronize()
        gradients = [(parameter, parameter.grad) for parameter in self.snapshot.parameters]
        self.moving_of_mine = host_values.Moving(mine, [])
        self.moving_of_mine.keep_before(lambda: self.call_mine(mine, 0))
        self.reset()
        return mine, gradients

    def call_mine(self, mine, index: int):
        """Return the loss of the user's own capture for batch `index`."""
        with errors_with_lines(self.path, "mine"):
            return mine(self.batch(index))

    def keep_loss(self, index: int, loss) -> None:
        """Remember the loss in the result of a step, without waiting for the device."""
        loss = loss_of(loss)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # What a graph returned, the next replay overwrites.
            self.losses[index % NUM_LOSSES] = loss.detach().clone()
        elif isinstance(loss, (int, float)):
            self.losses[index % NUM_LOSSES] = float(loss)
        else:
            is_tensor = isinstance(loss, torch.Tensor)
            kind = f"tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise ValueError(f"{self.path.name}: the step returned a {kind}; it has to return its loss")

    # --- what a run asks of a state

    def reset(self) -> None:
        """Put everything back to the state after the first steps."""
        self.snapshot.restore()
        if self.moving_of_mine is not None:
            self.moving_of_mine.put_back()
        self.moving.put_back()
        self.losses.clear()

    def named_state(self) -> list[tuple[str, torch.Tensor]]:
        """Return all tensors that training carries from step to step."""
        return self.snapshot.tensors

    def results(self, count: int) -> list[float]:
        """Return the losses of the first steps; NaN for a step that was not made since the reset."""
        return [float(self.losses.get(index, math.nan)) for index in range(min(count, NUM_LOSSES))]

    def batch_class(self, index: int) -> int:
        """Return the number of the batch's shape."""
        return self.classes[index % len(self.classes)]


def marked(layers):
    """Return hooks that mark the end of each layer, forward and backward: places where the queue may be drained."""

    def hook(module, args, output):
        marks.mark(next(iter(tensors_in(output)), None))

    return [layer.register_forward_hook(hook) for layer in layers]


def _layers(modules):
    """The children of lists of layers, else of the modules: few enough that hooks on them cost nothing."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    containers = [part for module in modules for part in module.modules() if isinstance(part, lists)]
    inner = [child for container in containers for child in container]
    return inner or [child for module in modules for child in module.children()]


@contextlib.contextmanager
def errors_with_lines(path: Path, what: str = "the step"):
    """Within it, what a user's step raises is a ValueError with the line of the file, but for captures and memory."""
    try:
        yield
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        # torch has no deterministic kernel for an operator, which its text alone tells.
        if "deterministic" in str(error):
            raise
        raise ValueError(f"{user_file.where(error, path)}: {what} raised {user_file.said(error)}") from error
