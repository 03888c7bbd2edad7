"""Files of the safetensors format: tensors by name, read one by one into memory that is given, and written whole.

    file = open_file(path, flag="--checkpoint")      header checked against the size of the file, nothing else is read
    file.read_into("model.norm.weight", tensor)
    write_file(path, {"a": tensor}, {"format": "pt"})

Format (safetensors 0.8, README): the length of the header, 8 bytes little-endian; the header, JSON of name -> dtype,
shape, data_offsets [begin, end] counted from the header's end, besides text to text under __metadata__; the bytes.
Read and written here, since a file can then be streamed in pieces of known size and nothing has to be installed.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from common.files import sync, write_whole
from common.training.data import safetensors_header
from common.training.data.limits import shown
from common.training.data.safetensors_header import Entry

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
PIECE_BYTES = 16 * 2**20


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
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{self.flag}: {shown(name)} of {shown(self.path)} has the unknown dtype {shown(entry.dtype)}"
            )
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
    return File(path, *safetensors_header.read(path, flag), flag)


def write_file(path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write CPU or GPU tensors by name. The file appears whole or not at all; an older one stays until then."""
    described = {name: (_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}

    def write(file):
        file.write(safetensors_header.make(described, metadata))
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    write_whole(path, write)
    sync(Path(path).parent)
