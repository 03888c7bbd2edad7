"""The plain layer's matrices and SwiGLU in bf16, or with operands rounded to FP8 or NVFP4."""

import torch
from torch import nn
from torch.nn import functional as F

from common.precision import nvfp4
from common.precision.fp8 import E4M3_MAX, E5M2_MAX
from graph_worth import mark
from graph_worth.parallel import collectives
from llama31.config import Config


class Linear(nn.Linear):
    """bf16. Takes and ignores the flag of the others; autograd makes its weight gradient."""

    adds_to_main_grad, write = False, None

    def forward(self, x, is_first_microbatch: bool):
        return F.linear(x, self.weight)


def quantize_fp8(tensor, dtype, largest, group=collectives.ALONE):
    """(values in `dtype`, FP32 0-d inverse scale) of current scaling: the largest magnitude becomes `largest`.

    group: of ranks with parts of one tensor, which get one scale.
    """
    amax = tensor.detach().abs().amax().float()
    if collectives.group_size(group) > 1:
        collectives.all_reduce_max_(amax, group)
    scale = torch.where((amax > 0) & torch.isfinite(amax), largest / amax, torch.ones_like(amax))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype), 1.0 / scale


def rounded_fp8(tensor, dtype=torch.float8_e4m3fn, largest=E4M3_MAX, group=collectives.ALONE):
    """`tensor` rounded to FP8 with current scaling, in its own dtype again."""
    values, inverse = quantize_fp8(tensor, dtype, largest, group)
    return (values.float() * inverse).to(tensor.dtype)


class QuantizedLinear(nn.Module):
    """y = x W^T whose operands are rounded to FP8 or NVFP4; weight gradients are added to weight.main_grad.

    group: of the ranks that share its matrix. An amax is that of all their parts, so that they round as one rank would.
    The weight is rounded in a step's first microbatch, into `forward_weight` (blocks along the inputs) and
    `backward_weight` (along the outputs; the same tensor in FP8), which the other microbatches read.
    """

    adds_to_main_grad, write = True, None

    def __init__(self, in_features, out_features, dtype, device, precision, group):
        super().__init__()
        self.precision, self.group = precision, group
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.register_buffer("forward_weight", torch.empty_like(self.weight), persistent=False)
        backward = torch.empty_like(self.weight) if precision == "nvfp4_emulated" else self.forward_weight
        self.register_buffer("backward_weight", backward, persistent=False)

    @torch.no_grad()
    def round_weight(self):
        if self.precision == "fp8":
            self.forward_weight.copy_(rounded_fp8(self.weight, group=self.group))
        else:
            for buffer, value in zip(
                (self.forward_weight, self.backward_weight), nvfp4.frozen_weight(self.weight), strict=True
            ):
                buffer.copy_(value)

    def forward(self, x, is_first_microbatch: bool):
        if is_first_microbatch:
            self.round_weight()
        return _QuantizedLinear.apply(x, self.weight, self)


class StoredFP8Linear(nn.Module):
    """y = x W^T with a weight that is stored in FP8: `weight` is a Parameter of E4M3 values, `inverse` their scale.

    Adam writes it with `write`, so that there is nothing to cast in a step.
    """

    adds_to_main_grad = True
    precision = "fp8"

    def __init__(self, in_features, out_features, dtype, device, group):
        super().__init__()
        self.group = group
        values = torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("inverse", torch.ones((), device=device), persistent=False)
        self.dtype = dtype

    @torch.no_grad()
    def write(self, master):
        values, inverse = quantize_fp8(master, torch.float8_e4m3fn, E4M3_MAX, self.group)
        self.weight.copy_(values)
        self.inverse.copy_(inverse)

    @property
    def forward_weight(self):
        return (self.weight.float() * self.inverse).to(self.dtype)

    backward_weight = forward_weight

    def forward(self, x, is_first_microbatch: bool):
        return _QuantizedLinear.apply(x, self.weight, self)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, linear):
        ctx.linear = linear
        if linear.precision == "fp8":
            x = rounded_fp8(x, group=linear.group)
            ctx.save_for_backward(x)
            return F.linear(x, linear.forward_weight)
        ctx.save_for_backward(x)
        mark()  # to round a tensor takes some hundred launches
        return F.linear(nvfp4.emulate(x), linear.forward_weight)

    @staticmethod
    def backward(ctx, grad):
        (x,), linear = ctx.saved_tensors, ctx.linear
        rows, columns = grad.flatten(0, -2), x.flatten(0, -2)
        if linear.precision == "fp8":
            grad = rounded_fp8(grad, torch.float8_e5m2, E5M2_MAX, linear.group)
            grad_weight = grad.flatten(0, -2).t() @ columns
        else:
            mark()
            # This GEMM sums over tokens, so its blocks lie along them.
            grad_weight = nvfp4.emulate(rows.t().contiguous()) @ nvfp4.emulate(columns.t().contiguous()).t()
            grad = nvfp4.emulate(grad)
        linear.weight.main_grad.add_(grad_weight)
        return grad @ linear.backward_weight, None, None


def make_linear(config: Config, in_features, out_features, dtype, device, group=collectives.ALONE):
    """A linear without bias of the config's precision and format of stored weights. group: as in QuantizedLinear."""
    if config.weights == "fp8":
        return StoredFP8Linear(in_features, out_features, dtype, device, group)
    if config.precision != "bf16":
        return QuantizedLinear(in_features, out_features, dtype, device, config.precision, group)
    return Linear(in_features, out_features, bias=False, dtype=dtype, device=device)


class SwiGLU(torch.autograd.Function):
    """silu(gate) up of fc1's output [s, b, 2 ffn], which is all that is kept."""

    @staticmethod
    def forward(ctx, fc1):
        ctx.save_for_backward(fc1)
        gate, up = fc1.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        (fc1,), grad = ctx.saved_tensors, grad.float()
        gate, up = (part.float() for part in fc1.chunk(2, -1))
        sigmoid = torch.sigmoid(gate)
        grads = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
        return torch.cat(grads, -1).to(fc1.dtype)
