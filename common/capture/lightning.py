"""CUDA graphs under Lightning: the full iteration is captured once inside Trainer.fit and replayed from then on.

    Trainer(callbacks=[CUDAGraphCallback(warmup_steps=11)]).fit(module, data)

In the graph: training_step, zero_grad, backward, gradient clipping and the optimizer's step. Eager: Lightning's loop,
the batch's copy into static inputs, self.log, schedulers, checkpoints, validation.

Where it hooks in: `LightningModule.optimizer_step`, replaced on the module while it trains. Lightning's loop calls it
once for each batch with a closure that holds training_step, zero_grad and backward, and keeps its counters outside of
it, so global_step, schedulers and checkpoints go on as they are. What a replay cannot do by itself is done after it:
the closure gets its result, and what self.log was given at the capture is logged again with its new values. Both are
copies made on the device; nothing waits for it.

Each step:      on_train_batch_start and _end and all hooks of epochs, validation and checkpoints, self.log
Warm-up and     training_step, on_before_zero_grad, optimizer_zero_grad, on_before_backward, backward,
capture alone:  on_after_backward, on_before_optimizer_step, configure_gradient_clipping: a replay repeats their tensor
                operations only
What is frozen and cannot be seen: Python values that these read, such as self.global_step, self.training or a number
that is counted up. batch_idx, numbers given to self.log and changes in the optimizer's param_groups are seen and
refused. Random numbers come from the default generator. The graph is captured anew in each fit, also after a resume.

Works with:     one device; precision 32-true, 64-true, bf16-true, bf16-mixed, 16-true with the module's own loss scale
Refused:        other strategies and precisions, accumulate_grad_batches > 1, manual optimization (and with it several
                optimizers), an overridden optimizer_step, an optimizer that is not capturable or whose learning rate
                is not a tensor
Without a GPU a host graph stands in (common/capture/host_graph.py): there the capture itself makes its step, on CUDA a
replay.
"""

import contextlib
import copy

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten
from torchmetrics import Metric

from common.capture.host_graph import HostGraph
from common.capture.pool import CaptureError, CudaGraph, Pool, StaticInputs

HOOKS_OF_THE_CAPTURE = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
FIX_LR = "pass lr=torch.tensor(..., device=...)"


