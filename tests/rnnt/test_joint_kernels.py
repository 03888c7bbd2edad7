"""rnnt/kernels/joint: the joint's hidden layer in Triton against torch's operators."""

import pytest
import torch

from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted


def hidden_of(f, g, dropout):
    from rnnt.kernels.joint import JointHidden

    return JointHidden.apply(f, g, dropout)


def operands(batch, frames, symbols, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(batch, frames, size, generator=generator).to(DEVICE, dtype).requires_grad_()
    g = torch.randn(batch, symbols, size, generator=generator).to(DEVICE, dtype).requires_grad_()
    return f, g, torch.randn(batch, frames, symbols, size, generator=generator).to(DEVICE, dtype)


SHAPES = [(1, 1, 1, 1), (2, 18, 5, 40), (3, 33, 20, 64), (1, 4, 70, 24), (2, 5, 3, 13)]


@on_device
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_passes_where_the_output_is_positive(shape, dropout):
    f, g, grad = operands(*shape)
    hidden = hidden_of(f, g, dropout)
    kept = (hidden > 0).detach()
    expected = torch.relu(f[:, :, None] + g[:, None]) * kept / (1 - dropout)
    torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(out, (f, g), grad) for out in (hidden, expected))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


@on_device
def test_16_bit(dtype=torch.float16):
    f, g, grad = operands(2, 18, 5, 40, dtype)
    hidden = hidden_of(f, g, 0.3)
    kept = (hidden > 0).detach()
    exact_f, exact_g = (x.detach().double().requires_grad_() for x in (f, g))
    expected = torch.relu(exact_f[:, :, None] + exact_g[:, None]) * kept / 0.7
    eps = torch.finfo(dtype).eps
    assert hidden.dtype == dtype
    torch.testing.assert_close(hidden.double(), expected, rtol=eps, atol=0)
    ours = torch.autograd.grad(hidden, (f, g), grad)
    theirs = torch.autograd.grad(expected, (exact_f, exact_g), grad.double())
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == dtype
        # Summed in FP32 and rounded once.
        torch.testing.assert_close(our.double(), their, rtol=eps, atol=1e-5)


@on_device
def test_dropped_share_in_each_part_and_row(dropout=0.3):
    f, g = torch.ones(2, 30, 64, device=DEVICE), torch.ones(2, 20, 64, device=DEVICE)
    dropped = (hidden_of(f, g, dropout) == 0).double()
    num_elements = dropped.numel()
    deviation = (dropout * (1 - dropout)) ** 0.5
    assert abs(dropped.mean() - dropout) < 4 * deviation / num_elements**0.5
    for dims in ((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 3)):
        shares = dropped.mean(dims)
        bound = 4.5 * deviation / (num_elements / len(shares)) ** 0.5
        assert ((shares - dropout).abs() < bound).all(), dims
    # Neighbours, and elements that share a draw of Philox, are independent.
    for shift in (1, 8, 16, 32):
        both = (dropped * dropped.roll(shift, -1)).mean()
        assert abs(both - dropout**2) < 5 * deviation / num_elements**0.5, shift


@on_device
def test_every_call_draws_anew_and_the_seed_repeats_it():
    f, g, _ = operands(2, 9, 4, 32)
    torch.manual_seed(3)
    first, second = hidden_of(f, g, 0.3), hidden_of(f, g, 0.3)
    torch.manual_seed(3)
    again = hidden_of(f, g, 0.3)
    assert torch.equal(first, again) and not torch.equal(first, second)


@on_device
def test_nan_stays():
    f, g, _ = operands(1, 2, 2, 8)
    with torch.no_grad():
        f[0, 1, 3] = float("nan")
    hidden = hidden_of(f, g, 0.0)
    assert hidden[0, 1, :, 3].isnan().all() and hidden.isnan().sum() == 2


@on_device
def test_same_gradients_run_after_run():
    # Only on a GPU do programs run at once.
    f, g, grad = operands(2, *((8, 5) if INTERPRETED else (50, 20)), 32, torch.float16)
    hidden = hidden_of(f, g, 0.3)
    first, second = (torch.autograd.grad(hidden, (f, g), grad, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_benchmark_size():
    f, g, grad = operands(8, 205, 57, 512, torch.float16)
    hidden = hidden_of(f, g, 0.3)
    kept = (hidden > 0).detach()
    exact_f, exact_g = (x.detach().float().requires_grad_() for x in (f, g))
    expected = torch.relu(exact_f[:, :, None] + exact_g[:, None]) * kept / 0.7
    torch.testing.assert_close(hidden.float(), expected, rtol=1e-3, atol=0)
    ours = torch.autograd.grad(hidden, (f, g), grad)
    theirs = torch.autograd.grad(expected, (exact_f, exact_g), grad.float())
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.float(), their, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_replays_draw_as_eager_does():
    from graph_worth.capture.pool import Pool
    from rnnt.kernels.joint import JointHidden

    def step():
        hidden = JointHidden.apply(f, g, 0.3)
        return hidden, *torch.autograd.grad(hidden, (f, g), grad)

    with torch.cuda.stream(torch.cuda.Stream()):
        f, g, grad = operands(2, 20, 9, 64, torch.float16)
        step()
        pool = Pool("cuda")
        graph, results = pool.capture(step)
        torch.manual_seed(5)
        expected = [step() for _ in range(3)]
        torch.manual_seed(5)
        for values in expected:
            graph.replay()
            assert all(map(torch.equal, results, values))
        assert not torch.equal(expected[0][0], expected[1][0])
        torch.cuda.synchronize()
        pool.release()


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
