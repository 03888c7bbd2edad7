"""llama2_lora/data: what a window holds, packing, rows in both formats, ranks and held-out windows, mistakes."""

import itertools
import json
import math
import os
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.data import limits, token_files
from llama2_lora.config import MAX_DOCUMENTS, Config
from llama2_lora.data import rows
from llama2_lora.data.windows import open_windows

CONFIG = Config(
    layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=64, vocab=256, sequence=32, rank=4, documents="separate"
)


def lengths_of(batch):
    """Return the lengths of the documents of a window, padding among them."""
    return [length for length in np.diff(batch.cu_seqlens.numpy()).tolist() if length]


def assert_consistent(batch, config=CONFIG):
    s = config.sequence
    assert [tensor.dtype for tensor in batch] == [torch.int64, torch.int64, torch.float32, torch.int32, torch.int64]
    assert [len(tensor) for tensor in batch] == [s, s, s, MAX_DOCUMENTS + 1, s]
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == s and bounds == sorted(bounds)
    for begin, end in itertools.pairwise(sorted(set(bounds))):
        assert batch.positions[begin:end].tolist() == list(range(end - begin))
        inner = slice(begin, end - 1)
        counts = batch.loss_mask[inner] > 0
        assert torch.equal(batch.targets[inner][counts], batch.tokens[begin + 1 : end][counts])
        assert batch.loss_mask[end - 1] == 0 and batch.targets[end - 1] == 0


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(CONFIG, data=str(path))


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet.write_table(pyarrow.table({**columns, "attention_mask": [[1]] * len(rows)}), path)


def packed_rows(count, length, seed=0):
    generator = np.random.default_rng(seed)
    return [{"input_ids": generator.integers(1, 256, length).tolist()} for _ in range(count)]


def windows_of(tmp_path, rows, **options):
    return open_windows(write_jsonl(tmp_path / "rows.jsonl", rows), **options)


def every(windows):
    """All training windows of one rank's first epoch, as sorted lists of tokens."""
    return sorted(windows.batch(index).tokens.tolist() for index in range(windows.num_windows))


def assert_same_windows(ours, theirs):
    assert ours.num_windows == theirs.num_windows
    pairs = [(ours.batch(index), theirs.batch(index)) for index in range(ours.num_windows)]
    assert all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


def refused(config, **options):
    with pytest.raises(ValueError, match="^--data") as caught:
        open_windows(config, **options).batch(0)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- nothing given


@pytest.fixture(autouse=True)
def short_corpus():
    """All of the standard library, where it is not replaced by `corpus`."""


@pytest.fixture
def corpus(monkeypatch):
    """A small Python corpus of 20,000 bytes."""
    tokens = np.random.default_rng(5).integers(32, 127, 20_000).astype(np.uint8)
    made = SimpleNamespace(tokens=tokens, num_tokens=len(tokens), name="python-small")
    monkeypatch.setattr(token_files, "python_corpus", lambda: made)
    return tokens


def test_excerpts_of_python_fill_windows_whose_layouts_differ(corpus):
    windows = open_windows(CONFIG)
    batches = [windows.batch(index) for index in range(64)]
    for batch in batches:
        assert_consistent(batch)
        assert batch.loss_mask.sum() == CONFIG.sequence - len(lengths_of(batch))
    assert len({tuple(batch.cu_seqlens.tolist()) for batch in batches}) >= 60
    counts = [len(lengths_of(batch)) for batch in batches]
    assert max(counts) <= 8 and len(set(counts)) >= 4 and sum(counts) / 64 > 3
    text = bytes(corpus)
    assert all(bytes(batch.tokens.tolist()) in text for batch in batches)


def test_the_standard_library_of_this_machine():
    windows = open_windows(replace(CONFIG, sequence=1024))
    assert windows.num_windows > 5000 and windows.name.startswith("python-3.")
    assert_consistent(windows.batch(0), replace(CONFIG, sequence=1024))


def test_a_whole_window_is_one_document_with_the_same_tokens_and_mask(corpus):
    separate = open_windows(CONFIG).batch(3)
    whole = open_windows(replace(CONFIG, documents="whole")).batch(3)
    assert whole.cu_seqlens.tolist() == [0] + [32] * MAX_DOCUMENTS
    assert whole.positions.tolist() == list(range(32))
    for name in ("tokens", "targets", "loss_mask"):
        assert torch.equal(getattr(whole, name), getattr(separate, name))


def test_windows_depend_on_seed_and_index_alone(corpus):
    first, again = open_windows(CONFIG), open_windows(CONFIG)
    for index in (700, 3, 5000):
        assert all(torch.equal(a, b) for a, b in zip(first.batch(index), again.batch(index), strict=True))
    assert not torch.equal(open_windows(CONFIG, seed=1).batch(3).tokens, first.batch(3).tokens)


