"""Shards of VAE moments and text encodings: reading the samples of a folder of them. No torch here.

A shard is a safetensors file of n samples. It holds numbers and no code:
    moments   [n, 8, 64, 64]   from the VAE: 4 channels of means, 4 of log-variances
    context   [n, 77, 1024]    text encodings: OpenCLIP ViT-H-14, penultimate layer
Both are float32 or float16. Only the sample that is read is in memory.
MLPerf's encoded training set, tar files of pickles, is not read.
"""

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from common.data.limits import MAX_ROWS, first_line
from common.data.safetensors_file import open_file
from graph_worth.text import printable

NAMES = ("moments", "context")
# The format's name of a dtype -> numpy's.
DTYPES = {"F32": "float32", "F16": "float16"}


def find(folder) -> list[str]:
    """The names of a folder's shards; ValueError where there is none. Opens none, so training can ask it first."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ValueError(f"--data {printable(folder)}: cannot be read ({error.strerror})") from None
    shards = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("."))
    if not shards:
        raise ValueError(f"--data {printable(folder)}: no shards (*.safetensors) in it")
    return shards


class Samples:
    """Random access to the samples of all shards of a folder, in the order of names and places.

    `dtypes` has the dtype of the moments and of the encodings, "float32" or "float16". A `Samples` can be sent to
    worker processes. ValueError in one line names a shard that is damaged, or does not fit the sizes or the others.
    """

    def __init__(self, folder, latent_size: int, context_tokens: int, context_dim: int):
        self.folder = Path(folder)
        self.shapes = {"moments": (8, latent_size, latent_size), "context": (context_tokens, context_dim)}
        self.dtypes = {}
        self.shards = find(folder)
        entries = [self._entries(shard) for shard in self.shards]
        self._ends = np.cumsum([entry["moments"].shape[0] for entry in entries], dtype=np.int64)
        if len(self) > MAX_ROWS:
            raise ValueError(f"--data {printable(folder)}: {len(self):,} samples, at most {MAX_ROWS:,} are read")

    def _entries(self, shard):
        path = self.folder / shard
        entries = open_file(path, "--data").entries
        for name in NAMES:
            if name not in entries:
                raise ValueError(f"--data: {printable(path)} has no tensor {name}")
            dtype, shape = entries[name].dtype, entries[name].shape[1:]
            known = [self.dtypes[name]] if name in self.dtypes else list(DTYPES.values())
            if DTYPES.get(dtype) not in known or shape != self.shapes[name]:
                raise ValueError(
                    f"--data: {printable(path)} has {name} of dtype {dtype} and shape {shape}, "
                    f"not {' or '.join(known)} and {self.shapes[name]}"
                )
            self.dtypes[name] = DTYPES[dtype]
        counts = [entries[name].shape[0] for name in NAMES]
        if counts[0] != counts[1]:
            raise ValueError(f"--data: {printable(path)} has {counts[0]:,} moments, {counts[1]:,} encodings")
        return entries

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> dict[str, np.ndarray]:
        """The sample's arrays by name. Raises ValueError where it cannot be read, or has NaN or infinity."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        path = self.folder / self.shards[number]
        try:
            with safe_open(path, "np") as file:
                arrays = {name: file.get_slice(name)[row] for name in NAMES}
        except (OSError, SafetensorError) as error:
            reason = first_line(error)
            raise ValueError(f"--data: sample {row} of {printable(path)}: cannot be read ({reason})") from None
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise ValueError(f"--data: sample {row} of {printable(path)}: NaN or infinity in the {name}")
        return arrays
