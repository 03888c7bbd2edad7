"""CUDA graphs under Lightning: the full iteration is captured inside Trainer.fit and replayed from then on.

    from graph_worth.lightning import CUDAGraphCallback
    Trainer(callbacks=[CUDAGraphCallback()]).fit(module, data)

In the graph: training_step, zero_grad, backward, gradient clipping and the optimizer's step. Eager: Lightning's loop,
the batch's copy into static inputs, logs, schedulers, checkpoints, validation.

The callback replaces `LightningModule.optimizer_step` on the module while it trains. Lightning's loop calls it once for
each batch with a closure that holds training_step, zero_grad and backward, and keeps its counters outside of it, so
global_step, schedulers and checkpoints go on as they are. `graphed` makes the step: its first calls of a shape are
eager, and the first replays are compared with eager. After a replay the closure gets a copy of its result.

self.log of tensors works in the step: after a replay the module logs copies of them, which lie on the GPU until
Lightning reads them. Hooks inside of the graph (on_before_zero_grad, on_before_backward, on_after_backward,
on_before_optimizer_step) run in eager steps and at the capture; a replay repeats their tensor operations only.
"""

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves, tree_map_only

from graph_worth.capture.pool import CaptureError
from graph_worth.your_step.graphed import graphed
from graph_worth.your_step.libraries import CHECKPOINT, PRESERVES

# What the loop counts between steps.
_COUNTERS = {"current_epoch", "global_step", "is_last_batch"}
_LIGHTNING = str(Path(lightning.__file__).parent)