# --- ranks, epochs


def test_ranks_read_every_window_once_an_epoch(corpus):
    ranks = [open_windows(CONFIG, rank, 3) for rank in range(3)]
    assert ranks[0].num_windows == 20_000 // 32
    steps = ranks[0].num_windows // 3
    epochs = []
    for epoch in (0, 1):
        read = [tuple(rank.batch(epoch * steps + step).tokens.tolist()) for step in range(steps) for rank in ranks]
        assert len(set(read)) == len(read) == 3 * steps
        epochs.append(read)
    assert epochs[0] != epochs[1]


def test_a_source_too_short_for_all_ranks_is_refused(tmp_path):
    config = write_jsonl(tmp_path / "rows.jsonl", packed_rows(3, 32))
    assert "fills 3 windows of --sequence 32, 4 ranks read one each" in refused(config, world_size=4)


# --- packed rows


def test_a_packed_row_is_one_window_and_one_sequence(tmp_path):
    rows = [{**row, "loss_mask": [1] * 32, "seq_start_id": [0]} for row in packed_rows(9, 32)]
    windows = windows_of(tmp_path, rows)
    assert every(windows) == sorted(row["input_ids"] for row in rows)
    batch = windows.batch(0)
    assert_consistent(batch)
    assert lengths_of(batch) == [32] and batch.loss_mask.tolist() == [1.0] * 31 + [0.0]
    # Documents within a row are kept apart.
    batch = windows_of(tmp_path, [{"input_ids": list(range(32)), "seq_start_id": [0, 5, 20]}]).batch(0)
    assert_consistent(batch)
    assert lengths_of(batch) == [5, 15, 12] and batch.loss_mask.sum() == 29


def test_labels_lie_at_the_target_and_a_loss_mask_at_what_predicts_it(tmp_path):
    ids = list(range(1, 33))
    # The targets 11 to 20 count, which are predicted at the tokens 10 to 19, places 9 to 18.
    expected = [float(9 <= place <= 18) for place in range(32)]
    labels = [token if 11 <= token <= 20 else -100 for token in ids]
    for fields in ({"labels": labels}, {"loss_mask": [int(value) for value in expected]}):
        batch = windows_of(tmp_path, [{"input_ids": ids, **fields}]).batch(0)
        assert batch.loss_mask.tolist() == expected
        assert_consistent(batch)


def test_a_longer_row_is_cut_and_windows_that_do_not_count_are_left_out(tmp_path):
    ids = np.random.default_rng(0).integers(1, 256, 128).tolist()
    windows = windows_of(tmp_path, [{"input_ids": ids, "labels": [-100] * 70 + ids[70:]}])
    assert every(windows) == sorted([ids[64:96], ids[96:]])
    first = next(batch for batch in map(windows.batch, range(2)) if batch.tokens.tolist() == ids[64:96])
    assert first.loss_mask.tolist() == [0.0] * 5 + [1.0] * 26 + [0.0]


def test_shorter_rows_share_a_window_and_padding_fills_the_rest(tmp_path):
    rows = [{"input_ids": [number] * length} for number, length in enumerate((10, 12, 20, 5, 32, 40), start=1)]
    windows = windows_of(tmp_path, rows)
    found = {tuple(lengths_of(batch)): batch for batch in map(windows.batch, range(windows.num_windows))}
    # 10 + 12, then 10 of padding; 20 + 5 and 7; 32; of 40 the first 32; its other 8 and 24.
    assert set(found) == {(10, 12, 10), (20, 5, 7), (32,), (8, 24)} and windows.num_windows == 5
    for batch in found.values():
        assert_consistent(batch)
    padded = found[10, 12, 10]
    assert not padded.tokens[22:].any() and not padded.loss_mask[21:].any()
    assert padded.loss_mask.sum() == 9 + 11
    # At most 15 documents, so that padding has bounds of its own.
    short = windows_of(tmp_path, [{"input_ids": [7, 8]}] * 16).batch(0)
    assert short.tokens.tolist() in ([7, 8] * 15 + [0, 0], [7, 8] + [0] * 30)


@pytest.mark.parametrize("suffix, write", [(".jsonl", write_jsonl), (".parquet", write_parquet)])
def test_both_formats_give_the_same_windows_from_files_and_folders(tmp_path, suffix, write):
    """As Hugging Face lays a data set out: train and validation, several files each, in a folder data."""
    rows = [{**row, "loss_mask": [0] * 7 + [1] * 25, "seq_start_id": [0]} for row in packed_rows(8, 32)]
    (tmp_path / "plain").mkdir()
    write_jsonl(tmp_path / "plain" / "train.jsonl", rows)
    plain = open_windows(replace(CONFIG, data=str(tmp_path / "plain")))
    assert plain.num_windows == 8
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name, part in (("train-0", rows[:5]), ("train-1", rows[5:]), ("validation-0", rows[:2])):
        write(tmp_path / "hub" / "data" / f"{name}{suffix}", part)
    assert_same_windows(open_windows(replace(CONFIG, data=str(tmp_path / "hub"))), plain)
    alone = open_windows(replace(CONFIG, data=str(tmp_path / "hub" / "data" / f"train-0{suffix}")))
    assert alone.num_windows == 5


