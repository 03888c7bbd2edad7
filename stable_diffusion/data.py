"""Tar shards of VAE moments and text encodings: reading them, writing realistic ones, checking a folder.

    python -m stable_diffusion.data --out shards --shards 2 --samples 128
    python -m stable_diffusion.data --check shards

Format, that of the benchmark's encoded training set (LAION-400M subset, 832 shards 00000.tar to 00831.tar, 6,513,144
samples). A sample is two members, <key>.pyd and <key>.txt. The .pyd is a pickled dict of two numpy arrays:
    image_embed      [1, 8, 64, 64]   moments of the VAE: 4 channels of means, 4 of log-variances
    captions_embed   [77, 1024]       OpenCLIP ViT-H-14, penultimate layer
and the .txt the caption, which training does not read. Both arrays are float32: not written down anywhere, but at
446,464 bytes a sample the 832 shards have the 2.7T that the submission's README names; float16 would not.
Read in: mlcommons/training_results_v5.0, NVIDIA's stable_diffusion encode_captions.py (writes it) and README.md;
NeMo 25.04, stable_diffusion_dataset.py, build_train_valid_precached_clip_datasets (reads it) and ldm/ddpm.py, get_input
(squeezes the 1). Shards as MLCommons hands them out hold <key>.npy (moments) and <key>.txt with captions not encoded:
those are refused by name.

Batches keep the stored dtype on the way to the device: half precision has steps of 1/64 in means of 16 and more.
numpy alone is needed to write and to check; torch is imported where tensors are made.
"""

import argparse
import concurrent.futures
import copy
import fcntl
import functools
import io
import itertools
import os
import pickle
import shutil
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import mistakes_in_one_line

LATENT_SCALE = 0.18215
STORED = {"moments": "image_embed", "context": "captions_embed"}
DTYPES = ("float32", "float16")
GENERATOR_VERSION = 1
MANY_SHARDS = 32
WORKER_TIMEOUT_S = 300

# The log-variances of generated moments are a choice. That the posteriors of Stable Diffusion's VAE are nearly
# deterministic is known (madebyollin/taesd issue 37); LDM clamps them to [-30, 20].
LOG_VARIANCE, LOG_VARIANCE_RANGE = -17.0, (-25.0, -9.0)


class Dropped(NamedTuple):
    """What is not read and why. key "": the shard, or what followed in it."""

    shard: str
    key: str
    reason: str

    def __str__(self):
        return f"{self.shard} {self.key}".rstrip() + f": {self.reason}"


class BadSample(Exception):
    """A sample that cannot be trained on; its text is the reason."""


# ------------------------------------------------------------------------------------------------
# One sample


class _ArraysOnly(pickle.Unpickler):
    """Builds dicts, numbers, text and numpy arrays; a pickle that names any other class or function is refused."""

    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the pickle names {module}.{name}, only numpy arrays are read")
        return _ALLOWED[module, name]


def _reconstruct(*_):
    # What numpy's own does with the arguments that pickled arrays have; shape and dtype follow as the state.
    return np.ndarray((0,), np.int8)


def _from_buffer(buffer, dtype, shape, order):
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


_ALLOWED = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
for _core in ("numpy.core", "numpy._core"):  # numpy 1 and 2
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = _reconstruct
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = _from_buffer


def decode(content: bytes, shapes: dict[str, tuple]) -> dict[str, np.ndarray]:
    """The arrays of a .pyd member by name, checked. shapes: name -> shape, as in `Samples.shapes`. Raises BadSample."""
    try:
        stored = _ArraysOnly(io.BytesIO(content)).load()
    except Exception as error:  # foreign bytes can make the unpickler raise anything
        raise BadSample(f"undecodable: {_first_line(error)}") from None
    if not isinstance(stored, dict):
        raise BadSample(f"a pickled {type(stored).__name__} instead of a dict")
    arrays = {}
    for name, key in STORED.items():
        array = stored.get(key)
        if not isinstance(array, np.ndarray):
            raise BadSample(f"no array {key} in it")
        if array.dtype.name not in DTYPES or not array.dtype.isnative:
            raise BadSample(f"{name} of dtype {array.dtype}, not {' or '.join(DTYPES)}")
        if name == "moments" and array.ndim == 4 and array.shape[0] == 1:
            array = array[0]
        if array.shape != shapes[name]:
            raise BadSample(f"{name} of shape {array.shape}, not {shapes[name]}")
        if not np.isfinite(array).all():
            raise BadSample(f"NaN or infinity in the {name}")
        arrays[name] = array
    return arrays


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------------------------
# A folder of shards


