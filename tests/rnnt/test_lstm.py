"""rnnt/lstm: its stack on the CPU against torch's LSTM, the order of its turns, and --lstm."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.variant import Unsupported
from rnnt import model as model_module
from rnnt import state as state_module
from rnnt.config import PRESETS, Config
from rnnt.lstm import UNIT, lstm, turns
from rnnt.model import RNNT, initialise
from rnnt.other_variants import CompiledNetworks
from tests.helpers.lstm_cases import close, random, run_stack, torch_lstm, weights_of

TOY = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16)

# ------------------------------------------------------------------------------------------------
# Against torch's LSTM


def test_outputs_and_all_gradients_are_those_of_torchs_lstm():
    weights, x, grad = weights_of(48, 64, scale=2.0), random(9, 8, 48), random(9, 8, 64, seed=1)
    layer, wide = torch_lstm(weights), x.double().requires_grad_()
    expected = layer(wide)[0]
    expected = expected, *torch.autograd.grad(expected, (wide, *layer.parameters()), grad.double())
    for found, wanted in zip(run_stack(x, [weights], grad), expected, strict=True):
        assert found.dtype == torch.float16 and found.shape == wanted.shape
        close(found, wanted, 5e-3)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": random(3, 4, 8)}, "our LSTM kernels take batches of 8, not of 4: take --lstm cudnn"),
        ({"x": random(3, 8, 8).bfloat16()}, "our LSTM kernels take FP16: take --lstm cudnn"),
        ({"layers": [weights_of(8, 8), weights_of(8, 16)]}, "a stack's layers have one width"),
    ],
)
def test_other_stacks_are_refused(change, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        lstm(**{"x": random(3, 8, 8), "layers": [weights_of(8, 8)]} | change)


def test_padding_changes_nothing():
    weights, x, grad = weights_of(48, 64, scale=2.0), random(9, 8, 48), random(9, 8, 64, seed=1)
    lengths = torch.tensor([3, 5, 1, 0, 2, 5, 4, 4], dtype=torch.int32)
    h, grad_x, *grads = run_stack(x, [weights], grad, lengths, 1)
    expected_h, expected_grad_x, *expected = run_stack(x[:6], [weights], grad[:6])
    assert torch.equal(h[:6], expected_h) and torch.equal(grad_x[:6], expected_grad_x)
    assert not h[6:].any() and not grad_x[6:].any()
    for found, wanted in zip(grads, expected, strict=True):
        close(found, wanted, 1e-3)


@pytest.mark.parametrize("num_layers, num_steps", [(1, 5), (2, 409), (3, 205), (5, 641), (3, 2)])
def test_turns_hold_every_time_step_once_and_in_order(num_layers, num_steps):
    done = [0] * num_layers
    for turn in turns(num_layers, num_steps):
        before = list(done)
        assert 1 <= len({layer for layer, _, _ in turn}) == len(turn) <= 2
        for layer, first, end in turn:
            assert first == before[layer] < end and ((end - first) % UNIT == 0 or end == num_steps)
            # The layer below had these steps in an earlier turn.
            assert layer == 0 or before[layer - 1] >= end
            done[layer] = end
    assert done == [num_steps] * num_layers


def test_two_layers_side_by_side_take_two_thirds_of_the_time_steps():
    # The encoder of the benchmark: 2 layers over 409 frames, 3 over 205; a turn costs 10 time steps more.
    both = [turn for order in (turns(2, 409), turns(3, 205)) for turn in order]
    one, two = 2 * 419 + 3 * 215, sum(10 + max(end - first for _, first, end in turn) for turn in both)
    assert 0.6 * one < two < 0.68 * one


# ------------------------------------------------------------------------------------------------
# --lstm


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"batch": 16}, "--batch 8"),
        ({"precision": "bf16"}, "--precision fp16"),
        ({"batch": 4, "prediction_hidden": 2048}, "--batch 8 and one of 256, 512, 768, 1024 as --prediction-hidden"),
    ],
)
def test_settings_that_the_kernels_do_not_take_are_refused(change, wanted):
    with pytest.raises(ValueError, match=f"^--lstm wavefront: takes {wanted}, or take cudnn$"):
        replace(PRESETS["bench"], lstm="wavefront", **change)


def outputs_of(model, frames=7, tokens=3, longest=None):
    """f and g for random input of 8 utterances."""
    lengths, token_lengths = (torch.tensor([most, *[1] * 7], dtype=torch.int32) for most in longest or (frames, tokens))
    f, _ = model.encoder(random(frames, 8, 16), lengths)
    return f, model.prediction(torch.arange(8 * tokens).view(tokens, 8).T % 15, token_lengths)


def test_both_kinds_of_lstm_give_the_same_networks(monkeypatch):
    dropouts = []
    monkeypatch.setattr(model_module, "lstm", lambda *given: dropouts.append(given[-1]) or lstm(*given))
    outputs = []
    for config in (TOY, replace(TOY, lstm="wavefront")):
        model = RNNT(config)
        initialise(model, config, seed=0)
        outputs.append(outputs_of(model.half().eval()))
    for cudnn, ours in zip(*outputs, strict=True):
        # The first utterance is the longest; after the others' ends nothing is promised.
        close(ours[:1, :3], cudnn[:1, :3], 5e-3)
    # In training each network has its own dropout.
    outputs_of(model.train())
    assert dropouts == [0.0] * 3 + [TOY.encoder_dropout] * 2 + [TOY.prediction_dropout]


def test_networks_end_with_the_longest_utterance():
    config = replace(TOY, lstm="wavefront")
    model = RNNT(config)
    initialise(model, config, seed=0)
    model.half().eval()
    padded, exact = outputs_of(model, 9, 5, (5, 2)), outputs_of(model, 5, 2)
    for found, wanted, linear in zip(padded, exact, (model.encoder.linear, model.prediction.linear), strict=True):
        assert wanted.shape[1] == 3
        close(found[:, :3], wanted, 1e-3)
        # After the end there is nothing but the bias.
        assert torch.equal(found[:, 3:], linear.bias.expand_as(found[:, 3:]))
        assert not torch.equal(found[:, 2], linear.bias.expand_as(found[:, 2]))


@pytest.mark.parametrize("which", ["cudnn", "wavefront"])
def test_a_run_asks_whether_our_kernels_gave_up(monkeypatch, which):
    asked = []
    monkeypatch.setattr(state_module.lstm, "check", asked.append)
    state_module.State.check(SimpleNamespace(config=Config(lstm=which), device="a device"))
    assert asked == ([] if which == "cudnn" else ["a device"])


# ------------------------------------------------------------------------------------------------
# torch.compile


def toy_state(which):
    model = RNNT(replace(TOY, lstm=which)).half()
    state = SimpleNamespace(config=replace(TOY, lstm=which), device=torch.device("cpu"), model=model)
    state.encoder, state.prediction, state.joint = model.encoder, model.prediction, lambda f, g: f
    state.inputs = SimpleNamespace(reset=lambda: None, dummy_batch=lambda frames, tokens: None)
    state.plan = SimpleNamespace(require_few_pairs=lambda name: [(8, 4), (16, 4)])
    return state


def test_the_compiled_networks_leave_everything_as_eager_needs_it(monkeypatch):
    import torch._dynamo.config
    import torch._inductor.config

    # Compiled variants on a CPU. The host graph has no foreign makers.
    monkeypatch.setattr("rnnt.other_variants.require_compiler", lambda device: None)
    monkeypatch.setattr("common.variant.require_compiler", lambda device: None)
    monkeypatch.setattr("common.variant.Pool.adopt", contextlib.nullcontext)
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *a: function(*a))
    state, during = toy_state("cudnn"), []

    def seen():
        dynamo = torch._dynamo.config
        settings = [torch._inductor.config.fallback_random, dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit]
        return [*settings, *map(state.__dict__.get, ("encoder", "prediction", "joint"))]

    def step(state, index):
        during.append(seen())

    before = seen()
    variant = CompiledNetworks(state, step, step)
    assert seen() == before and len(during) == 3
    for _ in range(2):
        variant.enter()
        assert seen() == during[0] == during[-1]
        assert all(own != other for own, other in zip(seen(), before, strict=True))
        variant.leave()
        assert seen() == before

    def fails(state, batch):
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        CompiledNetworks(state, fails, step)
    assert seen() == before
    with pytest.raises(Unsupported, match="take --lstm cudnn"):
        CompiledNetworks(toy_state("wavefront"), step, step)
