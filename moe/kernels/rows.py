"""Rows from token order into expert order and back: `gather` copies tokens to their rows, `combine` adds rows up.

Each is the other's backward, and both only read through indices: sums are made in a fixed order, without atomics. An
index of -1 stands for a row without a token, which is zero, and for a token's choice that has no row.
"""

import functools

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton


def gather(y, plan):
    """Tokens y [t, hidden] in the order of the experts' rows, [rows, hidden]."""
    return _Gather.apply(y, plan.token_of_row, plan.row_of_choice)


def combine(z, residual, plan):
    """Residual [t, hidden] plus the sum of each token's rows of z [rows, hidden]."""
    return _Combine.apply(z, residual, plan.token_of_row, plan.row_of_choice)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, token_of_row, row_of_choice):
        ctx.save_for_backward(row_of_choice)
        return gather_rows(y, token_of_row)

    @staticmethod
    def backward(ctx, grad):
        return sum_rows(grad.contiguous(), ctx.saved_tensors[0], None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, residual, token_of_row, row_of_choice):
        ctx.save_for_backward(token_of_row)
        return sum_rows(z, row_of_choice, residual)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        return gather_rows(grad, ctx.saved_tensors[0]), grad, None, None


def gather_rows(y, index):
    """y[index] with zeros where index [rows] is -1."""
    if not in_triton(y):
        return y.index_select(0, index.clamp(min=0)).masked_fill((index < 0)[:, None], 0)
    out = torch.empty(index.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    _gather_launch(y.shape[1], y.dtype)((index.shape[0], 1, 1), (y, index, out))
    return out


def sum_rows(z, index, residual):
    """residual + the sum of z[index[t, k]] over k, in FP32; index [t, k], residual [t, hidden] or None."""
    if not in_triton(z):
        picked = z.index_select(0, index.flatten().clamp(min=0)).view(*index.shape, -1)
        total = picked.float().masked_fill((index < 0)[..., None], 0).sum(1)
        return (total if residual is None else total + residual.float()).to(z.dtype)
    out = torch.empty(index.shape[0], z.shape[1], dtype=z.dtype, device=z.device)
    launch = _sum_launch(z.shape[1], index.shape[1], residual is not None, z.dtype)
    launch((index.shape[0], 1, 1), (z, index, out if residual is None else residual, out))
    return out


@functools.cache
def _gather_launch(width, dtype):
    return Launch(_gather_kernel, width, triton.next_power_of_2(width), num_warps=4)


@functools.cache
def _sum_launch(width, count, has_residual, dtype):
    return Launch(_sum_kernel, width, count, has_residual, triton.next_power_of_2(width), num_warps=4)


if triton:

    @triton.jit
    def _gather_kernel(y, index, out, width: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, block)
        source = tl.load(index + row).to(tl.int64)
        inside = column < width
        values = tl.load(y + source * width + column, mask=inside & (source >= 0), other=0.0)
        tl.store(out + row * width + column, values, mask=inside)

    @triton.jit
    def _sum_kernel(
        z, index, residual, out, width: tl.constexpr, count: tl.constexpr, has_residual: tl.constexpr,
        block: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, block)
        inside = column < width
        total = tl.zeros((block,), tl.float32)
        for k in tl.static_range(count):
            row = tl.load(index + token * count + k).to(tl.int64)
            total += tl.load(z + row * width + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if has_residual:
            total += tl.load(residual + token * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