class CUDAGraphCallback(Callback):
    """Captures the full iteration of `Trainer.fit`, and replays it.

    Args:
        owned: what training changes beside the module and its optimizer, such as weights of an EMA.
        graph_options: arguments of `graphed`, such as shapes=16, on_refusal="eager" or cpu="host_graph".

    Raises:
        ValueError: by fit, before the first step: a list of what in the trainer, the module or the optimizer cannot be
            captured, and what to change.
        CaptureError: a step shows that it cannot be captured.
    """

    def __init__(self, owned=(), **graph_options):
        self._owned, self._options = list(owned), graph_options
        self.graphed: graphed | None = None
        self._past_replays = 0
        self._batch: Any = None
        self._module: Any = None

    @property
    def num_replays(self) -> int:
        """Graph replays over all fits."""
        return self._past_replays + (self.graphed.replays if self.graphed else 0)

    @property
    def pool(self):
        """The pool of the fit's graphs; None before the first capture."""
        return self.graphed.pool if self.graphed else None

    # --------------------------------------------------------------------------------------------
    # Lightning's hooks

    def setup(self, trainer, pl_module, stage):
        """Refuse what cannot be captured, in one list: as soon as Lightning has asked the module for its optimizer."""
        if stage != "fit":
            return
        problems = [*_problems_of_trainer(trainer), *_problems_of_module(pl_module)]
        configure = pl_module.configure_optimizers

        def checked():
            vars(pl_module).pop("configure_optimizers", None)
            configured = configure()
            _refuse([*problems, *_problems_of_optimizers(configured, trainer.strategy.root_device)])
            return configured

        if type(trainer.strategy) is not SingleDeviceStrategy:
            _refuse(problems)
        self._module = pl_module
        pl_module.configure_optimizers = checked

    def on_train_start(self, trainer, pl_module):
        """Put the graphed step in the place of the module's optimizer_step."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                # A checkpoint leaves it on the CPU.
                group["lr"] = group["lr"].to(trainer.strategy.root_device)
        eager_step = pl_module.optimizer_step
        step = _Step(trainer, pl_module)
        self.graphed = graphed(step, [pl_module, *trainer.optimizers, *self._owned], **self._options)
        # A function, not a bound method: a copy of the module then has no copy of this callback.
        pl_module.optimizer_step = lambda *args: self._step(step, eager_step, *args)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Keep the batch for the step."""
        self._batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Let the batch go."""
        self._batch = None

    def on_train_end(self, trainer, pl_module):
        """Release the graph and give the module its own optimizer_step back."""
        self._stop()

    def on_exception(self, trainer, pl_module, exception):
        """Release the graph, as at the end of a fit."""
        self._stop()

    def _step(self, step, eager_step, epoch, batch_idx, optimizer, closure):
        assert self.graphed is not None, "training has begun"
        run = functools.partial(eager_step, epoch, batch_idx, optimizer, closure)
        if self.graphed.refusal:
            run()
            return
        step.run, step.closure = run, closure
        try:
            result = self.graphed(self._batch)
        except CaptureError as error:
            # Raised, or said once: the step was eager then.
            self.graphed.refuse(error)
            result = step.result
        step.run = step.closure = step.result = None
        closure._result = ClosureResult(None, extra=result["extra"])
        closure._result.loss = result["loss"]
        # The hook that logged; Lightning puts its own back.
        for self._module._current_fx_name, name, value, kwargs in result["logs"]:
            self._module.log(name, value, **kwargs)

    def _stop(self):
        if self._module is not None:
            # Only this class puts them there.
            vars(self._module).pop("optimizer_step", None)
            vars(self._module).pop("configure_optimizers", None)
        if self.graphed is not None:
            self.graphed.release()
            self._past_replays = self.num_replays
        self.graphed = self._batch = None


class _Step:
    """Lightning's step on any batch, eagerly or in a capture: with `run` and its `closure`, which are those of a batch.

    func: what messages name.
    """

    def __init__(self, trainer, module):
        self.func = module.training_step
        self.run: Any = None
        self.closure: Any = None
        self.result: Any = None
        # Not the trainer itself, whose counters go on between steps.
        self._module, self._trainer = module, lambda: trainer

    def __call__(self, batch):
        """Return {"loss": tensor, "extra": the rest of training_step's result, "logs": calls of self.log}.

        Raises:
            CaptureError: after an eager step, whose result is kept: a list of what a graph would not repeat.
        """
        logs: list[tuple] = []
        problems: dict[str, None] = {}

        def on_batch(_, *args):
            return self.func(batch, *(_Index(arg, problems) if type(arg) is int else arg for arg in args))

        def log(name, value, *args, **kwargs):
            kinds = [type(leaf).__name__ for leaf in tree_leaves(value) if not isinstance(leaf, torch.Tensor)]
            if kinds:
                problems[f"self.log({name!r}, ...) of a {kinds[0]}: log a tensor, or in on_train_batch_end"] = None
            names = "prog_bar", "logger", "on_step", "on_epoch"
            value = tree_map_only(torch.Tensor, torch.Tensor.detach, value)
            logs.append((self._module._current_fx_name, name, value, dict(zip(names, args, strict=False)) | kwargs))

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(self._module, training_step=on_batch, log=log))
            for word, kind in ("self", type(self._module)), ("trainer", type(self._trainer())):
                for name in _COUNTERS & set(dir(kind)):
                    stack.enter_context(mock.patch.object(kind, name, _noting(word, kind, name, problems)))
            for callback in self._trainer().callbacks:
                stack.enter_context(mock.patch.object(callback, "log", log))
            self.run()
        result = self.closure.consume_result()
        if result.loss is None:
            problems["training_step returned None: a graph cannot skip steps"] = None
        extra = tree_map_only(torch.Tensor, torch.Tensor.detach, result.extra)
        self.result = {"loss": result.loss, "extra": extra, "logs": logs}
        if problems:
            raise CaptureError("; ".join(problems))
        return self.result


# ------------------------------------------------------------------------------------------------
# What is refused


def _refuse(problems):
    if problems:
        raise ValueError("\n  - ".join(["CUDAGraphCallback cannot capture this fit:", *problems]))


def _problems_of_trainer(trainer):
    strategy, precision = trainer.strategy, trainer.precision_plugin
    if type(strategy) is not SingleDeviceStrategy or strategy.root_device.type not in ("cuda", "cpu"):
        yield f"{type(strategy).__name__} on {strategy.root_device}: use Trainer(devices=1), on a GPU or the CPU"
    known = type(precision) in (Precision, HalfPrecision, DoublePrecision, MixedPrecision)
    if not known or getattr(precision, "scaler", None) is not None:
        yield (
            f"precision {precision.precision!r} keeps state on the host: use 'bf16-mixed', 'bf16-true', '32-true', or "
            "'16-true' with a loss scale of the module's own"
        )
    schedules = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    if trainer.accumulate_grad_batches != 1 or schedules:
        number = "changes by a callback" if schedules else f"is {trainer.accumulate_grad_batches}"
        yield f"accumulate_grad_batches {number}: use 1, and a loop over microbatches inside training_step"


def _problems_of_module(module):
    if not module.automatic_optimization:
        yield "manual optimization: it needs automatic_optimization = True"
    if is_overridden("optimizer_step", module):
        yield (
            f"{type(module).__name__}.optimizer_step is overridden and would run at the capture alone: do it in "
            "on_train_batch_start, or change the learning rate by a scheduler"
        )
    parts = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
    if any(getattr(vars(part).get("_gradient_checkpointing_func"), "keywords", {}).get(*PRESERVES) for part in parts):
        yield f"gradient checkpointing that saves random states: {CHECKPOINT}"


def _problems_of_optimizers(configured, device):
    parts = tree_leaves(configured)
    for optimizer in (part for part in parts if isinstance(part, torch.optim.Optimizer)):
        name = type(optimizer).__name__
        rates = [group.get("lr") for group in optimizer.param_groups]
        for lr in [lr for lr in rates if not isinstance(lr, torch.Tensor) or lr.device != device][:1]:
            yield (
                f"the learning rate of {name} is {lr!r}, no tensor on {device}, and a graph would freeze it: pass "
                "lr=torch.tensor(..., device=self.device)"
            )
        if any(group.get("capturable") is False for group in optimizer.param_groups):
            yield f"{name} is not capturable: pass capturable=True (and fused=True)"
    for scheduler in parts:
        if getattr(scheduler, "cycle_momentum", False):
            yield f"{type(scheduler).__name__} changes momenta, which a graph freezes: pass cycle_momentum=False"


class _Index(int):
    """An index that may be passed on: what reads it is a problem, since a graph would hold its value for ever."""

    problems: dict[str, None]

    def __new__(cls, value, problems):
        index = super().__new__(cls, value)
        index.problems = problems
        return index


def _noting(word, kind, name, problems):
    """Return a property of a module or a trainer that a graph would freeze, and that notes who else reads it."""
    original = getattr(kind, name)

    def get(holder):
        if not sys._getframe(1).f_code.co_filename.startswith(_LIGHTNING):
            problems[
                f"the step reads {word}.{name}, which a graph freezes: keep what depends on it in a tensor on the "
                "device, which on_train_batch_start fills"
            ] = None
        return original.fget(holder)

    return property(get)


def _reading(name):
    def method(index, *args):
        index.problems[
            "training_step reads batch_idx, which a graph freezes: do what depends on it in on_train_batch_start or "
            "on_train_batch_end"
        ] = None
        return getattr(int, name)(index, *args)

    return method


_READING = "eq ne lt le gt ge bool hash index int float add radd sub rsub mul rmul mod rmod floordiv truediv and pow"
for _name in [*_READING.split(), "neg", "str", "repr", "format"]:
    setattr(_Index, f"__{_name}__", _reading(f"__{_name}__"))
