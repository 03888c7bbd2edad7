"""FP8 training with delayed or current scaling, as Transformer Engine runs it and as a stand-in without FP8 hardware.

Delayed scaling keeps a state per GEMM operand: quantise with the scale at hand, record the largest magnitude (amax) of
what was quantised, and after a microbatch make a new scale from the amax history. The scale update is not part of a
layer: a graphed layer only fills amaxes, and the update runs eagerly between graphs. Current scaling has no state: each
tensor is quantised with a scale from its own amax. With either, weights are quantised once per step, in the first
microbatch, into a cache.

A script uses one of `NoScaling`, `TransformerEngineScaling`, `EmulatedScaling`, `EmulatedCurrentScaling`:

    with fp8.forward():                   the layers of one microbatch, called or replayed; scales updated on exit
    with fp8.backward(replayed=False):    their backward pass
    with fp8.layers(first=True):          the layers of one chunk and microbatch of a pipeline; no update
    fp8.update()                          all scales once, after a step's last pass, where layers() was used
    with fp8.capturing():                 around captures: no update is recorded
    fp8.reset(), fp8.named_state()        in place; for hashing
"""

import contextlib

import torch
from torch.nn import functional as F

from common.training.parallel import collectives
from common.training.precision.transformer_engine import transformer_engine
from common.variant import Unsupported

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


class NoScaling:
    """bf16 layers: nothing to scale, every part does nothing."""

    def _nothing(self, *arguments, **flags):
        return contextlib.nullcontext()

    forward = backward = layers = without_update = capturing = _nothing

    def update(self):
        """Nothing to update."""

    reset = update

    def named_state(self):
        """Nothing: bf16 layers have no scales."""
        return iter(())


# ------------------------------------------------------------------------------------------------
# Transformer Engine


def usable_transformer_engine():
    """`transformer_engine()`; Unsupported where it cannot run."""
    try:
        return transformer_engine()
    except (ImportError, OSError) as error:
        raise Unsupported(f"Transformer Engine is not usable ({str(error).splitlines()[0][:120]}): make te") from None


def te_fault(fp8: bool) -> str | None:
    """Return the reason why te.TransformerLayer cannot run on this GPU, or None. fp8: whether it computes in FP8."""
    try:
        engine = usable_transformer_engine()
    except Unsupported as error:
        return str(error)
    available, reason = engine.is_fp8_available(return_reason=True) if fp8 else (True, "")
    return None if available else f"no FP8 on this GPU ({reason})"


def require_fp8() -> None:
    """Unsupported, in Transformer Engine's words, where it has no FP8 on this GPU."""
    if fault := te_fault(fp8=True):
        raise Unsupported(fault)


