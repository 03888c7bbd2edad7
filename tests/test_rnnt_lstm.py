"""The LSTM stacks of rnnt/lstm.py against torch's LSTM and against each other, and --lstm."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rnnt import lstm as lstm_module
from rnnt import lstm_check
from rnnt import model as model_module
from rnnt import state as state_module
from rnnt.config import PRESETS, Config
from rnnt.lstm import UNIT, lstm, turns
from rnnt.model import RNNT, initialise
from rnnt.variants import hide_kernels
from tests.lstm_cases import close, random, run_stack, stack_of, torch_lstm, weights_of

# ------------------------------------------------------------------------------------------------
# Against torch's LSTM


def test_outputs_and_all_gradients_are_those_of_torchs_lstm():
    weights, x, grad = weights_of(48, 64, scale=2.0), random(9, 8, 48), random(9, 8, 64, seed=1)
    layer, wide = torch_lstm(weights), x.double().requires_grad_()
    expected = layer(wide)[0]
    expected_grads = torch.autograd.grad(expected, (wide, *layer.parameters()), grad.double())

    narrow = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    h = lstm(narrow[0], [narrow[1:]])
    assert h.dtype == torch.float16
    close(h, expected, 3e-3)
    for found, expected_grad in zip(torch.autograd.grad(h, narrow, grad), expected_grads, strict=True):
        assert found.dtype == torch.float16 and found.shape == expected_grad.shape
        close(found, expected_grad, 5e-3)


def test_one_time_step_has_no_gradient_of_recurrent_weights():
    weights, x = weights_of(8, 8), random(1, 8, 8)
    narrow = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    grads = torch.autograd.grad(lstm(narrow[0], [narrow[1:]]), narrow, random(1, 8, 8, seed=1))
    assert grads[2].shape == weights[1].shape and not grads[2].any()
    assert grads[1].any()


def test_another_batch_is_refused_with_the_flag():
    with pytest.raises(ValueError, match="our LSTM kernels take batches of 8, not of 4: take --lstm cudnn"):
        lstm(random(3, 4, 8), [weights_of(8, 8)])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": random(3, 8, 8).bfloat16()}, "our LSTM kernels take FP16: take --lstm cudnn"),
        ({"layers": [weights_of(8, 8), weights_of(8, 16)]}, "a stack's layers have one width"),
        ({"at_once": 3}, "at_once 3: takes 1 or 2"),
    ],
)
def test_what_a_stack_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        lstm(**{"x": random(3, 8, 8), "layers": [weights_of(8, 8)]} | change)


def test_gradients_add_up_in_memory_of_their_own():
    weights = [tensor.requires_grad_() for tensor in weights_of(8, 8)]
    for _ in range(2):
        lstm(random(3, 8, 8), [weights]).float().sum().backward()
    (once,) = torch.autograd.grad(lstm(random(3, 8, 8), [weights]).float().sum(), weights[2])
    for bias in weights[2:]:
        close(bias.grad, 2 * once, 1e-3)
    assert len({weight.grad.data_ptr() for weight in weights}) == 4


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_stack_is_layer_after_layer(at_once, dropout):
    layers, x, grad = stack_of(3, 24, 32), random(80, 8, 24), random(80, 8, 32, seed=1)
    assert len(turns(3, 80, 2)) > 3
    lengths = torch.tensor([20, 63, 1, 0, 60, 29, 4, 11], dtype=torch.int32)
    torch.manual_seed(5)
    found = run_stack(x, layers, grad, lengths, 1, dropout, at_once)
    torch.manual_seed(5)
    kept = torch.empty(3, 80, 8, 32, dtype=torch.uint8).bernoulli_(1 - dropout)
    assert (dropout == 0) == kept.all()
    narrow = [tensor.clone().requires_grad_() for tensor in (x, *(weight for layer in layers for weight in layer))]
    below = narrow[0]
    for index in range(3):
        below = lstm(below, [narrow[1 + 4 * index :][:4]], lengths, 1) * (kept[index] / (1 - dropout)).half()
    expected = below, *torch.autograd.grad(below, narrow, grad)
    assert not found[0][64:].any() and found[0][63].any()
    for one, other in zip(found, expected, strict=True):
        close(one, other, 5e-3)


def test_dropout_drops_the_share_it_is_told():
    layers, x = stack_of(1, 24, 32), random(64, 8, 24)
    torch.manual_seed(0)
    whole, dropped = (lstm(x, layers, dropout=dropout) for dropout in (0.0, 0.25))
    is_kept = dropped != 0
    assert is_kept.float().mean() == pytest.approx(0.75, abs=0.02)
    close(dropped[is_kept], whole[is_kept] / 0.75, 1e-3)


@pytest.mark.parametrize("num_layers, num_steps", [(1, 5), (2, 409), (3, 205), (5, 641), (2, 1), (3, 2)])
def test_turns_hold_every_time_step_once_and_in_order(num_layers, num_steps):
    for at_once in (1, 2):
        order = turns(num_layers, num_steps, at_once)
        done = [0] * num_layers
        for turn in order:
            before = list(done)
            assert 1 <= len({layer for layer, _, _ in turn}) == len(turn) <= at_once
            for layer, first, end in turn:
                assert first == before[layer] < end
                # The layer below had these steps in an earlier turn.
                assert layer == 0 or before[layer - 1] >= end
                done[layer] = end
        assert done == [num_steps] * num_layers
    assert len(turns(num_layers, num_steps, 1)) == num_layers


def test_two_layers_side_by_side_take_two_thirds_of_the_time_steps():
    def cost(num_layers, num_steps, at_once):
        return sum(10 + max(end - first for _, first, end in turn) for turn in turns(num_layers, num_steps, at_once))

    # The encoder of the benchmark: 2 layers over 409 frames, 3 over 205.
    one, two = (cost(2, 409, at_once) + cost(3, 205, at_once) for at_once in (1, 2))
    assert one == 2 * 419 + 3 * 215 and 0.6 * one < two < 0.68 * one
    # The prediction network is short and gains less.
    assert cost(2, 57, 2) < 0.9 * cost(2, 57, 1)
    for turn in turns(2, 409, 2):
        assert all((end - first) % UNIT == 0 or end == 409 for _, first, end in turn)


def test_padding_changes_nothing():
    weights, x, grad = weights_of(48, 64, scale=2.0), random(9, 8, 48), random(9, 8, 64, seed=1)
    lengths = torch.tensor([3, 5, 1, 0, 2, 5, 4, 4], dtype=torch.int32)

    def compute(x, grad, *padding):
        tensors = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
        h = lstm(tensors[0], [tensors[1:]], *padding)
        return h, *torch.autograd.grad(h, tensors, grad)

    h, grad_x, *grads = compute(x, grad, lengths, 1)
    expected_h, expected_grad_x, *expected = compute(x[:6], grad[:6])
    assert torch.equal(h[:6], expected_h) and torch.equal(grad_x[:6], expected_grad_x)
    assert not h[6:].any() and not grad_x[6:].any()
    for found, wanted in zip(grads, expected, strict=True):
        close(found, wanted, 1e-3)


# ------------------------------------------------------------------------------------------------
# The switch


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"batch": 16}, "--batch 8"),
        ({"precision": "bf16"}, "--precision fp16"),
        ({"encoder_hidden": 640}, "one of 256, 512, 768, 1024 as --encoder-hidden"),
        ({"batch": 4, "prediction_hidden": 2048}, "--batch 8 and one of 256, 512, 768, 1024 as --prediction-hidden"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_flags(change, wanted):
    persistent = replace(PRESETS["bench"], lstm="persistent")
    with pytest.raises(ValueError, match=f"^--lstm persistent: takes {wanted}, or take cudnn$"):
        replace(persistent, **change)


def test_a_wavefront_is_refused_a_second_stream():
    with pytest.raises(ValueError, match="^--streams 2: --lstm wavefront leaves no room beside the encoder, take 1$"):
        replace(PRESETS["bench"], lstm="wavefront", streams=2)


@pytest.mark.parametrize(
    "which, streams, widths",
    [("persistent", 1, [1024]), ("persistent", 2, [1024, 512]), ("wavefront", 1, [1024, 1024])],
)
def test_what_runs_side_by_side_must_fit(monkeypatch, which, streams, widths):
    asked = []
    monkeypatch.setattr(state_module.lstm, "require", lambda device, *words: asked.append(words))
    state_module._require_lstm(replace(PRESETS["bench"], lstm=which, streams=streams), torch.device("cpu"))
    assert asked == [(which, *widths)]


def test_all_kinds_of_lstm_give_the_same_networks(monkeypatch):
    calls = []
    monkeypatch.setattr(model_module, "lstm", lambda *arguments: calls.append(arguments) or lstm(*arguments))
    toy = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16)
    outputs = []
    for config in (toy, replace(toy, lstm="persistent"), replace(toy, lstm="wavefront")):
        model = RNNT(config)
        initialise(model, config, seed=0)
        model.half().eval()
        f, lengths = model.encoder(random(7, 8, 16), torch.full((8,), 7, dtype=torch.int32))
        outputs.append((f, model.prediction(torch.arange(24).view(8, 3) % 15, torch.full((8,), 3, dtype=torch.int32))))
        assert f.shape[1] == lengths[0] == 4
    for torchs, *ours in zip(*outputs, strict=True):
        for found in ours:
            close(found, torchs, 5e-3)
    assert [at_once for *_, at_once in calls] == [1, 1, 1, 2, 2, 2]
    # In training what each network drops.
    assert {dropout for *_, dropout, _ in calls} == {0.0}
    model.train()
    model.encoder(random(7, 8, 16), torch.full((8,), 7, dtype=torch.int32))
    model.prediction(torch.arange(24).view(8, 3) % 15, torch.full((8,), 3, dtype=torch.int32))
    assert [dropout for *_, dropout, _ in calls[6:]] == [toy.encoder_dropout] * 2 + [toy.prediction_dropout]


def test_compiled_networks_do_not_look_into_the_kernels(monkeypatch):
    seen, cut = [], lstm_module.turns
    monkeypatch.setattr(lstm_module, "turns", lambda *a: seen.append(torch.compiler.is_compiling()) or cut(*a))
    toy = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16, lstm="wavefront")
    encoder = RNNT(toy).half().encoder
    hide_kernels(encoder)
    compiled = torch.compile(encoder, backend="eager")
    compiled(random(7, 8, 16), torch.full((8,), 7, dtype=torch.int32))[0].sum().backward()
    assert seen and not any(seen)


@pytest.mark.parametrize("which", ["cudnn", "persistent", "wavefront"])
def test_a_run_asks_whether_our_kernels_gave_up(monkeypatch, which):
    asked = []
    monkeypatch.setattr(state_module.lstm, "check", asked.append)
    state_module.State.check(SimpleNamespace(config=Config(lstm=which), device="a device"))
    assert asked == ([] if which == "cudnn" else ["a device"])


def test_networks_end_with_the_longest_utterance():
    toy = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16, lstm="persistent")
    model = RNNT(toy)
    initialise(model, toy, seed=0)
    model.half().eval()
    features, tokens = random(9, 8, 16), torch.arange(40).view(8, 5) % 15
    lengths, token_lengths = (torch.tensor([longest, *[1] * 7], dtype=torch.int32) for longest in (5, 2))
    (f, _), g = model.encoder(features, lengths), model.prediction(tokens, token_lengths)
    alone = model.encoder(features[:5], lengths)[0], model.prediction(tokens[:, :2], token_lengths)
    for found, wanted, linear in zip((f, g), alone, (model.encoder.linear, model.prediction.linear), strict=True):
        num = wanted.shape[1]
        assert num == 3
        # Before the end what the batch alone gives, the half of a frame after it too; behind it nothing but the bias.
        close(found[:, :num], wanted, 1e-3)
        assert torch.equal(found[:, num:], linear.bias.expand_as(found[:, num:]))
        assert not torch.equal(found[:, num - 1], linear.bias.expand_as(found[:, num - 1]))


@pytest.mark.parametrize("ignores_lengths", [False, True])
def test_the_check_on_a_gpu_finds_what_ignores_padding(monkeypatch, ignores_lengths):
    monkeypatch.setattr(lstm_check, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(lstm_check, "PROBLEMS", [])
    monkeypatch.setattr(lstm_check.lstm_kernel, "check", lambda device: None)
    if ignores_lengths:
        monkeypatch.setattr(lstm_check, "lstm", lambda x, layers, *how: lstm(x, layers))
    lstm_check.check(32, 9, num_layers=2, padding=5)
    expected = [(32, 9, 2, 5, 1)] if ignores_lengths else []
    assert expected == lstm_check.PROBLEMS
