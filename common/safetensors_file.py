"""Files of the safetensors format: tensors by name, read one by one into memory that is given, and written whole.

    file = open_file(path, flag="--checkpoint")      header checked against the size of the file, nothing else is read
    file.read_into("model.norm.weight", tensor)
    write_file(path, {"a": tensor}, {"format": "pt"})

Format (safetensors 0.8, README): the length of the header, 8 bytes little-endian; the header, JSON of name -> dtype,
shape, data_offsets [begin, end] counted from the header's end, besides text to text under __metadata__; the bytes.
Read and written here, since a file can then be streamed in pieces of known size and nothing has to be installed.
"""

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from common.files import sync, write_whole

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PIECE_BYTES = 16 * 2**20
_LENGTH = struct.Struct("<Q")


class Entry(NamedTuple):
    """One tensor of a file: dtype by the format's name, shape, place of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class File(NamedTuple):
    """An opened file: `entries` by name, `metadata` text by name. flag: what error messages begin with."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    flag: str

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, contiguous in CPU memory, of as many elements, in its own dtype.

        Where dtypes differ the file is read in pieces of 16 MiB. ValueError where the file has become shorter.
        """
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        assert out.is_contiguous() and out.numel() * dtype.itemsize == entry.num_bytes
        flat = out.view(-1)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(entry.offset)
            if dtype == out.dtype:
                self._fill(file, flat)
                return
            piece = torch.empty(min(PIECE_BYTES // dtype.itemsize, flat.numel()), dtype=dtype)
            for start in range(0, flat.numel(), len(piece)):
                part = flat[start : start + len(piece)]
                self._fill(file, piece[: len(part)])
                part.copy_(piece[: len(part)])

    def read(self, name: str) -> torch.Tensor:
        """A new CPU tensor of the file's dtype and shape."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_into(name, out)
        return out

    def _fill(self, file, tensor):
        buffer = memoryview(tensor.view(torch.uint8).numpy())
        # One call reads 2 GiB at most.
        while buffer:
            count = file.readinto(buffer)
            if not count:
                raise ValueError(f"{self.flag}: {self.path} ended while it was read")
            buffer = buffer[count:]


def open_file(path, flag: str) -> File:
    """Read the header and check every tensor's dtype, shape and place against the size of the file.

    ValueError in one line that begins with `flag`: missing, no safetensors file, truncated, or a header that
    contradicts itself. What the bytes of a tensor hold is not checked: the format has no checksum.
    """
    path = Path(path)
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(_LENGTH.size)
            if start == b"version ":
                raise ValueError(f"{flag}: {path} is the pointer of a file in Git LFS: git lfs pull brings the file")
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"{flag}: {path} is not a safetensors file")
            if _LENGTH.size + length > num_bytes:
                raise ValueError(f"{flag}: {path} is truncated within its header")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path} ({error.strerror})") from None
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(fields, _LENGTH.size + length) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{flag}: the header of {path} is damaged") from None
    for name, entry in entries.items():
        size = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        if size is not None and math.prod(entry.shape) * size != entry.num_bytes:
            raise ValueError(f"{flag}: the header of {path} is damaged, {name} has not the bytes that its shape takes")
        missing = entry.offset + entry.num_bytes - num_bytes
        if missing > 0:
            raise ValueError(f"{flag}: {path} is truncated, it ends {missing:,} bytes before {name} does")
    return File(path, entries, metadata, flag)


def _entry(fields, data_start):
    begin, end = fields["data_offsets"]
    shape = tuple(fields["shape"])
    numbers = (begin, end, *shape)
    if not all(type(number) is int for number in numbers) or not 0 <= begin <= end or min(shape, default=0) < 0:
        raise ValueError("no place in a file")
    return Entry(str(fields["dtype"]), shape, data_start + begin, end - begin)


def write_file(path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write CPU or GPU tensors by name. The file appears whole or not at all; an older one stays until then."""
    header, begin = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    # The data begin at a multiple of 8.
    text += b" " * (-len(text) % 8)

    def write(file):
        file.write(_LENGTH.pack(len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    write_whole(path, write)
    sync(Path(path).parent)
