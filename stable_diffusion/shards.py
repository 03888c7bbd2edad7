"""Tar shards of VAE moments and text encodings: their format, and reading samples from a folder of them.

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

No torch here.
"""

import concurrent.futures
import copy
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

STORED = {"moments": "image_embed", "context": "captions_embed"}
DTYPES = ("float32", "float16")
MANY_SHARDS = 32
# Samples that are tried until one is good.
NUM_TRIES = 256


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

    It can be sent to worker processes.
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

    def _find_dtypes(self):
        """Read samples, evenly spread where there are many, until one is good."""
        tried = np.unique(np.linspace(0, len(self) - 1, min(len(self), NUM_TRIES)).astype(int)).tolist()
        faults = []
        for index in tried:
            try:
                self.dtypes = {name: array.dtype.name for name, array in self.read(index).items()}
                return
            except BadSample as error:
                faults.append(Dropped(*self.name(index), str(error)))
        count = f"none of {len(tried)} samples is good" if tried else "no samples in it"
        raise ValueError(f"--data {self.folder}: {count}: {[*faults, *self.dropped][0]}")


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
