"""The transducer loss and the joint's hidden layer. Neither reads padding, and neither reads a value on the host.

    hidden = joint_hidden(f, g, dropout=0.3, training=True)                                # [B, T2, U1, J]
    losses = transducer_loss(linear(hidden), tokens, frame_lengths, token_lengths, blank)  # [B]

On CUDA both are Triton kernels (rnnt/kernels/loss.py, rnnt/kernels/joint.py), elsewhere the torch operators of this
file, which the kernels are tested against.

Source: Graves (2012), "Sequence Transduction with Recurrent Neural Networks". The loss is -log of the summed
probability of all paths from frame 0 without labels to the last frame with all labels; a blank goes on to the next
frame, a label stays. alpha[t, u] is the log-probability of all paths to (t, u), beta[t, u] (in the kernels) of all
paths on from there.
"""

import torch
import torch.nn.functional as F


def transducer_loss(logits, tokens, frame_lengths, token_lengths, blank: int) -> torch.Tensor:
    """-log p(tokens | logits) of each utterance, FP32 [B], in nats; differentiable in the logits.

    logits: [B, T2, U1, V] of a floating dtype, contiguous, not normalised; U1 = U + 1. tokens: int64 [B, U], classes
    that are not the blank. frame_lengths: int32 [B], at most T2; token_lengths: int32 [B], at most U. All on one
    device. Values beyond the lengths do not matter, and their gradient is exactly 0. An utterance without frames has
    loss 0.

    On CUDA the backward pass writes the logits' gradient into the logits' memory: it runs once, and nothing else may
    read the logits after it.
    """
    if logits.is_cuda:
        from rnnt.kernels.loss import TransducerLoss

        return TransducerLoss.apply(logits, tokens, frame_lengths, token_lengths, blank)
    return plain_transducer_loss(logits, tokens, frame_lengths, token_lengths, blank)


def joint_hidden(f, g, dropout: float, training: bool) -> torch.Tensor:
    """dropout(relu(f[:, :, None] + g[:, None])): f [B, T2, J] and g [B, U1, J] of one dtype -> [B, T2, U1, J].

    On CUDA it is one kernel. Its dropout is drawn from a seed of the default generator, with a probability rounded to a
    multiple of 2**-16, and is the same run after run and in a graph.
    """
    if f.is_cuda:
        from rnnt.kernels.joint import JointHidden

        return JointHidden.apply(f, g, dropout if training else 0.0)
    return F.dropout(F.relu(f[:, :, None] + g[:, None]), dropout, training)


def plain_transducer_loss(logits, tokens, frame_lengths, token_lengths, blank: int) -> torch.Tensor:
    """transducer_loss with torch operators on any device; leaves the logits as they are.

    It goes label after label. A path at (t, u) has emitted label u at some frame s <= t and blanks from s to t, so
    alpha[t, u] is a running log-sum-exp over s. Cells beyond an utterance's end are computed, too, and not used.
    """
    num_frames, num_symbols = logits.shape[1:3]
    t = torch.arange(num_frames, device=logits.device)[:, None]
    u = torch.arange(num_symbols, device=logits.device)
    num_t, num_u = frame_lengths.view(-1, 1).long(), token_lengths.view(-1, 1).long()
    outside = (t >= num_t[:, None]) | (u > num_u[:, None])
    log_probs = logits.float().masked_fill(outside[..., None], 0).log_softmax(-1)
    blanks = log_probs[..., blank]
    labels = F.pad(tokens, (0, 1)).masked_fill(u >= num_u, 0)
    emissions = log_probs.gather(-1, labels[:, None, :, None].expand(-1, num_frames, -1, -1)).squeeze(-1)

    # Log-probability of all blanks before each frame, at one label.
    passed = F.pad(blanks.cumsum(1), (0, 0, 1, -1))
    alpha = [passed[..., 0]]
    for label in range(1, num_symbols):
        emitted = alpha[-1] + emissions[..., label - 1] - passed[..., label]
        alpha.append(passed[..., label] + emitted.logcumsumexp(1))
    # The last blank leads out of the last cell.
    ends = (torch.stack(alpha, 2) + blanks).flatten(1)
    total = ends.gather(1, (num_t - 1).clamp(min=0) * num_symbols + num_u).squeeze(1)
    return torch.where(frame_lengths > 0, -total, 0.0)
