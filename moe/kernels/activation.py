"""The experts' activation, times the router's weight of the row: SwiGLU, and GPT-OSS's clamped one with biases.

    qwen3      silu(gate) up
    gpt_oss    gate sigmoid(1.702 gate) (up + 1), gate cut at 7 from above, up to -7 .. 7; biases are added before

The weight of a row is applied here and not to the experts' output, as Megatron does: then the backward needs no copy of
that output. One kernel each way; the backward computes the activation again, which the weight gradient needs.
"""

import functools

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton

ALPHA, LIMIT = 1.702, 7.0


def activate(z, bias, weights, plan):
    """[rows, ffn] of z [rows, 2 ffn], gate and up side by side. bias [experts, 2 ffn]: None is SwiGLU without one.

    plan: has a row for each choice, and a choice for each row.
    """
    if not in_triton(z):
        return _plain(z, bias, _weight_of_row(weights, plan), plan).to(z.dtype)
    out = torch.empty(z.shape[0], z.shape[1] // 2, dtype=z.dtype, device=z.device)
    launch = _launch(False, z.shape[1] // 2, bias is not None, z.dtype)
    launch((z.shape[0], 1, 1), (z, z if bias is None else bias, weights, plan.choice_of_row, plan.expert_of_row, out))
    return out


def activate_backward(grad, z, bias, weights, plan):
    """(gradient of z, activation, gradient of weights) for the gradient of the activation."""
    if not in_triton(z):
        return _plain_backward(grad, z, bias, weights, plan)
    grad_z, out, grad_weights = torch.empty_like(z), torch.empty_like(grad), torch.empty_like(weights)
    launch = _launch(True, z.shape[1] // 2, bias is not None, z.dtype)
    tensors = (grad, z, z if bias is None else bias, weights, plan.choice_of_row, plan.expert_of_row)
    launch((z.shape[0], 1, 1), (*tensors, grad_z, out, grad_weights))
    return grad_z, out, grad_weights


def _weight_of_row(weights, plan):
    return weights.flatten().index_select(0, plan.choice_of_row)[:, None]


def _plain(z, bias, weight, plan):
    z = z.float()
    if bias is None:
        gate, up = z.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up * weight
    gate, up = (z + bias.float().index_select(0, plan.expert_of_row)).chunk(2, -1)
    # Not clamp, whose backward drops NaN.
    gate, up = torch.where(gate > LIMIT, LIMIT, gate), torch.where(up.abs() > LIMIT, up.sign() * LIMIT, up)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1) * weight


def _plain_backward(grad, z, bias, weights, plan):
    with torch.enable_grad():
        kept, weight = z.detach().requires_grad_(), _weight_of_row(weights.detach(), plan).requires_grad_()
        out = _plain(kept, bias, weight, plan)
    grad_z, grad_weight = torch.autograd.grad(out, (kept, weight), grad.float())
    grad_weights = grad_weight.flatten().index_select(0, plan.row_of_choice.flatten()).view_as(weights)
    return grad_z.to(z.dtype), out.detach().to(z.dtype), grad_weights


@functools.cache
def _launch(is_backward, width, is_clamped, dtype):
    kernel = _backward if is_backward else _forward
    return Launch(kernel, width, is_clamped, ALPHA, LIMIT, triton.next_power_of_2(width), num_warps=4)


if triton:

    @triton.jit
    def _load(z, bias, expert_of_row, row, column, inside, width: tl.constexpr, is_clamped: tl.constexpr):
        gate = tl.load(z + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(z + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        if is_clamped:
            expert = tl.load(expert_of_row + row).to(tl.int64)
            gate += tl.load(bias + expert * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias + expert * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        return gate, up

    @triton.jit
    def _weight(weights, choice_of_row, row):
        choice = tl.load(choice_of_row + row).to(tl.int64)
        return choice, tl.load(weights + choice)

    @triton.jit
    def _cut(gate, up, limit: tl.constexpr):
        """NaN stays NaN, which a GPU's minimum drops."""
        gate = tl.minimum(gate, limit, tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, tl.PropagateNan.ALL)
        return gate, tl.maximum(up, -limit, tl.PropagateNan.ALL) + 1.0

    @triton.jit
    def _forward(
        z, bias, weights, choice_of_row, expert_of_row, out, width: tl.constexpr, is_clamped: tl.constexpr,
        alpha: tl.constexpr, limit: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, block)
        inside = column < width
        gate, up = _load(z, bias, expert_of_row, row, column, inside, width, is_clamped)
        _, weight = _weight(weights, choice_of_row, row)
        if is_clamped:
            gate, up = _cut(gate, up, limit)
            value = gate * tl.sigmoid(alpha * gate) * up
        else:
            value = gate * tl.sigmoid(gate) * up
        tl.store(out + row * width + column, (value * weight).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward(
        grad, z, bias, weights, choice_of_row, expert_of_row, grad_z, out, grad_weights,
        width: tl.constexpr, is_clamped: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, block)
        inside = column < width
        gate, up = _load(z, bias, expert_of_row, row, column, inside, width, is_clamped)
        choice, weight = _weight(weights, choice_of_row, row)
        g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if is_clamped:
            cut, factor = _cut(gate, up, limit)
            sigmoid = tl.sigmoid(alpha * cut)
            value = cut * sigmoid
            slope = sigmoid * (1.0 + alpha * cut * (1.0 - sigmoid))
        else:
            sigmoid = tl.sigmoid(gate)
            factor = up
            value = gate * sigmoid
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_weights + choice, tl.sum(g * value * factor, axis=0))
        tl.store(out + row * width + column, (value * factor * weight).to(out.dtype.element_ty), mask=inside)
        g = g * weight
        of_gate, of_up = g * factor * slope, g * value
        if is_clamped:
            of_gate, of_up = tl.where(gate > limit, 0.0, of_gate), tl.where(tl.abs(up) > limit, 0.0, of_up)
        start = grad_z + row * 2 * width + column
        tl.store(start, of_gate.to(grad_z.dtype.element_ty), mask=inside)
        tl.store(start + width, of_up.to(grad_z.dtype.element_ty), mask=inside)
