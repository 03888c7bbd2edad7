"""rnnt/lamb: against a float64 reference, through skipped steps, in a graph, on two ranks and on the GPU."""

import os
from pathlib import Path

import pytest
import torch

from graph_worth.capture.pool import Pool
from graph_worth.parallel import collectives
from rnnt.lamb import Lamb
from tests.helpers import gloo_ranks
from tests.helpers.lamb_cases import CONFIG, SCALE, SHAPES, equal, gradients, optimizer, parameters, state


class Reference:
    """The rule in float64, tensor by tensor, from its text. The 16-bit parameter is only rounded, never kept."""

    def __init__(self, params, config):
        self.dtype = params[0].dtype
        self.p = [param.double() for param in params]
        self.m, self.v = ([torch.zeros_like(p) for p in self.p] for _ in range(2))
        self.ema = [p.clone() for p in self.p]
        self.rule, self.count = config, 0

    def step(self, scaled_grads):
        grads = [grad.double() / SCALE for grad in scaled_grads]
        self.norm = torch.cat([grad.flatten() for grad in grads]).norm().item()
        rule = self.rule
        factor = min(1.0, rule.clip / (self.norm + 1e-6))
        self.count += 1
        for i, grad in enumerate(grads):
            self.m[i] = rule.beta1 * self.m[i] + (1 - rule.beta1) * factor * grad
            self.v[i] = rule.beta2 * self.v[i] + (1 - rule.beta2) * (factor * grad) ** 2
            m_hat = self.m[i] / (1 - rule.beta1**self.count)
            v_hat = self.v[i] / (1 - rule.beta2**self.count)
            u = m_hat / (v_hat.sqrt() + rule.eps) + rule.weight_decay * self.p[i]
            size_p, size_u = self.p[i].to(self.dtype).double().norm().item(), u.norm().item()
            ratio = size_p / size_u if size_p and size_u else 1.0
            self.p[i] = self.p[i] - rule.lr * ratio * u
            self.ema[i] = rule.ema * self.ema[i] + (1 - rule.ema) * self.p[i]


