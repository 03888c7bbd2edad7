"""The sum of `graph_worth/measuring/tensor_hash.py` in one pass over a tensor's memory, for tensors on a GPU."""

from functools import cache

import torch
import triton
import triton.language as tl

from graph_worth.capture.triton_launch import Launch

CHUNK, BLOCK = 1 << 17, 2048  # elements of a program, and of one of its turns


@triton.jit(do_not_specialize=["n"])
def _add_hash(total, bits, n, ODD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Add the sum of (bits[i] + 1) * ((i + 1) * ODD | 1) to total [1] int64; it wraps around: in any order the same."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    sums = tl.zeros((BLOCK,), tl.int64)
    for offset in range(0, CHUNK, BLOCK):
        place = start + offset + tl.arange(0, BLOCK)
        inside = place < n
        value = tl.load(bits + place, mask=inside, other=0).to(tl.int64) + 1
        sums += tl.where(inside, value * ((place + 1) * ODD | 1), 0)
    tl.atomic_add(total, tl.sum(sums, axis=0))


@cache
def _launch(dtype, odd):
    return Launch(_add_hash, odd, CHUNK, BLOCK, num_warps=8)


def add_hash_(total: torch.Tensor, bits: torch.Tensor, odd: int) -> None:
    """total, 0-d int64, += the hash of bits [n], uint8, int16 or int32, contiguous; odd: the weights' multiplier."""
    if bits.numel():
        _launch(bits.dtype, odd)((triton.cdiv(bits.numel(), CHUNK), 1, 1), (total, bits), (bits.numel(),))