# --- mistakes

ROW = {"input_ids": list(range(32))}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([ROW, {"input_ids": [1, 256]}], "rows.jsonl has the token 256, beyond --vocab 256: take --vocab 257"),
        ([{"input_ids": [1, -1]}], "has the token -1, which is no id"),
        ([{"input_ids": [1, 2.5]}], "has input_ids that is no list of 32-bit integers"),
        ([{"input_ids": [2**40]}], "has input_ids that is no list"),
        ([{"input_ids": []}], "row 0 of .* has input_ids without an element"),
        ([{**ROW, "labels": [1] * 31}], "has 32 input_ids and another number of labels"),
        ([{**ROW, "loss_mask": [1] * 33}], "has 32 input_ids and another number of labels"),
        ([{**ROW, "seq_start_id": [1]}], "seq_start_id that does not rise from 0 within its 32 tokens"),
        ([{**ROW, "seq_start_id": [0, 9, 9]}], "seq_start_id that does not rise"),
        ([{**ROW, "seq_start_id": [0, 32]}], "seq_start_id that does not rise"),
        ([ROW, {"prompt": "a", "completion": "b"}], "row 1 of .*rows.jsonl has no input_ids"),
        ([7], "row 0 of .*rows.jsonl has no input_ids"),
        ([], "has no rows"),
        ([{"input_ids": [1] * 31}], "has 31 tokens, fewer than one window of --sequence 32"),
        ([{**ROW, "labels": [-100] * 32}], "no document of .* has a second token that counts in the loss"),
        ([{"input_ids": [7]}] * 40, "no document of .* has a second token"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, rows, named):
    config = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=f"^--data: .*{named}"):
        open_windows(config)


def test_rows_with_nonsense_in_place_of_numbers_are_refused_in_one_line(tmp_path):
    """Check values that numpy turns into an array of objects, text or bools, or cannot convert."""
    for value in (None, "abc", {"a": 1}, ["a"], [True], [None], [[]], [[1], [2, 3]], [2**70], [1e400], 7):
        for field in ("input_ids", "labels", "seq_start_id"):
            config = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, field: value}])
            assert f"has {field} that is no list of" in refused(config), (field, value)
    for value in ("abc", [[1], [2, 3]], ["a"] * 32, [math.nan] * 32, [math.inf] + [1] * 31):
        config = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, "loss_mask": value}])
        assert "has loss_mask that is no list of finite numbers" in refused(config)


@pytest.mark.parametrize("suffix, write", [(".jsonl", write_jsonl), (".parquet", write_parquet)])
def test_files_that_are_cut_or_no_files_are_one_line(tmp_path, suffix, write):
    path = tmp_path / f"train{suffix}"
    config = replace(CONFIG, data=str(tmp_path))
    write(path, [{**row, "loss_mask": [1] * 32, "seq_start_id": [0]} for row in packed_rows(4, 32)])
    whole = path.read_bytes()
    for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 30, len(whole) - 2):
        path.write_bytes(whole[:length])
        assert str(path) in refused(config), length
    for make, told in (
        (os.mkfifo, "it is a pipe, a socket or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a pipe, a socket or a device"),
        (os.mkdir, "Is a directory"),
    ):
        path.unlink()
        make(path)
        assert told in refused(config)


def test_limits_are_one_line_that_names_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    config = replace(CONFIG, data=str(path))
    path.write_text("[" * 200_000)
    assert "line 1 of" in refused(config)
    path.write_text('{"text": "' + "a" * 9 * 2**20 + '"}')
    assert "has more than 8,388,608 bytes" in refused(config)
    os.truncate(path, 5 * 2**30)
    assert "has 5,368,709,120 bytes, at most 4,294,967,296 are read" in refused(config)
    monkeypatch.setattr(limits, "MAX_ROWS", 3)
    assert "has more than 3 rows" in refused(write_jsonl(path, packed_rows(4, 32)))


def write_zeros(path, number, **others):
    """One row of equal numbers, which take few bytes in a parquet file."""
    pyarrow = pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = pyarrow.ListArray.from_arrays([0, number], pyarrow.array(np.zeros(number, np.int32)))
    parquet.write_table(pyarrow.table({"input_ids": row, **others}), path)
    assert path.stat().st_size < number / 20
    return parquet


