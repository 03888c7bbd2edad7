"""common/optimizers/adam.py against a float64 reference, its reset, and that it never reads on the host."""

import numpy
import pytest
import torch

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from graph_worth.capture.host_graph import HostPool

SHAPES = [(5, 3), (7,)]
# A large eps makes the update depend on the gradients' scale, so that clipping shows in the weights.
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 0.05, "weight_decay": 0.1}
# Norms on both sides of clip=1.
SCALES = [0.01, 3.0, 0.1, 30.0, 0.05, 0.2, 5.0, 0.02, 0.3, 1.0]


def make(clip, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    grads = [torch.zeros(shape) for shape in SHAPES]
    return params, grads, Adam(params, Hyperparameters(clip=clip, **OPTIONS | options), grads)


def gradients(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator) * SCALES[step % len(SCALES)] for shape in SHAPES]


def fill(grads, step):
    for grad, value in zip(grads, gradients(step), strict=True):
        grad.copy_(value)


class Reference:
    """AdamW with decoupled decay and Megatron's clipping in float64."""

    def __init__(self, params, clip, lr, betas, eps, weight_decay):
        self.params = [param.detach().double().numpy().copy() for param in params]
        self.m = [numpy.zeros_like(param) for param in self.params]
        self.v = [numpy.zeros_like(param) for param in self.params]
        self.options, self.clip, self.num_steps = (lr, betas, eps, weight_decay), clip, 0

    def step(self, grads):
        lr, (beta1, beta2), eps, decay = self.options
        grads = [grad.double().numpy() for grad in grads]
        norm = numpy.sqrt(sum((grad**2).sum() for grad in grads))
        factor = min(1.0, self.clip / (norm + 1e-6))
        self.num_steps += 1
        for index, grad in enumerate(grads):
            grad = grad * factor
            self.m[index] = beta1 * self.m[index] + (1 - beta1) * grad
            self.v[index] = beta2 * self.v[index] + (1 - beta2) * grad**2
            m = self.m[index] / (1 - beta1**self.num_steps)
            v = self.v[index] / (1 - beta2**self.num_steps)
            self.params[index] = self.params[index] * (1 - lr * decay) - lr * m / (numpy.sqrt(v) + eps)
        return norm, factor


@pytest.mark.parametrize("clip", [1.0, 1e6], ids=["some steps clipped", "none clipped"])
def test_ten_steps_against_float64(clip):
    params, grads, adam = make(clip)
    reference = Reference(params, clip, **OPTIONS)
    factors = []
    for step in range(10):
        fill(grads, step)
        adam.step()
        norm, factor = reference.step(gradients(step))
        factors.append(factor)
        assert float(adam.grad_norm) == pytest.approx(norm, rel=1e-5), "the norm before clipping"
        for param, expected in zip(params, reference.params, strict=True):
            numpy.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    num_clipped = sum(factor < 1 for factor in factors)
    assert {1.0: 0 < num_clipped < 10, 1e6: num_clipped == 0}[clip]


def test_bf16_parameters_follow_masters_that_keep_what_bf16_loses():
    params, grads, adam = make(clip=1.0, dtype=torch.bfloat16, lr=3e-4, weight_decay=0.0)
    with torch.no_grad():
        for param in params:
            param.fill_(1.0)
    adam.reset()
    start = [param.detach().clone() for param in params]
    moved = False
    for step in range(20):
        for grad in grads:
            grad.fill_(1.0)
        adam.step()
        for param, master, first in zip(params, adam.masters, start, strict=True):
            assert master.dtype == torch.float32 and param.dtype == torch.bfloat16
            assert torch.equal(param, master.bfloat16())
            if step == 0:
                assert torch.equal(param, first), "this step is too small for bf16 ..."
                assert (master < first.float()).all(), "... and must not be lost"
            moved = moved or not torch.equal(param, first)
    assert moved


def addresses(adam):
    return [tensor.data_ptr() for _, tensor in adam.named_state()] + [adam.lr.data_ptr(), adam.grad_norm.data_ptr()]


def test_reset_is_in_place_and_makes_the_same_run_again():
    params, grads, adam = make(clip=1.0, dtype=torch.bfloat16)
    start = [param.detach().clone() for param in params]

    def run():
        for step in range(4):
            fill(grads, step)
            adam.step()
            adam.lr.mul_(0.9)
        return [tensor.clone() for _, tensor in adam.named_state()] + [param.detach().clone() for param in params]

    first, before = run(), addresses(adam)
    with torch.no_grad():
        for param, value in zip(params, start, strict=True):
            param.copy_(value)
    adam.reset()
    assert addresses(adam) == before
    assert float(adam.lr) == pytest.approx(OPTIONS["lr"])
    for master, param in zip(adam.masters, params, strict=True):
        assert torch.equal(master, param.float())
    assert all(map(torch.equal, run(), first))


def test_a_step_is_captured_without_a_host_read_and_replays_equal_eager():
    """The clip factor and the learning rate live on the device: they change from replay to replay."""
    params, grads, adam = make(clip=1.0, dtype=torch.bfloat16)
    others, other_grads, other = make(clip=1.0, dtype=torch.bfloat16)
    fill(grads, 0)
    graph, _ = HostPool().capture(adam.step)
    fill(other_grads, 0)
    other.step()
    for step in range(1, 6):
        for optimizer in (adam, other):
            optimizer.lr.mul_(0.8)
        fill(grads, step)
        graph.replay()
        fill(other_grads, step)
        other.step()
        assert torch.equal(adam.grad_norm, other.grad_norm)
        assert all(map(torch.equal, params, others))
    for (name, ours), (_, theirs) in zip(adam.named_state(), other.named_state(), strict=True):
        assert torch.equal(ours, theirs), name
