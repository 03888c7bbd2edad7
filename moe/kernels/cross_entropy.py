"""Cross-entropy of a large vocabulary: each row of logits becomes its gradient in place, in two passes over memory."""

import functools

import torch

from graph_worth import Launch
from moe.kernels import in_triton, tl, triton

BLOCK, NUM_WARPS = 4096, 8


def cross_entropy_(logits, targets, losses, scale: float):
    """Fill losses FP32 [t] with each row's cross-entropy, and logits [t, vocab] with its gradient times scale."""
    if in_triton(logits):
        vocab = logits.shape[1]
        _launch(vocab, scale, logits.dtype)((logits.shape[0], 1, 1), (logits, targets, losses))
        return
    log_p = logits.float().log_softmax(-1)
    losses.copy_(-log_p.gather(1, targets[:, None])[:, 0])
    one_hot = torch.zeros_like(log_p).scatter(1, targets[:, None], 1.0)
    logits.copy_((log_p.exp() - one_hot) * scale)


@functools.cache
def _launch(vocab, scale, dtype):
    return Launch(_kernel, vocab, scale, min(BLOCK, triton.next_power_of_2(vocab)), num_warps=NUM_WARPS)


if triton:

    @triton.jit
    def _kernel(logits, targets, losses, vocab: tl.constexpr, scale: tl.constexpr, block: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        row, target = logits + token * vocab, tl.load(targets + token)
        largest = tl.full((block,), -float("inf"), tl.float32)
        total = tl.zeros((block,), tl.float32)
        for first in range(0, vocab, block):
            column = first + tl.arange(0, block)
            values = tl.load(row + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            bound = tl.maximum(largest, values, tl.PropagateNan.ALL)
            # A lane that has seen nothing but -inf has no number yet.
            kept = tl.where(largest == -float("inf"), 0.0, total * tl.exp(largest - bound))
            total = kept + tl.where(values == -float("inf"), 0.0, tl.exp(values - bound))
            largest = bound
        top = tl.max(largest, axis=0)
        sums = tl.where(largest == -float("inf"), 0.0, total * tl.exp(largest - top))
        log_sum = top + tl.log(tl.sum(sums, axis=0))
        tl.store(losses + token, log_sum - tl.load(row + target).to(tl.float32))
        tl.debug_barrier()  # the target's logit is read before a thread overwrites it
        for first in range(0, vocab, block):
            column = first + tl.arange(0, block)
            inside = column < vocab
            values = tl.load(row + column, mask=inside, other=-float("inf")).to(tl.float32)
            grad = (tl.exp(values - log_sum) - tl.where(column == target, 1.0, 0.0)) * scale
            tl.store(row + column, grad.to(logits.dtype.element_ty), mask=inside)
