"""rnnt/kernels/loss: the loss in Triton against a float64 loop and against torch's operators."""

import pytest
import torch

from rnnt.loss import plain_transducer_loss, transducer_loss
from tests.helpers.transducer_reference import batch, loss_and_grad, outside, reference
from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
RAGGED = ([7, 3, 1, 5], [5, 0, 2, 3])


def kernels():
    from rnnt.kernels.loss import TransducerLoss

    return TransducerLoss


def weights_of(arguments):
    return torch.linspace(-2, 3, len(arguments[0]), device=DEVICE)


def check(arguments):
    losses, grad = loss_and_grad(kernels().apply, arguments, weights_of(arguments))
    expected_losses, expected_grad = reference(*arguments, weights_of(arguments))
    assert losses.dtype == torch.float32 and grad.dtype == arguments[0].dtype
    torch.testing.assert_close(losses.cpu(), expected_losses.float(), rtol=3e-6, atol=1e-5)
    torch.testing.assert_close(grad.cpu(), expected_grad.to(grad.dtype), rtol=2e-3, atol=1e-4)


@on_device
@pytest.mark.parametrize(
    ("frames", "labels", "vocab", "dtype"),
    [
        pytest.param(*RAGGED, 11, torch.float32, id="ragged"),
        pytest.param(*RAGGED, 11, torch.float16, id="16-bit"),
        pytest.param([1, 1], [0, 3], 8, torch.float32, id="one-frame"),
        pytest.param([3, 2], [63, 64], 5, torch.float32, id="65-of-128-lanes"),
        pytest.param([3, 2], [140, 150], 5, torch.float32, id="two-warps"),
        pytest.param([9, 12, 5], [4, 2, 3], 1024, torch.float32, id="benchmark-vocabulary"),
        pytest.param([2, 3], [1, 1], 5000, torch.float32, id="a-row-a-program"),
    ],
)
def test_against_float64(frames, labels, vocab, dtype):
    check(batch(frames, labels, vocab, dtype=dtype, device=DEVICE))


@on_device
def test_blank_is_any_class():
    logits, tokens, *lengths, _ = batch(*RAGGED, vocab=11, device=DEVICE)
    arguments = (logits, tokens + 1, *lengths, 0)
    check(arguments)


@on_device
def test_what_lies_beyond_the_lengths_is_not_read():
    logits, tokens, *lengths, blank = batch(*RAGGED, vocab=11, device=DEVICE)
    weights = weights_of((logits,))
    clean_losses, clean_grad = loss_and_grad(kernels().apply, (logits, tokens, *lengths, blank), weights)
    beyond = outside(logits, *lengths)
    dirty = logits.masked_fill(beyond[..., None], float("nan"))
    after = torch.arange(tokens.shape[1], device=DEVICE) >= lengths[1][:, None]
    losses, grad = loss_and_grad(kernels().apply, (dirty, tokens.masked_fill(after, 10**9), *lengths, blank), weights)
    assert torch.equal(losses, clean_losses) and torch.equal(grad, clean_grad)
    assert beyond.any() and grad[beyond].count_nonzero() == 0 and grad[~beyond].count_nonzero() > 0


@on_device
def test_an_utterance_without_frames_has_no_loss():
    logits, tokens, frame_lengths, *rest = batch([4, 4], [2, 2], vocab=5, device=DEVICE)
    frame_lengths[1] = 0
    losses, grad = loss_and_grad(kernels().apply, (logits, tokens, frame_lengths, *rest), torch.ones(2, device=DEVICE))
    assert losses[0] > 0 and losses[1] == 0
    assert grad[0].count_nonzero() > 0 and grad[1].count_nonzero() == 0


@on_device
def test_nan_inside_reaches_the_loss():
    logits, *rest = batch([4, 4], [2, 2], vocab=5, device=DEVICE)
    logits[1, 2, 1] = float("nan")
    losses = kernels().apply(logits, *rest)
    assert losses[0].isfinite() and losses[1].isnan()


@on_device
def test_the_gradient_takes_the_memory_of_the_logits():
    leaf, *rest = batch(*RAGGED, vocab=11, device=DEVICE)
    logits = leaf.requires_grad_() * 1.0
    losses = kernels().apply(logits, *rest)
    (grad,) = torch.autograd.grad(losses.sum(), logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="since the first backward"):
        torch.autograd.grad(losses.sum(), logits)


@on_device
def test_same_numbers_run_after_run():
    # Only on a GPU do programs run at once.
    frames, labels = ([5, 3], [4, 6]) if INTERPRETED else ([30, 21], [12, 20])
    arguments = batch(frames, labels, vocab=64, dtype=torch.float16, device=DEVICE)
    first, second = (loss_and_grad(kernels().apply, arguments, weights_of(arguments)) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_benchmark_size():
    frames, labels = [205, 205, 190, 150, 205, 33, 1, 120], [56, 40, 56, 30, 0, 12, 3, 55]
    arguments = batch(frames, labels, 1024, dtype=torch.float16, device="cuda")
    weights = weights_of(arguments)
    losses, grad = loss_and_grad(kernels().apply, arguments, weights)
    expected_losses, expected_grad = loss_and_grad(plain_transducer_loss, arguments, weights)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-3)
    # Sums of logarithms reach 2600 here, where FP32 has steps of 2e-4, in both.
    torch.testing.assert_close(grad, expected_grad, rtol=3e-2, atol=1e-4)


@pytest.mark.gpu
def test_replays_of_a_captured_loss_equal_eager():
    from graph_worth.capture.pool import Pool

    frames, labels = [40, 40, 40], [20, 20, 20]

    def step():
        # A copy, since the gradient takes its place.
        losses = transducer_loss(leaf * 1.0, *rest)
        return losses, torch.autograd.grad((losses * weights).sum(), leaf)[0]

    with torch.cuda.stream(torch.cuda.Stream()):
        logits, *rest = batch(frames, labels, 64, device="cuda")
        weights = weights_of((logits,))
        leaf = logits.clone().requires_grad_()
        step()
        pool = Pool("cuda")
        graph, (losses, grad) = pool.capture(step, static_inputs=(leaf, *rest[:3]))
        for seed in (1, 2):
            fresh = batch(frames, labels, 64, seed=seed, device="cuda")
            fresh[2].copy_(torch.tensor([40, 7 * seed, 11]))
            fresh[3].copy_(torch.tensor([3, 20, 6 * seed]))
            with torch.no_grad():
                for static, value in zip((leaf, *rest[:3]), fresh, strict=False):
                    static.copy_(value)
            graph.replay()
            expected_losses, expected_grad = loss_and_grad(kernels().apply, fresh, weights)
            assert torch.equal(losses, expected_losses) and torch.equal(grad, expected_grad)
        torch.cuda.synchronize()
        pool.release()


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
