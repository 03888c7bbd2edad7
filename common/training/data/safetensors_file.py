"""Files of the safetensors format as tensors of torch: read one by one, and written whole.

    file = open_file(path, flag="--checkpoint")      header checked against the size of the file, nothing else is read
    file.read_into("model.norm.weight", tensor)
    write_file(path, {"a": tensor}, {"format": "pt"})

The safetensors package parses, maps and writes; the refusals in one line are of safetensors_header.py.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from common.files import sync, write_whole
from common.training.data import safetensors_header
from common.training.data.safetensors_header import Entry


class File(NamedTuple):
    """An opened file: `entries` by name. flag: what error messages begin with."""

    path: Path
    entries: dict[str, Entry]
    flag: str

    def read_into(self, name: str, out: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """Fill `out`, of the shape of the tensor, or of a part of it, in its own dtype; it copies that part alone.

        ValueError where the file is not as it was opened.
        """
        out.copy_(self._mapped(name)[part])

    def read(self, name: str) -> torch.Tensor:
        """A new CPU tensor of the file's dtype and shape. ValueError where the file is not as it was opened."""
        return self._mapped(name).clone()

    def _mapped(self, name):
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise safetensors_header.damaged(self.path, self.flag, error) from None


def open_file(path, flag: str) -> File:
    """Read the header and check every tensor's dtype, shape and place against the size of the file.

    ValueError in one line that begins with `flag`: missing, no safetensors file, truncated, or a header that
    contradicts itself. What the bytes of a tensor hold is not checked: the format has no checksum.
    """
    path = Path(path)
    return File(path, safetensors_header.read(path, flag), flag)


def write_file(path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write CPU or GPU tensors by name. The file appears whole or not at all; an older one stays until then."""
    # Copies: the package refuses tensors that share memory.
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, metadata)
    write_whole(path, lambda file: file.write(content))
    sync(Path(path).parent)
