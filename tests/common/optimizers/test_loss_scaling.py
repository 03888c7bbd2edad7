"""common/optimizers: the loss scale as a state machine, and the update that an overflow skips."""

import random

import pytest
import torch

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.optimizers.loss_scaler import LossScaler
from graph_worth.capture.pool import Pool


class Rule:
    """The rule in plain Python, written from its text: what LossScaler does on the device."""

    def __init__(self, scale, growth_interval, hysteresis, floor=1.0):
        self.scale, self.growth, self.tracker, self.floor_overflows = scale, 0, hysteresis, 0
        self.num_skipped = 0
        self.growth_interval, self.hysteresis, self.floor = growth_interval, hysteresis, floor

    def update(self, overflow):
        if not overflow:
            self.tracker, self.floor_overflows = self.hysteresis, 0
            self.growth += 1
            if self.growth == self.growth_interval:
                self.scale, self.growth = self.scale * 2, 0
            return
        self.num_skipped += 1
        self.floor_overflows = self.floor_overflows + 1 if self.scale <= self.floor else 0
        self.growth = 0
        self.tracker = max(0, self.tracker - 1)
        if self.tracker == 0:
            self.scale = max(self.floor, self.scale / 2)


def of(scaler):
    tensors = (scaler.scale, scaler.growth, scaler.tracker, scaler.floor_overflows, scaler.num_skipped)
    return [tensor.item() for tensor in tensors]


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_scale_follows_the_rule(hysteresis):
    generator = random.Random(hysteresis)
    scaler, rule = LossScaler("cpu", 64.0, 5, hysteresis), Rule(64.0, 5, hysteresis)
    seen = set()
    for step in range(240):
        # Streaks of both kinds, so that the scale reaches its floor and grows again.
        overflow = generator.random() < (0.9 if step // 40 % 2 else 0.02)
        scaler.found_inf.fill_(float(overflow))
        scaler.update()
        rule.update(overflow)
        assert of(scaler) == [rule.scale, rule.growth, rule.tracker, rule.floor_overflows, rule.num_skipped]
        seen.add(rule.scale)
    assert 1.0 in seen and max(seen) > 64.0


def test_a_scale_at_the_end_of_fp32_stays():
    scaler = LossScaler("cpu", 2.0**127, 1, 2)
    scaler.update()
    assert scaler.scale.item() == 2.0**127


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    params = [torch.randn(5, 3).to(dtype).requires_grad_(), torch.randn(7).to(dtype).requires_grad_()]
    scaler = LossScaler("cpu", 1024.0, 1000, 2)
    adam = Adam(params, Hyperparameters(0.01, (0.9, 0.999), eps=1e-8, weight_decay=0.01), scaler=scaler)
    return params, scaler, adam


def grads_of(params, scaler, seed):
    torch.manual_seed(seed)
    return [(torch.randn_like(param.float()) * scaler.scale).to(param.dtype) for param in params]


def test_update_is_adamw_on_unscaled_gradients():
    params, scaler, adam = model(torch.float32)
    reference = [param.detach().clone().requires_grad_() for param in params]
    adamw = torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for step in range(5):
        grads = grads_of(params, scaler, step)
        # torch's kernel writes unscaled FP32 gradients back.
        adam.step([grad.clone() for grad in grads])
        for param, grad in zip(reference, grads, strict=True):
            param.grad = grad / 1024
        adamw.step()
        norm = torch.cat([grad.flatten() / 1024 for grad in grads]).norm()
        torch.testing.assert_close(adam.grad_norm, norm)
    for ours, theirs in zip(params, reference, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_skips_the_step_and_does_not_count(bad):
    params, scaler, adam = model()
    adam.step(grads_of(params, scaler, 0))
    before = {name: tensor.clone() for name, tensor in adam.named_state()}
    weights = [param.detach().clone() for param in params]
    grads = grads_of(params, scaler, 1)
    grads[1][3] = bad
    adam.step(grads)
    assert scaler.found_inf == 1 and not torch.isfinite(adam.grad_norm)
    assert all(torch.equal(before[name], tensor) for name, tensor in adam.named_state())
    assert all(map(torch.equal, weights, params))
    # The next step is what it would have been without the overflow, at the same scale.
    adam.step(grads_of(params, scaler, 2))
    others, other_scaler, other = model()
    other.step(grads_of(others, other_scaler, 0))
    other.step(grads_of(others, other_scaler, 2))
    assert all(map(torch.equal, params, others))


def test_replayed_overflows_are_eager_s_bit_for_bit():
    """One capture of check, update and scale; gradients of chosen steps overflow."""
    runs = []
    for graphed in (False, True):
        params, scaler, adam = model()
        static = [torch.zeros_like(param) for param in params]
        if graphed:
            pool = Pool(torch.device("cpu"))
            graph, _ = pool.capture(lambda adam=adam, static=static: adam.step(static), static)
            # On the host a capture runs once for real.
            torch._foreach_copy_([p.detach() for p in params], [p.detach() for p in model()[0]])
            adam.reset()
            scaler.reset()
        states = []
        for step in range(30):
            torch._foreach_copy_(static, grads_of(params, scaler, step))
            if step in (3, 4, 5, 11, 20, 21):
                static[0][1, 1] = float("inf")
            graph.replay() if graphed else adam.step(static)
            named = (*adam.named_state(), *scaler.named_state())
            states.append([tensor.detach().clone() for tensor in (*(tensor for _, tensor in named), *params)])
        runs.append(states)
    for eager, replayed in zip(*runs, strict=True):
        assert all(map(torch.equal, eager, replayed))
    assert scaler.scale.item() < 1024
