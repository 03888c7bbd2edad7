"""common/data/safetensors_file.py: tensors and parts of them, refusals in one line."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from common.data.safetensors_file import open_file


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "half": torch.randn(6, 4, generator=generator).bfloat16(),
        "steps": torch.tensor(12, dtype=torch.int32),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def path(tmp_path):
    save_file(tensors(), tmp_path / "a.safetensors", {"format": "pt", "step": "3"})
    return tmp_path / "a.safetensors"


def test_what_is_written_is_read_again(path):
    file = open_file(path, "--x")
    assert set(file.entries) == set(tensors())
    for name, tensor in tensors().items():
        read = file.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
        read.fill_(1)  # its own memory, not the file's
    assert torch.equal(file.read("matrix"), tensors()["matrix"])
    assert os.listdir(path.parent) == [path.name]


def test_a_part_is_read_alone(path):
    assert torch.equal(open_file(path, "--x").read("matrix", (slice(1, 3), slice(2, 7))), tensors()["matrix"][1:3, 2:7])


def test_a_file_that_shrinks_after_it_was_opened(path):
    file = open_file(path, "--x")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="^--x: .*a.safetensors is damaged or truncated: "):
        file.read("half")


def with_header(header):
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda content: b"", "is not a safetensors file"),
        (lambda content: b"\x80\x02" + b"\xff" * 30, "is not a safetensors file"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\n", "pointer of a file in Git LFS"),
        (lambda content: content[:20], "is damaged or truncated: "),
        (lambda content: content[:-1], "is damaged or truncated: "),
        (lambda content: with_header(b"{nonsense}"), "is damaged or truncated: "),
        (lambda content: with_header(b"[" * 100_000), "is damaged or truncated: "),
        (
            lambda content: with_header(
                json.dumps({"\n": {"dtype": "F32", "shape": [3], "data_offsets": [0, 64]}}).encode()
            ),
            "is damaged or truncated: ",
        ),
    ],
)
def test_what_is_no_safetensors_file(path, damage, fault):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^--x: .*a.safetensors.* ?{fault}") as caught:
        open_file(path, "--x")
    assert str(caught.value).isprintable()


def test_a_missing_file(path):
    path.unlink()
    with pytest.raises(ValueError, match=r"^--x: cannot read .*a.safetensors \(No such file or directory\)$"):
        open_file(path, "--x")


def test_a_header_beyond_the_documented_limit_is_not_read(path):
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 8 * 2**20 + 1))
    os.truncate(path, 9 * 2**20)
    with pytest.raises(ValueError, match="has a header of 8,388,609 bytes, at most 8,388,608 are read"):
        open_file(path, "--checkpoint")
