"""rnnt/model: shapes, stacking, initialisation, and padding against none."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rnnt.config import PRESETS
from rnnt.loss import transducer_loss
from rnnt.model import RNNT, initialise, stack_time

TINY = replace(PRESETS["tiny"], pre_layers=2, prediction_layers=2)


def make(config=TINY, seed=0):
    model = RNNT(config)
    initialise(model, config, seed)
    return model


def batch(config, frames, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.zeros(max(frames), len(frames), config.features)
    ids = torch.zeros(len(tokens), max(tokens), dtype=torch.int64)
    for row, (length, count) in enumerate(zip(frames, tokens, strict=True)):
        features[:length, row] = torch.randn(length, config.features, generator=generator)
        ids[row, :count] = torch.randint(config.vocab - 1, (count,), generator=generator)
    return features, torch.tensor(frames, dtype=torch.int32), ids, torch.tensor(tokens, dtype=torch.int32)


def losses(model, config, features, feature_lengths, tokens, token_lengths):
    f, lengths = model.encoder(features, feature_lengths)
    logits = model.joint(f, model.prediction(tokens))
    return transducer_loss(logits, tokens, lengths, token_lengths, config.vocab - 1)


def pad(features, feature_lengths, tokens, token_lengths, frames, num_tokens):
    features = nn.functional.pad(features, (0, 0, 0, 0, 0, frames - len(features)))
    return features, feature_lengths, nn.functional.pad(tokens, (0, num_tokens - tokens.shape[1])), token_lengths


def test_the_benchmark_s_tensors():
    with torch.device("meta"):
        model = RNNT(PRESETS["bench"])
    assert len(list(model.parameters())) == 35
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["encoder.post.0.weight_ih_l0"] == (4096, 2048)
    assert shapes["prediction.embedding.weight"] == (1023, 512)
    assert shapes["joint.linear.weight"] == (1024, 512)
    # One layer and one direction each: what cuDNN's persistent kernels and a graph's dropout ask for.
    lstms = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    assert len(lstms) == 7
    assert {(lstm.num_layers, lstm.dropout, lstm.bidirectional) for lstm in lstms} == {(1, 0.0, False)}


@pytest.mark.parametrize("frames, stacked", [(10, 5), (11, 6), (1, 1)])
def test_shapes(frames, stacked):
    model = make()
    features, feature_lengths, tokens, _ = batch(TINY, [frames, max(1, frames - 3)], [4, 2])
    f, lengths = model.encoder(features, feature_lengths)
    g = model.prediction(tokens)
    assert f.shape == (2, stacked, TINY.joint_hidden) and lengths.dtype == torch.int32
    assert lengths.tolist() == [stacked, (max(1, frames - 3) + 1) // 2]
    assert g.shape == (2, 5, TINY.joint_hidden)
    assert model.joint(f, g).shape == (2, stacked, 5, TINY.vocab)


def test_each_network_has_its_own_dropout_after_each_lstm(monkeypatch):
    model, shares = make(), []
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: shares.append(self.p if self.training else 0.0) or x)
    features, feature_lengths, tokens, _ = batch(TINY, [10, 7], [4, 2])
    for is_training in (True, False):
        model.train(is_training)
        model.encoder(features, feature_lengths)
        model.prediction(tokens)
    assert shares == [TINY.encoder_dropout] * 4 + [TINY.prediction_dropout] * 2 + [0.0] * 6


def test_stacking_puts_two_frames_side_by_side():
    x = torch.arange(5.0).view(5, 1, 1) + torch.tensor([[0.0, 0.5], [10.0, 10.5]])
    assert stack_time(x)[:, 0].tolist() == [[0.0, 0.5, 1.0, 1.5], [2.0, 2.5, 3.0, 3.5], [4.0, 4.5, 0.0, 0.0]]
    assert stack_time(x)[0, 1].tolist() == [10.0, 10.5, 11.0, 11.5]


def test_initialisation_is_seeded_and_in_place():
    model = make()
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    initialise(model, TINY, 1)
    assert all(not torch.equal(parameter, before[name][1]) for name, parameter in model.named_parameters())
    initialise(model, TINY, 0)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])


def test_initial_ranges():
    model = make(replace(TINY, encoder_hidden=256)).requires_grad_(False)
    layer = model.encoder.pre[0]
    # PyTorch's range 1 / sqrt(hidden), times 0.5.
    assert float(layer.weight_hh_l0.abs().max()) == pytest.approx(0.5 / 256**0.5, rel=1e-3)
    assert layer.bias_ih_l0[256:512].eq(0.5).all() and layer.bias_hh_l0[256:512].eq(0).all()
    assert layer.bias_ih_l0[:256].abs().max() <= 0.5 / 256**0.5
    # The forget gates have a number of their own.
    layer = make(replace(TINY, init_scale=2.0, forget_bias=1.5)).requires_grad_(False).encoder.pre[0]
    assert float(layer.weight_hh_l0.abs().max()) == pytest.approx(2 / 48**0.5, rel=1e-2)
    assert layer.bias_ih_l0[48:96].eq(1.5).all()
    assert float(model.prediction.embedding.weight.std()) == pytest.approx(1.0, rel=0.1)


# --- padded against unpadded, with dropout off


def gradients(model, total):
    return torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize("padded", [(13, 5), (24, 8)])
def test_padding_an_even_batch_changes_nothing_but_rounding(padded):
    """Utterances of an even number of frames: nothing of the padding can be seen."""
    model = make().double().eval()
    given = batch(TINY, [12, 8, 6], [5, 2, 4])
    given = (given[0].double(), *given[1:])
    ours = losses(model, TINY, *pad(*given, *padded))
    exact = losses(model, TINY, *given)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=0)
    for a, b in zip(gradients(model, ours.sum()), gradients(model, exact.sum()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_padding_an_odd_batch_changes_the_longest_utterance_s_last_frame_alone():
    model = make().eval()
    given = batch(TINY, [13, 8], [5, 2])
    ours = losses(model, TINY, *pad(*given, 20, 8))
    exact = losses(model, TINY, *given)
    assert torch.isclose(ours[1], exact[1], rtol=1e-5)
    assert ours[0] != exact[0] and abs(ours[0] / exact[0] - 1) < 0.02
    f, _ = model.encoder(*given[:2])
    longer, _ = model.encoder(*pad(*given, 20, 8)[:2])
    torch.testing.assert_close(longer[0, :6], f[0, :6], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(longer[0, 6], f[0, 6], rtol=1e-3)


def test_what_lies_in_the_padding_of_tokens_never_matters():
    model = make().eval()
    features, feature_lengths, tokens, token_lengths = batch(TINY, [12, 8], [5, 2])
    exact = losses(model, TINY, features, feature_lengths, tokens, token_lengths)
    tokens = tokens.clone()
    tokens[1, 2:] = 7
    assert torch.equal(losses(model, TINY, features, feature_lengths, tokens, token_lengths), exact)
