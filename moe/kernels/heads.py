"""Queries, keys and values out of one projection: norms of queries and keys (Qwen3) and the rotary embedding.

One kernel each way, a program for each token. The norms' weight gradients are summed over tokens in a fixed order.
"""

import functools

import torch
import torch.nn.functional as F

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton


def split_heads(qkv, shape, rope, norms=None, eps: float = 0.0):
    """(q [t, heads, d], k and v [t, kv heads, d]) of qkv [t, (heads + 2 kv heads) d]: all q heads, then k's, then v's.

    shape: (heads, kv heads, d). rope: (cos, sin), FP32 [t, d / 2] each: element i of a head turns with element
    i + d / 2. norms: (weight of queries, weight of keys), [d] each, of their RMSNorm over a head, or None.
    """
    if not in_triton(qkv):
        return _plain(qkv, shape, rope, norms, eps)
    q_norm, k_norm = norms or (None, None)
    return _SplitHeads.apply(qkv, *rope, q_norm, k_norm, shape, eps)


def _plain(qkv, shape, rope, norms, eps):
    heads, kv_heads, dim = shape
    q, k, v = qkv.view(qkv.shape[0], -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = (F.rms_norm(x, (dim,), weight, eps) for x, weight in zip((q, k), norms, strict=True))
    return _turned(q, *rope), _turned(k, *rope), v


def _turned(x, cos, sin):
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, q_norm, k_norm, shape, eps):
        heads, kv_heads, dim = shape
        tokens, has_norms = qkv.shape[0], q_norm is not None
        q, k, v = (qkv.new_empty(tokens, count, dim) for count in (heads, kv_heads, kv_heads))
        norms = (q_norm, k_norm) if has_norms else (qkv, qkv)
        _launch(False, shape, eps, has_norms, qkv.dtype)((tokens, 1, 1), (qkv, cos, sin, *norms, q, k, v))
        ctx.save_for_backward(qkv, cos, sin, *norms)
        ctx.shape, ctx.eps, ctx.has_norms = shape, eps, has_norms
        return q, k, v

    @staticmethod
    def backward(ctx, *grads):
        qkv, cos, sin, q_norm, k_norm = ctx.saved_tensors
        tokens, dim = qkv.shape[0], ctx.shape[2]
        grad = torch.empty_like(qkv)
        partial = qkv.new_empty(tokens if ctx.has_norms else 1, 2, dim, dtype=torch.float32)
        tensors = (qkv, cos, sin, q_norm, k_norm, *(output_grad.contiguous() for output_grad in grads), grad, partial)
        _launch(True, ctx.shape, ctx.eps, ctx.has_norms, qkv.dtype)((tokens, 1, 1), tensors)
        of_norms = partial.sum(0).to(qkv.dtype).unbind() if ctx.has_norms else (None, None)
        return grad, None, None, *of_norms, None, None


