"""rnnt/speech/dali_pipeline: DALI's features against the same by numpy, and files that DALI cannot read."""

import numpy as np
import pytest
import torch

from tests.helpers.speech_files import encode, soundfile, tone

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed: ./setup.sh dali")

from rnnt.speech.dali_pipeline import DaliExtractor
from rnnt.speech.folder import num_frames, resampled

CPU = torch.device("cpu")
MAX_SAMPLES = 150_000


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """write(samples or bytes) -> the path of a FLAC file."""
    folder = tmp_path_factory.mktemp("speech")

    def write(sound):
        path = folder / f"{len(list(folder.iterdir()))}.flac"
        path.write_bytes(sound if isinstance(sound, bytes) else encode(sound))
        return str(path)

    return write


@pytest.fixture(scope="module")
def extract():
    return DaliExtractor(4, MAX_SAMPLES, 1, CPU)


def mel_filters():
    """[80, 257]: triangles of area 1, evenly spaced on Slaney's mel scale from 0 to 8000 Hz."""
    mel = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 82)
    edges = np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) * (mel - 15) / 27))[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    bins = np.arange(257) * 16000 / 512
    return 2 / (high - low) * np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clip(min=0)


def by_numpy(path, offset):
    """The features of sound without silence, at its own speed."""
    audio, _ = soundfile.read(path)
    audio += 1e-5 * np.random.default_rng(0).standard_normal(2 * MAX_SAMPLES, dtype=np.float32)[offset:][: len(audio)]
    audio = audio - 0.97 * np.concatenate((audio[:1], audio[:-1]))
    padded = np.pad(audio, 160, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * (np.arange(320) + 0.5) / 320)
    frames = np.stack([padded[160 * k :][:320] * window for k in range(num_frames(len(audio)))])
    log = np.log(mel_filters() @ (np.abs(np.fft.rfft(frames, 512)) ** 2).T)
    return (log - log.mean(1, keepdims=True)) / log.std(1, keepdims=True)


def assert_as_numpy(extractor, paths, bound):
    offsets = [0, MAX_SAMPLES - 1]
    batch, frames = extractor(paths, [1.0] * 2, offsets)
    assert batch.device.type == extractor.device.type
    for row, (path, offset) in enumerate(zip(paths, offsets, strict=True)):
        expected = by_numpy(path, offset)
        assert frames[row] == expected.shape[1] and not batch[row, :, frames[row] :].any()
        difference = np.abs(batch[row, :, : frames[row]].cpu().numpy() - expected)
        assert difference.max() < bound and difference.mean() < bound / 100


def test_features_equal_those_by_numpy(speech, extract):
    # FP32 transforms; features have variance 1.
    assert_as_numpy(extract, [speech(tone(1.0, 110)), speech(tone(1.4, 190))], 5e-3)


@pytest.mark.gpu
def test_features_of_a_gpu_equal_those_by_numpy(speech):
    extractor, paths = DaliExtractor(4, MAX_SAMPLES, 1, torch.device("cuda", 0)), [speech(tone(1.0)), speech(tone(1.4))]
    assert_as_numpy(extractor, paths, 2e-2)
    first, again = (extractor(paths, [1.0] * 2, [0, 7])[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(ValueError, match="cannot be decoded"):
        extractor([speech(encode(tone(1.0))[:5000])], [1.0], [0])


@pytest.mark.parametrize("scale", [0.85, 1.15])
def test_speech_is_resampled(speech, extract, scale):
    def sound(rate, num_samples):
        time = np.arange(num_samples) / rate
        return sum(0.05 * np.sin(2 * np.pi * k * 200 * time) * np.cos(7 * k * time) for k in range(1, 15))

    slowed, frames = extract([speech(sound(16000, 16000))], [scale], [0])
    expected, _ = extract([speech(sound(16000 * scale, resampled(16000, scale)))], [1.0], [0])
    assert frames == [num_frames(resampled(16000, scale))] and slowed.shape == expected.shape
    unchanged, _ = extract([speech(sound(16000, resampled(16000, scale)))], [1.0], [0])
    alike, other = (
        torch.corrcoef(torch.stack((slowed[0, :40].flatten(), features[0, :40].flatten())))[0, 1]
        for features in (expected, unchanged)
    )
    assert alike > 0.99 and other < 0.5


def test_silence_is_cut_off_at_both_ends(speech, extract):
    for before, after in ((9000, 0), (0, 9000), (5000, 12000)):
        _, (frames,) = extract([speech(np.concatenate((np.zeros(before), tone(0.8), np.zeros(after))))], [1.0], [0])
        # A window of 2048 samples counts as a whole, and DALI's sums leave something behind for up to 8192.
        assert 81 <= frames <= 81 + (2 * 2048 + 8192) // 160


def test_other_dither_gives_other_features(speech, extract):
    path = speech(np.concatenate((tone(0.5), np.zeros(2000), tone(0.5))))
    first, again, other = (extract([path], [1.0], [offset])[0] for offset in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_file_that_cannot_be_used_is_named(speech):
    good, whole = speech(tone(1.0)), encode(tone(1.0))
    damaged = whole[: len(whole) // 2] + bytes(60) + whole[len(whole) // 2 + 60 :]
    for bad, fault in (
        (speech(damaged), "cannot be decoded"),
        (speech(whole[:5000]), "cannot be decoded"),
        (speech(np.zeros(8000)), "holds nothing but silence"),
        (good + "x", "cannot be decoded"),
    ):
        with pytest.raises(ValueError, match=f"^--data: {bad} {fault}"):
            DaliExtractor(4, MAX_SAMPLES, 1, CPU)([good, bad], [1.0] * 2, [0] * 2)
    # A fault of the program is not taken for a bad file: here the dither ends before the utterance does.
    with pytest.raises(RuntimeError, match="slice"):
        DaliExtractor(4, MAX_SAMPLES, 1, CPU)([good], [1.0], [10**7])
