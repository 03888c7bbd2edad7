"""common/safetensors_file: reading into given memory, refusals in one line, whole files."""

import json
import os
import struct

import pytest
import torch

from common.training.data import safetensors_header
from common.training.data.safetensors_file import open_file, write_file


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
    write_file(tmp_path / "a.safetensors", tensors(), {"format": "pt", "step": "3"})
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


def test_tensors_that_share_memory_are_written_each(path):
    whole = torch.arange(6.0)
    write_file(path, {"a": whole, "b": whole, "c": whole[2:]}, {})
    assert torch.equal(open_file(path, "--x").read("c"), whole[2:])


def test_rows_of_a_larger_tensor_of_another_dtype_are_filled_in_place(path):
    out = torch.zeros(9, 7, dtype=torch.bfloat16)
    open_file(path, "--x").read_into("matrix", out[2:7])
    assert torch.equal(out[2:7], tensors()["matrix"].bfloat16()) and not out[:2].any() and not out[7:].any()


def test_a_header_says_where_the_bytes_are(path):
    path.write_bytes(safetensors_header.make({"a": ("F32", (2, 3)), "none": ("F16", (0, 2))}) + bytes(24))
    entries = safetensors_header.read(path, "--x")
    assert (entries["a"].dtype, entries["a"].shape, entries["none"].shape) == ("F32", (2, 3), (0, 2))
    assert entries["a"].offset % 8 == 0 and entries["a"].offset + 24 == path.stat().st_size


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


def test_a_write_that_is_cut_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_file(path, {"first": torch.ones(1000)}, {})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_header_beyond_the_documented_limit_is_not_read(path):
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 8 * 2**20 + 1))
    os.truncate(path, 9 * 2**20)
    with pytest.raises(ValueError, match="has a header of 8,388,609 bytes, at most 8,388,608 are read"):
        open_file(path, "--checkpoint")