class CUDAGraphCallback(Callback):
    """Captures the full iteration of `Trainer.fit` after `warmup_steps` eager steps.

    warmup_steps: from 1 up; libraries initialise and choose their kernels in them. ragged: what to do with a batch
    that does not fit the first one's shapes, such as the last of an epoch: "error", or "eager" for that batch.
    num_replays, num_ragged: graph replays, and batches that ran eagerly for their shape, over all fits.

    Raises ValueError for what cannot be captured, by name and with what to change, and CaptureError for what only
    the capture shows.
    """

    def __init__(self, warmup_steps: int = 11, ragged: str = "error"):
        if warmup_steps < 1:
            raise ValueError(f"CUDAGraphCallback(warmup_steps={warmup_steps}): takes a number from 1 up")
        if ragged not in ("error", "eager"):
            raise ValueError(f"CUDAGraphCallback(ragged={ragged!r}): takes 'error' or 'eager'")
        self.warmup_steps, self.ragged = warmup_steps, ragged
        self.num_ragged = 0
        self.pool: Pool | None = None
        self._past_replays = 0
        self._stream_before: torch.cuda.Stream | None = None
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
        self._lrs: list = []
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._logged: list[tuple] = []

    # --------------------------------------------------------------------------------------------
    # Lightning's hooks

    def setup(self, trainer, pl_module, stage):
        """Refuse what cannot be captured, and enter a side stream, where a fit begins."""
        if stage == "fit":
            _require_trainer(trainer, pl_module)
            self._enter_side_stream(trainer.strategy.root_device)

    def on_fit_start(self, trainer, pl_module):
        """Remember the learning rates' tensors, before a resume puts copies in their place."""
        self._lrs = [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups]

    def on_train_start(self, trainer, pl_module):
        """Make the pool and put the captured step in the place of the module's optimizer_step."""
        (optimizer,) = trainer.optimizers
        _put_back(optimizer, self._lrs)
        device = trainer.strategy.root_device
        _require_optimizer(optimizer, device)
        _warn_of_hooks(trainer, pl_module)
        self._device, self._module, self._optimizer = device, pl_module, optimizer
        self.pool = Pool(device)
        eager_step = pl_module.optimizer_step
        # A function, not a bound method: a copy of the module then has no copy of this callback.
        pl_module.optimizer_step = lambda *args: self._step(trainer, eager_step, *args)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Keep the batch for the step."""
        self._batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Let the batch go."""
        self._batch = None

    def on_validation_end(self, trainer, pl_module):
        """Give the parameters the graph's gradients again: Lightning drops all gradients before a validation."""
        self._show_gradients()

    def on_train_end(self, trainer, pl_module):
        """Release the graph and give the module its own optimizer_step back."""
        self._stop()

    def teardown(self, trainer, pl_module, stage):
        """Return to the stream that was current before the fit."""
        self._leave_side_stream()

    def on_exception(self, trainer, pl_module, exception):
        """Release the graph and return to the stream before, as at the end of a fit."""
        self._stop()
        self._leave_side_stream()

    # --------------------------------------------------------------------------------------------
    # A step: eager, captured or replayed

    def _step(self, trainer, eager_step, epoch, batch_idx, optimizer, closure):
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(_accumulates(trainer))
        misfit = self._load(self._batch)
        if misfit:
            self._step_ragged(misfit, batch_idx)
            eager_step(epoch, batch_idx, optimizer, closure)
            self._show_gradients()
        elif self._num_warm < self.warmup_steps:
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

    def _load(self, batch) -> str | None:
        """Copy the batch into the static inputs; returns why it does not fit, or None."""
        pairs, structure = tree_flatten_with_path(batch)
        leaves = {f"batch{keystr(path)}": leaf for path, leaf in pairs}
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        others = {name: leaf for name, leaf in leaves.items() if name not in tensors}
        if self._inputs is None:
            _require_batch(tensors, others, self._device)
            self._inputs = StaticInputs({name: tensor.clone() for name, tensor in tensors.items()})
            self._others, self._structure = others, structure
            leaves.update(self._inputs.buffers)
            self._static_batch = tree_unflatten(list(leaves.values()), structure)
            return None
        if structure != self._structure:
            return f"a batch of {sorted(leaves)}, the first one was of {sorted(self._others | self._inputs.buffers)}"
        for name, value in others.items():
            if value != self._others[name]:
                return f"{name} is {value!r}, captured as {self._others[name]!r}: only tensors may change"
        try:
            self._inputs.load(tensors)
        except ValueError as error:
            return str(error)
        return None

    def _step_ragged(self, misfit, batch_idx):
        if self.ragged == "error":
            raise ValueError(
                f"batch {batch_idx} does not fit the graph: {misfit}; use DataLoader(drop_last=True), "
                "or CUDAGraphCallback(ragged='eager')"
            )
        if not self.num_ragged:
            rank_zero_warn(f"CUDAGraphCallback: batch {batch_idx} runs eagerly, as will others like it: {misfit}")
        self.num_ragged += 1

    def _capture(self, eager_step, closure) -> CudaGraph | HostGraph:
        """Capture one whole step on the static batch and return its graph. On the host this makes the step."""
        module, optimizer, pool, inputs = self._module, self._optimizer, self.pool, self._inputs
        assert pool is not None and inputs is not None, "training has begun and a batch was loaded"
        training_step, metrics = module.training_step, _metric_updates(module)
        # What the backward pass then allocates lies in the graph's pool, and zero_grad launches nothing.
        optimizer.zero_grad(set_to_none=True)

        def step_on_static_batch(_, *args):
            frozen = [_Frozen(arg) if type(arg) is int else arg for arg in args]
            return training_step(self._static_batch, *frozen)

        static = tuple(inputs.buffers.values())
        with _replaced(module, "training_step", step_on_static_batch), _replaced(module, "log", self._log), _no_cache():
            self._graph, _ = pool.capture(eager_step, static)
        self._result = result = closure.consume_result()
        if result.loss is None:
            raise CaptureError("training_step returned None in the capture: a graph cannot skip steps")
        updated = [name for name, count in _metric_updates(module).items() if count != metrics[name]]
        if updated:
            raise CaptureError(
                f"training_step updates the metric {updated[0]!r}, whose counts a replay does not see: return what it "
                "needs from training_step and update it in on_train_batch_end"
            )
        # The autograd graph is not needed again.
        result.closure_loss = None
        result.extra = tree_map_only(torch.Tensor, torch.Tensor.detach, result.extra)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grads = [(parameter, parameter.grad) for parameter in parameters]
        self._settings, self._state = _settings(optimizer), optimizer.state
        return self._graph

    def _log(self, name, value, *args, **kwargs):
        """Stands in for self.log in the capture: keeps the call for after each replay."""
        fx = self._module._current_fx_name
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"self.log({name!r}, ...) in {fx} gets a {type(value).__name__}, which a graph would freeze: "
                "log a tensor, or log it in on_train_batch_end"
            )
        self._logged.append((fx, name, value.detach(), args, kwargs))

    def _deliver(self, closure):
        """The step's result as Lightning's loop expects it, and what it logs: copies that later steps leave alone."""
        result = copy.copy(self._result)
        assert result is not None and result.loss is not None, "the capture keeps its result"
        result.loss = result.loss.clone()
        result.extra = tree_map_only(torch.Tensor, torch.Tensor.clone, result.extra)
        closure._result = result
        module = self._module
        before = module._current_fx_name
        for fx, name, value, args, kwargs in self._logged:
            module._current_fx_name = fx
            module.log(name, value, *args, **kwargs)
        module._current_fx_name = before

    def _require_unchanged(self):
        """The optimizer must be as captured: its Python numbers and its tensors' places are in the graph."""
        if self._optimizer.state is not self._state:
            raise ValueError("the optimizer's state was loaded after the capture: load it before Trainer.fit")
        now = _settings(self._optimizer)
        if now == self._settings:
            return
        changed = {name for a, b in zip(now, self._settings, strict=False) for name in a if a[name] != b.get(name)}
        if changed:
            raise ValueError(
                f"param_groups changed after the capture: {', '.join(sorted(changed))}; a graph holds their values. "
                "The learning rate may change in place (lr.fill_(...), as schedulers do); of OneCycleLR and CyclicLR "
                "take cycle_momentum=False"
            )
        raise ValueError("param_groups were added after the capture: add them before training starts")

    def _show_gradients(self):
        for parameter, grad in self._grads:
            parameter.grad = grad

    # --------------------------------------------------------------------------------------------
    # Begin and end

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

    def _enter_side_stream(self, device):
        """Captures need a stream that is not the default one, and warm-up must run on it too."""
        if device.type != "cuda":
            return
        current = torch.cuda.current_stream(device)
        if current != torch.cuda.default_stream(device):
            return
        side = torch.cuda.Stream(device)
        side.wait_stream(current)
        torch.cuda.set_stream(side)
        self._stream_before = current

    def _leave_side_stream(self):
        if self._stream_before is not None:
            self._stream_before.wait_stream(torch.cuda.current_stream(self._stream_before.device))
            torch.cuda.set_stream(self._stream_before)
            self._stream_before = None


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
            f"CUDAGraphCallback cannot capture precision {precision.precision!r} ({type(precision).__name__}), which "
            "keeps state on the host: use 'bf16-mixed', 'bf16-true', '32-true', or '16-true' with a loss scale of "
            "the module's own"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(_accumulates(trainer))
    if not module.automatic_optimization:
        raise ValueError(
            "CUDAGraphCallback needs automatic_optimization = True: manual steps have no one place to capture"
        )
    if is_overridden("optimizer_step", module):
        raise ValueError(
            f"{type(module).__name__}.optimizer_step is overridden and would run at the capture alone: do it in "
            "on_train_batch_start, or change the learning rate by a scheduler"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step(dataloader_iter) reads batches, which no graph can: take (batch, batch_idx)")


def _accumulates(trainer):
    return (
        f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, CUDAGraphCallback captures a whole step of one "
        "batch: use Trainer(accumulate_grad_batches=1) and a loop over microbatches inside training_step"
    )


def _require_optimizer(optimizer, device):
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if not isinstance(lr, torch.Tensor):
            raise ValueError(f"the learning rate of {name} is {lr}, which a graph would freeze: {FIX_LR}")
        if lr.device != device:
            raise ValueError(f"the learning rate of {name} is on {lr.device}, the step runs on {device}: {FIX_LR}")
        if group.get("capturable") is False:
            raise ValueError(f"{name} is not capturable: pass capturable=True (and fused=True)")


def _require_batch(tensors, others, device):
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, a graph reads its inputs on {device}: move it there")
    for name, value in others.items():
        if not isinstance(value, (int, float, str, bool, type(None))):
            raise ValueError(
                f"{name} is a {type(value).__name__}: a graph reads tensors, in tuples, lists and dictionaries"
            )


def _warn_of_hooks(trainer, module):
    """Name what someone wrote for every step and what will run in few of them."""
    owners = [(owner, Callback) for owner in trainer.callbacks] + [(module, LightningModule)]
    for owner, base in owners:
        for hook in HOOKS_OF_THE_CAPTURE:
            if is_overridden(hook, owner, base):
                rank_zero_warn(
                    f"CUDAGraphCallback: {type(owner).__name__}.{hook} runs in warm-up and at the capture; afterwards "
                    "its tensor operations are replayed and its Python code is not run"
                )


# ------------------------------------------------------------------------------------------------
# Small parts


def _put_back(optimizer, lrs):
    """A resume has put copies in the place of the learning rates' tensors, on the host: bring the values home."""
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if isinstance(lr, torch.Tensor) and group["lr"] is not lr:
            lr.copy_(group["lr"])
            group["lr"] = lr


def _settings(optimizer):
    """Return the part of param_groups that a graph fixes: tensors by identity (contents may change), plain values."""
    return [
        {
            name: id(value) if isinstance(value, torch.Tensor) else len(value) if name == "params" else value
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]


def _metric_updates(module):
    return {name: part.update_count for name, part in module.named_modules() if isinstance(part, Metric)}


@contextlib.contextmanager
def _replaced(module, name, value):
    """module.name is `value` inside of the block."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


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
