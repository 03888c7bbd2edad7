"""rnnt/decoding.py: its labels against a search of one utterance after the other."""

import dataclasses

import pytest
import torch

from rnnt.config import PRESETS
from rnnt.decoding import GreedyDecoder
from tests.helpers.decoder_cases import BLANK, CONFIG, encoded, model


@torch.no_grad()
def one_by_one(net, f, lengths, per_frame=30, total=300):
    """The search as it is usually written: an utterance, its frames, the labels of a frame."""
    training = net.training
    net.eval()
    found = []
    for encoder_output, length in zip(f, lengths.tolist(), strict=True):
        labels = []
        for frame in encoder_output[:length]:
            for _ in range(min(per_frame, total - len(labels))):
                # The output after all labels so far.
                g = net.prediction(torch.tensor([labels], dtype=torch.int64))[:, -1:]
                best = net.joint(frame.view(1, 1, -1), g).argmax().item()
                if best == BLANK:
                    break
                labels.append(best)
        found.append(labels)
    net.train(training)
    return found


@pytest.mark.parametrize("unrolled, num_layers", [(1, 3), (4, 1)])
def test_labels_are_those_of_a_search_one_by_one(unrolled, num_layers):
    net = model(2.0, dataclasses.replace(CONFIG, prediction_layers=num_layers))
    decoder = GreedyDecoder(net, 5, 12, unrolled=unrolled)
    rates = []
    # One batch after another: nothing of the one before may be left.
    for seed, lengths in enumerate(([9, 1, 0, 12, 5], [12] * 5, [1] * 5, [0] * 5, [9, 1, 0, 12, 5])):
        f, lengths = encoded(5, 12, seed), torch.tensor(lengths, dtype=torch.int32)
        expected = one_by_one(net, f, lengths)
        assert decoder.decode(f, lengths) == expected
        rates.append(sum(map(len, expected)) / max(1, int(lengths.sum())))
    # Blanks and labels, which vary.
    assert any(0.2 < rate < 3 for rate in rates), rates
    assert len({label for labels in one_by_one(net, encoded(5, 12), torch.tensor([12] * 5)) for label in labels}) > 3
    decoder.close()


@pytest.mark.parametrize(("per_frame", "total"), [(3, 300), (3, 9), (1, 1)])
def test_limits(per_frame, total):
    """Without a blank every frame ends at its limit, and utterances at theirs."""
    net = model(-1000.0)
    f, lengths = encoded(3, 6), torch.tensor([6, 2, 1], dtype=torch.int32)
    expected = one_by_one(net, f, lengths, per_frame, total)
    assert [len(labels) for labels in expected] == [min(length * per_frame, total) for length in lengths.tolist()]
    assert GreedyDecoder(net, 3, 6, total, per_frame).decode(f, lengths) == expected


def test_smaller_and_shorter_batches():
    net = model(2.0)
    decoder = GreedyDecoder(net, 4, 12)
    for batch, frames in [(4, 12), (2, 12), (3, 5), (1, 1), (4, 12)]:
        f, lengths = encoded(batch, frames, seed=batch), torch.arange(frames, frames - batch, -1).clamp(min=1).int()
        expected = one_by_one(net, f, lengths)
        # Values behind an utterance do not matter.
        for row, length in enumerate(lengths.tolist()):
            f[row, length:] = float("nan")
        assert decoder.decode(f, lengths) == expected
    for batch, frames in ((5, 12), (4, 13)):
        with pytest.raises(ValueError, match=f"{batch} utterances of {frames} frames, .* holds 4 of 12: raise"):
            decoder.decode(encoded(batch, frames), torch.full((batch,), frames))


def test_replays_read_weights_that_changed_in_place():
    net = model(2.0)
    decoder = GreedyDecoder(net, 3, 8)
    f, lengths = encoded(3, 8), torch.tensor([8, 6, 7], dtype=torch.int32)
    for module in (net.prediction, net.joint):
        before = decoder.decode(f, lengths)
        for index, weight in enumerate(module.parameters()):
            with torch.no_grad():
                weight.add_(0.7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index)))
        expected = one_by_one(net, f, lengths)
        assert decoder.decode(f, lengths) == expected != before


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_labels_on_a_gpu(batch):
    """In FP32 those of the CPU; at the benchmark's sizes in FP16 there are labels, the same in each decoding."""
    cases = ((PRESETS["bench"], torch.float16, 19.5), (CONFIG, torch.float32, 2.0))
    with torch.cuda.stream(torch.cuda.Stream()):
        for config, dtype, blank_bias in cases:
            decoder = GreedyDecoder(model(blank_bias, config, dtype, "cuda"), batch, 205)
            on_host = GreedyDecoder(model(blank_bias, config), batch, 205)
            num_labels = 0
            for seed in range(3):
                f = encoded(batch, 205, seed, config)
                lengths = (205 - 23 * seed * torch.arange(batch)).clamp(min=0).int()
                found, again = (decoder.decode(f.to("cuda", dtype), lengths.cuda()) for _ in range(2))
                assert found == again
                num_labels += sum(map(len, found))
                if dtype == torch.float32:
                    assert found == on_host.decode(f, lengths)
            assert num_labels > 50
            decoder.close()