class TransformerEngineScaling:
    """FP8 in hybrid formats: E4M3 forward, E5M2 for gradients.

    Delayed scaling as NVIDIA's GPT-3 submission sets it: history 1024, "max", margin 0; or current scaling.

    layers: the te modules. Their scales are registered with TE by their first eager call. group: name of the ranks
    over which amaxes of delayed scaling are reduced; None: TE's choice, all ranks. given: another recipe of TE.
    """

    def __init__(
        self, layers, amax_history_len: int = 1024, group: str | None = None, current: bool = False, given=None
    ):
        from transformer_engine.common import recipe

        self._modules = layers
        self.group = None if group is None else collectives.process_group(group)
        if given is not None:
            self.recipe = given
        elif current:
            self.recipe = recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)
        else:
            self.recipe = recipe.DelayedScaling(
                margin=0,
                fp8_format=recipe.Format.HYBRID,
                amax_history_len=amax_history_len,
                amax_compute_algo="max",
                reduce_amax=group is None or self.group is not None,
            )

    def _autocast(self, **flags):
        options = {"enabled": True, "recipe": self.recipe, "amax_reduction_group": self.group}
        return transformer_engine().autocast(**options, **flags)

    @contextlib.contextmanager
    def forward(self):
        """Run the layers of one microbatch inside of it; on exit the forward scales are updated."""
        # On exit TE updates the forward scales from the amaxes, whether layers were called or replayed.
        with self._autocast():
            yield

    @contextlib.contextmanager
    def without_update(self):
        """An FP8 region that ends without an update of the scales.

        Around a backward in which layers run again by TE's checkpoint, too: such a run opens a region of its own, whose
        end would update all scales unless it is inside of another.
        """
        region = self._autocast()
        region.__enter__()
        try:
            yield
        finally:
            # The exit updates where gradients are recorded.
            with torch.no_grad():
                region.__exit__(None, None, None)

    @contextlib.contextmanager
    def backward(self, replayed: bool = False):
        """Run the backward pass of one microbatch inside of it. replayed: whether graphs ran the layers."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        yield
        # Called layers update in the backward of the region's first module; replayed ones cannot.
        if replayed:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    @contextlib.contextmanager
    def layers(self, first: bool):
        """TE alone would update the scales of all chunks whenever one of them has run.

        first: whether graphs that TE made cast the weights.
        """
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        with self.without_update():
            # Whose backward would update the scales; TE's graphs would set the flag of the cast there, too.
            FP8GlobalStateManager.is_first_fp8_module()
            if FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is not None:
                FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not first)
            yield

    def update(self):
        """Make new scales from the amaxes, once for the layers of both passes."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        for forward in (True, False):
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)

    @contextlib.contextmanager
    def capturing(self):
        """Capture layers inside of it: no update of the scales is recorded."""
        from transformer_engine.pytorch.graph import set_capture_end, set_capture_start

        set_capture_start()
        try:
            with self._autocast(_graph=True):
                yield
        finally:
            set_capture_end()

    def reset(self):
        """Set all scales to 1 and all amax histories to 0, in place."""
        for _, tensor in self._tensors("scale"):
            tensor.fill_(1.0)
        for _, tensor in self._tensors("amax_history"):
            tensor.zero_()

    def named_state(self):
        """Yield (name, tensor) of the scales and of the amax histories."""
        yield from self._tensors("scale")
        yield from self._tensors("amax_history")

    def _tensors(self, what):
        """Yield (name, tensor) of delayed scaling; current scaling has none."""
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
        from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

        for index, layer in enumerate(self._modules):
            for name, module in layer.named_modules():
                meta = module.fp8_meta if isinstance(module, TransformerEngineBaseModule) else {}
                for key in ("scaling_fwd", "scaling_bwd"):
                    if isinstance(meta.get(key), DelayedScalingRecipeState):
                        yield f"layers.{index}.{name}.{key}.{what}", getattr(meta[key], what)


# ------------------------------------------------------------------------------------------------
# The stand-in: quantise and dequantise around bf16 or fp32 GEMMs


def _emulated_linears(layers):
    return [module for layer in layers for module in layer.modules() if isinstance(module, EmulatedLinear)]


class EmulatedCurrentScaling(NoScaling):
    """Current scaling of the `EmulatedLinear`s under `layers`: operands are rounded to FP8, GEMMs keep their dtype."""

    def __init__(self, layers):
        for linear in _emulated_linears(layers):
            linear.attach(_CurrentScale(E4M3_MAX), 0, _CurrentScale(E5M2_MAX), 0)


class _CurrentScale:
    """In the place of a `_ScalingState`: no history, and a scale that lasts for one tensor."""

    def __init__(self, largest):
        self.largest = largest

    def quantize(self, tensor, row, dtype):
        amax = tensor.detach().abs().amax().float()
        return _rounded(tensor, _scale_of(amax, self.largest, torch.ones_like(amax)), self.largest, dtype)


class EmulatedScaling(NoScaling):
    """Delayed scaling without FP8 GEMMs, as `EmulatedCurrentScaling`.

    Same histories, scales and weight cache as the real recipe, so that captures meet the same side effects on any
    machine. group: name of the ranks over which amaxes are reduced.
    """

    def __init__(self, layers, amax_history_len: int = 1024, group: str = collectives.ALONE):
        linears = _emulated_linears(layers)
        device = linears[0].weight.device
        # Rows: input and weight of each linear, then gradient of each; one fused update a direction.
        self._forward = _ScalingState(2 * len(linears), amax_history_len, E4M3_MAX, device, group)
        self._backward = _ScalingState(len(linears), amax_history_len, E5M2_MAX, device, group)
        for index, linear in enumerate(linears):
            linear.attach(self._forward, 2 * index, self._backward, index)

    @contextlib.contextmanager
    def forward(self):
        """Run the layers of one microbatch inside of it; on exit the forward scales are updated."""
        yield
        self._forward.update()

    @contextlib.contextmanager
    def backward(self, replayed: bool = False):
        """Run the backward pass of one microbatch inside of it; on exit the gradients' scales are updated."""
        yield
        self._backward.update()

    def update(self):
        """Make new scales from the amaxes, of both passes."""
        self._forward.update()
        self._backward.update()

    def reset(self):
        """Set all scales to 1 and all amax histories to 0, in place."""
        for name, tensor in self.named_state():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)

    def named_state(self):
        """Yield (name, tensor) of the scales and amax histories."""
        for direction, state in (("forward", self._forward), ("backward", self._backward)):
            yield f"fp8.{direction}.scale", state.scale
            yield f"fp8.{direction}.amax_history", state.amax_history


