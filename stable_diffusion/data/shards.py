"""Shards of VAE moments and text encodings: writing one, and reading the samples of a folder of them. No torch here.

A shard is a safetensors file of n samples. It holds numbers and no code:
    moments   [n, 8, 64, 64]   from the VAE: 4 channels of means, 4 of log-variances
    context   [n, 77, 1024]    text encodings: OpenCLIP ViT-H-14, penultimate layer
Both are float32 or float16. The metadata has a name for each sample under "keys", one a line. A sample is read by two
reads at known places; nothing else of a shard is in memory.

The benchmark's encoded training set comes as tar files of pickles, which are not read here:
`python -m stable_diffusion.data.convert_latents` makes shards of them, once.
"""

import copy
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.files import write_whole
from common.training.data import safetensors_header
from common.training.data.limits import MAX_HEADER_BYTES, MAX_ROWS, PICKLES, shown

NAMES = ("moments", "context")
# The format's name of a dtype -> numpy's.
DTYPES = {"F32": "float32", "F16": "float16"}
MAX_KEY_LENGTH = 200


class BadSample(ValueError):
    """A sample that cannot be trained on; its text is the reason, in one line."""


def shapes_of(latent_size: int, context_tokens: int, context_dim: int) -> dict[str, tuple[int, ...]]:
    """The shape of a sample's moments and of its text encoding, by name."""
    return {"moments": (8, latent_size, latent_size), "context": (context_tokens, context_dim)}