class Samples:
    """Random access to the samples of all *.tar files of a folder, in the order of names and places.

    folder: what --data names. Moments are [8, latent_size, latent_size], encodings [context_tokens, context_dim].
    Construction reads tar headers only, and samples until one is good, which tells the dtypes. `dropped` lists shards
    and samples that are not read, as far as that shows. `dtypes`: name -> "float32" or "float16"; samples of another
    dtype than the first good one are dropped. Raises ValueError that names --data where nothing can be read.

    A map-style dataset for torch's DataLoader, which can be sent to worker processes.
    """

    def __init__(self, folder, latent_size: int, context_tokens: int, context_dim: int):
        self.folder = Path(folder)
        self.shapes = {"moments": (8, latent_size, latent_size), "context": (context_tokens, context_dim)}
        self.dtypes = {}
        self.dropped: list[Dropped] = []
        if not self.folder.is_dir():
            raise ValueError(f"--data {folder}: {'not a folder' if self.folder.exists() else 'no such folder'}")
        self.shards = sorted(path.name for path in self.folder.glob("*.tar") if not path.name.startswith("."))
        if not self.shards:
            raise ValueError(f"--data {folder}: no shards (*.tar) in it")
        keys, places = [], []
        for number, (found, dropped) in enumerate(_scan_all([self.folder / shard for shard in self.shards])):
            keys += [key.encode("utf-8", "surrogateescape") for key, _, _ in found]
            places += [(number, offset, size) for _, offset, size in found]
            self.dropped += dropped
        # Arrays, because millions of Python objects would be copied to every worker.
        self._keys = np.array(keys, dtype=np.bytes_)
        self._places = np.array(places, dtype=np.int64).reshape(-1, 3)
        self._find_dtypes()

    def __len__(self) -> int:
        return len(self._keys)

    def part(self, start: int, stop: int) -> "Samples":
        """Samples start to stop - 1 alone, as a `Samples` of their own."""
        part = copy.copy(self)
        part._keys, part._places = self._keys[start:stop], self._places[start:stop]
        return part

    def __getitem__(self, index: int) -> dict:
        """Tensors "moments" [8, size, size] and "context" [tokens, dim] in the stored dtype; raises BadSample."""
        import torch

        return {name: torch.from_numpy(array.copy()) for name, array in self.read(index).items()}

    def name(self, index: int) -> tuple[str, str]:
        """(shard, key) of a sample."""
        return self.shards[self._places[index, 0]], self._keys[index].decode(errors="replace")

    def read(self, index: int) -> dict[str, np.ndarray]:
        """The sample's arrays, checked; raises BadSample with the reason."""
        number, offset, size = (int(value) for value in self._places[index])
        try:
            with open(self.folder / self.shards[number], "rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise BadSample(f"cannot be read: {error.strerror}") from None
        arrays = decode(content, self.shapes)
        for name, dtype in self.dtypes.items():
            if arrays[name].dtype.name != dtype:
                raise BadSample(f"{name} of dtype {arrays[name].dtype} where the others are {dtype}")
        return arrays

    def _find_dtypes(self, num_tries=256):
        """Read samples, evenly spread where there are many, until one is good."""
        tried = np.unique(np.linspace(0, len(self) - 1, min(len(self), num_tries)).astype(int)).tolist()
        first_fault = None
        for index in tried:
            try:
                self.dtypes = {name: array.dtype.name for name, array in self.read(index).items()}
                return
            except BadSample as error:
                first_fault = first_fault or Dropped(*self.name(index), str(error))
        count = f"none of {len(tried)} samples is good" if tried else "no samples in it"
        raise ValueError(f"--data {self.folder}: {count}: {first_fault or self.dropped[0]}")


def _scan_all(paths):
    """_scan of every path, in order. All headers of the benchmark's shards take one process about eight minutes."""
    if len(paths) < MANY_SHARDS:
        return [_scan(path) for path in paths]
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count())) as pool:
        return list(pool.map(_scan, paths, chunksize=4))


