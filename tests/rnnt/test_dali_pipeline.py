"""rnnt/speech/dali_pipeline: DALI's features against those of plain torch, and files that DALI cannot read."""

import io

import numpy as np
import pytest
import torch

from rnnt.speech import features
from tests.helpers.speech_files import encode, tone

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed: ./setup.sh dali")

from rnnt.speech.dali_pipeline import DaliExtractor

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: ./setup.sh speech")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def speech():
    """Three recordings, as bytes; one starts and ends with silence."""
    first, second = tone(2.7, 110), tone(3.4, 190, seed=1)
    silent = np.concatenate((np.zeros(6000), first, np.zeros(9000)))
    return [as_array(encode(sound)) for sound in (first, second, silent)]


def as_array(content):
    return np.frombuffer(content, np.uint8)


@pytest.fixture(scope="module")
def noise():
    return features.make_noise(150000)


@pytest.fixture(scope="module")
def dithered(noise):
    return DaliExtractor(4, noise, 1, CPU)


@pytest.fixture(scope="module")
def plain():
    return DaliExtractor(4, features.Noise(np.zeros(60000, np.float32), 0), 1, CPU)


def by_torch(encoded, scale, noise):
    samples, _ = soundfile.read(io.BytesIO(encoded.tobytes()), dtype="float32")
    return features.extract(torch.from_numpy(samples), scale, noise)


def compare(extractor, encoded, scales, offsets, noise):
    """(largest, mean) difference of each utterance."""
    batch, frames = extractor(encoded, scales, offsets)
    out = []
    for row, (content, scale, offset) in enumerate(zip(encoded, scales, offsets, strict=True)):
        expected = by_torch(content, scale, None if noise is None else torch.from_numpy(noise.table[offset:]))
        assert frames[row] == expected.shape[1]
        difference = (batch[row, :, : frames[row]] - expected).abs()
        assert not batch[row, :, frames[row] :].any()
        out.append((float(difference.max()), float(difference.mean())))
    return out


def test_features_equal_those_of_torch(dithered, speech, noise):
    # FP32 transforms in another order; features have variance 1.
    for largest, mean in compare(dithered, speech, [1.0] * 3, [0, 777, 150000 - 1], noise):
        assert largest < 5e-3 and mean < 2e-5


@pytest.mark.gpu
def test_features_of_a_gpu_equal_those_of_torch(speech, noise):
    extractor = DaliExtractor(4, noise, 1, torch.device("cuda", 0))
    offsets = [0, 777, 150000 - 1]
    first, frames = extractor(speech, [1.0] * 3, offsets)
    again, _ = extractor(speech, [1.0] * 3, offsets)
    assert first.is_cuda and torch.equal(first, again)
    for row, (content, offset) in enumerate(zip(speech, offsets, strict=True)):
        expected = by_torch(content, 1.0, torch.from_numpy(noise.table[offset:]))
        assert frames[row] == expected.shape[1] and not first[row, :, frames[row] :].any()
        difference = (first[row, :, : frames[row]].cpu() - expected).abs()
        assert difference.max() < 2e-2 and difference.mean() < 1e-4
    assert extractor([speech[0], speech[1][:5000]], [1.0] * 2, [0] * 2).keys() == {1}


def loud(*sounds):
    """Recordings with nothing to cut off: (seconds, pitch) each."""
    return [as_array(encode(tone(seconds, pitch))) for seconds, pitch in sounds]


def test_resampled_features_equal_those_of_torch(dithered, noise):
    # DALI counts places within a block of 1024 samples in FP32, which shifts some by 1e-4 of a sample.
    sounds = loud((1.0, 150), (0.6, 250), (2.3, 180))
    for largest, mean in compare(dithered, sounds, [0.85, 1.15, 1.0371], [5, 50, 500], noise):
        assert largest < 0.1 and mean < 1e-3


def test_features_without_dither_equal_those_of_torch(plain):
    for largest, mean in compare(plain, loud((1.0, 150), (0.6, 250)), [1.0, 1.0], [0, 0], None):
        assert largest < 5e-3 and mean < 2e-5


def test_silence_is_cut_off_where_torch_does(plain):
    for before, after in ((9000, 0), (0, 9000), (5000, 12000)):
        sound = as_array(encode(np.concatenate((np.zeros(before), tone(0.8), np.zeros(after)))))
        _, frames = plain([sound], [1.0], [0])
        expected = by_torch(sound, 1.0, None)
        # DALI sums squares in FP32, sample after sample, and starts anew every 8192: a loud part leaves something
        # behind that can lie above the threshold until then.
        assert 0 <= frames[0] - expected.shape[1] <= 8192 // 160
        assert frames[0] < (before + after) // 160 + 81


def test_other_dither_gives_other_features(dithered, speech):
    first, _ = dithered(speech, [1.0] * 3, [0, 0, 0])
    again, _ = dithered(speech, [1.0] * 3, [0, 0, 0])
    other, _ = dithered(speech, [1.0] * 3, [1, 1, 1])
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_stereo_and_wav_are_read(plain):
    left, right = tone(0.5, 150), tone(0.5, 220)
    sounds = [as_array(encode(np.stack((left, right), 1), kind="WAV")), as_array(encode((left + right) / 2))]
    batch, frames = plain(sounds, [1.0, 1.0], [0, 0])
    assert frames[0] == frames[1] and (batch[0] - batch[1]).abs().mean() < 0.02


def test_bad_files_are_told_apart_and_the_pipeline_goes_on(dithered, speech):
    before, _ = dithered(speech, [1.0] * 3, [0] * 3)
    damaged = speech[0].copy()
    damaged[len(damaged) // 2 :][:50] ^= 0x55
    faults = dithered([damaged, speech[1], speech[1][:5000]], [1.0] * 3, [0] * 3)
    assert faults.keys() == {0, 2}
    assert all(str(fault).startswith("cannot be decoded: ") and len(str(fault)) < 200 for fault in faults.values())
    faults = dithered([speech[0], as_array(encode(np.zeros(8000)))], [1.0] * 2, [0] * 2)
    assert {row: str(fault) for row, fault in faults.items()} == {1: "nothing but silence"}
    after, _ = dithered(speech, [1.0] * 3, [0] * 3)
    assert torch.equal(before, after)


def test_a_fault_of_the_program_is_not_taken_for_a_bad_file(dithered, speech):
    # The noise ends before the utterance does.
    with pytest.raises(RuntimeError, match="slice"):
        dithered(speech[:1], [1.0], [10**7])
    dithered(speech, [1.0] * 3, [0] * 3)
