"""Attention with sliding windows, sinks and packed sequences, in what torch has built in.

Without any of these it is torch's scaled_dot_product_attention. With them it is the flash kernel that torch ships,
called below its public function because that takes no window and returns no log-sum-exp. A sink is a logit without a
value: with lse the log-sum-exp of a query's scores,

    lse' = log(exp(lse) + exp(sink)),    out' = out exp(lse - lse'),

and the flash backward, given out' and lse', computes the gradients of queries, keys and values as they are: it makes
the probabilities anew from lse' and takes the row sum of grad out' from each. The sink's own gradient is minus that row
sum times its probability, exp(sink - lse'). On a CPU all of it is plain masked attention.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe.kernels.sinks import add_sinks_, sink_gradient


class Sequences(NamedTuple):
    """Places of sequences among the tokens. bounds: int32 [n + 1] on the device, the start of each sequence and the end
    of the last one, of packed ones; None for sequences of one length. Bounds at the end may repeat."""

    length: int
    bounds: torch.Tensor | None = None


def attend(q, k, v, sequences: Sequences, window: int = 0, sinks=None):
    """Causal attention [t, heads, d] of q [t, heads, d], k and v [t, kv heads, d].

    A token sees no token of another sequence. window: tokens that it sees, itself included; 0 for all. sinks: [heads],
    a further logit of each head's softmax, or None.
    """
    if not q.is_cuda:
        return _plain(q, k, v, sequences, window, sinks)
    if not window and sinks is None and sequences.bounds is None:
        q, k, v = (x.view(-1, sequences.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[3])
    return _Flash.apply(q, k, v, sinks, sequences.bounds, sequences.length, window)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, bounds, length, window):
        shapes = (-1, length) if bounds is None else (-1,)
        q, k, v = (x.view(*shapes, *x.shape[1:]) for x in (q, k, v))
        ctx.further = (bounds, bounds, length, length, 0.0, True)
        # Of a window of w tokens w - 1 are to the left.
        ctx.window = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        out, lse, *rng = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.further, False, **ctx.window)[:4]
        if sinks is not None:
            lse = add_sinks_(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, *rng, sinks)
        return out.view(-1, *out.shape[-2:])

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *rng, sinks = ctx.saved_tensors
        grad = grad.contiguous().view_as(out)
        grads = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *ctx.further, *rng, **ctx.window)
        grad_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        return *(x.view(-1, *x.shape[-2:]) for x in grads), grad_sinks, None, None, None


def _plain(q, k, v, sequences, window, sinks):
    tokens, heads, dim = q.shape
    place = torch.arange(tokens, device=q.device)
    if sequences.bounds is None:
        sequence = place // sequences.length
    else:
        sequence = torch.searchsorted(sequences.bounds, place, right=True)
    distance = place[:, None] - place[None, :]
    hidden = (distance < 0) | (sequence[:, None] != sequence[None, :])
    if window:
        hidden = hidden | (distance >= window)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1, output_size=heads) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * dim**-0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(heads, tokens, 1)), -1)
    weights = scores.softmax(-1)[..., :tokens]
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
