"""The gradient of the embedding's rows, added to FP32 main_grad: only the rows that a microbatch has are touched.

torch makes a dense 16-bit gradient of all rows and adds that: on an H200 0.5 ms for 2,048 tokens and 6,400 rows of
12,288 numbers, nearly all of it zeros. A form of _add_rows that looked at all tokens for every block took 0.41 ms.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from graph_worth import Launch

ROWS, COLUMNS = 64, 64  # that a program sums for
TOKENS, ALL_TOKENS = 64, 2048  # that it looks at in one go; that _look_for does


@triton.jit
def _look_for(is_named, named, n, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """is_named [blocks]: 1 where a token names one of a block's ROWS rows, else 0."""
    first = tl.program_id(0) * ROWS
    hits = tl.zeros((TOKENS,), tl.int32)
    for start in range(0, n, TOKENS):
        at = start + tl.arange(0, TOKENS)
        row = tl.load(named + at, mask=at < n, other=-1)
        hits |= ((row >= first) & (row < first + ROWS)).to(tl.int32)
    tl.store(is_named + tl.program_id(0), tl.max(hits, axis=0))


@triton.jit
def _add_rows(
    total, is_named, named, grad, n, hidden: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """total [rows, hidden] FP32 += the sums of grad [n, hidden] over the tokens that name each row; one order of sums.

    A program sums ROWS rows and COLUMNS columns, as a product of ones and zeros with the gradients. It ends at once
    where no token names its rows, and skips tokens that name other rows.
    """
    if tl.load(is_named + tl.program_id(1)) == 0:
        return
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    times = tl.zeros((ROWS,), tl.int32)
    for start in range(0, n, TOKENS):
        at = start + tl.arange(0, TOKENS)
        row = tl.load(named + at, mask=at < n, other=-1)
        inside = (row >= first) & (row < first + ROWS)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            names = rows[:, None] == row[None, :]
            wanted = inside[:, None] & (columns < hidden)[None, :]
            values = tl.load(grad + at[:, None].to(tl.int64) * hidden + columns[None, :], mask=wanted, other=0.0)
            sums = tl.dot(names.to(values.dtype), values, sums)
            times += tl.sum(names.to(tl.int32), axis=1)
    pointers = total + rows[:, None].to(tl.int64) * hidden + columns[None, :]
    wanted = (times > 0)[:, None] & (columns < hidden)[None, :]
    tl.store(pointers, tl.load(pointers, mask=wanted, other=0.0) + sums, mask=wanted)


@lru_cache
def _launches(n, hidden, dtype):
    add = Launch(_add_rows, n, hidden, ROWS, COLUMNS, TOKENS, num_warps=4)
    return Launch(_look_for, n, ROWS, ALL_TOKENS, num_warps=4), add


def add_rows_(total: torch.Tensor, tokens: torch.Tensor, grad: torch.Tensor) -> None:
    """total [rows, hidden] FP32 += grad [..., hidden], 16-bit, in the rows that `tokens` [...], int64 below rows, name.

    Bit for bit the same at each call. An infinite or NaN gradient makes all rows of its block of 64 NaN that are named.
    """
    assert tokens.dtype == torch.int64
    grad, tokens = grad.contiguous(), tokens.contiguous()
    rows, hidden = total.shape
    blocks = triton.cdiv(rows, ROWS)
    is_named = torch.empty(blocks, dtype=torch.int32, device=total.device)
    look_for, add = _launches(tokens.numel(), hidden, grad.dtype)
    look_for((blocks, 1, 1), (is_named, tokens))
    add((triton.cdiv(hidden, COLUMNS), blocks, 1), (total, is_named, tokens, grad))
