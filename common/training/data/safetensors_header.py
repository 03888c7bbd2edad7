"""The header of a safetensors file: which tensors it holds and where. Without torch.

    entries = read(path, flag="--data")
    file.write(make({"context": ("F16", (256, 77, 1024))}))

The safetensors package checks a header. Here are limits, refusals in one line, and the places of the bytes in the file.
"""

import json
import math
import struct
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from common.text import printable
from common.training.data.limits import MAX_HEADER_BYTES, first_line, open_regular

_ITEM_BYTES = {"F32": 4, "F16": 2}
_LENGTH = struct.Struct("<Q")


class Entry(NamedTuple):
    """One tensor of a file: dtype by the format's name, shape, place of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read(path, flag: str) -> dict[str, Entry]:
    """Read the header and check every tensor's dtype, shape and place against the size of the file.

    ValueError in one line that begins with `flag`: missing, no safetensors file, truncated, a header that contradicts
    itself, or one of more than MAX_HEADER_BYTES.
    """
    name = printable(path)
    try:
        with open_regular(path, flag) as file:
            start = file.read(_LENGTH.size)
            if start == b"version ":
                raise ValueError(f"{flag}: {name} is the pointer of a file in Git LFS: git lfs pull brings the file")
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            if not 2 <= length <= 100_000_000:  # the format's own limit
                raise ValueError(f"{flag}: {name} is not a safetensors file")
            if length > MAX_HEADER_BYTES:
                raise ValueError(
                    f"{flag}: {name} has a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read"
                )
            text = file.read(length)
        with safe_open(path, "np"):  # checks all of it
            header = json.loads(text)
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {name} ({error.strerror})") from None
    except SafetensorError as error:
        raise damaged(path, flag, error) from None
    data_start = _LENGTH.size + length
    return {
        tensor: Entry(fields["dtype"], tuple(fields["shape"]), data_start + fields["data_offsets"][0])
        for tensor, fields in header.items()
        if tensor != "__metadata__"
    }


def damaged(path, flag: str, error: Exception) -> ValueError:
    """The refusal of a file that the safetensors package cannot read, in one line."""
    return ValueError(f"{flag}: {printable(path)} is damaged or truncated: {first_line(error)}")


def make(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file, up to its first tensor's bytes, which then follow one another in this order.

    tensors: name -> (dtype, "F32" or "F16"; shape).
    """
    header: dict[str, dict] = {}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    # The data begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text
