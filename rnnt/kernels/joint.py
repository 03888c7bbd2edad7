"""The joint's hidden layer on CUDA: dropout(relu(f + g)) in one Triton kernel, its gradients in another.

No mask is kept. Where the stored output is positive its gradient passes, times 1 / (1 - dropout); where it is 0, ReLU
or dropout made it so and nothing passes. The backward kernel reads output and gradient once, sums the gradient of f
over the symbols in full and that of g over blocks of frames; torch adds the blocks. Always in the same order, so the
same numbers run after run.
"""

import functools

import torch
import triton
import triton.language as tl

from graph_worth import Launch

# A draw of Philox is 128 bits and its cost would be most of the forward kernel's: 16 bits an element, eight elements.
PARTS = tl.constexpr(8)
LEVELS = 2**16
FRAMES = 16


class JointHidden(torch.autograd.Function):
    """rnnt.loss.joint_hidden on CUDA tensors; dropout 0 draws nothing."""

    @staticmethod
    def forward(ctx, f, g, dropout):
        f, g = f.contiguous(), g.contiguous()
        (batch, num_frames, size), num_symbols = f.shape, g.shape[1]
        out = torch.empty((batch, num_frames, num_symbols, size), dtype=f.dtype, device=f.device)
        # Of the default generator, so that a graph's replay draws a new one. Without dropout nothing reads it.
        seed = torch.randint(2**62, (1,), device=f.device) if dropout else f
        launch, rows = _forward_of(size, dropout, f.dtype, g.dtype)
        num_rows = batch * num_frames * num_symbols
        launch((triton.cdiv(num_rows, rows), 1, 1), (f, g, out, seed), (num_rows, num_frames, num_symbols))
        ctx.save_for_backward(out)
        ctx.scale = 1 / (1 - dropout)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        batch, num_frames, num_symbols, size = out.shape
        assert grad.dtype == out.dtype
        grad = grad.contiguous()
        num_blocks = triton.cdiv(num_frames, FRAMES)
        grad_f = torch.empty((batch, num_frames, size), dtype=out.dtype, device=out.device)
        sums = torch.empty((num_blocks, batch, num_symbols, size), dtype=torch.float32, device=out.device)
        launch, columns = _backward_of(size, max(16, triton.next_power_of_2(num_symbols)), ctx.scale, out.dtype)
        grid = (triton.cdiv(size, columns), num_blocks, batch)
        launch(grid, (out, grad, grad_f, sums), (num_frames, num_symbols))
        return grad_f, sums.sum(0).to(out.dtype), None


@functools.cache
def _forward_of(size, dropout, *dtypes):
    """The launch of _forward, and how many rows a program takes."""
    part = triton.cdiv(size, PARTS.value)
    columns = triton.next_power_of_2(part)
    rows = max(1, 1024 // columns)
    constants = {"THRESHOLD": round(dropout * LEVELS), "SCALE": 1 / (1 - dropout)}
    return Launch(_forward, **constants, SIZE=size, PART=part, ROWS=rows, COLUMNS=columns), rows


@functools.cache
def _backward_of(size, symbols, scale, dtype):
    """The launch of _backward, and how many columns a program takes."""
    columns = max(16, min(4096 // symbols, triton.next_power_of_2(size)))
    constants = {"SCALE": scale, "SIZE": size, "FRAMES": FRAMES, "SYMBOLS": symbols, "COLUMNS": columns}
    return Launch(_backward, **constants, num_warps=min(16, max(4, symbols * columns // 1024))), columns


# Lengths differ from batch to batch, and a kernel that is compiled again would stop training for a second.
@triton.jit(do_not_specialize=["num_rows", "num_frames", "num_symbols"])
def _forward(
    f, g, out, seed, num_rows, num_frames, num_symbols,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    frame = row // num_symbols
    symbol = frame // num_frames * num_symbols + row % num_symbols
    column = tl.arange(0, COLUMNS)
    if THRESHOLD > 0:
        words = tl.randint4x(tl.load(seed), row[:, None] * PART + column[None, :])
    for part in tl.static_range(PARTS):
        at = part * PART + column
        mask = (row < num_rows)[:, None] & ((column < PART) & (at < SIZE))[None, :]
        x = tl.load(f + frame[:, None] * SIZE + at[None, :], mask=mask, other=0).to(tl.float32)
        x += tl.load(g + symbol[:, None] * SIZE + at[None, :], mask=mask, other=0).to(tl.float32)
        # NaN is not <= 0 and stays: the loss scale waits for it.
        x = tl.where(x <= 0, 0.0, x)
        if THRESHOLD > 0:
            bits = (words[part // 2] >> (part % 2 * 16)) & 0xFFFF
            x = tl.where(bits >= THRESHOLD, x * SCALE, 0.0)
        address = out + row.to(tl.int64)[:, None] * SIZE + at[None, :]
        tl.store(address, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_frames", "num_symbols"])
def _backward(
    out, grad, grad_f, sums, num_frames, num_symbols,
    SCALE: tl.constexpr, SIZE: tl.constexpr, FRAMES: tl.constexpr, SYMBOLS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    u = tl.arange(0, SYMBOLS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block, b = tl.program_id(1), tl.program_id(2)
    mask = (u < num_symbols)[:, None] & (column < SIZE)[None, :]
    tile = u[:, None] * SIZE + column[None, :]
    total = tl.zeros((SYMBOLS, COLUMNS), tl.float32)
    for t in tl.range(block * FRAMES, tl.minimum(block * FRAMES + FRAMES, num_frames), num_stages=3):
        frame = b * num_frames + t
        start = frame.to(tl.int64) * num_symbols * SIZE
        value = tl.load(out + start + tile, mask=mask, other=0)
        x = tl.load(grad + start + tile, mask=mask, other=0).to(tl.float32)
        x = tl.where(value <= 0, 0.0, x)
        total += x
        tl.store(grad_f + frame * SIZE + column, (tl.sum(x, 0) * SCALE).to(grad_f.dtype.element_ty), mask=column < SIZE)
    start = (block * tl.num_programs(2) + b).to(tl.int64) * num_symbols * SIZE
    tl.store(sums + start + tile, total * SCALE, mask=mask)
