"""Attention sinks on top of a flash kernel's output and log-sum-exp: one kernel each way, a program for each token."""

import functools

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton


def add_sinks_(out, lse, sinks):
    """Make attention's output, in place, that of a softmax with one more logit a head; returns its log-sum-exp.

    out [..., s, heads, d] and lse FP32 [..., heads, s]: contiguous. sinks: [heads], the logits, which have no value.
    """
    if in_triton(out):
        # Not lse in place: several threads of a program load an element, and none may find it written.
        with_sink = torch.empty_like(lse)
        launch = _launch(False, lse.shape[-1], *out.shape[-2:], out.dtype)
        launch((_tokens(out), 1, 1), (out, lse, sinks, with_sink))
        return with_sink
    with_sink = torch.logaddexp(lse, sinks.float()[:, None])
    out.mul_(torch.exp(lse - with_sink).transpose(-1, -2)[..., None].to(out.dtype))
    return with_sink


def sink_gradient(grad, out, lse, sinks):
    """The gradient of sinks for that of the output; out and lse are those that `add_sinks_` made."""
    if in_triton(out):
        partial = torch.empty(_tokens(out), out.shape[-2], dtype=torch.float32, device=out.device)
        launch = _launch(True, lse.shape[-1], *out.shape[-2:], out.dtype)
        launch((_tokens(out), 1, 1), (grad, out, lse, sinks, partial))
        return partial.sum(0).to(sinks.dtype)
    row_sums = (grad.float() * out.float()).sum(-1).transpose(-1, -2)
    of_tokens = -torch.exp(sinks.float()[:, None] - lse) * row_sums
    return of_tokens.transpose(-1, -2).flatten(0, -2).sum(0).to(sinks.dtype)


def _tokens(out):
    return out.numel() // (out.shape[-1] * out.shape[-2])


@functools.cache
def _launch(is_backward, length, heads, dim, dtype):
    blocks = (triton.next_power_of_2(heads), triton.next_power_of_2(dim))
    return Launch(_gradient if is_backward else _add, length, heads, dim, *blocks, num_warps=4)


if triton:

    @triton.jit
    def _place(length, heads: tl.constexpr, block_heads: tl.constexpr):
        token, head = tl.program_id(0), tl.arange(0, block_heads)
        return head, (token // length * heads + head) * length + token % length

    @triton.jit
    def _add(
        out, lse, sinks, with_sink, length: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
        block_heads: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        head, place = _place(length, heads, block_heads)
        column = tl.arange(0, block)
        without_sink = tl.load(lse + place, mask=head < heads, other=0.0)
        sink = tl.load(sinks + head, mask=head < heads, other=0.0).to(tl.float32)
        both = tl.maximum(without_sink, sink) + tl.log(1.0 + tl.exp(-tl.abs(without_sink - sink)))
        tl.store(with_sink + place, both, mask=head < heads)
        inside = (head < heads)[:, None] & (column < dim)[None, :]
        target = out + (tl.program_id(0).to(tl.int64) * heads + head)[:, None] * dim + column[None, :]
        values = tl.load(target, mask=inside, other=0.0).to(tl.float32) * tl.exp(without_sink - both)[:, None]
        tl.store(target, values.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _gradient(
        grad, out, lse, sinks, partial, length: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
        block_heads: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        head, place = _place(length, heads, block_heads)
        column = tl.arange(0, block)
        inside = (head < heads)[:, None] & (column < dim)[None, :]
        offset = (tl.program_id(0).to(tl.int64) * heads + head)[:, None] * dim + column[None, :]
        g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(out + offset, mask=inside, other=0.0).to(tl.float32)
        sink = tl.load(sinks + head, mask=head < heads, other=0.0).to(tl.float32)
        probability = tl.exp(sink - tl.load(lse + place, mask=head < heads, other=0.0))
        row = partial + tl.program_id(0).to(tl.int64) * heads + head
        tl.store(row, -probability * tl.sum(g * values, axis=1), mask=head < heads)