def _scan(path):
    """([(key, offset, size) of every .pyd member], [Dropped]) of one shard, from tar headers alone."""
    found, dropped, kinds, last = [], [], set(), ""

    def drop(key, reason):
        dropped.append(Dropped(path.name, key, reason))

    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            num_bytes = os.fstat(file.fileno()).st_size
            while (member := tar.next()) is not None:
                tar.members.clear()  # it keeps every header otherwise
                # As webdataset splits names: the extension is all that follows the first dot of the last component.
                key, _, kind = os.path.basename(member.name).partition(".")
                if not member.isreg():
                    continue
                last = key
                kinds.add(kind)
                missing = member.offset_data + member.size - num_bytes
                if missing > 0:
                    fault = f"shard ends {missing:,} bytes before {os.path.basename(member.name)} does"
                    drop(key if kind == "pyd" else "", f"{fault}, what followed is lost")
                    return found, dropped
                if kind == "pyd":
                    found.append((key, member.offset_data, member.size))
            file.seek(tar.offset)
            end = file.read(tarfile.BLOCKSIZE)
            if end != bytes(tarfile.BLOCKSIZE):
                fault = "damaged" if len(end) == tarfile.BLOCKSIZE else "cut off"
                drop("", f"{fault} after {last}, what followed is lost")
    except tarfile.TarError as error:
        fault = f"damaged after {last}, what followed is lost" if last else "not a tar file"
        drop("", f"{fault}: {_first_line(error)}")
    except OSError as error:
        drop("", f"cannot be read: {error.strerror}")
    if not found and not dropped:
        if {"npy", "txt"} <= kinds:
            drop("", "moments with captions that are not encoded (.npy, .txt): run the benchmark's encode_captions.py")
        else:
            members = ", ".join("." + kind for kind in sorted(kinds)[:4]) or "nothing"
            drop("", f"holds {members} and no samples (.pyd)")
    return found, dropped


