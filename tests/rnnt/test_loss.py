"""rnnt/loss: the transducer loss against all alignments, an autograd loop and torchaudio; padding, dtypes, capture."""

import pytest
import torch

from graph_worth.capture.pool import Pool
from rnnt.loss import joint_hidden, transducer_loss
from tests.helpers.transducer_reference import batch, enumerated, loss_and_grad, outside, reference

WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])
RAGGED = ([7, 3, 1, 5], [5, 0, 2, 3])


@pytest.mark.parametrize(("frames", "labels"), [(1, 0), (1, 3), (2, 1), (4, 0), (4, 3)])
def test_all_alignments(frames, labels):
    logits, tokens, *lengths, blank = batch([frames], [labels], vocab=5)
    expected = enumerated(logits[0], tokens[0].tolist(), blank)
    torch.testing.assert_close(transducer_loss(logits, tokens, *lengths, blank)[0], expected.float())


def test_gradient_of_ragged_utterances():
    arguments = batch(*RAGGED, vocab=11)
    losses, grad = loss_and_grad(transducer_loss, arguments, WEIGHTS)
    expected_losses, expected_grad = reference(*arguments, WEIGHTS)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected_losses.float())
    torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-4, atol=2e-5)


def test_steep_and_long():
    # Most alignments are impossible here, and log-probabilities reach -1000.
    arguments = batch([30, 22], [20, 22], vocab=9, spread=16.0)
    weights = torch.ones(2)
    losses, grad = loss_and_grad(transducer_loss, arguments, weights)
    expected_losses, expected_grad = reference(*arguments, weights)
    torch.testing.assert_close(losses, expected_losses.float())
    torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_what_lies_beyond_the_lengths_does_not_matter(garbage):
    logits, tokens, *lengths, blank = batch(*RAGGED, vocab=11)
    clean_losses, clean_grad = loss_and_grad(transducer_loss, (logits, tokens, *lengths, blank), WEIGHTS)
    beyond = outside(logits, *lengths)
    dirty = logits.masked_fill(beyond[..., None], garbage)
    dirty_tokens = tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths[1][:, None], 10**9)
    losses, grad = loss_and_grad(transducer_loss, (dirty, dirty_tokens, *lengths, blank), WEIGHTS)
    assert torch.equal(losses, clean_losses) and torch.equal(grad, clean_grad)
    assert beyond.any() and grad[beyond].count_nonzero() == 0 and grad[~beyond].count_nonzero() > 0


def test_16_bit_logits(dtype=torch.float16):
    arguments = batch(*RAGGED, vocab=11, dtype=dtype)
    losses, grad = loss_and_grad(transducer_loss, arguments, WEIGHTS)
    expected_losses, expected_grad = reference(*arguments, WEIGHTS)
    assert losses.dtype == torch.float32 and grad.dtype == dtype
    # In FP32 inside: only the gradient is rounded, once.
    torch.testing.assert_close(losses, expected_losses.float())
    torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


def test_an_utterance_without_frames_has_no_loss():
    logits, tokens, frame_lengths, *rest = batch([4, 4], [2, 2], vocab=5)
    frame_lengths[1] = 0
    losses, grad = loss_and_grad(transducer_loss, (logits, tokens, frame_lengths, *rest), torch.ones(2))
    assert losses[0] > 0 and losses[1] == 0
    assert grad[0].count_nonzero() > 0 and grad[1].count_nonzero() == 0


def test_nan_inside_reaches_the_loss():
    logits, *rest = batch([4, 4], [2, 2], vocab=5)
    logits[1, 2, 1] = float("nan")
    losses = transducer_loss(logits, *rest)
    assert losses[0].isfinite() and losses[1].isnan()


def test_replays_of_a_captured_loss_equal_eager():
    logits, *rest = arguments = batch(*RAGGED, vocab=11)
    pool = Pool("cpu")
    leaf = logits.clone().requires_grad_()

    def step():
        losses = transducer_loss(leaf, *rest)
        return losses, torch.autograd.grad((losses * WEIGHTS).sum(), leaf)[0]

    graph, (losses, grad) = pool.capture(step, static_inputs=(leaf, *rest[:3]))
    seen = []
    for seed, frames, labels in ((1, [7, 6, 7, 1], [5, 5, 1, 0]), (2, [2, 7, 4, 3], [3, 2, 5, 1])):
        fresh = batch([7, 7, 7, 7], [5, 5, 5, 5], vocab=11, seed=seed)
        fresh[2].copy_(torch.tensor(frames))
        fresh[3].copy_(torch.tensor(labels))
        with torch.no_grad():
            for static, value in zip((leaf, *rest[:3]), fresh, strict=False):
                static.copy_(value)
        graph.replay()
        expected_losses, expected_grad = loss_and_grad(transducer_loss, fresh, WEIGHTS)
        assert torch.equal(losses, expected_losses) and torch.equal(grad, expected_grad)
        seen.append(losses.clone())
    assert not torch.equal(*seen) and len(arguments) == 5
    pool.release()


# Where there is a GPU there is a torchaudio that loads beside torch; its wheel does not load beside a CPU torch.
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchaudio(device):
    """Not with one frame or no label, where its CUDA kernel differs from the reference that ours is checked against."""
    try:
        from torchaudio.functional import rnnt_loss
    except (ImportError, OSError) as error:
        pytest.skip(f"torchaudio with rnnt_loss cannot be imported: {str(error).splitlines()[0]}")
    logits, tokens, *lengths, blank = batch([7, 3, 4, 5], [5, 1, 2, 3], vocab=11, device=device)
    theirs = logits.clone().requires_grad_()
    expected = rnnt_loss(theirs, tokens.int(), *lengths, blank=blank, reduction="none")
    weights = WEIGHTS.to(device)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), theirs)
    losses, grad = loss_and_grad(transducer_loss, (logits, tokens, *lengths, blank), weights)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=2e-5)


# ------------------------------------------------------------------------------------------------
# The joint's hidden layer


def test_joint_hidden():
    f, g = torch.randn(2, 3, 6), torch.randn(2, 4, 6)
    hidden = joint_hidden(f, g, 0.3, training=False)
    assert hidden.shape == (2, 3, 4, 6)
    assert torch.equal(hidden[1, 2, 3], (f[1, 2] + g[1, 3]).clamp(min=0))