def require_finite(arrays: dict[str, np.ndarray]) -> None:
    """Raise BadSample where an array has NaN or infinity."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise BadSample(f"NaN or infinity in the {name}")


def write_shard(path, samples: Iterable[tuple[str, dict[str, np.ndarray]]]) -> int:
    """Write a shard of (key, arrays by name), whole or not at all; returns the number of samples.

    All moments have one shape and dtype, and so have all encodings. One sample at a time is in memory.
    """
    path, keys, described = Path(path), [], {}
    with tempfile.TemporaryFile(dir=path.parent) as moments, tempfile.TemporaryFile(dir=path.parent) as context:
        parts = dict(zip(NAMES, (moments, context), strict=True))
        for key, arrays in samples:
            keys.append("".join(letter if letter.isprintable() else "?" for letter in key[:MAX_KEY_LENGTH]))
            for name, part in parts.items():
                array = arrays[name]
                assert described.setdefault(name, (array.dtype, array.shape)) == (array.dtype, array.shape)
                part.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
        dtypes = {dtype: name for name, dtype in DTYPES.items()}
        tensors = {name: (dtypes[dtype.name], (len(keys), *shape)) for name, (dtype, shape) in described.items()}

        def write(file):
            file.write(safetensors_header.make(tensors, {"keys": "\n".join(keys)}))
            for part in parts.values():
                part.seek(0)
                shutil.copyfileobj(part, file, 1 << 20)

        write_whole(path, write)
    return len(keys)


# ------------------------------------------------------------------------------------------------
# A folder of shards


def find(folder) -> list[str]:
    """The names of a folder's shards, at least one. No shard is opened, so training can ask before it builds anything.

    Raises:
        ValueError: There is none; one line that names --data, and the converter where there are tar files.
    """
    folder = Path(folder)
    if folder.suffix in (".tar", *PICKLES) and folder.is_file():
        raise ValueError(_says_how_to_convert(folder, folder.parent))
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise ValueError(f"--data {shown(folder)}: cannot be read ({error.strerror})") from None
    shards = [name for name in names if name.endswith(".safetensors")]
    if not shards and any(name.endswith(".tar") for name in names):
        raise ValueError(_says_how_to_convert(folder, folder))
    if not shards:
        raise ValueError(f"--data {shown(folder)}: no shards (*.safetensors) in it")
    return shards


def _says_how_to_convert(data, folder):
    return (
        f"--data {shown(data)}: samples in tar files are pickled, which can run code, and are not read: convert them "
        f"once, python -m stable_diffusion.data.convert_latents --in {shlex.quote(shown(folder))} --out NEW "
        "--trust-input"
    )


class Samples:
    """Random access to the samples of all shards of a folder, in the order of names and places.

    `dtypes` has the dtype of the moments and of the encodings, "float32" or "float16". A `Samples` can be sent to
    worker processes.

    Args:
        folder: As given to --data.
        latent_size: Height and width of the moments.
        context_tokens: Tokens of a text encoding.
        context_dim: Width of a text encoding.

    Raises:
        ValueError: A shard is damaged, or does not fit the sizes or the other shards; one line that names it.
    """

    def __init__(self, folder, latent_size: int, context_tokens: int, context_dim: int):
        self.folder = Path(folder)
        self.shapes = shapes_of(latent_size, context_tokens, context_dim)
        self.dtypes = {}
        self.shards = find(folder)
        entries = [self._entries(shard) for shard in self.shards]
        self._offsets = [[each[name].offset for name in NAMES] for each in entries]
        self._ends = np.cumsum([each["moments"].shape[0] for each in entries], dtype=np.int64)
        self._start, self._stop = 0, int(self._ends[-1])
        if self._stop > MAX_ROWS:
            raise ValueError(f"--data {shown(folder)}: {self._stop:,} samples, at most {MAX_ROWS:,} are read")

    def _entries(self, shard):
        """The entries of a shard's header, checked."""
        entries, _ = safetensors_header.read(self.folder / shard, "--data", MAX_HEADER_BYTES)
        for name in NAMES:
            fault = self._fault(name, entries.get(name))
            if fault:
                raise ValueError(f"--data: {shown(self.folder / shard)} has {fault}")
        counts = [entries[name].shape[0] for name in NAMES]
        if counts[0] != counts[1]:
            raise ValueError(f"--data: {shown(self.folder / shard)} has {counts[0]:,} moments, {counts[1]:,} encodings")
        return entries

    def _fault(self, name, entry):
        if entry is None:
            return f"no tensor {name}"
        if entry.dtype not in DTYPES:
            return f"{name} of dtype {shown(entry.dtype[:20])}, not {' or '.join(DTYPES.values())}"
        if entry.shape[1:] != self.shapes[name]:
            return f"{name} of shape {entry.shape[1:]}, not {self.shapes[name]}"
        dtype = DTYPES[entry.dtype]
        if self.dtypes.setdefault(name, dtype) != dtype:
            return f"{name} of dtype {dtype} where earlier shards have {self.dtypes[name]}"
        return None

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int) -> "Samples":
        """Samples start to stop - 1, as a `Samples` of their own."""
        part = copy.copy(self)
        part._start, part._stop = self._start + start, self._start + stop
        return part

    def read(self, index: int) -> dict[str, np.ndarray]:
        """The sample's arrays by name, read-only.

        Raises:
            BadSample: It cannot be read, or has NaN or infinity; one line that names shard and sample.
        """
        index += self._start
        number = int(np.searchsorted(self._ends, index, side="right"))
        place = index - (int(self._ends[number - 1]) if number else 0)
        try:
            arrays = self._arrays(number, place)
            require_finite(arrays)
        except (OSError, BadSample) as error:
            reason = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            shard = shown(self.folder / self.shards[number])
            raise BadSample(f"--data: sample {place} of {shard}: {reason}") from None
        return arrays

    def _arrays(self, number, place):
        arrays = {}
        with open(self.folder / self.shards[number], "rb", buffering=0) as file:
            for name, offset in zip(NAMES, self._offsets[number], strict=True):
                dtype = np.dtype(self.dtypes[name]).newbyteorder("<")
                size = dtype.itemsize * math.prod(self.shapes[name])
                content = os.pread(file.fileno(), size, offset + place * size)
                if len(content) < size:
                    raise BadSample("the shard has become shorter")
                arrays[name] = np.frombuffer(content, dtype).reshape(self.shapes[name])
        return arrays
