"""The experts' weight gradients, written or added to buffers of fixed addresses.

torch._grouped_mm returns a new tensor, which a pass of its own would copy or add to the buffer: of 128 experts that is
as much memory traffic as the products themselves. It also leaves open what an expert without rows gets, here zeros.
Each element is summed over the expert's rows in their order, however many rows the others have: runs repeat bit for
bit, and rows in static buffers give what the same rows give without.
"""

import functools

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton

# x's columns, grad's columns, and the rows taken at a time: the fastest of fifteen on an H100.
TILE_M, TILE_N, TILE_K = 128, 128, 32
NUM_WARPS, NUM_STAGES = 4, 5
SMALL = (16, 16, 16)
# Rows and columns that a program of the sums of rows takes at a time.
SUM_ROWS, SUM_COLUMNS = 32, 128


def grouped_weight_gradient_(out, x, grad, offsets, adds: bool):
    """Put x^T grad of each expert's rows into out [experts, m, n], contiguous, or add it to what out holds.

    x [rows, m] and grad [rows, n] have out's dtype and are ordered by expert; offsets int32 [experts], the end of each
    expert's rows, on the device.
    """
    if not in_triton(x):
        products = torch._grouped_mm(x.t(), grad, offs=offsets)
        return out.add_(products) if adds else out.copy_(products)
    num_experts, m, n = out.shape
    tiles = SMALL if m * n < TILE_M * TILE_N else (TILE_M, TILE_N, TILE_K)
    grid = (triton.cdiv(m, tiles[0]) * triton.cdiv(n, tiles[1]), num_experts, 1)
    _launch(m, n, adds, tiles, out.dtype)(grid, (x.contiguous(), grad.contiguous(), offsets, out))
    return out


def grouped_sums(grad, offsets, expert_of_row):
    """The sum of each expert's rows of grad [rows, n], in its dtype: [experts, n].

    grad is ordered by expert; rows behind the last expert's are undefined and belong to nobody. offsets int32
    [experts], the end of each expert's rows, on the device; expert_of_row int32 [rows].
    """
    num_experts, n = len(offsets), grad.shape[1]
    if not in_triton(grad):
        row = torch.arange(len(grad), dtype=torch.int32, device=grad.device)
        # The last sum is that of rows which belong to nobody.
        expert = expert_of_row.masked_fill(row >= offsets[-1], num_experts)
        sums = torch.zeros(num_experts + 1, n, device=grad.device).index_add_(0, expert, grad.float())
        return sums[:-1].to(grad.dtype)
    out = torch.empty(num_experts, n, dtype=grad.dtype, device=grad.device)
    _sums_launch(n, grad.dtype)((triton.cdiv(n, SUM_COLUMNS), num_experts, 1), (grad.contiguous(), offsets, out))
    return out


@functools.cache
def _sums_launch(n, dtype):
    return Launch(_sums_kernel, n, SUM_ROWS, SUM_COLUMNS, num_warps=4)


@functools.cache
def _launch(m, n, adds, tiles, dtype):
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES} if tiles != SMALL else {"num_warps": 4}
    return Launch(_kernel, m, n, adds, *tiles, **options)


if triton:

    @triton.jit
    def _kernel(
        x, grad, offsets, out, m: tl.constexpr, n: tl.constexpr, adds: tl.constexpr,
        tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
    ):  # fmt: skip
        expert = tl.program_id(1)
        num_columns: tl.constexpr = (n + tile_n - 1) // tile_n
        i = tl.program_id(0) // num_columns * tile_m + tl.arange(0, tile_m)
        j = tl.program_id(0) % num_columns * tile_n + tl.arange(0, tile_n)
        # Columns beyond the edge are read from the start and not stored.
        i_read = tl.max_contiguous(tl.multiple_of(tl.where(i < m, i, 0), 8), 8) if m % tile_m else i
        j_read = tl.max_contiguous(tl.multiple_of(tl.where(j < n, j, 0), 8), 8) if n % tile_n else j
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        total = tl.zeros((tile_m, tile_n), tl.float32)
        for first in range(start, end, tile_k):
            row = first + tl.arange(0, tile_k)
            inside = (row < end)[:, None]
            place = row.to(tl.int64)[:, None]
            a = tl.load(x + place * m + i_read[None, :], mask=inside, other=0.0)
            b = tl.load(grad + place * n + j_read[None, :], mask=inside, other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision="ieee")  # of FP32; BF16 has no other
        target = out + expert.to(tl.int64) * m * n + i.to(tl.int64)[:, None] * n + j[None, :]
        inside = (i < m)[:, None] & (j < n)[None, :]
        if adds:
            total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _sums_kernel(grad, offsets, out, n: tl.constexpr, num_rows: tl.constexpr, num_columns: tl.constexpr):
        expert = tl.program_id(1)
        j = tl.program_id(0) * num_columns + tl.arange(0, num_columns)
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        total = tl.zeros((num_rows, num_columns), tl.float32)
        for first in range(start, end, num_rows):
            row = first + tl.arange(0, num_rows)
            place = row.to(tl.int64)[:, None] * n + j[None, :]
            total += tl.load(grad + place, mask=(row < end)[:, None] & (j < n)[None, :], other=0.0).to(tl.float32)
        target = out + expert.to(tl.int64) * n + j
        tl.store(target, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=j < n)
