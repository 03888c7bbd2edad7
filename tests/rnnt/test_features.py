"""rnnt/speech/features: each part of the plain torch features against a naive loop or a closed form."""

import math

import numpy as np
import pytest
import torch

from rnnt.speech import features
from rnnt.speech.folder import BadAudio, num_frames, resampled, spliced
from tests.helpers.speech_files import tone


def audio(seconds=1.0, **kwargs):
    return torch.from_numpy(tone(seconds, **kwargs)).float()


# ------------------------------------------------------------------------------------------------
# One utterance


@pytest.mark.parametrize("scale", [0.85, 1.15, 0.5, 2.0])
def test_resampling_keeps_a_tone_at_its_time(scale):
    frequency = 440.0
    sound = torch.sin(2 * math.pi * frequency * torch.arange(8000) / 16000)
    out = features.resample(sound, scale)
    assert len(out) == resampled(8000, scale)
    expected = torch.sin(2 * math.pi * frequency * torch.arange(len(out)) / (16000 * np.float32(scale)))
    assert (out - expected)[100:-100].abs().max() < 2e-3


def test_resampling_equals_a_naive_sum():
    sound, scale = audio(0.02), 0.9
    out = features.resample(sound, scale)
    for k in (0, 1, 7, 150, len(out) - 1):
        place = k / float(np.float32(scale))
        expected = 0.0
        for i in range(len(sound)):
            if abs(i - place) <= features.LOBES:
                window = 0.5 + 0.5 * math.cos(math.pi * (i - place) / features.LOBES)
                expected += float(sound[i]) * float(np.sinc(i - place)) * window
        assert float(out[k]) == pytest.approx(expected, abs=1e-6)


def test_silence_is_cut_off_at_both_ends():
    sound = torch.cat((1e-5 * torch.randn(6000), audio(0.5), 1e-5 * torch.randn(5000)))
    begin, length = features.sounding(sound)
    # A window of 2048 samples that holds one loud sample counts as a whole.
    assert 6000 - 2047 <= begin < 6100
    assert 6000 + 8000 < begin + length <= 6000 + 8000 + 2047
    # By hand: mean squares of the last 2048 samples, nothing before the first.
    padded = torch.cat((torch.zeros(2047), sound)).double().square()
    power = torch.stack([padded[k : k + 2048].sum() for k in range(len(sound))])
    loud = [k for k in range(len(sound)) if power[k] >= power.max() * 1e-6]
    assert begin == max(0, loud[0] - 2047) and begin + length == loud[-1] + 1


def test_sound_throughout_is_kept_whole():
    sound = audio(0.3)
    assert features.sounding(sound) == (0, len(sound))


