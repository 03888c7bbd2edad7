"""The transducer loss on CUDA: three Triton kernels and no value read on the host.

    log-probabilities   one pass over the logits: log-sum-exp of each row, log-probabilities of blank and label
    alpha and beta      one warp for each and each utterance, an anti-diagonal a step: a step takes its operands from
                        the step before, and what counts is its latency
    gradient            second pass over the logits, read and overwritten: softmax times occupancy, less the
                        occupancies of blank and label; 0 beyond the lengths

All is in base 2, which is what the hardware's exponentials and logarithms work in. Lattices are stored by
anti-diagonals, [B, T2 + U1 - 1, LANES] with cell (t, u) at [t + u, u], so that a step reads and writes neighbours.
Grids follow from shapes, lengths are read by the kernels: captures and replays need no more.
"""

import functools

import torch
import triton
import triton.language as tl

from graph_worth import Launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Stands for -inf in sums of logarithms, where -inf less -inf would be NaN.
LOW = tl.constexpr(-1e30)
TILE = 4096


class TransducerLoss(torch.autograd.Function):
    """rnnt.loss.transducer_loss on CUDA tensors."""

    @staticmethod
    def forward(ctx, logits, tokens, frame_lengths, token_lengths, blank):
        assert logits.is_contiguous() and tokens.dtype == torch.int64
        assert frame_lengths.dtype == token_lengths.dtype == torch.int32
        batch, num_frames, num_symbols, num_classes = logits.shape
        tokens = tokens.contiguous()
        lanes = max(64, triton.next_power_of_2(num_symbols))
        cells = (batch, num_frames + num_symbols - 1, lanes)
        log_sums = torch.empty(logits.shape[:3], dtype=torch.float32, device=logits.device)
        blanks, emissions = torch.full((2, *cells), LOW.value, dtype=torch.float32, device=logits.device)
        alpha, beta = torch.empty((2, *cells), dtype=torch.float32, device=logits.device)
        losses = torch.empty(batch, dtype=torch.float32, device=logits.device)
        log_probabilities, alpha_beta, _, rows = _launches(num_classes, lanes, blank, logits.dtype)
        num_rows = log_sums.numel()
        log_probabilities(
            (triton.cdiv(num_rows, rows), 1, 1),
            (logits, tokens, frame_lengths, token_lengths, log_sums, blanks, emissions),
            (num_rows, num_frames, num_symbols),
        )
        lattices = (blanks, emissions, frame_lengths, token_lengths, alpha, beta, losses)
        alpha_beta((2, batch, 1), lattices, (cells[1],))
        ctx.save_for_backward(logits, tokens, frame_lengths, token_lengths, log_sums, blanks, emissions, alpha, beta)
        ctx.blank, ctx.consumed = blank, False
        return losses

    @staticmethod
    def backward(ctx, grad_losses):
        if ctx.consumed:
            raise RuntimeError("the logits' memory holds their gradient since the first backward pass")
        ctx.consumed = True
        assert grad_losses.dtype == torch.float32
        logits, *saved = ctx.saved_tensors
        tokens, frame_lengths, token_lengths, log_sums, blanks, emissions, alpha, beta = saved
        _, num_frames, num_symbols, num_classes = logits.shape
        *_, gradient, rows = _launches(num_classes, alpha.shape[-1], ctx.blank, logits.dtype)
        num_rows = log_sums.numel()
        gradient((triton.cdiv(num_rows, rows), 1, 1), (
            logits, grad_losses.contiguous(), tokens, frame_lengths, token_lengths,
            log_sums, blanks, emissions, alpha, beta,
        ), (num_rows, num_frames, num_symbols))  # fmt: skip
        return logits.detach(), None, None, None, None


