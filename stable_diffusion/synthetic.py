"""Generated shards: moments with the spectra of images and encodings with the structure of captions. No torch here."""

import fcntl
import functools
import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np

from stable_diffusion.config import LATENT_SCALE
from stable_diffusion.shards import STORED

GENERATOR_VERSION = 1

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
            write(partial, 2, samples, 0, latent_size, context_tokens, context_dim)
            partial.rename(folder)
    return folder


def write(folder, shards, samples, seed, latent_size, context_tokens, context_dim) -> None:
    """Write `shards` shards of `samples` samples each. Raises ValueError if the folder has shards already.

    A sample's content depends on (seed, its place among all, the sizes), not on how they are cut into shards.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.tar")):
        raise ValueError(f"--out {folder}: has shards already, name another folder")
    language = _Language(seed, context_tokens, context_dim)
    for shard in range(shards):
        path = folder / f"{shard:05d}.tar"
        partial = path.with_name(f".{path.name}.partial")
        with tarfile.open(partial, "w") as tar:
            for place in range(samples):
                key = f"{shard:05d}{place:04d}"
                generator = np.random.default_rng([seed, 1, shard * samples + place])
                arrays = {
                    STORED["moments"]: _moments(generator, latent_size),
                    STORED["context"]: language.encoding(generator),
                }
                # Protocol 4 is what the benchmark's Python writes; later ones default to 5.
                _add(tar, f"{key}.pyd", pickle.dumps(arrays, protocol=4))
                _add(tar, f"{key}.txt", f"generated sample {key}, no image behind it".encode())
        os.replace(partial, path)


def _add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@functools.cache
def _inverse_frequency(size):
    """1/f over the half plane of rfft2, f in cycles an image, so scaled that filtered white noise keeps variance 1."""
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.hypot(rows, rows.T)
    # The mean of a plane varies between samples as its slowest waves do.
    frequency[0, 0] = 1.0
    weights = 1 / frequency
    return (weights / np.sqrt(np.mean(weights**2)))[:, : size // 2 + 1]


def _fields(generator, num, size):
    """Planes [num, size, size] of variance 1 over many draws, amplitude 1/f, every wave with a phase of its own."""
    white = generator.standard_normal((num, size, size))
    return np.fft.irfft2(np.fft.rfft2(white) * _inverse_frequency(size), s=(size, size))


def _moments(generator, size):
    """float32 [1, 8, size, size]: means as images have them, and log-variances of a nearly deterministic encoder.

    Means: amplitude spectra of 1/f, 15 % of the variance common to all channels, contrast differing by a quarter
    between samples, standard deviation 1 / 0.18215. Log-variances: smooth fields, lower where the means change fast.
    """
    common, own, sharpness = np.split(_fields(generator, 9, size), [1, 5])
    contrast = np.exp(0.25 * generator.standard_normal() - 0.25**2)
    mean = contrast * (np.sqrt(0.15) * common + np.sqrt(0.85) * own) / LATENT_SCALE
    change = sum(np.abs(np.roll(mean, 1, axis) - mean) for axis in (1, 2)).mean(axis=0)
    log_variance = LOG_VARIANCE - 1.5 * (change / change.mean() - 1) + 2.5 * sharpness
    return np.concatenate([mean, np.clip(log_variance, *LOG_VARIANCE_RANGE)])[None].astype(np.float32)


class _Language:
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
        said = np.cumsum(rows[1:], axis=0) / np.arange(1, self.tokens)[:, None]
        rows[1:] += 0.5 * said + self.positions[1:]
        rows -= rows.mean(axis=1, keepdims=True)
        rows /= rows.std(axis=1, keepdims=True)
        return (rows * self.gain + self.bias).astype(np.float32)