def test_against_float64(dtype=torch.float16):
    params = parameters(dtype)
    lamb, reference = optimizer(params), Reference(params, CONFIG)
    clipped = set()
    for step in range(12):
        # Norms on both sides of the bound.
        grads = gradients(step, size=3e-3 if step % 2 else 1.0, dtype=dtype)
        lamb.step(grads)
        reference.step(grads)
        clipped.add(reference.norm > CONFIG.clip)
        assert lamb.grad_norm.item() == pytest.approx(reference.norm, rel=1e-5)
    assert clipped == {True, False} and lamb.steps == 12
    found = state(lamb)
    for index, name in [(index, name) for index in range(len(params)) for name in ("master", "exp_avg", "exp_avg_sq")]:
        expected = {"master": reference.p, "exp_avg": reference.m, "exp_avg_sq": reference.v}[name][index]
        torch.testing.assert_close(
            found[f"optimizer.{index}.{name}"][: expected.numel()].double(), expected.flatten(), rtol=2e-5, atol=1e-6
        )
    for param, ema, expected, expected_ema in zip(params, lamb.ema, reference.p, reference.ema, strict=True):
        torch.testing.assert_close(ema.double(), expected_ema, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(param.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_learning_rate_is_read_on_the_device():
    lamb, other = optimizer(parameters()), optimizer(parameters())
    for step in range(2):
        lamb.lr.fill_(0.5 / (step + 1))
        lamb.step(gradients(step))
        other.step(gradients(step))
    assert not equal(state(lamb), state(other))
    lamb.lr.zero_()
    before = [param.clone() for param in lamb.params]
    lamb.step(gradients(2))
    assert all(map(torch.equal, lamb.params, before))


@pytest.mark.parametrize("value, first", [(float("-inf"), True), (float("nan"), False)])
def test_an_overflow_changes_nothing(value, first):
    lamb, other = optimizer(parameters()), optimizer(parameters())
    if not first:
        for one in (lamb, other):
            one.step(gradients(0))
    before = state(lamb)
    bad = gradients(1)
    bad[1][4321] = value
    lamb.step(bad)
    assert equal(state(lamb), before)
    assert lamb.scaler.found_inf == 1 and lamb.scaler.scale == SCALE / 2 and not torch.isfinite(lamb.grad_norm)
    # And it did not count: the next step is that of one who never saw it.
    for one in (lamb, other):
        one.scaler.reset()
        one.step(gradients(2))
    assert equal(state(lamb), state(other)) and lamb.steps == (1 if first else 2)


def test_parameters_stay_where_they_are_and_follow_the_masters():
    flat = torch.randn(300).bfloat16()
    before = flat.clone()
    params = [flat[:100].view(10, 10), flat[100:300]]
    lamb = optimizer(params)
    for _ in range(3):
        lamb.step([torch.randn(param.shape).bfloat16() for param in params])
    masters = dict(lamb.named_state())
    for index, param in enumerate(params):
        assert torch.equal(param.flatten(), masters[f"optimizer.{index}.master"][: param.numel()].bfloat16())
    assert torch.equal(flat, torch.cat([param.flatten() for param in params])) and not torch.equal(flat, before)


def test_reset_is_in_place_and_starts_again():
    params = parameters()
    lamb = optimizer(params)
    start, addresses = state(lamb), [tensor.data_ptr() for _, tensor in lamb.named_state()]
    first = [param.clone() for param in params]
    for step in range(3):
        lamb.step(gradients(step))
    once = state(lamb)
    lamb.lr.fill_(9.0)
    torch._foreach_copy_(params, first)
    lamb.reset()
    assert equal(state(lamb), start) and lamb.lr.item() == pytest.approx(CONFIG.lr) and lamb.grad_norm == 0
    assert all(map(torch.equal, lamb.ema, [param.float() for param in params]))
    for step in range(3):
        lamb.step(gradients(step))
    assert equal(state(lamb), once)
    assert [tensor.data_ptr() for _, tensor in lamb.named_state()] == addresses


# --- several ranks


@pytest.mark.parametrize("world_size", [2, 40])
def test_shares_of_the_ranks_are_the_whole(world_size):
    whole = optimizer(parameters())
    found = {}
    for rank in range(world_size):
        lamb = optimizer(parameters(), rank=rank, world_size=world_size)
        assert len(lamb.block_owners) * Lamb.BLOCK == lamb.master.numel()
        for name, tensor in lamb.named_state():
            found.setdefault(name, []).append(tensor)
    for name, tensor in whole.named_state():
        if name != "optimizer.steps":
            assert torch.equal(torch.cat(found.pop(name)), tensor), name
    assert found.keys() == {"optimizer.steps"}


NUM_STEPS, BAD_STEP = 5, 2


def gradients_of_rank(step, rank):
    """Their mean over two ranks is exact in 16 bit; an overflow happens on one rank alone."""
    generator = torch.Generator().manual_seed(step)
    grads = []
    for shape in SHAPES:
        mean, difference = (torch.randint(-60, 61, shape, generator=generator) for _ in range(2))
        grads.append((mean + (difference if rank == 0 else -difference if rank == 1 else 0)).bfloat16())
    if step == BAD_STEP and rank != 0:
        grads[3][7] = float("nan")
    return grads


def run(rank, world_size, graphed=False):
    """Five steps, as replays of a graph or eager; rank None: of the mean."""
    lamb = optimizer(parameters(), rank=rank or 0, world_size=world_size)
    static = gradients_of_rank(0, rank)
    step_once, norms = lambda: lamb.step(static), []
    if graphed:
        step_once()
        graph, _ = Pool(torch.device("cpu")).capture(step_once, static_inputs=static)
        torch._foreach_copy_(lamb.params, parameters())
        lamb.reset()
        lamb.scaler.reset()
    for step in range(NUM_STEPS):
        torch._foreach_copy_(static, gradients_of_rank(step, rank))
        graph.replay() if graphed else step_once()
        norms.append(lamb.grad_norm.item())
    if world_size > 1:
        # A rank has the averages of its share.
        collectives.all_gather_(lamb._flat_ema)
    return lamb, norms


def worker():
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    lamb, norms = run(rank, world_size)
    found = {"params": lamb.params, "ema": lamb.ema, "norms": norms, "scale": lamb.scaler.scale, "steps": lamb.steps}
    found["replays are eager"] = equal(state(run(rank, world_size, graphed=True)[0]), state(lamb))
    torch.save(found, Path(os.environ["RESULTS"], f"{rank}.pt"))


@pytest.mark.slow
def test_two_ranks_are_one_with_the_mean_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    gloo_ranks.run("tests.rnnt.test_lamb", "worker", world_size=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in ("params", "ema"):
        assert all(map(torch.equal, one[name], other[name]))
    for name in ("scale", "steps"):
        assert torch.equal(one[name], other[name])
    assert one["replays are eager"] and other["replays are eager"]
    assert one["steps"] == NUM_STEPS - 1 and one["scale"] == SCALE / 2

    single, norms = run(None, 1)
    for found in (one["norms"], other["norms"]):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(norms), rtol=1e-5, atol=0, equal_nan=True)
    for found, expected in zip(one["ema"], single.ema, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for found, expected in zip(one["params"], single.params, strict=True):
        torch.testing.assert_close(found, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-7)


# --- GPU


@pytest.mark.gpu
def test_replays_equal_eager_steps_on_the_gpu():
    with torch.cuda.stream(torch.cuda.Stream()):
        eager, graphed = (optimizer(parameters(torch.float16, "cuda")) for _ in range(2))
        static = [grad.cuda() for grad in gradients(0, dtype=torch.float16)]
        graphed.step(static)
        pool = Pool(torch.device("cuda"))
        graph, _ = pool.capture(lambda: graphed.step(static), static_inputs=static)
        torch._foreach_copy_(graphed.params, parameters(torch.float16, "cuda"))
        graphed.reset()
        graphed.scaler.reset()
        for step in range(6):
            grads = [grad.cuda() for grad in gradients(step, dtype=torch.float16)]
            if step == 3:
                grads[0][0, 0] = float("inf")
            torch._foreach_copy_(static, grads)
            eager.step(grads)
            graph.replay()
            assert equal(state(eager), state(graphed)), step
        pool.release()