@pytest.mark.parametrize("others", [{}, {"text": ["x" * 2_000_000]}], ids=["alone", "beside a column that is not read"])
def test_a_parquet_file_that_declares_more_than_it_may_is_refused(tmp_path, monkeypatch, others):
    path, number = tmp_path / "rows.parquet", 2_000_000
    parquet = write_zeros(path, number, **others)
    declared = 4 * number + 512
    # pyarrow adds a bit for each number.
    monkeypatch.setattr(rows, "_most_bytes", lambda file_bytes: declared + number // 8 + 100)
    assert len(rows.read([path], 32000).tokens) == number
    monkeypatch.setattr(rows, "_most_bytes", lambda file_bytes: declared - 1)
    # Nothing of it is decoded.
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    assert refused(replace(CONFIG, data=str(path))) == (
        f"--data: {path} cannot be read: it declares 1 rows of 8,000,512 bytes, more than it may: at most 10,000,000 "
        "and 8,000,511"
    )


def test_a_parquet_file_that_declares_too_little_ends_at_the_limit(tmp_path, monkeypatch):
    path, number = tmp_path / "rows.parquet", 2_000_000
    parquet = write_zeros(path, number)

    def varint(value):  # of 4 bytes; Thrift doubles what may be negative
        return bytes((2 * value >> 7 * place) % 128 | (128 if place < 3 else 0) for place in range(4))

    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert varint(number) in data[footer:]
    path.write_bytes(data[:footer] + data[footer:].replace(varint(number), varint(3)))
    assert parquet.ParquetFile(path).metadata.row_group(0).column(0).num_values == 3
    assert len(rows.read([path], 32000).tokens) == number
    monkeypatch.setattr(rows, "_most_bytes", lambda file_bytes: 2**20)
    assert refused(replace(CONFIG, data=str(path))).endswith("it holds more than 1,048,576 bytes uncompressed")


def test_parquet_is_read_without_pandas(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    write_parquet(tmp_path / "rows.parquet", packed_rows(3, 32))
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert len(rows.read([tmp_path / "rows.parquet"], 32000).tokens) == 3 * 32


@pytest.mark.slow
def test_a_parquet_file_of_many_rows_or_of_other_types_is_refused(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    parquet, path = pytest.importorskip("pyarrow.parquet"), tmp_path / "rows.parquet"
    config = replace(CONFIG, data=str(path))
    parquet.write_table(pyarrow.table({"input_ids": [[1]] * 300_000}), path)
    assert "declares 300,000 rows of " in refused(config)
    parquet.write_table(pyarrow.table({"input_ids": [[[1]]]}), path)
    assert "input_ids is of type list<element: list<element: int64>>, no list of numbers" in refused(config)
    write_parquet(path, packed_rows(4, 32))
    monkeypatch.setattr(limits, "MAX_ROWS", 3)
    assert "declares 4 rows" in refused(config)


def test_a_disk_that_fails_is_one_line(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    line = refused(replace(CONFIG, data=str(tmp_path / "rows.jsonl")))
    assert line.endswith("rows.jsonl (Input/output error)")


@pytest.mark.parametrize("name", ["train.npy", "rows.pkl", "rows.jsonl"])
def test_a_pickle_is_refused_and_never_loaded(tmp_path, name):
    harmed = tmp_path / "harmed"
    (tmp_path / name).write_text(f"cos\nmkdir\n(V{harmed}\ntR.")
    line = refused(replace(CONFIG, data=str(tmp_path / name)))
    assert name == "rows.jsonl" or f"{name}: takes .parquet, .jsonl" in line
    assert not harmed.exists()
    pickle.loads((tmp_path / name).read_bytes())
    assert harmed.exists()


def test_other_damaged_or_missing_sources(tmp_path, monkeypatch):
    def told(name):
        return refused(replace(CONFIG, data=str(tmp_path / name)))

    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n\n{"inp')
    assert "line 3 of" in told("rows.jsonl")
    assert told("none.jsonl") == f"--data: cannot read {tmp_path}/none.jsonl (No such file or directory)"
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("text" * 100)
    assert told("books") == f"--data {tmp_path}/books: this folder has no train file of .parquet, .jsonl"
    assert told("books/a.txt").endswith("a.txt: takes .parquet, .jsonl, or a folder with train files")
    (tmp_path / "a\n\x1b[31m.jsonl").write_text("{")
    assert r"a\n\x1b[31m.jsonl" in told("a\n\x1b[31m.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert told("a.parquet").endswith("needs pyarrow to be read: ./setup.sh parquet, or make a .jsonl of it")


def test_an_epoch_is_shuffled_once(corpus, monkeypatch):
    """Thousands of windows are made before the first step."""
    windows, drawn = open_windows(CONFIG), []
    make = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or make(seed))
    for index in range(2 * windows.num_windows):
        windows.batch(index)
    assert [epoch for _, epoch in drawn] == [0, 1]
