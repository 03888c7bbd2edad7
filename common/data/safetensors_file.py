"""Files of the safetensors format by the safetensors package, with limits and refusals in one line.

file = open_file(path, flag="--checkpoint")      the package checks all of the header; no tensor is read
tensor = file.read("model.norm.weight")
"""

from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from common.data.limits import MAX_HEADER_BYTES, first_line, open_regular
from graph_worth.text import printable


class Entry(NamedTuple):
    """One tensor of a file: dtype by the format's name, and shape."""

    dtype: str
    shape: tuple[int, ...]


class File(NamedTuple):
    """An opened file: `entries` by name. flag: the beginning of error messages."""

    path: Path
    entries: dict[str, Entry]
    flag: str

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Any:
        """Return a tensor in the file's dtype, or a part of it, which alone is read.

        ValueError where the file is not as it was opened.
        """
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_slice(name)[part] if part else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.path, self.flag, error) from None


def open_file(path, flag: str) -> File:
    """Check the header: every tensor's dtype, shape and place against the size of the file.

    ValueError in one line that begins with `flag`: missing, no safetensors file, truncated, a header that contradicts
    itself, or one of more than MAX_HEADER_BYTES. The format has no checksum: nothing checks the bytes of a tensor.
    """
    name = printable(path)
    with open_regular(path, flag) as file:
        start = file.read(8)
    if start == b"version ":
        raise ValueError(f"{flag}: {name} is the pointer of a file in Git LFS: git lfs pull brings the file")
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    if not 2 <= length <= 100_000_000:  # the format's own limit
        raise ValueError(f"{flag}: {name} is not a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{flag}: {name} has a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read")
    try:
        with safe_open(path, "np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  # no dict
            entries = {key: Entry(tensor.get_dtype(), tuple(tensor.get_shape())) for key, tensor in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, flag, error) from None
    return File(Path(path), entries, flag)


def _damaged(path, flag, error):
    return ValueError(f"{flag}: {printable(path)} is damaged or truncated: {first_line(error)}")
