"""Norm, clipping and AdamW on FP32 masters in two passes over memory, for a GPU.

torch's fused AdamW wants gradients in the masters' dtype: 16-bit gradients are copied to FP32 first, unscaled or
clipped ones are written back, and new masters are copied to the parameters in a pass of their own. Here one kernel
reads the gradients for their norm and one does the rest. Bytes a parameter: 30 with 16-bit gradients (torch's: 46), 34
with FP32 ones and 16-bit parameters (torch's: 42). All tensors go into one launch, which finds them through tables of
addresses on the device.

Sums are added in one order, so that a step repeats bit for bit. Nothing is read on the host.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from common.optimizers.hyperparameters import Hyperparameters
from graph_worth.capture.triton_launch import Launch


class Tiles(NamedTuple):
    """chunk: elements of a program, all of one tensor. Blocks: elements taken at a time, by so many warps."""

    chunk: int
    norm_block: int
    norm_warps: int
    update_block: int
    update_warps: int


# By the bytes of a gradient's element. FP32: a thread of the update has 4 elements, 16 bytes of each FP32 tensor; with
# 8, the width of its 16-bit store, all else would go through shared memory. Measured against others on an H200.
TILES = {2: Tiles(8192, 1024, 4, 1024, 4), 4: Tiles(8192, 2048, 4, 2048, 16)}
TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
TRITON_DTYPES |= {torch.uint8: tl.uint8}
# Graphs that a FusedUpdate can be captured in, with gradients that each step brings.
MAX_GRAPHS = 16


@triton.jit
def _sum_of_squares(  # noqa: PLR0913
    partial, grads, tensors, starts, sizes, chunk: tl.constexpr, block: tl.constexpr, dtype: tl.constexpr
):
    """Fill partial [chunks] with the FP32 sum of squares of each chunk of the gradients."""
    tensor = tl.load(tensors + tl.program_id(0))
    start = tl.multiple_of(tl.load(starts + tl.program_id(0)), 16)
    left = tl.load(sizes + tensor) - start
    grad = tl.multiple_of(tl.load(grads + tensor).to(tl.pointer_type(dtype)), 16) + start
    total = tl.zeros((block,), tl.float32)
    # Whole chunks have no mask, which would keep the loads from being of 16 bytes.
    if left >= chunk:
        for step in tl.static_range(chunk // block):
            g = tl.load(grad + step * block + tl.arange(0, block), eviction_policy="evict_first").to(tl.float32)
            total += g * g
    else:
        for step in range(chunk // block):
            offset = step * block + tl.arange(0, block)
            g = tl.load(grad + offset, mask=offset < left, other=0.0).to(tl.float32)
            total += g * g
    tl.store(partial + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _prepare(  # noqa: PLR0913
    scalars, step, lr, scale, found_inf, grad_norm, clip, weight_decay, log_beta1, log_beta2
):
    """Count the step if found_inf is 0, and fill scalars: factor of the gradients, step size, decay, root of bias 2.

    The factor divides by scale and brings a norm + 1e-6 above clip down to clip.
    """
    count = tl.load(step) + tl.where(tl.load(found_inf) > 0, 0.0, 1.0)
    tl.store(step, count)
    # 1 - beta ** count loses half of FP32's digits in the first steps.
    exponent = count.to(tl.float64)
    bias1, bias2 = 1.0 - tl.exp(exponent * log_beta1), 1.0 - tl.exp(exponent * log_beta2)
    norm, bound = tl.load(grad_norm) + 1e-6, tl.load(clip)
    # A norm that is NaN makes the factor NaN.
    tl.store(scalars, tl.where(norm <= bound, 1.0, bound / norm) / tl.load(scale))
    tl.store(scalars + 1, (tl.load(lr) / bias1).to(tl.float32))
    tl.store(scalars + 2, 1.0 - tl.load(lr) * weight_decay)
    tl.store(scalars + 3, tl.sqrt(bias2).to(tl.float32))


@triton.jit
def _update(  # noqa: PLR0913
    table, grads, tensors, starts, sizes, scalars, found_inf, num_tensors,
    beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr,
    grad_dtype: tl.constexpr, dtype: tl.constexpr, moment_dtype: tl.constexpr, stores: tl.constexpr,
):  # fmt: skip
    """Update a chunk of masters and moments, and of parameters if `stores`."""
    if tl.load(found_inf) > 0:
        return
    tensor = tl.load(tensors + tl.program_id(0))
    # In 64 bits up to here; what follows counts from the chunk's start.
    start = tl.multiple_of(tl.load(starts + tl.program_id(0)), 16)
    left = tl.load(sizes + tensor) - start
    grad = tl.multiple_of(tl.load(grads + tensor).to(tl.pointer_type(grad_dtype)), 16) + start
    param = tl.multiple_of(tl.load(table + tensor).to(tl.pointer_type(dtype)), 16) + start
    master = tl.multiple_of(tl.load(table + num_tensors + tensor).to(tl.pointer_type(tl.float32)), 16) + start
    exp_avg = tl.multiple_of(tl.load(table + 2 * num_tensors + tensor).to(tl.pointer_type(moment_dtype)), 16) + start
    exp_avg_sq = tl.multiple_of(tl.load(table + 3 * num_tensors + tensor).to(tl.pointer_type(moment_dtype)), 16) + start
    factor, step_size = tl.load(scalars), tl.load(scalars + 1)
    decay, root_bias2 = tl.load(scalars + 2), tl.load(scalars + 3)
    if left >= chunk:
        for step in range(chunk // block):
            offset = step * block + tl.arange(0, block)
            g = tl.load(grad + offset, eviction_policy="evict_first")
            p = tl.load(master + offset, eviction_policy="evict_first")
            m = tl.load(exp_avg + offset, eviction_policy="evict_first").to(tl.float32)
            v = tl.load(exp_avg_sq + offset, eviction_policy="evict_first").to(tl.float32)
            p, m, v = _adamw(g, p, m, v, factor, step_size, decay, root_bias2, beta1, beta2, eps)
            tl.store(master + offset, p, eviction_policy="evict_first")
            tl.store(exp_avg + offset, m.to(moment_dtype), eviction_policy="evict_first")
            tl.store(exp_avg_sq + offset, v.to(moment_dtype), eviction_policy="evict_first")
            if stores:
                tl.store(param + offset, p.to(dtype), eviction_policy="evict_first")
    else:
        for step in range(chunk // block):
            offset = step * block + tl.arange(0, block)
            inside = offset < left
            g, p = tl.load(grad + offset, mask=inside, other=0.0), tl.load(master + offset, mask=inside, other=0.0)
            m, v = (
                tl.load(exp_avg + offset, mask=inside, other=0.0).to(tl.float32),
                tl.load(exp_avg_sq + offset, mask=inside, other=0.0).to(tl.float32),
            )
            p, m, v = _adamw(g, p, m, v, factor, step_size, decay, root_bias2, beta1, beta2, eps)
            tl.store(master + offset, p, mask=inside)
            tl.store(exp_avg + offset, m.to(moment_dtype), mask=inside)
            tl.store(exp_avg_sq + offset, v.to(moment_dtype), mask=inside)
            if stores:
                tl.store(param + offset, p.to(dtype), mask=inside)


@triton.jit
def _adamw(  # noqa: PLR0913
    g, p, m, v, factor, step_size, decay, root_bias2, beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr
):
    """Return (p, m, v) after a step with the gradient g * factor."""
    g = g.to(tl.float32) * factor
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * decay - step_size * m / (tl.sqrt(v) / root_bias2 + eps)
    return p, m, v


class FusedUpdate:
    """Norm and AdamW update of many tensors, one launch each.

    Addresses must not change, except those of gradients that each step brings.

    Args:
        states: Lists of parameters, masters, first and second moments, in the same shapes and strides. Parameters:
            dense, of one dtype; the masters themselves if somebody else writes the parameters. Masters: FP32. Moments:
            FP32 or bf16.
        hyperparameters: Of all tensors.
        grads: Buffers of one dtype, in the same shapes and strides, which every step applies. Empty: each step brings
            gradients of the parameters' dtype.
    """

    def __init__(self, states, hyperparameters: Hyperparameters, grads=()):
        params, masters, exp_avg, *_ = states
        betas = hyperparameters.betas
        device, first_grad = params[0].device, (grads or params)[0]
        assert all(tensor.data_ptr() % 16 == 0 for tensors in states for tensor in tensors)
        self.table = torch.tensor([[t.data_ptr() for t in tensors] for tensors in states], device=device)
        tiles = TILES[first_grad.element_size()]
        self.chunk = tiles.chunk
        chunks = [(i, start) for i, param in enumerate(params) for start in range(0, param.numel(), tiles.chunk)]
        self.grid = (len(chunks), 1, 1)
        # For each chunk its tensor and its first element; for each tensor its size.
        columns = (*zip(*chunks, strict=True), [param.numel() for param in params])
        self.chunks = tuple(torch.tensor(column, device=device) for column in columns)
        self.partial = torch.zeros(len(chunks), device=device)
        self.scalars = torch.zeros(4, device=device)
        dtypes = [TRITON_DTYPES[tensor.dtype] for tensor in (first_grad, params[0], exp_avg[0])]
        norm, update = (tiles.chunk, tiles.norm_block), (tiles.chunk, tiles.update_block)
        logs = (math.log(beta) for beta in betas)
        self._sum_of_squares = Launch(_sum_of_squares, *norm, dtypes[0], num_warps=tiles.norm_warps)
        self._prepare = Launch(_prepare, hyperparameters.weight_decay, *logs, num_warps=1)
        fixed = (len(params), *betas, hyperparameters.eps, *update, *dtypes, params[0] is not masters[0])
        self._update = Launch(_update, *fixed, num_warps=tiles.update_warps)
        # The strides that a gradient must have too: elements are paired by their place in memory.
        self.layouts = [(param.shape, param.stride()) for param in params]
        # Addresses of the gradients, and the table on the device that holds them.
        self._pointed: tuple[list[int], torch.Tensor]
        self._pointed = ([], torch.zeros(len(params), dtype=torch.int64, device=device))
        self._fixed = bool(grads)
        if self._fixed:
            self._require_layout(grads)
            addresses = [grad.data_ptr() for grad in grads]
            self._pointed = (addresses, torch.tensor(addresses, device=device))
        self._eager, self._on_cuda = self._pointed, device.type == "cuda"
        # A graph keeps the one that its replays copy addresses from: nothing can be pinned during a capture.
        self._pinned = [
            torch.zeros(len(params), dtype=torch.int64, pin_memory=self._on_cuda) for _ in range(MAX_GRAPHS)
        ]
        self._kept: list[tuple] = []

    def norm(self, grads, out: torch.Tensor) -> None:
        """Fill out, a 0-d FP32 tensor, with the norm of all gradients."""
        self._point_to(grads)
        self._sum_of_squares(self.grid, (self.partial, self._pointed[1], *self.chunks))
        torch.sqrt(self.partial.sum(), out=out)

    def step(self, grads, scalars) -> None:
        """Count the step and apply gradients that norm() has seen. Nothing changes if found_inf is 1.

        Args:
            grads: As for norm().
            scalars: Six 0-d FP32 tensors: step, which is counted here; lr; scale, by which the gradients are divided;
                found_inf; grad_norm, of the unscaled gradients; clip, the largest norm.
        """
        if not self._fixed and [grad.data_ptr() for grad in grads] != self._pointed[0]:
            self._point_to(grads)
        self._prepare((1, 1, 1), (self.scalars, *scalars))
        self._update(self.grid, (self.table, self._pointed[1], *self.chunks, self.scalars, scalars[3]))

    def _point_to(self, grads):
        """Point to the gradients. A captured graph has its own table, which its replays fill."""
        if self._fixed:
            return
        addresses = [grad.data_ptr() for grad in grads]
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            self._require_layout(grads)
            source, table = self._pinned.pop(), torch.empty_like(self._eager[1])
            self._kept.append((source, table))
            source.copy_(torch.tensor(addresses))
            table.copy_(source, non_blocking=True)
            self._pointed = (addresses, table)
            return
        if addresses != self._eager[0]:
            self._require_layout(grads)
            self._eager[1].copy_(torch.tensor(addresses, pin_memory=self._on_cuda), non_blocking=True)
            self._eager = (addresses, self._eager[1])
        self._pointed = self._eager

    def _require_layout(self, grads):
        for grad, layout in zip(grads, self.layouts, strict=True):
            assert (grad.shape, grad.stride()) == layout, f"gradient {grad.shape} {grad.stride()}, parameter {layout}"
            assert grad.data_ptr() % 16 == 0, "a gradient that does not start at a multiple of 16 bytes"
