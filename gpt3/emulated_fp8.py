"""The stand-in for Transformer Engine's FP8: quantise and dequantise around bf16 or FP32 GEMMs, on any machine."""

import contextlib

import torch
from torch.nn import functional as F

from common.precision.fp8 import E4M3_MAX, E5M2_MAX, NoScaling
from graph_worth.parallel import collectives


class EmulatedScaling(NoScaling):
    """Delayed scaling of the `EmulatedLinear`s under `layers`: operands are rounded to FP8, GEMMs keep their dtype.

    Same histories, scales and weight cache as the real recipe, so that captures meet the same side effects on any
    machine. group: name of the ranks over which amaxes are reduced.
    """

    def __init__(self, layers, amax_history_len: int = 1024, group: str = collectives.ALONE):
        linears = [module for layer in layers for module in layer.modules() if isinstance(module, EmulatedLinear)]
        device = linears[0].weight.device
        # Rows: input and weight of each linear, then gradient of each; one fused update a direction.
        self._forward = _ScalingState(2 * len(linears), amax_history_len, E4M3_MAX, device, group)
        self._backward = _ScalingState(len(linears), amax_history_len, E5M2_MAX, device, group)
        for index, linear in enumerate(linears):
            linear.attach(self._forward, 2 * index, self._backward, index)

    @contextlib.contextmanager
    def forward(self):
        """Run the layers of one microbatch in this block. On exit the forward scales are updated."""
        yield
        self._forward.update()

    @contextlib.contextmanager
    def backward(self, replayed: bool = False):
        """Run the backward pass of one microbatch in this block. On exit the gradients' scales are updated."""
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
        amax = self.amax_history.amax(dim=0)
        # Within FP32; as it was where the amax is zero or not finite.
        usable = (amax > 0) & torch.isfinite(amax)
        scale = (self.largest / amax).clamp(max=torch.finfo(torch.float32).max)
        self.scale.copy_(torch.where(usable, scale, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()

    def quantize(self, tensor, row, dtype):
        """`tensor` rounded to FP8 at this row's scale, in its own dtype again; the amax is recorded."""
        slot = self.amax_history[0, row]
        slot.copy_(torch.maximum(slot, tensor.detach().abs().amax()))
        scale = self.scale[row]
        scaled = (tensor.float() * scale).clamp(-self.largest, self.largest)
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
