"""Megatron-LM's indexed dataset (megatron/core/datasets/indexed_dataset.py) as tokens."""

import struct
from pathlib import Path

import numpy as np

from common.data.limits import open_regular

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, length of the document index
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def read(prefix) -> tuple[np.ndarray, str]:
    """Return the tokens, not read yet, and the name of `prefix`.bin and .idx (MMapIndexedDataset, version 1).

    prefix: with or without .bin or .idx. Raises ValueError that names the file and what is wrong with it: missing,
    foreign, truncated, a dtype that holds no token ids, or lengths that contradict the size of the .bin.
    """
    bin_path, idx_path = paths(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise ValueError(f"--data: {path} is missing, Megatron token files come as .bin and .idx")
    if not starts_as_index(idx_path):
        raise ValueError(f"--data: {idx_path} is not a Megatron index, it does not start with {_MAGIC!r}")
    with open_regular(idx_path, "--data") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"--data: {idx_path} is truncated within its header")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"--data: {idx_path} has version {version}, this code reads version 1")
    if code not in _DTYPES:
        raise ValueError(f"--data: {idx_path} has the dtype code {code}, token ids have one of {sorted(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    if not num_sequences:
        raise ValueError(f"--data: {idx_path} has no sequences")
    # int32 lengths, int64 pointers, int64 document index.
    num_index_bytes = _HEADER.size + num_sequences * (4 + 8) + num_documents * 8
    if (actual := idx_path.stat().st_size) != num_index_bytes:
        raise ValueError(f"--data: {idx_path} has {actual} bytes, its counts need {num_index_bytes}")
    lengths = np.memmap(idx_path, dtype="<i4", mode="r", offset=_HEADER.size, shape=(num_sequences,))
    if int(lengths.min()) < 0:
        raise ValueError(f"--data: {idx_path} has a negative sequence length")
    num_tokens = int(lengths.sum(dtype=np.int64))
    if num_tokens * dtype.itemsize != bin_path.stat().st_size:
        raise ValueError(
            f"--data: {bin_path} has {bin_path.stat().st_size} bytes, the lengths in {idx_path.name} sum to "
            f"{num_tokens} tokens of {dtype.itemsize} bytes"
        )
    if not num_tokens:  # nothing cannot be mapped
        raise ValueError(f"--data: {bin_path} holds no tokens")
    return np.memmap(bin_path, dtype=dtype, mode="r"), bin_path.stem


def starts_as_index(path) -> bool:
    """Return whether a file starts as the index of Megatron token files; ValueError where it cannot be read."""
    with open_regular(path, "--data") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def paths(prefix) -> tuple[Path, Path]:
    """(.bin, .idx) of Megatron token files; prefix: with or without either ending."""
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(text + ".bin"), Path(text + ".idx")