class _ScalingState:
    """amax_history [history, rows], scale [rows]: the layout of the real recipe, newest amax in history row 0."""

    def __init__(self, rows, history, largest, device, group):
        self.largest, self.group = largest, group
        self.amax_history = torch.zeros(history, rows, device=device)
        self.scale = torch.ones(rows, device=device)

    @torch.no_grad()
    def update(self):
        if collectives.group_size(self.group) > 1:
            collectives.all_reduce_max_(self.amax_history[0], self.group)
        self.scale.copy_(_scale_of(self.amax_history.amax(dim=0), self.largest, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()

    def quantize(self, tensor, row, dtype):
        """`tensor` rounded to FP8 at this row's scale, in its own dtype again; the amax is recorded."""
        slot = self.amax_history[0, row]
        slot.copy_(torch.maximum(slot, tensor.detach().abs().amax()))
        return _rounded(tensor, self.scale[row], self.largest, dtype)


def _scale_of(amax, largest, otherwise):
    """Return largest / amax, within FP32; `otherwise` where amax is zero or not finite."""
    usable = (amax > 0) & torch.isfinite(amax)
    return torch.where(usable, (largest / amax).clamp(max=torch.finfo(torch.float32).max), otherwise)


def _rounded(tensor, scale, largest, dtype):
    """`tensor` rounded to FP8 at a scale, in its own dtype again."""
    scaled = (tensor.float() * scale).clamp(-largest, largest)
    return (scaled.to(dtype).float() / scale).to(tensor.dtype)


class EmulatedLinear(torch.nn.Module):
    """y = x W^T + b with FP8-rounded x, W and dy. Weight gradients accumulate in FP32 `weight.main_grad`.

    weight: [out, in]; bias: [out]. The caller sets `weight.main_grad` (FP32, [out, in]) before the first
    backward pass. In the first microbatch of a step main_grad is overwritten, later ones add to it.
    """

    def __init__(self, in_features, out_features, dtype, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
        self.register_buffer("weight_cache", torch.empty_like(self.weight), persistent=False)

    def attach(self, forward_state, forward_row, backward_state, backward_row):
        """Give this linear its rows in the recipe's states: input, then weight; gradient."""
        self.forward_state, self.forward_row = forward_state, forward_row
        self.backward_state, self.backward_row = backward_state, backward_row

    def forward(self, x, is_first_microbatch: bool, add_bias: bool = True):
        """add_bias=False leaves the bias to the caller, who adds it to a sum over ranks."""
        return _EmulatedLinear.apply(x, self.weight, self.bias if add_bias else None, self, is_first_microbatch)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, module, is_first_microbatch):
        state, row = module.forward_state, module.forward_row
        if is_first_microbatch:
            module.weight_cache.copy_(state.quantize(weight.detach(), row + 1, torch.float8_e4m3fn))
        x = state.quantize(x, row, torch.float8_e4m3fn)
        ctx.save_for_backward(x)
        ctx.module, ctx.is_first_microbatch = module, is_first_microbatch
        return F.linear(x, module.weight_cache, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        module = ctx.module
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        grad = module.backward_state.quantize(grad, module.backward_row, torch.float8_e5m2)
        grad_x = grad @ module.weight_cache
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.is_first_microbatch:
            module.weight.main_grad.copy_(grad_weight)
        else:
            module.weight.main_grad.add_(grad_weight)
        return grad_x, None, grad_bias, None, None
