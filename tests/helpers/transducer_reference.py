"""The transducer loss in float64, twice: over all alignments one by one, and as a loop over cells under autograd."""

import itertools

import torch


def enumerated(logits, tokens, blank):
    """-log p of one utterance: logits [T, U + 1, V], tokens a list of U labels. For very small T and U."""
    num_frames = len(logits)
    log_probs = logits.double().log_softmax(-1)
    paths = []
    # The last step is the blank out of the last frame; labels stand anywhere before it.
    for places in itertools.combinations(range(num_frames - 1 + len(tokens)), len(tokens)):
        t = u = 0
        steps = []
        for step in range(num_frames + len(tokens)):
            if step in places:
                steps.append(log_probs[t, u, tokens[u]])
                u += 1
            else:
                steps.append(log_probs[t, u, blank])
                t += 1
        paths.append(sum(steps))
    return -torch.stack(paths).logsumexp(0)


def looped(logits, tokens, frame_lengths, token_lengths, blank):
    """Losses [B] of a padded batch, differentiable, cell after cell."""
    log_probs = logits.double().log_softmax(-1)
    losses = []
    for b, (num_frames, num_labels) in enumerate(zip(frame_lengths.tolist(), token_lengths.tolist(), strict=True)):
        alpha = {}
        for t, u in itertools.product(range(num_frames), range(num_labels + 1)):
            ways = []
            if t > 0:
                ways.append(alpha[t - 1, u] + log_probs[b, t - 1, u, blank])
            if u > 0:
                ways.append(alpha[t, u - 1] + log_probs[b, t, u - 1, tokens[b, u - 1]])
            alpha[t, u] = torch.stack(ways).logsumexp(0) if ways else log_probs.new_zeros(())
        losses.append(-alpha[num_frames - 1, num_labels] - log_probs[b, num_frames - 1, num_labels, blank])
    return torch.stack(losses)


def reference(logits, tokens, frame_lengths, token_lengths, blank, weights):
    """(losses [B], gradient of their weighted sum), float64, on the host."""
    logits = logits.detach().double().cpu().requires_grad_()
    losses = looped(logits, tokens.cpu(), frame_lengths.cpu(), token_lengths.cpu(), blank)
    (grad,) = torch.autograd.grad((losses * weights.cpu().double()).sum(), logits)
    return losses.detach(), grad


def batch(frames, labels, vocab, dtype=torch.float32, seed=0, spread=2.0, device="cpu"):
    """Arguments of transducer_loss for utterances of these lengths; the blank is the last class."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(frames), max(frames), max(labels) + 1, vocab)
    logits = (torch.randn(shape, generator=generator) * spread).to(dtype)
    tokens = torch.randint(vocab - 1, (len(frames), max(labels)), generator=generator)
    lengths = (torch.tensor(lengths, dtype=torch.int32) for lengths in (frames, labels))
    return *(tensor.to(device) for tensor in (logits, tokens, *lengths)), vocab - 1


def outside(logits, frame_lengths, token_lengths):
    """Boolean [B, T2, U1]: rows beyond the lengths."""
    t = torch.arange(logits.shape[1], device=logits.device)[:, None]
    u = torch.arange(logits.shape[2], device=logits.device)
    return (t >= frame_lengths.view(-1, 1, 1)) | (u > token_lengths.view(-1, 1, 1))


def loss_and_grad(function, arguments, weights):
    """Losses [B] of a function of (logits, ...), and the gradient of their weighted sum by the logits."""
    logits = arguments[0].detach().clone().requires_grad_()
    losses = function(logits, *arguments[1:])
    (grad,) = torch.autograd.grad((losses * weights).sum(), logits)
    return losses.detach(), grad
