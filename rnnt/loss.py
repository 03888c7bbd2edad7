"""The transducer loss and the joint's hidden layer, both with padding that nothing reads and lengths on the device.

    hidden = joint_hidden(f, g, dropout=0.3, training=True)                                # [B, T2, U1, J]
    losses = transducer_loss(linear(hidden), tokens, frame_lengths, token_lengths, blank)  # [B]

On CUDA both are Triton kernels (rnnt/loss_kernels.py, rnnt/joint_kernels.py), elsewhere torch operators: the code in
this file, which is also what the kernels are tested against. Nothing here reads a value on the host.

The loss is that of Graves (2012), "Sequence Transduction with Recurrent Neural Networks": -log of the summed
probability of all paths from frame 0 without labels to the last frame with all of them, where a blank goes on to the
next frame and a label stays. alpha[t, u] is the log-probability of all paths to (t, u), beta[t, u] of all that lead on
from there, its own steps included.
"""

import torch
import torch.nn.functional as F


def transducer_loss(logits, tokens, frame_lengths, token_lengths, blank: int) -> torch.Tensor:
    """-log p(tokens | logits) of each utterance, FP32 [B], in nats; differentiable in the logits.

    logits: [B, T2, U1, V] of a floating dtype, contiguous, not normalised; U1 = U + 1. tokens: int64 [B, U], classes
    that are not the blank. frame_lengths: int32 [B], at most T2; token_lengths: int32 [B], at most U. All on one
    device. What lies beyond the lengths does not matter and its gradient is exactly 0. An utterance without frames has
    loss 0.

    On CUDA the backward pass consumes the logits: it writes their gradient into their own memory. Nothing else may read
    them after it, and it runs once; a linear layer that made them needs them no more.
    """
    if logits.is_cuda:
        return _on_cuda(logits, tokens, frame_lengths, token_lengths, blank)
    return PlainTransducerLoss.apply(logits, tokens, frame_lengths, token_lengths, blank)


def joint_hidden(f, g, dropout: float, training: bool) -> torch.Tensor:
    """dropout(relu(f[:, :, None] + g[:, None])): f [B, T2, J] and g [B, U1, J] of one dtype -> [B, T2, U1, J].

    On CUDA one kernel, which draws the dropout from a seed of the default generator, rounds the probability to a
    multiple of 2**-16, and gives the same numbers run after run and in a graph.
    """
    if f.is_cuda and not torch.compiler.is_compiling():
        from rnnt.joint_kernels import JointHidden

        return JointHidden.apply(f, g, dropout if training else 0.0)
    return F.dropout(F.relu(f[:, :, None] + g[:, None]), dropout, training)


@torch.compiler.disable
def _on_cuda(*arguments):
    from rnnt.loss_kernels import TransducerLoss

    return TransducerLoss.apply(*arguments)


# ------------------------------------------------------------------------------------------------
# With torch operators


