"""Audio to features in plain torch, as MLPerf's RNN-T makes them with DALI.

extract(...)      decoded audio -> normalised log-mel frames of 10 ms of one utterance. rnnt/speech/dali_pipeline.py
                  does the same and is tested against it.
finish(...)       a padded batch of these -> input of the encoder: masks, three frames spliced, padding, width

Source of all numbers: NVIDIA's submission to MLPerf v3.1, RNN-T, common/data/dali/pipeline.py and
common/data/features.py. Random numbers come from numpy generators on the host, which the caller seeds: DALI and torch
get the same ones, and a batch can be made again.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from rnnt.speech.folder import HOP, SAMPLE_RATE, STACK, BadAudio, num_frames, resampled, spliced

NUM_MELS = 80
FFT_SIZE = 512
WINDOW = 320
PREEMPHASIS = 0.97
DITHER = 1e-5
# Full scale is 1. WAVs of floats may go beyond it a little; samples far beyond are no recording.
MAX_SAMPLE = 8.0
SILENCE_DB = -60.0
# DALI's default window of short-term power, in samples.
SILENCE_WINDOW = 2048
LOG_FLOOR = 1e-20
# DALI's resampler at its default quality.
LOBES = 16

NUM_BAND_MASKS, MAX_BANDS = 2, 20
NUM_TIME_MASKS, MAX_TIME_SHARE = 10, 0.03


class Noise(NamedTuple):
    """Dither, FP32, standard deviation 1e-5: every utterance adds a stretch of one table, from a random offset.

    Drawing two million numbers a batch would cost the host more than the rest of its work.
    """

    table: np.ndarray
    max_offset: int


def make_noise(max_samples: int) -> Noise:
    """A table for utterances of up to max_samples, twice as long."""
    table = np.random.default_rng(0).standard_normal(2 * max_samples, dtype=np.float32)
    return Noise(np.float32(DITHER) * table, max_samples)


# ------------------------------------------------------------------------------------------------
# One utterance


def extract(audio: torch.Tensor, scale: float, noise: torch.Tensor | None = None) -> torch.Tensor:
    """FP32 [80, frames of 10 ms] of audio, FP32 [samples] in [-1, 1].

    scale: new sample rate over old. noise: FP32, at least as long as the audio, added after silence is cut off; None
    adds nothing. Raises BadAudio, see require_sound.
    """
    require_sound(float(audio.min()), float(audio.max()))
    audio = resample(audio, scale)
    begin, length = sounding(audio)
    audio = audio[begin : begin + length]
    if noise is not None:
        audio = audio + noise[:length]
    # The sample before the first one is taken as equal to it, as DALI does ("clamp").
    audio = audio - PREEMPHASIS * torch.cat((audio[:1], audio[:-1]))
    return normalised(torch.log(mel_filters() @ power_spectrum(audio)).clamp_min(math.log(LOG_FLOOR)))


def require_sound(lowest: float, highest: float) -> None:
    """Raises BadAudio where all samples are equal, or one is beyond 8 times full scale or NaN.

    lowest, highest: of the samples; one of them is NaN if a sample is.
    """
    if not -MAX_SAMPLE <= lowest <= highest <= MAX_SAMPLE:
        raise BadAudio(f"samples from {lowest:.3g} to {highest:.3g}, full scale is 1")
    if lowest == highest:
        raise BadAudio("nothing but silence")


def resample(audio: torch.Tensor, scale: float) -> torch.Tensor:
    """FP32 [ceil(samples * scale)]: a sinc under a Hann window of 16 lobes, zeros beyond the ends.

    As in DALI, sample k lies at k / scale of the old ones, and the filter keeps its width where the rate falls, so
    frequencies above half the new rate are folded back.
    """
    if scale == 1.0:
        return audio
    scale = float(np.float32(scale))
    num_out = resampled(len(audio), scale)
    taps = torch.arange(-LOBES + 1, LOBES + 1)
    neighbours = F.pad(audio, (LOBES - 1, LOBES + 1)).unfold(0, 2 * LOBES, 1)
    parts = []
    for start in range(0, num_out, 1 << 16):
        place = torch.arange(start, min(start + (1 << 16), num_out), dtype=torch.float64) / scale
        first = place.floor()
        # Neither 0 nor 1, where sin(x) / x needs a case of its own.
        past = (place - first).clamp(1e-9, 1 - 1e-9)[:, None]
        # sin(pi * (t - x)) is -sin(pi * x) for even t, sin(pi * x) for odd ones: one sine for all taps.
        sinc = torch.sin(math.pi * past) / (math.pi * (past - taps)) * (1 - 2 * (taps % 2))
        angle, angles = math.pi / LOBES * past, math.pi / LOBES * taps
        hann = 0.5 + 0.5 * (torch.cos(angle) * torch.cos(angles) + torch.sin(angle) * torch.sin(angles))
        parts.append((neighbours[first.long()] * (sinc * hann).float()).sum(dim=1))
    return torch.cat(parts)


def sounding(audio: torch.Tensor) -> tuple[int, int]:
    """(begin, length) of the audio without silence at both ends.

    Silence is where the mean square over 2048 samples lies 60 dB below its largest value. A window counts for all of
    its samples, so some silence stays. DALI sums in FP32 and at times keeps up to half a second more of it.
    """
    sums = F.pad(audio.double().square().cumsum(0), (SILENCE_WINDOW, 0))
    power = sums[SILENCE_WINDOW:] - sums[:-SILENCE_WINDOW]
    loud = (power >= power.max() * 10 ** (SILENCE_DB / 10)).nonzero()
    begin = max(0, int(loud[0]) - SILENCE_WINDOW + 1)
    return begin, int(loud[-1]) - begin + 1


def power_spectrum(audio: torch.Tensor) -> torch.Tensor:
    """FP32 [257, frames]: 512-point FFT of 320 samples under a Hann window, every 160, mirrored at the ends."""
    # Unlike torch's, this mirrors audio that is shorter than a window as often as needed.
    padded = torch.from_numpy(np.pad(audio.numpy(), WINDOW // 2, mode="reflect"))
    frames = padded.unfold(0, WINDOW, HOP)[: num_frames(len(audio))]
    return torch.fft.rfft(frames * _hann(), FFT_SIZE).abs().square().T


@functools.cache
def _hann():
    return 0.5 - 0.5 * torch.cos(2 * math.pi * (torch.arange(WINDOW) + 0.5) / WINDOW)


def _mel(frequency):
    # Slaney's scale: linear to 1000 Hz, logarithmic above.
    linear = 3 * frequency / 200
    return np.where(frequency < 1000, linear, 15 + 27 * np.log(np.maximum(frequency, 1000) / 1000) / np.log(6.4))


def _frequency(mel):
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) * (mel - 15) / 27))


@functools.cache
def mel_filters() -> torch.Tensor:
    """FP32 [80, 257]: triangles evenly spaced on Slaney's mel scale from 0 to 8000 Hz, each of area 1."""
    edges = _frequency(np.linspace(_mel(0.0), _mel(SAMPLE_RATE / 2), NUM_MELS + 2))
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    bins = np.arange(FFT_SIZE // 2 + 1) * SAMPLE_RATE / FFT_SIZE
    triangles = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clip(min=0)
    return torch.from_numpy(2 / (high - low) * triangles).float()


def normalised(features: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over time in each mel band; a band that never changes becomes 0."""
    centred = features - features.mean(dim=1, keepdim=True)
    deviation = centred.square().mean(dim=1, keepdim=True).sqrt()
    return torch.where(deviation > 0, centred / deviation, 0.0)


# ------------------------------------------------------------------------------------------------
# A batch


def draw_masks(generator: np.random.Generator, lengths: list[int]) -> np.ndarray:
    """SpecAugment's masks, int32 [B, 12, 2]: begin and end of 2 over mel bands, then of 10 over frames of 10 ms.

    lengths: frames of each utterance. A mask covers 0 to 20 bands, or 0 to 3 % of the length, all equally likely.
    """
    # The room that each mask has and its largest width, [B, 12, 2].
    bands = NUM_BAND_MASKS * [[NUM_MELS, MAX_BANDS]]
    limits = np.array([bands + NUM_TIME_MASKS * [[length, int(MAX_TIME_SHARE * length)]] for length in lengths])
    widths = generator.integers(0, limits[..., 1], endpoint=True)
    begins = generator.integers(0, limits[..., 0] - widths, endpoint=True)
    return np.stack((begins, begins + widths), axis=2).astype(np.int32)


def mask(features: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Features [B, 80, T] with 0 where masks cover them. masks: int32 [B, 12, 2] on their device, see draw_masks."""
    bands = _covered(masks[:, :NUM_BAND_MASKS], features.shape[1])
    times = _covered(masks[:, NUM_BAND_MASKS:], features.shape[2])
    return features.masked_fill(bands[:, :, None] | times[:, None, :], 0.0)


def _covered(masks, size):
    place = torch.arange(size, device=masks.device)
    return ((place >= masks[..., :1]) & (place < masks[..., 1:])).any(dim=1)


def splice(features: torch.Tensor) -> torch.Tensor:
    """[B, 240, ceil(T / 3)] from features [B, 80, T]: three frames above each other; 0 beyond the end."""
    size, bands, length = features.shape
    stacked = spliced(length)
    features = F.pad(features, (0, STACK * stacked - length))
    return features.view(size, bands, stacked, STACK).permute(0, 3, 1, 2).reshape(size, STACK * bands, stacked)


def finish(features, lengths: torch.Tensor, masks: torch.Tensor | None, width: int, dtype: torch.dtype):
    """The encoder's input, [T, B, width] in `dtype`, from features [B, 80, frames of 10 ms], FP32.

    lengths: int32 [B], spliced frames; all is 0 beyond them. masks: see draw_masks; None masks nothing. Both are on the
    features' device. width: 240 or more.
    """
    if masks is not None:
        features = mask(features, masks)
    features = splice(features)
    beyond = torch.arange(features.shape[2], device=features.device) >= lengths[:, None]
    features = features.masked_fill(beyond[:, None, :], 0.0)
    return F.pad(features, (0, 0, 0, width - features.shape[1])).permute(2, 0, 1).to(dtype).contiguous()