@functools.cache
def _launches(num_classes, lanes, blank, dtype):
    """Return the launches of the three kernels for logits of this dtype, and the rows of logits a program takes."""
    columns = triton.next_power_of_2(num_classes)
    # 32 numbers a thread keep enough loads in flight.
    rows, num_warps = max(1, TILE // max(columns, 128)), max(4, columns // 1024)
    constants = {"BLANK": blank, "CLASSES": num_classes, "LANES": lanes, "ROWS": rows, "COLUMNS": columns}
    return (
        Launch(_log_probabilities, **constants, num_warps=num_warps),
        Launch(_alpha_beta, LANES=lanes, num_warps=max(1, lanes // 128)),
        Launch(_gradient, **constants, num_warps=num_warps),
        rows,
    )


# Lengths differ from batch to batch, and a kernel that is compiled again would stop training for a second.
_SIZES = ["num_rows", "num_frames", "num_symbols"]


@triton.jit
def _place(row, num_rows, num_frames, num_symbols, frame_lengths, token_lengths, LANES: tl.constexpr):
    """Utterance, frame and symbol of a row of logits; the utterance's lengths, its first cell and the row's."""
    u = row % num_symbols
    t = row // num_symbols % num_frames
    b = row // num_symbols // num_frames
    num_t = tl.load(frame_lengths + b, mask=row < num_rows, other=0)
    num_u = tl.load(token_lengths + b, mask=row < num_rows, other=0)
    first = b * (num_frames + num_symbols - 1) * LANES
    return b, t, u, num_t, num_u, first, first + (t + u) * LANES + u


@triton.jit(do_not_specialize=_SIZES)
def _log_probabilities(
    logits, tokens, frame_lengths, token_lengths, log_sums, blanks, emissions,
    num_rows, num_frames, num_symbols,
    BLANK: tl.constexpr, CLASSES: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, t, u, num_t, num_u, _, cell = _place(row, num_rows, num_frames, num_symbols, frame_lengths, token_lengths, LANES)
    inside = (t < num_t) & (u <= num_u)
    labelled = inside & (u < num_u)
    start = logits + row.to(tl.int64) * CLASSES
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < CLASSES)[None, :]
    x = tl.load(start[:, None] + column[None, :], mask=mask, other=float("-inf")).to(tl.float32) * LOG2E
    label = tl.load(tokens + b * (num_symbols - 1) + u, mask=labelled, other=0)
    at_blank = tl.load(start + BLANK, mask=inside, other=0).to(tl.float32) * LOG2E
    at_label = tl.load(start + label, mask=labelled, other=0).to(tl.float32) * LOG2E
    peak = tl.where(inside, tl.max(x, 1), 0.0)
    log_sum = peak + tl.log2(tl.sum(tl.exp2(x - peak[:, None]), 1))
    tl.store(log_sums + row, log_sum, mask=inside)
    tl.store(blanks + cell, at_blank - log_sum, mask=inside)
    tl.store(emissions + cell, at_label - log_sum, mask=labelled)


@triton.jit
def _log_add(a, b):
    return tl.maximum(a, b) + tl.log2(1.0 + tl.exp2(-tl.abs(a - b)))


@triton.jit(do_not_specialize=["num_diagonals"])
def _alpha_beta(
    blanks, emissions, frame_lengths, token_lengths, alpha, beta, losses, num_diagonals, LANES: tl.constexpr
):  # fmt: skip
    # No masks: what no utterance has is LOW in blanks and emissions, so nothing goes on from there.
    b = tl.program_id(1)
    num_t = tl.load(frame_lengths + b)
    num_u = tl.load(token_lengths + b)
    u = tl.arange(0, LANES)
    lane = b * num_diagonals * LANES + u
    last = num_t + num_u - 1
    if tl.program_id(0) == 0:
        left = tl.maximum(u - 1, 0)
        state = tl.where(u == 0, 0.0, LOW)
        tl.store(alpha + lane, state)
        for d in tl.range(0, last, num_stages=4):
            by_blank = state + tl.load(blanks + lane + d * LANES)
            by_label = state + tl.load(emissions + lane + d * LANES)
            state = _log_add(by_blank, tl.where(u == 0, LOW, tl.gather(by_label, left, 0)))
            tl.store(alpha + lane + (d + 1) * LANES, state)
    else:
        right = tl.minimum(u + 1, LANES - 1)
        # After one more blank than there are cells: all paths end there.
        state = tl.where(u == num_u, 0.0, LOW)
        for i in tl.range(0, last + 1, num_stages=4):
            d = last - i
            by_blank = state + tl.load(blanks + lane + d * LANES)
            by_label = tl.gather(state, right, 0) + tl.load(emissions + lane + d * LANES)
            state = _log_add(by_blank, by_label)
            tl.store(beta + lane + d * LANES, state)
        total = tl.sum(tl.where(u == 0, state, 0.0), 0)
        tl.store(losses + b, tl.where(num_t > 0, -total * LN2, 0.0))


@triton.jit(do_not_specialize=_SIZES)
def _gradient(
    logits, grad_losses, tokens, frame_lengths, token_lengths, log_sums, blanks, emissions, alpha, beta,
    num_rows, num_frames, num_symbols,
    BLANK: tl.constexpr, CLASSES: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, t, u, num_t, num_u, first, cell = _place(
        row, num_rows, num_frames, num_symbols, frame_lengths, token_lengths, LANES
    )
    inside = (t < num_t) & (u <= num_u)
    labelled = inside & (u < num_u)
    address = logits + row.to(tl.int64)[:, None] * CLASSES + tl.arange(0, COLUMNS)[None, :]
    column = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(address, mask=inside[:, None] & (column < CLASSES), other=0).to(tl.float32) * LOG2E

    reached = tl.load(alpha + cell, mask=inside, other=LOW) - tl.load(beta + first, mask=inside, other=0)
    # From the last cell a blank leads to the end of all paths, from the rest of the last frame it leads nowhere.
    at_end = tl.where(u == num_u, 0.0, LOW)
    after_blank = tl.where(t + 1 < num_t, tl.load(beta + cell + LANES, mask=inside & (t + 1 < num_t), other=0), at_end)
    after_label = tl.load(beta + cell + LANES + 1, mask=labelled, other=LOW)
    scale = tl.load(grad_losses + b, mask=inside, other=0)
    by_blank = scale * tl.exp2(reached + tl.load(blanks + cell, mask=inside, other=0) + after_blank)
    by_label = scale * tl.exp2(reached + tl.load(emissions + cell, mask=labelled, other=0) + after_label)
    label = tl.load(tokens + b * (num_symbols - 1) + u, mask=labelled, other=-1)

    softmax = tl.exp2(x - tl.load(log_sums + row, mask=inside, other=0)[:, None])
    grad = softmax * (by_blank + by_label)[:, None]
    grad -= tl.where(column == BLANK, by_blank[:, None], 0.0)
    grad -= tl.where(column == label[:, None], by_label[:, None], 0.0)
    # Beyond the lengths scale is 0, and so are both occupancies.
    tl.store(address, grad.to(logits.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < CLASSES))
