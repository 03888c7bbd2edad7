"""rnnt/speech/features: masks and splicing against naive loops."""

import numpy as np
import pytest
import torch

pytest.importorskip("soundfile", reason="soundfile is not installed: ./setup.sh speech")

from rnnt.speech import features
from rnnt.speech.folder import spliced


def test_masks_are_drawn_within_their_limits():
    lengths = [1000, 333, 34, 10]
    drawn = [features.draw_masks(np.random.default_rng(seed), lengths) for seed in range(300)]
    begins, ends = np.moveaxis(np.stack(drawn), -1, 0)
    widths = ends - begins
    assert begins.shape == (300, 4, 12) and (begins >= 0).all()
    assert (ends[:, :, :2] <= 80).all() and widths[:, :, :2].min() == 0 and widths[:, :, :2].max() == 20
    for row, length in enumerate(lengths):
        assert ends[:, row, 2:].max() <= length
        assert widths[:, row, 2:].max() == int(0.03 * length) and widths[:, row, 2:].min() == 0
    assert np.array_equal(drawn[0], features.draw_masks(np.random.default_rng(0), lengths))


@pytest.mark.parametrize("length", [1, 2, 3, 100, 101])
def test_splicing_equals_a_naive_loop(length):
    mel = torch.randn(2, 80, length)
    out = features.splice(mel)
    assert out.shape == (2, 240, spliced(length))
    for step in range(out.shape[2]):
        for k in range(3):
            place = 3 * step + k
            expected = mel[:, :, place] if place < length else torch.zeros(2, 80)
            assert torch.equal(out[:, 80 * k : 80 * (k + 1), step], expected)


def test_a_finished_batch_is_masked_and_spliced_and_zero_beyond_its_lengths():
    mel, lengths = torch.randn(2, 80, 120), torch.tensor([40, 13], dtype=torch.int32)
    masks = features.draw_masks(np.random.default_rng(3), [120, 38])
    expected = mel.clone()
    for row in range(2):
        for place, (begin, end) in enumerate(masks[row].tolist()):
            if place < 2:
                expected[row, begin:end] = 0
            else:
                expected[row, :, begin:end] = 0
    assert not torch.equal(expected, mel)
    out = features.finish(mel, lengths, torch.from_numpy(masks), 256, torch.bfloat16)
    assert out.shape == (40, 2, 256) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert not out[:, :, 240:].any() and not out[13:, 1].any()
    assert torch.equal(out[:, 0, :240], features.splice(expected)[0].T.bfloat16())
    assert torch.equal(out[:13, 1, :240], features.splice(expected)[1, :, :13].T.bfloat16())
    assert torch.equal(features.finish(mel, lengths, None, 240, torch.float32)[:, 0], features.splice(mel)[0].T)
