"""CUDA graphs under Lightning: the full iteration is captured once inside Trainer.fit and replayed from then on.

    Trainer(callbacks=[CUDAGraphCallback(warmup_steps=11)]).fit(module, data)

In the graph: training_step, zero_grad, backward, gradient clipping and the optimizer's step. Eager: Lightning's loop,
the batch's copy into static inputs, schedulers, checkpoints, validation.

The callback replaces `LightningModule.optimizer_step` on the module while it trains. Lightning's loop calls it once for
each batch with a closure that holds training_step, zero_grad and backward, and keeps its counters outside of it, so
global_step, schedulers and checkpoints go on as they are. After a replay the closure gets a copy of its result.

Hooks inside of the graph (on_before_zero_grad, on_before_backward, on_after_backward, on_before_optimizer_step) run in
warm-up and at the capture; a replay repeats their tensor operations only. Python values that these or training_step
read, such as self.global_step, are frozen and cannot be seen. batch_idx, self.log in the captured step and changes in
the optimizer's param_groups are seen and refused. The graph is captured anew in each fit.

Works with:     one device; precision 32-true, 64-true, bf16-true, bf16-mixed, 16-true with the module's own loss scale;
                batches that are dictionaries of tensors of fixed shapes; a current stream that is not the default one
Refused:        other strategies and precisions, accumulate_grad_batches > 1, manual optimization (and with it several
                optimizers), an overridden optimizer_step, an optimizer that is not capturable or whose learning rate
                is not a tensor
Without a GPU a host graph stands in (host_graph.py): there the capture itself makes its step, on CUDA a replay.
"""

import contextlib
import copy

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_map_only

from graph_worth.capture.cuda_graph import CudaGraph
from graph_worth.capture.host_graph import HostGraph
from graph_worth.capture.pool import CaptureError, Pool, StaticInputs


