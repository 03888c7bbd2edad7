"""Generated shards: moments with the spectra of images and encodings with the structure of captions. No torch here."""

import fcntl
import functools
import shutil
from pathlib import Path

import numpy as np

from stable_diffusion.config import LATENT_SCALE
from stable_diffusion.data.shards import write_shard

GENERATOR_VERSION = 2

# The log-variances of generated moments are a choice. That the posteriors of Stable Diffusion's VAE are nearly
# deterministic is known (madebyollin/taesd issue 37); LDM clamps them to [-30, 20].
LOG_VARIANCE, LOG_VARIANCE_RANGE = -17.0, (-25.0, -9.0)


def ensure_generated(cache_folder, latent_size: int, context_tokens: int, context_dim: int) -> Path:
    """The folder of generated shards of these sizes below `cache_folder`, written if it is not there.

    256 samples in two shards (115 MB at full size), 64 where latents are smaller than 32. Several processes may ask at
    once: one writes, the others wait, and the folder appears whole or not at all.
    """
    samples = 128 if latent_size >= 32 else 32
    name = f"v{GENERATOR_VERSION}-{2 * samples}x{latent_size}x{context_tokens}x{context_dim}"
    folder, partial = Path(cache_folder) / name, Path(cache_folder) / f".{name}.partial"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write(partial, 2, samples, 0, latent_size, context_tokens, context_dim)
            partial.rename(folder)
    return folder


def write(folder, shards, samples, seed, latent_size, context_tokens, context_dim) -> None:
    """Write `shards` shards of `samples` samples each to a folder that exists.

    A sample's content depends on (seed, its place among all, the sizes), not on how they are cut into shards.
    """
    captions = _Captions(seed, context_tokens, context_dim)

    def generated(shard):
        for place in range(samples):
            generator = np.random.default_rng([seed, 1, shard * samples + place])
            moments = _moments(generator, latent_size)
            yield f"{shard:05d}{place:04d}", {"moments": moments, "context": captions.encoding(generator)}

    for shard in range(shards):
        write_shard(Path(folder) / f"{shard:05d}.safetensors", generated(shard))


@functools.cache
def _inverse_frequency(size):
    """1/f over the half plane of rfft2, f in cycles an image, scaled so that filtered white noise keeps variance 1."""
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.hypot(rows, rows.T)
    # The mean of a plane varies between samples as its slowest waves do.
    frequency[0, 0] = 1.0
    weights = 1 / frequency
    return (weights / np.sqrt(np.mean(weights**2)))[:, : size // 2 + 1]


def _moments(generator, size):
    """float32 [8, size, size]: means as images have them, and log-variances of a nearly deterministic encoder.

    Means: amplitude spectra of 1/f, 15 % of the variance common to all channels, contrast differing by a quarter
    between samples, standard deviation 1 / 0.18215. Log-variances: smooth fields, lower where the means change fast.
    """
    white = generator.standard_normal((9, size, size))
    fields = np.fft.irfft2(np.fft.rfft2(white) * _inverse_frequency(size), s=(size, size))
    common, own, sharpness = np.split(fields, [1, 5])
    contrast = np.exp(0.25 * generator.standard_normal() - 0.25**2)
    mean = contrast * (np.sqrt(0.15) * common + np.sqrt(0.85) * own) / LATENT_SCALE
    change = sum(np.abs(np.roll(mean, 1, axis) - mean) for axis in (1, 2)).mean(axis=0)
    log_variance = LOG_VARIANCE - 1.5 * (change / change.mean() - 1) + 2.5 * sharpness
    return np.concatenate([mean, np.clip(log_variance, *LOG_VARIANCE_RANGE)]).astype(np.float32)


class _Captions:
    """Encodings as a causal text encoder with a last layer norm gives them, without one.

    Row 0 is the same in all samples, since nothing precedes it; then 1 to tokens - 2 words, an end, and padding whose
    rows are alike within a sample and nearly so between samples. A few dimensions are large in every row.
    """

    def __init__(self, seed, tokens, dim):
        generator = np.random.default_rng([seed, 0])
        self.tokens = tokens
        self.words = generator.standard_normal((512, dim))
        self.start, self.end, self.padding = generator.standard_normal((3, dim))
        self.positions = 0.3 * generator.standard_normal((tokens, dim))
        self.gain, self.bias = 1 + 0.1 * generator.standard_normal(dim), 0.05 * generator.standard_normal(dim)
        large = generator.choice(dim, max(1, dim // 200), replace=False)
        self.bias[large] = generator.choice([-1, 1], len(large)) * generator.uniform(5, 12, len(large))

    def encoding(self, generator):
        """float32 [tokens, dim]. Captions of the web have a dozen words, some many more."""
        drawn = round(generator.lognormal(np.log(12), 0.6))
        num_words = min(max(1, drawn), max(0, self.tokens - 2))
        rows = np.empty((self.tokens, len(self.start)))
        rows[:1] = 4 * self.start
        rows[1 : num_words + 1] = self.words[generator.integers(len(self.words), size=num_words)]
        rows[num_words + 1 :] = self.padding
        rows[num_words + 1 : num_words + 2] = self.end
        mean_so_far = np.cumsum(rows[1:], axis=0) / np.arange(1, self.tokens)[:, None]
        rows[1:] += 0.5 * mean_so_far + self.positions[1:]
        rows -= rows.mean(axis=1, keepdims=True)
        rows /= rows.std(axis=1, keepdims=True)
        return (rows * self.gain + self.bias).astype(np.float32)
