"""common/token_files: corpora, folders of text, Megatron files, batches."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.data import text_folder, token_files

ROOT = Path(__file__).resolve().parents[3]
# Of Megatron-LM's index files.
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


@pytest.fixture
def documents():
    generator = np.random.default_rng(0)
    return [generator.integers(0, 50257, size=size) for size in (7, 1, 40, 19)]


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    """A standard library of three modules, one of them in a test folder."""
    root = tmp_path / "stdlib"
    for name, content in {"b.py": "b = 1\n", "a/c.py": "c = 2\n", "test/t.py": "t\n", "notes.txt": "n\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "site-packages").mkdir()
    (root / "site-packages" / "p.py").write_text("p\n")
    monkeypatch.setattr(token_files.sysconfig, "get_path", lambda name: str(root))
    return root


# --- the Python corpus


def test_python_corpus_is_source_text_in_order(small_stdlib):
    corpus = token_files.python_corpus()
    assert bytes(corpus.tokens) == b"c = 2\n\0b = 1\n\0"
    assert not corpus.tokens.flags.writeable
    assert corpus.name.startswith("python-3.")
    assert token_files.open_tokens("").name == corpus.name
    (small_stdlib / "b.py").write_text("b = 3\n")
    after = token_files.python_corpus()
    assert after.name != corpus.name and b"b = 3" in bytes(after.tokens)


# --- a folder of text


def make_folder(root):
    files = {
        "b.md": b"# b\n",
        "a/x.txt": "gr\u00fc\u00dfe\n".encode(),
        "image.bin": b"\xff\xfe\x00",
        "late.txt": b"a" * (1 << 20) + b"\xe2\x82",  # ends inside a character, after the first chunk
        "empty.txt": b"",
        ".git/blob": b"hidden",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


SKIPPED = "2 files are not UTF-8, skipped: image.bin, late.txt"


@pytest.mark.parametrize("rank, said", [(None, SKIPPED), ("0", SKIPPED), ("1", "")])
def test_folder_joins_text_and_its_first_rank_names_what_it_skips(tmp_path, monkeypatch, capsys, rank, said):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    folder = make_folder(tmp_path / "books")
    before = sorted(tmp_path.rglob("*"))
    tokens = token_files.open_tokens(folder)
    assert capsys.readouterr().err == (f"--data {folder}: {said}\n" if said else "")
    assert bytes(tokens.tokens) == "gr\u00fc\u00dfe\n\0# b\n\0".encode()
    assert tokens.tokens.dtype == np.uint8 and not tokens.tokens.flags.writeable and tokens.name == "books"
    assert sorted(tmp_path.rglob("*")) == before


def test_text_longer_than_a_piece_that_is_read_is_kept_whole(tmp_path):
    text = "\u00fc\u20ac" * 500_000  # of 5 bytes: pieces end inside of characters
    (tmp_path / "1.txt").write_text(text)
    assert bytes(token_files.open_tokens(tmp_path).tokens) == text.encode() + b"\0"


@pytest.mark.parametrize("module, limit, value", [(token_files, "MAX_FILES", 4), (text_folder, "MAX_TEXT_BYTES", 11)])
def test_huge_folder_is_refused_before_anything_is_read(tmp_path, monkeypatch, module, limit, value):
    root = tmp_path / "root"
    for name in ("a/1.txt", "a/2.txt", "3.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    monkeypatch.setattr(text_folder, limit, value + 1)
    assert token_files.open_tokens(root).num_tokens == 3 * 5
    monkeypatch.setattr(text_folder, limit, value - 1)
    monkeypatch.setitem(vars(text_folder), "open", None)
    with pytest.raises(ValueError, match=rf"^--data {root}: .* files.*: take one of its folders, or make Megatron"):
        token_files.open_tokens(root)


def test_text_above_a_gibibyte_is_refused_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setitem(vars(text_folder), "open", None)
    for name, size in {"a.txt": 2**30, "b.txt": 1}.items():
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    said = "1,073,741,825 bytes in 2 files, at most 1,073,741,824 are read as text: take .* Megatron token files"
    with pytest.raises(ValueError, match=f"^--data {tmp_path}: {said} \\(.bin, .idx\\) of it$"):
        token_files.open_tokens(tmp_path)


def test_the_whole_file_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("linked").symlink_to("/")
    monkeypatch.setattr(text_folder.os, "walk", None)
    with pytest.raises(ValueError, match="--data /: this is the whole file system"):
        token_files.open_tokens("linked")


def test_file_without_a_size_is_not_read(tmp_path, monkeypatch):
    """Those of /proc have none, and /proc/kmsg never ends. A folder of such files alone has no text."""
    (tmp_path / "2.txt").write_text("")
    monkeypatch.setitem(vars(text_folder), "open", None)
    with pytest.raises(ValueError, match="--data .*no UTF-8 text"):
        token_files.open_tokens(tmp_path)


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "1.txt").write_text("text")

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setitem(vars(text_folder), "open", refuse)
    with pytest.raises(ValueError, match=rf"--data {tmp_path}: cannot read {tmp_path}/1.txt \(Permission denied\)"):
        token_files.open_tokens(tmp_path)


# --- Megatron files


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_megatron_round_trip(tmp_path, documents, dtype):
    write_megatron(tmp_path / "c4", documents, dtype)
    tokens = token_files.open_tokens(tmp_path / "c4")
    assert isinstance(tokens.tokens, np.memmap) and tokens.tokens.dtype == dtype
    np.testing.assert_array_equal(tokens.tokens, np.concatenate(documents))
    assert tokens.name == "c4"


def edit(offset, content):
    return lambda data: data[:offset] + content + data[offset + len(content) :]


@pytest.mark.parametrize(
    "suffix, damage, message",
    [
        ("idx", edit(0, b"TNTIDX"), "c4.idx is not a Megatron index"),
        ("idx", lambda data: data[:20], "c4.idx is truncated within its header"),
        ("idx", edit(9, b"\x02"), "c4.idx has version 2"),
        ("idx", edit(17, b"\x06"), "c4.idx has the dtype code 6"),
        ("idx", lambda data: data[:-1], "c4.idx has 121 bytes, its counts need 122"),
        ("idx", edit(18, bytes(8)), "c4.idx has no sequences"),
        ("idx", edit(34, struct.pack("<i", -1)), "c4.idx has a negative"),
        ("idx", edit(34, struct.pack("<i", 8)), "c4.bin has 134 bytes, the lengths in c4.idx sum to 68 tokens"),
        ("bin", lambda data: data[:-1], "c4.bin has 133 bytes"),
    ],
)
def test_faulty_megatron_files_are_named(tmp_path, documents, suffix, damage, message):
    write_megatron(tmp_path / "c4", documents)
    path = tmp_path / f"c4.{suffix}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        token_files.open_tokens(tmp_path / "c4")


# --- choosing


def test_a_folder_of_token_files_is_no_text(tmp_path, documents):
    (tmp_path / "c4").mkdir()
    write_megatron(tmp_path / "c4" / "part", documents)
    with pytest.raises(ValueError, match=rf"^--data {tmp_path}/c4: .* token files .*: --data {tmp_path}/c4/part$"):
        token_files.open_tokens(str(tmp_path / "c4"))
    (tmp_path / "c4" / "part.idx").write_text("an index of a book")
    assert token_files.open_tokens(str(tmp_path / "c4")).num_tokens > 0


def test_open_tokens_chooses(small_stdlib, tmp_path, documents):
    write_megatron(tmp_path / "c4.v1", documents)
    assert token_files.open_tokens(str(small_stdlib)).name == "stdlib"
    for data in ("c4.v1", "c4.v1.bin", "c4.v1.idx"):
        assert token_files.open_tokens(str(tmp_path / data)).num_tokens == 67


def test_open_tokens_names_the_flag(tmp_path):
    with pytest.raises(ValueError, match="--data .*nowhere: neither a folder"):
        token_files.open_tokens(str(tmp_path / "nowhere"))
    (tmp_path / "half.idx").write_bytes(b"")
    with pytest.raises(ValueError, match="half.bin is missing"):
        token_files.open_tokens(str(tmp_path / "half"))


# --- batches


def counting(num_tokens):
    return token_files.TokenFile(np.arange(num_tokens, dtype=np.uint16), "counting")


def test_batch_is_windows_of_the_file():
    batch = counting(1000).batch(3, num_sequences=5, sequence_length=16)
    assert batch.shape == (5, 17) and batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()


def test_batch_depends_on_seed_and_index_alone():
    tokens = counting(60000)
    first = tokens.batch(7, 4, 8, seed=1)
    np.random.seed(0)
    tokens.batch(6, 4, 8, seed=1)
    np.testing.assert_array_equal(tokens.batch(7, 4, 8, seed=1), first)
    assert (tokens.batch(8, 4, 8, seed=1) != first).any()
    assert (tokens.batch(7, 4, 8, seed=2) != first).any()


def test_batch_reaches_both_ends():
    tokens = counting(10)
    batch = np.concatenate([tokens.batch(index, 8, 7) for index in range(20)])
    assert set(batch[:, 0]) == {0, 1, 2} and batch.max() == 9
    np.testing.assert_array_equal(counting(9).batch(0, 1, 8), [np.arange(9)])
    with pytest.raises(ValueError, match="--data: counting has 8 tokens.*needs 9"):
        counting(8).batch(0, 1, 8)


def test_works_without_torch():
    code = "import sys; sys.modules['torch'] = None; "
    code += "import common.data.token_files, common.flops, graph_worth.machine.environment"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- held-out windows


def test_held_out_windows_share_no_place_with_training_windows():
    length, tokens = 64, token_files.TokenFile(np.arange(20_000), "places")
    seen = {place for index in range(6) for row in tokens.batch(index, 5, length) for place in row}
    rows = tokens.held_out(40, length, num_batches=6, batch_sequences=5)
    assert rows.shape == (40, length + 1) and rows.dtype == np.int64
    assert (np.diff(rows) == 1).all() and not seen & set(rows.ravel())
    # Windows of batches that are not trained on may be among them.
    more = {place for index in range(6, 40) for row in tokens.batch(index, 5, length) for place in row}
    assert more & set(rows.ravel())
    assert (rows == tokens.held_out(40, length, num_batches=6, batch_sequences=5)).all()


def test_held_out_is_refused_where_training_leaves_too_little():
    with pytest.raises(LookupError, match="places"):
        token_files.TokenFile(np.arange(300), "places").held_out(4, 64, num_batches=6, batch_sequences=5)