class CUDAGraphCallback(Callback):
    """Captures the full iteration of `Trainer.fit` after `warmup_steps` (from 1 up) eager steps.

    ValueError where the trainer, the module or a batch cannot be captured, CaptureError where the capture shows that;
    both name what to change.
    """

    def __init__(self, warmup_steps: int = 11):
        if warmup_steps < 1:
            raise ValueError(f"CUDAGraphCallback(warmup_steps={warmup_steps}): takes a number from 1 up")
        self.warmup_steps = warmup_steps
        self.pool: Pool | None = None
        self._past_replays = 0
        self._forget()

    @property
    def num_replays(self) -> int:
        """Graph replays over all fits."""
        return self._past_replays + (self.pool.num_replays if self.pool else 0)

    def _forget(self):
        """As before the first batch of a fit."""
        self._num_warm = 0
        self._batch = None
        self._inputs: StaticInputs | None = None
        self._graph: CudaGraph | HostGraph | None = None
        self._result: ClosureResult | None = None

    # --------------------------------------------------------------------------------------------
    # Lightning's hooks

    def setup(self, trainer, pl_module, stage):
        """Refuse what cannot be captured, where a fit begins."""
        if stage == "fit":
            _require_trainer(trainer, pl_module)

    def on_train_start(self, trainer, pl_module):
        """Make the pool and put the captured step in the place of the module's optimizer_step."""
        (optimizer,) = trainer.optimizers
        device = trainer.strategy.root_device
        _require_optimizer(optimizer, device)
        self._device, self._module, self._optimizer = device, pl_module, optimizer
        self.pool = Pool(device)
        eager_step = pl_module.optimizer_step
        # A function, not a bound method: a copy of the module then has no copy of this callback.
        pl_module.optimizer_step = lambda *args: self._step(eager_step, *args)

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

    # --------------------------------------------------------------------------------------------
    # A step: eager, captured or replayed

    def _step(self, eager_step, epoch, batch_idx, optimizer, closure):
        self._load(self._batch)
        if self._num_warm < self.warmup_steps:
            self._num_warm += 1
            eager_step(epoch, batch_idx, optimizer, closure)
        elif self._graph is None:
            graph = self._capture(lambda: eager_step(epoch, batch_idx, optimizer, closure), closure)
            if self._device.type == "cuda":
                graph.replay()
            self._deliver(closure)
        else:
            self._require_unchanged()
            self._graph.replay()
            self._deliver(closure)

    def _load(self, batch) -> None:
        """Copy the batch into the static inputs, which the first batch makes."""
        if self._inputs is None:
            tensors = batch.values() if isinstance(batch, dict) else [None]
            if not all(isinstance(tensor, torch.Tensor) and tensor.device == self._device for tensor in tensors):
                raise ValueError(f"a graph reads tensors: let each batch be a dictionary of them, on {self._device}")
            self._inputs = StaticInputs({name: tensor.clone() for name, tensor in batch.items()})
            return
        try:
            self._inputs.load(batch)
        except ValueError as error:
            raise ValueError(f"the batch does not fit the graph: {error}; use DataLoader(drop_last=True)") from None

    def _capture(self, eager_step, closure) -> CudaGraph | HostGraph:
        """Capture one whole step on the static batch and return its graph. On the host this makes the step."""
        module, optimizer, pool, inputs = self._module, self._optimizer, self.pool, self._inputs
        assert pool is not None and inputs is not None, "training has begun and a batch was loaded"
        training_step = module.training_step
        # What the backward pass then allocates lies in the graph's pool, and zero_grad launches nothing.
        optimizer.zero_grad(set_to_none=True)

        def step_on_static_batch(_, *args):
            frozen = [_Frozen(arg) if type(arg) is int else arg for arg in args]
            return training_step(dict(inputs.buffers), *frozen)

        static = tuple(inputs.buffers.values())
        with _replaced(module, training_step=step_on_static_batch, log=_refuse_log), _no_cache():
            self._graph, _ = pool.capture(eager_step, static)
        self._result = result = closure.consume_result()
        if result.loss is None:
            raise CaptureError("training_step returned None in the capture: a graph cannot skip steps")
        # The autograd graph is not needed again.
        result.closure_loss = None
        result.extra = tree_map_only(torch.Tensor, torch.Tensor.detach, result.extra)
        self._settings, self._state = _settings(optimizer), optimizer.state
        return self._graph

    def _deliver(self, closure):
        """Give the closure the step's result, as copies that later replays leave alone."""
        result = copy.copy(self._result)
        assert result is not None and result.loss is not None, "the capture keeps its result"
        result.loss = result.loss.clone()
        result.extra = tree_map_only(torch.Tensor, torch.Tensor.clone, result.extra)
        closure._result = result

    def _require_unchanged(self):
        """The optimizer must be as captured: its Python numbers and its tensors' places are in the graph."""
        if self._optimizer.state is not self._state or _settings(self._optimizer) != self._settings:
            raise ValueError(
                "the optimizer's param_groups or state changed after the capture, which holds their values. The "
                "learning rate may change in place (lr.fill_(...), as schedulers do); of OneCycleLR and CyclicLR "
                "take cycle_momentum=False"
            )

    def _stop(self):
        if self.pool is None:
            return
        # Only this class puts it there.
        self._module.__dict__.pop("optimizer_step", None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._past_replays += self.pool.num_replays
        self.pool.release()
        self.pool = None
        self._forget()


# ------------------------------------------------------------------------------------------------
# What is refused


def _require_trainer(trainer, module):
    strategy, precision = trainer.strategy, trainer.precision_plugin
    if type(strategy) is not SingleDeviceStrategy or strategy.root_device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"CUDAGraphCallback works with one CUDA device or the CPU, not with {type(strategy).__name__} on "
            f"{strategy.root_device}: use Trainer(devices=1)"
        )
    known = type(precision) in (Precision, HalfPrecision, DoublePrecision, MixedPrecision)
    if not known or getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"CUDAGraphCallback cannot capture precision {precision.precision!r}, which keeps state on the host: use "
            "'bf16-mixed', 'bf16-true', '32-true', or '16-true' with a loss scale of the module's own"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}: use 1, and a loop over microbatches inside "
            "training_step"
        )
    if not module.automatic_optimization:
        raise ValueError("CUDAGraphCallback needs automatic_optimization = True")
    if is_overridden("optimizer_step", module):
        raise ValueError(
            f"{type(module).__name__}.optimizer_step is overridden and would run at the capture alone: do it in "
            "on_train_batch_start, or change the learning rate by a scheduler"
        )


def _require_optimizer(optimizer, device):
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if not isinstance(lr, torch.Tensor) or lr.device != device:
            raise ValueError(
                f"the learning rate of {name} is {lr!r}, no tensor on {device}, and a graph would freeze it: pass "
                "lr=torch.tensor(..., device=...)"
            )
        if group.get("capturable") is False:
            raise ValueError(f"{name} is not capturable: pass capturable=True (and fused=True)")


def _refuse_log(name, *args, **kwargs):
    raise CaptureError(f"self.log({name!r}, ...) in the captured step would run once: log in on_train_batch_end")


class _Frozen(int):
    """An index that may be passed on but not read: a graph would hold the capture's value for ever."""

    def _refuse(self, *args):
        raise CaptureError(
            f"training_step reads batch_idx, which a graph freezes at {int.__repr__(self)}: do what depends on it in "
            "on_train_batch_start or on_train_batch_end"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __index__ = __int__ = _refuse
    __float__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _refuse
    __truediv__ = __and__ = __pow__ = __neg__ = __str__ = __repr__ = __format__ = _refuse


# ------------------------------------------------------------------------------------------------
# Small parts


def _settings(optimizer):
    """Return the part of param_groups that a graph fixes: tensors by identity (contents may change), plain values."""
    return [
        {
            name: id(value) if isinstance(value, torch.Tensor) else len(value) if name == "params" else value
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]


@contextlib.contextmanager
def _replaced(module, **values):
    """Attributes of the module, which its class has, are these inside of the block."""
    before = {name: vars(module)[name] for name in values if name in vars(module)}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(module, name)
        vars(module).update(before)


@contextlib.contextmanager
def _no_cache():
    """Autocast without its cache: a cast made before the capture would be missing from the graph."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
