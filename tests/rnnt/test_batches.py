"""rnnt/data/batches: batches of any length in static buffers, padded or not."""

from dataclasses import replace

import pytest
import torch

from rnnt.config import PRESETS
from rnnt.data.batches import Batch, Inputs
from rnnt.data.synthetic import Synthetic

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
SIZE = (24, TINY.batch, TINY.features)


def make(config=TINY, device=CPU, pinned=False):
    source = Synthetic(config, 0, 1, torch.bfloat16, 1, pinned)
    return Inputs(source, (24, config.batch, config.features), 8, torch.bfloat16, device), source


def fixed(frames, tokens):
    return lambda *_: (frames, tokens)


def test_a_batch_is_taken_as_it_is():
    inputs, _ = make()
    for _ in range(5):
        views, batch = inputs.load()
        assert all(torch.equal(a, b) for a, b in zip(views, batch, strict=True))
        assert views.shape == (len(batch.features), batch.tokens.shape[1])
        assert views.features.is_contiguous() and views.tokens.is_contiguous()


def test_padding_is_zero_whatever_was_there_before():
    inputs, _ = make()
    for _ in range(6):
        captured = inputs.dummy_batch(24, 8)
        captured.tokens.fill_(5)
        views, batch = inputs.load(fixed(24, 8))
        # A graph reads where it was captured.
        assert [(a.data_ptr(), a.stride()) for a in views] == [(a.data_ptr(), a.stride()) for a in captured]
        frames, tokens = len(batch.features), batch.tokens.shape[1]
        assert views.features.shape[0] == 24 and views.tokens.shape[1] == 8
        assert torch.equal(views.features[:frames], batch.features) and (views.features[frames:] == 0).all()
        assert torch.equal(views.tokens[:, :tokens], batch.tokens) and (views.tokens[:, tokens:] == 0).all()
        assert torch.equal(views.feature_lengths, batch.feature_lengths)


def test_reset_begins_at_batch_0():
    inputs, _ = make()
    first = [tensor.clone() for tensor in inputs.load()[0]]
    inputs.load()
    inputs.reset()
    assert all(torch.equal(a, b) for a, b in zip(inputs.load()[0], first, strict=True))


def test_a_batch_that_does_not_fit_is_refused():
    inputs, source = make()
    zeros = torch.zeros(TINY.batch, dtype=torch.int32)
    for frames, tokens, size in ((25, 8, TINY.batch), (24, 9, TINY.batch), (24, 8, TINY.batch + 1)):
        features = torch.zeros(frames, size, TINY.features, dtype=torch.bfloat16)
        batch = Batch(features, zeros, torch.zeros(size, tokens, dtype=torch.int64), zeros)
        source.next = lambda batch=batch: batch
        with pytest.raises(ValueError, match=f"{size} utterances, {frames} frames and {tokens} tokens, .* 24 and 8"):
            inputs.load()


@pytest.mark.gpu
def test_batches_read_ahead_on_a_gpu_are_those_of_the_host():
    torch.cuda.set_stream(torch.cuda.Stream())
    config = replace(TINY, batch=8)
    inputs, _ = make(config, torch.device("cuda"), pinned=True)
    expected, _ = make(config)
    for index in range(20):
        fit = fixed(24, 8) if index % 2 else None
        views, _ = inputs.load(fit)
        # The step's own work, after which the buffers may be overwritten.
        copies = [tensor.clone() for tensor in views]
        torch.cuda._sleep(10**6)
        ours, _ = expected.load(fit)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(copies, ours, strict=True)), index
    inputs.reset()
    expected.reset()
    assert torch.equal(inputs.load()[0].features.cpu(), expected.load()[0].features)
