"""Generated shards: moments with the spectra of images, and encodings that look like captions. No torch here."""

import fcntl
import functools
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from stable_diffusion.config import LATENT_SCALE

GENERATOR_VERSION = 3
# A choice. Stable Diffusion's VAE is known to be nearly deterministic (madebyollin/taesd issue 37).
LOG_VARIANCE, LOG_VARIANCE_STD = -17.0, 2.5


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
    generator = np.random.default_rng([seed, 0])
    vocabulary = generator.standard_normal((512, context_dim))
    positions = 0.3 * generator.standard_normal((context_tokens, context_dim))
    for shard in range(shards):
        generators = [np.random.default_rng([seed, 1, shard * samples + sample]) for sample in range(samples)]
        moments = np.stack([_moments(sample_generator, latent_size) for sample_generator in generators])
        context = np.stack([_context(sample_generator, vocabulary, positions) for sample_generator in generators])
        save_file({"moments": moments, "context": context}, Path(folder) / f"{shard:05d}.safetensors")


@functools.cache
def _inverse_frequency(size):
    """1/f over the half plane of rfft2, scaled so that filtered white noise keeps variance 1."""
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.hypot(rows, rows.T)
    frequency[0, 0] = 1.0  # the mean varies between samples as the slowest waves do
    weights = 1 / frequency
    return (weights / np.sqrt(np.mean(weights**2)))[:, : size // 2 + 1]


def _moments(generator, size):
    """float32 [8, size, size]: means with amplitude spectra of 1/f, as images have, and smooth log-variances."""
    white = generator.standard_normal((8, size, size))
    fields = np.fft.irfft2(np.fft.rfft2(white) * _inverse_frequency(size), s=(size, size))
    log_variance = np.clip(LOG_VARIANCE + LOG_VARIANCE_STD * fields[4:], -25, -9)
    return np.concatenate([fields[:4] / LATENT_SCALE, log_variance]).astype(np.float32)


def _context(generator, vocabulary, positions):
    """float32 [tokens, dim], layer-normed rows: a start, some words (the web's captions have a dozen), padding."""
    tokens = len(positions)
    num_words = min(max(1, round(generator.lognormal(np.log(12), 0.6))), max(0, tokens - 2))
    words = np.ones(tokens, dtype=int)
    words[0] = 0
    words[1 : num_words + 1] = generator.integers(2, len(vocabulary), size=num_words)
    rows = vocabulary[words] + positions
    rows -= rows.mean(axis=1, keepdims=True)
    return (rows / rows.std(axis=1, keepdims=True)).astype(np.float32)
