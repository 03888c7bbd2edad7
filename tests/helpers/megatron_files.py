"""Megatron-LM's token files (.bin, .idx) for tests."""

import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(prefix, documents, dtype="uint16") -> None:
    """Write token documents as `prefix`.bin and `prefix`.idx (MMapIndexedDataset, version 1), one sequence each."""
    parts = [np.asarray(document).astype(np.dtype(dtype).newbyteorder("<")) for document in documents]
    lengths = [part.size for part in parts]
    ends = np.cumsum(lengths, dtype="<i8") * np.dtype(dtype).itemsize
    Path(f"{prefix}.bin").write_bytes(b"".join(part.tobytes() for part in parts))
    Path(f"{prefix}.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(lengths), len(lengths) + 1)
        + np.asarray(lengths, dtype="<i4").tobytes()
        + np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )
