"""common/safetensors_file: reading into given memory, checks at opening, whole files, agreement with the package."""

import json
import os
import struct

import pytest
import torch

from common.training.data import safetensors_file, safetensors_header
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


def rewrite(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_what_is_written_is_read_again(path):
    file = open_file(path, "--x")
    assert file.metadata == {"format": "pt", "step": "3"} and list(file.entries) == list(tensors())
    for name, tensor in tensors().items():
        read = file.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert os.listdir(path.parent) == [path.name]
    # As the format asks, so that a reader that maps the file finds aligned data.
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0


def test_another_dtype_is_converted_piece_by_piece(path, monkeypatch):
    sizes, fill = [], safetensors_file.File._fill
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 12)
    monkeypatch.setattr(
        safetensors_file.File, "_fill", lambda self, file, part: (sizes.append(part.nbytes), fill(self, file, part))
    )
    out = torch.empty(5, 7, dtype=torch.bfloat16)
    open_file(path, "--x").read_into("matrix", out)
    assert torch.equal(out, tensors()["matrix"].bfloat16())
    assert sizes == [12] * 11 + [8]


def test_rows_of_a_larger_tensor_are_filled_in_place(path):
    out = torch.zeros(9, 4, dtype=torch.bfloat16)
    open_file(path, "--x").read_into("half", out[2:8])
    assert torch.equal(out[2:8], tensors()["half"]) and not out[:2].any() and not out[8:].any()


@pytest.mark.parametrize("removed", [1, 24, 25])
def test_a_truncated_file_is_named_with_the_first_tensor_it_lacks(path, removed):
    # The last 24 bytes are half's, then steps' 4.
    content = path.read_bytes()
    path.write_bytes(content[:-removed])
    name, missing = ("half", removed - 4) if removed > 4 else ("steps", removed)
    with pytest.raises(
        ValueError, match=rf"^--x: .*a.safetensors is truncated, it ends {missing} bytes before {name} "
    ):
        open_file(path, "--x")


def test_a_file_that_shrinks_after_it_was_opened(path):
    file = open_file(path, "--x")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="^--x: .*a.safetensors ended while it was read$"):
        file.read("half")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04\x14" + bytes(30), "is not a safetensors file"),
        (b"\x80\x02" + b"\xff" * 30, "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "pointer of a file in Git LFS"),
        (struct.pack("<Q", 100) + b'{"a"', "truncated within its header"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path, content, fault):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=f"^--x: .*{fault}"):
        open_file(tmp_path / "a", "--x")


@pytest.mark.parametrize(
    "header",
    [
        b"{nonsense}",
        [1, 2],
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
    ],
)
def test_a_damaged_header(tmp_path, header):
    rewrite(tmp_path / "a", header, bytes(64))
    with pytest.raises(ValueError, match="^--x: the header of .*a is damaged"):
        open_file(tmp_path / "a", "--x")


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"^--x: cannot read .*none \(No such file or directory\)$"):
        open_file(tmp_path / "none", "--x")


def test_a_write_that_is_cut_leaves_the_old_file(path):
    class Cut:
        dtype, shape = torch.float32, (1,)

        def numel(self):
            return 1

        def element_size(self):
            return 4

        def detach(self):
            raise KeyboardInterrupt

    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_file(path, {"first": torch.ones(1000), "second": Cut()}, {})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_the_safetensors_package_reads_and_writes_the_same(path, tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="./setup.sh peft installs safetensors")
    for name, tensor in package.load_file(path).items():
        assert torch.equal(tensor, tensors()[name])
    package.save_file(tensors(), tmp_path / "b.safetensors", {"format": "pt"})
    file = open_file(tmp_path / "b.safetensors", "--x")
    assert file.metadata == {"format": "pt"}
    for name, tensor in tensors().items():
        assert torch.equal(file.read(name), tensor)


def test_a_dtype_that_nobody_knows_is_named_when_its_tensor_is_read(path):
    made = safetensors_header.make({"a": ("F32", (2,))}, {}).replace(b"F32", b"F3x")
    path.write_bytes(made + bytes(8))
    with pytest.raises(ValueError, match="a of .* has the unknown dtype F3x"):
        safetensors_file.open_file(path, "--data").read("a")