@pytest.mark.parametrize("num_samples", [1600, 1759, 100])
def test_power_spectrum_equals_a_naive_transform(num_samples):
    sound = audio(num_samples / 16000)
    power = features.power_spectrum(sound)
    assert power.shape == (257, num_frames(num_samples))
    mirrored = np.pad(sound.numpy().astype(np.float64), 800, "reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * (np.arange(320) + 0.5) / 320)
    for frame in range(power.shape[1]):
        piece = mirrored[800 + 160 * frame - 160 : 800 + 160 * frame + 160] * window
        expected = np.abs(np.fft.rfft(piece, 512)) ** 2
        np.testing.assert_allclose(power[:, frame].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_mel_filters_are_triangles_of_area_one():
    filters = features.mel_filters()
    assert filters.shape == (80, 257) and (filters >= 0).all()
    # Wide enough for many bins, a triangle's sum times the width of a bin is its area.
    assert (filters[40:].sum(1) * 16000 / 512 - 1).abs().max() < 0.02
    peaks = filters.argmax(1)
    assert (peaks[1:] >= peaks[:-1]).all() and int(peaks[-1]) < 256
    # Linear below 1000 Hz, 3 mel each 200 Hz.
    assert features._frequency(np.array([15.0])) == pytest.approx(1000)
    assert features._mel(np.array([6400.0])) == pytest.approx(42)


def test_features_have_mean_zero_and_variance_one():
    mel = features.extract(audio(1.0), 1.0)
    assert mel.shape == (80, 101)
    assert mel.mean(1).abs().max() < 1e-4 and (mel.var(1, unbiased=False) - 1).abs().max() < 1e-3


def test_a_constant_band_is_zero_not_nan():
    assert torch.equal(features.normalised(torch.full((2, 5), 3.0)), torch.zeros(2, 5))


def test_louder_speech_has_the_same_features():
    assert torch.allclose(features.extract(audio(0.5), 1.1), features.extract(4 * audio(0.5), 1.1), atol=2e-3)


def test_dither_is_added_after_the_cut():
    sound = audio(0.5)
    noise = torch.from_numpy(features.make_noise(len(sound)).table)
    assert not torch.equal(features.extract(sound, 1.0), features.extract(sound, 1.0, noise))
    quiet = torch.cat((torch.zeros(4000), sound))
    begin, length = features.sounding(quiet)
    by_hand = torch.cat((quiet[begin : begin + length] + noise[:length],))
    assert torch.equal(features.extract(quiet, 1.0, noise), features.extract(by_hand, 1.0))


def test_noise_is_long_and_quiet_enough():
    noise = features.make_noise(5000)
    assert len(noise.table) >= noise.max_offset + 5000
    assert noise.table.std() == pytest.approx(1e-5, rel=0.05) and noise.table.dtype == np.float32


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_silence_is_no_audio(value):
    with pytest.raises(BadAudio, match="nothing but silence"):
        features.extract(torch.full((4000,), value), 1.0)


# ------------------------------------------------------------------------------------------------
# A batch


def test_masks_are_drawn_within_their_limits():
    lengths = [1000, 333, 34, 10]
    drawn = [features.draw_masks(np.random.default_rng(seed), lengths) for seed in range(300)]
    masks = np.stack(drawn)
    begins, ends = masks[..., 0], masks[..., 1]
    widths = ends - begins
    assert masks.shape == (300, 4, 12, 2) and (begins >= 0).all()
    assert (ends[:, :, :2] <= 80).all() and widths[:, :, :2].min() == 0 and widths[:, :, :2].max() == 20
    for row, length in enumerate(lengths):
        assert ends[:, row, 2:].max() <= length
        assert widths[:, row, 2:].max() == int(0.03 * length) and widths[:, row, 2:].min() == 0
    assert np.array_equal(drawn[0], features.draw_masks(np.random.default_rng(0), lengths))


def test_masking_equals_a_naive_loop():
    lengths = [50, 120, 100]
    mel = torch.randn(3, 80, 120)
    masks = features.draw_masks(np.random.default_rng(3), lengths)
    expected = mel.clone()
    for row in range(3):
        for place, (begin, end) in enumerate(masks[row].tolist()):
            if place < 2:
                expected[row, begin:end] = 0
            else:
                expected[row, :, begin:end] = 0
    assert not torch.equal(expected, mel)
    assert torch.equal(features.mask(mel, torch.from_numpy(masks)), expected)


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


def test_finished_batch_has_zeros_beyond_its_lengths_and_width():
    mel = torch.randn(2, 80, 31)
    lengths = torch.tensor([11, 4], dtype=torch.int32)
    out = features.finish(mel, lengths, None, 256, torch.bfloat16)
    assert out.shape == (11, 2, 256) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert not out[:, :, 240:].any() and not out[4:, 1].any()
    assert torch.equal(out[:4, 1, :240], features.splice(mel)[1, :, :4].T.bfloat16())
    assert torch.equal(out[:, 0, :240], features.splice(mel)[0].T.bfloat16())


def test_finishing_masks_before_it_splices():
    mel = torch.ones(1, 80, 30)
    masks = torch.zeros(1, 12, 2, dtype=torch.int32)
    masks[0, 0] = torch.tensor([5, 7])
    masks[0, 2] = torch.tensor([4, 5])
    out = features.finish(mel, torch.tensor([10]), masks, 240, torch.float32)[:, 0].view(10, 3, 80)
    assert not out[:, :, 5:7].any() and not out[1, 1].any()
    assert out.sum() == 30 * 80 - 30 * 2 - 78