class PlainTransducerLoss(torch.autograd.Function):
    """transducer_loss with torch operators on any device; leaves the logits as they are."""

    @staticmethod
    def forward(ctx, logits, tokens, frame_lengths, token_lengths, blank):
        _, num_frames, num_symbols, _ = logits.shape
        t = torch.arange(num_frames, device=logits.device)[:, None]
        u = torch.arange(num_symbols, device=logits.device)
        num_t, num_u = frame_lengths.view(-1, 1, 1).long(), token_lengths.view(-1, 1, 1).long()
        inside = (t < num_t) & (u <= num_u)

        labels = F.pad(tokens, (0, 1)).masked_fill((u >= num_u).squeeze(1), 0)
        labels = labels[:, None, :, None].expand(-1, num_frames, -1, -1)
        x = logits.float()
        log_sums = x.logsumexp(-1)
        blanks = torch.where(inside, x[..., blank] - log_sums, -torch.inf)
        emissions = torch.where(inside & (u < num_u), x.gather(-1, labels).squeeze(-1) - log_sums, -torch.inf)

        alpha, beta = _alpha_beta(blanks, emissions, inside, _reversal(num_t, num_u, t, u))
        total = beta[:, :1, :1]
        is_last = (t == num_t - 1) & (u == num_u)
        after_blank = torch.where(is_last, 0.0, F.pad(beta, (0, 0, 0, 1), value=-torch.inf)[:, 1:])
        after_label = F.pad(beta, (0, 1), value=-torch.inf)[:, :, 1:]
        blank_occupancy = (alpha + blanks + after_blank - total).exp_().masked_fill_(~inside, 0)
        label_occupancy = (alpha + emissions + after_label - total).exp_().masked_fill_(~inside, 0)

        ctx.save_for_backward(logits, log_sums, labels, inside, blank_occupancy, label_occupancy)
        ctx.blank = blank
        return torch.where(frame_lengths > 0, -total.flatten(), 0.0)

    @staticmethod
    def backward(ctx, grad_losses):
        logits, log_sums, labels, inside, blank_occupancy, label_occupancy = ctx.saved_tensors
        grad = (logits.float() - log_sums[..., None]).exp_().mul_((blank_occupancy + label_occupancy)[..., None])
        grad[..., ctx.blank].sub_(blank_occupancy)
        grad.scatter_add_(-1, labels, -label_occupancy[..., None])
        grad.mul_(grad_losses.view(-1, 1, 1, 1)).masked_fill_(~inside[..., None], 0)
        return grad.to(logits.dtype), None, None, None, None


def _alpha_beta(blanks, emissions, inside, reversal):
    """Both [B, T2, U1]; -inf beyond the lengths.

    Seen from the end, beta follows alpha's rule: both run as one batch of 2 B lattices, diagonal after diagonal. What a
    step into a cell costs stands at that cell.
    """
    batch, num_frames, num_symbols = blanks.shape

    def turned(x):
        return x.flatten(1).gather(1, reversal).view_as(x)

    from_below = torch.cat((F.pad(blanks, (0, 0, 1, 0), value=-torch.inf)[:, :-1], turned(blanks)))
    from_left = torch.cat((F.pad(emissions, (1, 0), value=-torch.inf)[:, :, :-1], turned(emissions)))
    outside = ~inside.repeat(2, 1, 1)
    from_below = _skew(from_below.masked_fill_(outside, -torch.inf))
    from_left = _skew(from_left.masked_fill_(outside, -torch.inf))

    # A column more on the left: no path comes from there.
    cells = blanks.new_full((len(from_below), 2 * batch, num_symbols + 1), -torch.inf)
    cells[0, :batch, 1].fill_(0)
    cells[0, batch:, 1].copy_(from_below[0, batch:, 0])
    for d in range(1, len(cells)):
        before = cells[d - 1]
        torch.logaddexp(before[:, 1:] + from_below[d], before[:, :-1] + from_left[d], out=cells[d, :, 1:])

    cells = _unskew(cells[:, :, 1:], num_frames)
    return cells[:batch], turned(cells[batch:]).masked_fill_(~inside, -torch.inf)


def _reversal(num_t, num_u, t, u):
    """Where the flattened lattice [B, T2 * U1] of an utterance has the cell that (t, u) is, counted from its end."""
    return ((num_t - 1 - t).clamp(min=0) * len(u) + (num_u - u).clamp(min=0)).flatten(1)


def _skew(x):
    """[N, T2, U1] -> [T2 + U1 - 1, N, U1]: entry [d, n, u] is x[n, d - u, u], -inf where there is none."""
    _, num_frames, num_symbols = x.shape
    rows = F.pad(x.transpose(1, 2), (0, num_symbols), value=-torch.inf).flatten(1)
    return (
        rows[:, :-num_symbols].unflatten(1, (num_symbols, num_frames + num_symbols - 1)).permute(2, 0, 1).contiguous()
    )


def _unskew(x, num_frames):
    """The inverse of _skew."""
    num_symbols = x.shape[-1]
    rows = F.pad(x.permute(1, 2, 0).flatten(1), (0, num_symbols)).unflatten(1, (num_symbols, -1))
    return rows[:, :, :num_frames].transpose(1, 2)