# ------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """An endless sequence of batches of host tensors, the same in every run with the same arguments.

    samples: a `Samples`. batch: samples a rank. num_workers: reading processes, 0 for none. pin_memory: page-locked
    tensors (needs a GPU). Every epoch is shuffled anew from (seed, epoch); step k of all ranks together takes the
    next batch * world_size samples of it, each rank its own, and what does not fill a step is left out.

    Bad samples are found where they are read. Instead of each the batch takes the rank's next good sample beyond the
    batch, which then comes up twice; so no process has to know what another has found, and the sequence depends on
    the files alone. `dropped` lists what this rank has met, each once, and the first few are named on stderr.
    `dtypes`: name -> torch.dtype. ValueError that names --batch and --data where good samples do not fill one step.
    """

    max_named = 10

    def __init__(self, samples, batch, rank=0, world_size=1, num_workers=0, pin_memory=False, seed=0):
        import torch
        from torch.utils.data import DataLoader

        self.samples, self.dropped, self._bad = samples, [], {}
        self._needed = batch * world_size
        self._needs = f"--batch {batch}" + (f" on {world_size} ranks" if world_size > 1 else "")
        # What the scan found is the same on every rank.
        self._note(samples.dropped, silent=rank != 0)
        self._require_enough()
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in samples.dtypes.items()}
        self._loader = DataLoader(
            _BatchReader(samples, batch, rank, world_size, seed),
            batch_size=None,
            sampler=_Numbers(),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # A worker that cannot send what it read says so nowhere else.
            timeout=WORKER_TIMEOUT_S if num_workers else 0,
            collate_fn=_as_tensors,
            pin_memory=pin_memory,
            # DataLoader draws a seed for its workers, from the default generator unless it has its own.
            generator=torch.Generator(),
        )
        self._iterator = iter(self._loader)

    @property
    def num_dropped(self) -> int:
        return len(self.dropped)

    def next(self) -> dict:
        """The next batch: "moments" [batch, 8, size, size] and "context" [batch, tokens, dim] in the stored dtypes."""
        tensors, bad = next(self._iterator)
        for index, reason in bad:
            if index not in self._bad:
                self._bad[index] = reason
                self._note([Dropped(*self.samples.name(index), reason)])
        self._require_enough()
        return tensors

    def reset(self) -> None:
        """Start again at batch 0. Workers stay; what they have read ahead is thrown away."""
        self._iterator = iter(self._loader)

    def close(self) -> None:
        """End the workers, and say how many were dropped without being named. Can be called again."""
        if self._iterator is None:
            return
        if self._loader.num_workers:
            # No public name: DataLoader leaves it to the garbage collector, which may come late.
            self._iterator._shutdown_workers()
        self._iterator = self._loader._iterator = None
        if self.num_dropped > self.max_named:
            print(f"data: {self.num_dropped} dropped in all", file=sys.stderr)

    def _note(self, dropped, silent=False):
        for one in dropped:
            self.dropped.append(one)
            if silent or self.num_dropped > self.max_named:
                continue
            more = "; further ones are counted only" if self.num_dropped == self.max_named else ""
            print(f"data: dropped {one}{more}", file=sys.stderr)

    def _require_enough(self):
        good = len(self.samples) - len(self._bad)
        if good < self._needed:
            raise ValueError(
                f"--data {self.samples.folder}: {good} good samples of {len(self.samples)}, {self._needs} takes "
                f"{self._needed}: give more shards or a smaller --batch"
            )


class _Numbers:
    """0, 1, 2, ...: a sampler for a dataset whose items are whole batches."""

    def __iter__(self):
        return itertools.count()


class _BatchReader:
    """A dataset whose item k is batch k of one rank, with the bad samples met: (arrays, [(index, reason)])."""

    def __init__(self, samples, batch, rank, world_size, seed):
        self.samples, self.batch, self.rank, self.world_size, self.seed = samples, batch, rank, world_size, seed
        self.steps_per_epoch = len(samples) // (batch * world_size)
        self._bad = {}
        self._permutation = (None, None)

    def __getitem__(self, number: int):
        rows, bad = {}, {}
        for index in itertools.chain.from_iterable(self.indices(later) for later in itertools.count(number)):
            try:
                rows[index] = self._read(index)
            except BadSample as error:
                bad[index] = self._bad[index] = str(error)
                if len(self.samples) - len(self._bad) < self.batch * self.world_size:
                    return None, list(bad.items())
            if len(rows) == self.batch:
                break
        arrays = {name: np.stack([row[name] for row in rows.values()]) for name in STORED}
        return arrays, list(bad.items())

    def indices(self, number: int) -> list[int]:
        """What this rank reads in step `number` if all samples are good."""
        epoch, step = divmod(number, self.steps_per_epoch)
        if self._permutation[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation = epoch, generator.permutation(len(self.samples))
        start = (step * self.world_size + self.rank) * self.batch
        return self._permutation[1][start : start + self.batch].tolist()

    def _read(self, index):
        if index in self._bad:
            raise BadSample(self._bad[index])
        return self.samples.read(index)


def _as_tensors(item):
    import torch

    arrays, bad = item
    tensors = None if arrays is None else {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors, bad


# ------------------------------------------------------------------------------------------------
# Generated samples


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


# ------------------------------------------------------------------------------------------------
# Checking a folder


def check(samples: Samples) -> int:
    """Read every sample, print what is dropped and statistics of the rest; returns how many were dropped."""
    size = samples.shapes["moments"][-1]
    dropped, num_good = list(samples.dropped), 0
    sums, squares, power = np.zeros(4), np.zeros(4), np.zeros((4, size, size))
    log_variances, largest, context = [], 0.0, np.zeros(2)
    for index in range(len(samples)):
        try:
            arrays = samples.read(index)
        except BadSample as error:
            dropped.append(Dropped(*samples.name(index), str(error)))
            continue
        num_good += 1
        mean, log_variance = np.split(arrays["moments"].astype(np.float64), 2)
        sums += mean.mean(axis=(1, 2))
        squares += (mean**2).mean(axis=(1, 2))
        power += np.abs(np.fft.fft2(mean)) ** 2
        log_variances.append(np.quantile(log_variance, [0, 0.5, 1]))
        encoding = arrays["context"].astype(np.float64)
        context += encoding.mean(), (encoding**2).mean()
        largest = max(largest, float(np.abs(encoding).max()))
    print(f"folder      {samples.folder}")
    print(f"shards      {len(samples.shards)}")
    print(f"samples     {num_good:,} good, {len(dropped):,} dropped")
    for shard in sorted({one.shard for one in dropped}):
        here = [one for one in dropped if one.shard == shard]
        print(f"{shard}: {len(here):,} dropped")
        for one in here[:10]:
            print(f"    {one.key or '-':12s}  {one.reason}")
        if len(here) > 10:
            print(f"    and {len(here) - 10:,} more")
    if not num_good:
        return len(dropped)
    means, stds = sums / num_good, np.sqrt(squares / num_good - (sums / num_good) ** 2)
    low, middle, high = np.array(log_variances).T
    print(f"stored as   moments {samples.dtypes['moments']}, encodings {samples.dtypes['context']}")
    print("means       channel      mean       std  std x 0.18215  amplitude slope")
    for channel in range(4):
        slope = amplitude_slope(power[channel])
        scaled = LATENT_SCALE * stds[channel]
        print(f"            {channel:7d} {means[channel]:9.3f} {stds[channel]:9.3f} {scaled:14.3f} {slope:16.2f}")
    print(f"log-var     {low.min():.1f} to {high.max():.1f}, median {np.median(middle):.1f}")
    center = context[0] / num_good
    spread = np.sqrt(context[1] / num_good - center**2)
    print(f"encodings   mean {center:.3f}, std {spread:.3f}, largest magnitude {largest:.1f}")
    return len(dropped)


def amplitude_slope(power) -> float:
    """Slope of log amplitude over log frequency, from a power spectrum [size, size] as fft2 orders it; -1 is 1/f."""
    size = len(power)
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.rint(np.hypot(rows, rows.T)).astype(int)
    rings = np.arange(1, size // 2)
    amplitude = np.sqrt([power[frequency == ring].mean() for ring in rings])
    return float(np.polyfit(np.log(rings), np.log(amplitude), 1)[0])


# ------------------------------------------------------------------------------------------------
# Command line


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv=None) -> int:
    """Exit status: 0, 1 where --check found something to drop, 2 after a mistake."""
    parser = _Parser(prog="python -m stable_diffusion.data", description="Write or check shards of training samples.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", metavar="DIR", help="write generated shards here")
    action.add_argument("--check", metavar="DIR", help="read all samples here and print what is found")
    numbers = {
        "shards": (2, "shards to write"),
        "samples": (128, "samples in each"),
        "latent-size": (64, "height and width of the moments"),
        "context-tokens": (77, "tokens of a text encoding"),
        "context-dim": (1024, "width of a text encoding"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same content (0)")
    args = parser.parse_args(argv)
    for name in numbers:
        if getattr(args, name.replace("-", "_")) < 1:
            parser.error(f"--{name} takes a number from 1 up")
    if args.out == "":
        parser.error("--out takes a folder")
    if args.latent_size % 8:
        parser.error("--latent-size takes a multiple of 8")
    if args.seed < 0:
        parser.error("--seed takes a number from 0 up")
    sizes = (args.latent_size, args.context_tokens, args.context_dim)
    try:
        if args.check is not None:
            return 1 if check(Samples(args.check, *sizes)) else 0
        write(args.out, args.shards, args.samples, args.seed, *sizes)
    except (ValueError, OSError) as error:
        parser.error(str(error).replace("--data", "--check"))
    num_bytes = sum(path.stat().st_size for path in Path(args.out).glob("*.tar"))
    print(f"{args.out}: {args.shards} shards of {args.samples} samples, {num_bytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    with mistakes_in_one_line("stable_diffusion", "data"):
        status = main()
    sys.exit(status)