@functools.cache
def _launch(is_backward, shape, eps, has_norms, dtype):
    kernel = _backward if is_backward else _forward
    blocks = [triton.next_power_of_2(count) for count in (*shape[:2], shape[2] // 2)]
    return Launch(kernel, *shape, eps, has_norms, *blocks, num_warps=4)


if triton:

    @triton.jit
    def _turn_heads(
        source, target, cos, sin, weight, num_heads, half: tl.constexpr, eps: tl.constexpr, has_norms: tl.constexpr,
        block_heads: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        head, column = tl.arange(0, block_heads)[:, None], tl.arange(0, block)[None, :]
        inside = (head < num_heads) & (column < half)
        place = head * 2 * half + column
        low = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + place + half, mask=inside, other=0.0).to(tl.float32)
        if has_norms:
            factor = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * half) + eps)[:, None]
            of_low = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
            of_high = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
            # Rounded between, as torch's norm returns it.
            low = (low * factor * of_low).to(source.dtype.element_ty).to(tl.float32)
            high = (high * factor * of_high).to(source.dtype.element_ty).to(tl.float32)
        c = tl.load(cos + column, mask=column < half, other=0.0)
        s = tl.load(sin + column, mask=column < half, other=0.0)
        tl.store(target + place, (low * c - high * s).to(target.dtype.element_ty), mask=inside)
        tl.store(target + place + half, (high * c + low * s).to(target.dtype.element_ty), mask=inside)

    @triton.jit
    def _copy_heads(source, target, num_heads, half: tl.constexpr, block_heads: tl.constexpr, block: tl.constexpr):
        head, column = tl.arange(0, block_heads)[:, None], tl.arange(0, 2 * block)[None, :]
        inside = (head < num_heads) & (column < 2 * half)
        place = head * 2 * half + column
        tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)

    @triton.jit
    def _forward(
        qkv, cos, sin, q_norm, k_norm, q, k, v,
        heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, eps: tl.constexpr, has_norms: tl.constexpr,
        block_q: tl.constexpr, block_kv: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        half: tl.constexpr = dim // 2
        source = qkv + token * (heads + 2 * kv_heads) * dim
        cos, sin = cos + token * half, sin + token * half
        q, k, v = q + token * heads * dim, k + token * kv_heads * dim, v + token * kv_heads * dim
        _turn_heads(source, q, cos, sin, q_norm, heads, half, eps, has_norms, block_q, block)
        of_k = source + heads * dim
        _turn_heads(of_k, k, cos, sin, k_norm, kv_heads, half, eps, has_norms, block_kv, block)
        _copy_heads(of_k + kv_heads * dim, v, kv_heads, half, block_kv, block)

    @triton.jit
    def _turn_back(
        source, grad, target, cos, sin, weight, partial, num_heads, half: tl.constexpr, eps: tl.constexpr,
        has_norms: tl.constexpr, block_heads: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        head, column = tl.arange(0, block_heads)[:, None], tl.arange(0, block)[None, :]
        inside, in_half = (head < num_heads) & (column < half), column < half
        place = head * 2 * half + column
        g_low = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        g_high = tl.load(grad + place + half, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + column, mask=in_half, other=0.0)
        s = tl.load(sin + column, mask=in_half, other=0.0)
        d_low, d_high = g_low * c + g_high * s, g_high * c - g_low * s
        if has_norms:
            low = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(source + place + half, mask=inside, other=0.0).to(tl.float32)
            factor = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * half) + eps)[:, None]
            low, high = low * factor, high * factor
            row = tl.arange(0, block)
            tl.store(partial + row, tl.sum(d_low * low, axis=0), mask=row < half)
            tl.store(partial + half + row, tl.sum(d_high * high, axis=0), mask=row < half)
            d_low *= tl.load(weight + column, mask=in_half, other=0.0).to(tl.float32)
            d_high *= tl.load(weight + half + column, mask=in_half, other=0.0).to(tl.float32)
            mean = ((tl.sum(d_low * low, axis=1) + tl.sum(d_high * high, axis=1)) / (2 * half))[:, None]
            d_low, d_high = factor * (d_low - low * mean), factor * (d_high - high * mean)
        tl.store(target + place, d_low.to(target.dtype.element_ty), mask=inside)
        tl.store(target + place + half, d_high.to(target.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward(
        qkv, cos, sin, q_norm, k_norm, grad_q, grad_k, grad_v, grad, partial,
        heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, eps: tl.constexpr, has_norms: tl.constexpr,
        block_q: tl.constexpr, block_kv: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        half: tl.constexpr = dim // 2
        start = token * (heads + 2 * kv_heads) * dim
        cos, sin, partial = cos + token * half, sin + token * half, partial + token * 2 * dim
        grad_q, grad_k = grad_q + token * heads * dim, grad_k + token * kv_heads * dim
        _turn_back(
            qkv + start, grad_q, grad + start, cos, sin, q_norm, partial, heads, half, eps, has_norms, block_q, block
        )
        start += heads * dim
        _turn_back(
            qkv + start, grad_k, grad + start, cos, sin, k_norm, partial + dim, kv_heads, half, eps, has_norms,
            block_kv, block,
        )  # fmt: skip
        start += kv_heads * dim
        _copy_heads(grad_v + token * kv_heads * dim, grad + start, kv_heads, half, block_kv, block)
