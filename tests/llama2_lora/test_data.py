"""llama2_lora/data: what a window holds, packing, rows in every format, ranks and held-out windows, mistakes."""

import itertools
import json
import os
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.capture.pool import Pool, StaticInputs
from common.training.data import limits, token_files
from llama2_lora.config import MAX_DOCUMENTS, Config
from llama2_lora.data import rows as row_files
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


def packed_rows(count, length, seed=0):
    generator = np.random.default_rng(seed)
    return [{"input_ids": generator.integers(1, 256, length).tolist()} for _ in range(count)]


def every(windows):
    """All training windows of one rank's first epoch, as sorted lists of tokens."""
    return sorted(windows.batch(index).tokens.tolist() for index in range(windows.num_windows))


def refused(config, tmp_path, **options):
    with pytest.raises(ValueError, match="^--data") as caught:
        open_windows(config, tmp_path / "cache", **options).batch(0)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- nothing given


@pytest.fixture
def corpus(monkeypatch):
    """A small Python corpus of 20,000 bytes."""
    tokens = np.random.default_rng(5).integers(32, 127, 20_000).astype(np.uint8)
    monkeypatch.setattr(token_files, "python_corpus", lambda cache: token_files.TokenFile(tokens, "python-small", 256))
    return tokens


def test_excerpts_of_python_fill_windows_whose_layouts_differ(corpus, tmp_path):
    windows = open_windows(CONFIG, tmp_path)
    batches = [windows.batch(index) for index in range(64)]
    for batch in batches:
        assert_consistent(batch)
        assert batch.loss_mask.sum() == CONFIG.sequence - len(lengths_of(batch))
    assert len({tuple(batch.cu_seqlens.tolist()) for batch in batches}) >= 60
    counts = [len(lengths_of(batch)) for batch in batches]
    assert max(counts) <= 8 and len(set(counts)) >= 4 and sum(counts) / 64 > 3
    assert windows.name == "python-small" and windows.fill > 0.999
    text = bytes(corpus)
    assert all(bytes(batch.tokens.tolist()) in text for batch in batches)


def test_the_standard_library_of_this_machine(tmp_path):
    windows = open_windows(replace(CONFIG, sequence=1024), tmp_path)
    assert windows.num_windows > 5000 and windows.name.startswith("python-3.")
    for index in range(8):
        assert_consistent(windows.batch(index), replace(CONFIG, sequence=1024))
    assert len({len(lengths_of(windows.batch(index))) for index in range(16)}) > 2


def test_a_whole_window_is_one_document_with_the_same_tokens_and_mask(corpus, tmp_path):
    separate = open_windows(CONFIG, tmp_path).batch(3)
    whole = open_windows(replace(CONFIG, documents="whole"), tmp_path).batch(3)
    assert whole.cu_seqlens.tolist() == [0] + [32] * MAX_DOCUMENTS
    assert whole.positions.tolist() == list(range(32))
    for name in ("tokens", "targets", "loss_mask"):
        assert torch.equal(getattr(whole, name), getattr(separate, name))


def test_windows_depend_on_seed_and_index_alone(corpus, tmp_path):
    first, again = open_windows(CONFIG, tmp_path), open_windows(CONFIG, tmp_path)
    for index in (700, 3, 5000):
        assert all(torch.equal(a, b) for a, b in zip(first.batch(index), again.batch(index), strict=True))
    assert not torch.equal(open_windows(CONFIG, tmp_path, seed=1).batch(3).tokens, first.batch(3).tokens)


# --- ranks, epochs, held-out windows


def test_ranks_read_every_window_once_an_epoch_and_held_out_ones_never(corpus, tmp_path):
    ranks = [open_windows(CONFIG, tmp_path, rank, 3, num_held_out=7) for rank in range(3)]
    total = 20_000 // 32
    assert ranks[0].num_windows == total - 7 and ranks[0].num_held_out == 7
    steps = ranks[0].num_windows // 3
    epochs = []
    for epoch in (0, 1):
        read = [tuple(rank.batch(epoch * steps + step).tokens.tolist()) for step in range(steps) for rank in ranks]
        assert len(set(read)) == len(read) == 3 * steps
        epochs.append(read)
    assert epochs[0] != epochs[1]
    held_out = [[tuple(rank.held_out(index).tokens.tolist()) for index in range(7)] for rank in ranks]
    assert held_out[0] == held_out[1] == held_out[2]
    assert len(set(held_out[0])) == 7 and not set(held_out[0]) & set(epochs[0] + epochs[1])


def test_a_short_source_gives_ranks_their_windows_first(tmp_path):
    config = write_jsonl(tmp_path / "rows.jsonl", packed_rows(3, 32))
    assert open_windows(config, tmp_path, world_size=2).num_held_out == 1
    assert open_windows(config, tmp_path, world_size=3).num_held_out == 0
    assert "fills 3 windows of --sequence 32, 4 ranks read one each" in refused(config, tmp_path, world_size=4)


def test_rows_for_validation_are_held_out(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", packed_rows(6, 32))
    write_jsonl(tmp_path / "validation.jsonl", packed_rows(3, 32, seed=1))
    windows = open_windows(replace(CONFIG, data=str(tmp_path)), tmp_path / "cache", num_held_out=8)
    assert (windows.num_windows, windows.num_held_out) == (6, 3)
    held_out = [windows.held_out(index).tokens.tolist() for index in range(3)]
    assert held_out == [row["input_ids"] for row in packed_rows(3, 32, seed=1)]


# --- packed rows


def test_a_packed_row_is_one_window_and_one_sequence(tmp_path):
    rows = [{**row, "loss_mask": [1] * 32, "seq_start_id": [0]} for row in packed_rows(9, 32)]
    windows = open_windows(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path, num_held_out=0)
    assert every(windows) == sorted(row["input_ids"] for row in rows)
    batch = windows.batch(0)
    assert_consistent(batch)
    assert lengths_of(batch) == [32] and batch.loss_mask.tolist() == [1.0] * 31 + [0.0]
    assert batch.targets[:31].tolist() == batch.tokens[1:].tolist()


def test_labels_lie_at_the_target_and_a_loss_mask_at_what_predicts_it(tmp_path):
    ids = list(range(1, 33))
    # The targets 11 to 20 count, which are predicted at the tokens 10 to 19, places 9 to 18.
    expected = [float(9 <= place <= 18) for place in range(32)]
    labels = [token if 11 <= token <= 20 else -100 for token in ids]
    for fields in ({"labels": labels}, {"loss_mask": [int(value) for value in expected]}):
        config = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": ids, **fields}])
        batch = open_windows(config, tmp_path, num_held_out=0).batch(0)
        assert batch.loss_mask.tolist() == expected
        assert_consistent(batch)


def test_documents_within_a_row_are_kept_apart(tmp_path):
    row = {"input_ids": list(range(32)), "seq_start_id": [0, 5, 20]}
    batch = open_windows(write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path, num_held_out=0).batch(0)
    assert lengths_of(batch) == [5, 15, 12]
    assert_consistent(batch)
    assert batch.loss_mask.sum() == 29


def test_a_longer_row_is_cut_and_windows_that_do_not_count_are_left_out(tmp_path):
    ids = np.random.default_rng(0).integers(1, 256, 128).tolist()
    labels = [-100] * 70 + ids[70:]
    config = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": ids, "labels": labels}])
    windows = open_windows(config, tmp_path, num_held_out=0)
    assert every(windows) == sorted([ids[64:96], ids[96:]])
    first = next(batch for batch in map(windows.batch, range(2)) if batch.tokens.tolist() == ids[64:96])
    assert first.loss_mask.tolist() == [0.0] * 5 + [1.0] * 26 + [0.0]


def test_shorter_rows_share_a_window_and_padding_fills_the_rest(tmp_path):
    rows = [{"input_ids": [number] * length} for number, length in enumerate((10, 12, 20, 5, 32, 40), start=1)]
    windows = open_windows(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path, num_held_out=0)
    found = {tuple(lengths_of(batch)): batch for batch in map(windows.batch, range(windows.num_windows))}
    # 10 + 12, then 10 of padding; 20 + 5 and 7; 32; of 40 the first 32; its other 8 and 24.
    assert set(found) == {(10, 12, 10), (20, 5, 7), (32,), (8, 24)} and windows.num_windows == 5
    for batch in found.values():
        assert_consistent(batch)
    padded = found[10, 12, 10]
    assert not padded.tokens[22:].any() and not padded.loss_mask[21:].any()
    assert padded.loss_mask.sum() == 9 + 11
    assert windows.fill == (10 + 12 + 20 + 5 + 32 + 40) / (5 * 32)


# --- formats


def as_npy(path, rows):
    """Write a .npy, which holds input_ids alone."""
    np.save(path, np.array([row["input_ids"] for row in rows], np.int32), allow_pickle=False)


def as_safetensors(path, rows):
    row_files.write_safetensors(path, row_files.collect(path, rows))


def as_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet.write_table(pyarrow.table({**columns, "attention_mask": [[1]] * len(rows)}), path)


def as_jsonl(path, rows):
    write_jsonl(path, rows)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("train.safetensors", as_safetensors),
        ("data/train-00000-of-00001.safetensors", as_safetensors),
        ("train.jsonl", as_jsonl),
        ("data/train-00000-of-00001.parquet", as_parquet),
    ],
)
def test_all_formats_give_the_same_windows(tmp_path, name, write):
    rows = [{**row, "loss_mask": [0] * 7 + [1] * 25, "seq_start_id": [0]} for row in packed_rows(8, 32)]
    plain = open_windows(write_jsonl(tmp_path / "plain.jsonl", rows), tmp_path)
    path = tmp_path / "folder" / name
    path.parent.mkdir(parents=True)
    write(path, rows)
    for data in (tmp_path / "folder", path):
        windows = open_windows(replace(CONFIG, data=str(data)), tmp_path)
        for index in range(windows.num_windows):
            assert all(torch.equal(a, b) for a, b in zip(windows.batch(index), plain.batch(index), strict=True))


@pytest.mark.parametrize("dtype", ["<i4", ">i8", "u2"])
def test_an_npy_of_integers_has_a_document_in_each_row_and_is_mapped(tmp_path, dtype):
    rows = packed_rows(8, 32)
    plain = open_windows(write_jsonl(tmp_path / "plain.jsonl", rows), tmp_path)
    np.save(tmp_path / "train.npy", np.array([row["input_ids"] for row in rows], dtype))
    windows = open_windows(replace(CONFIG, data=str(tmp_path / "train.npy")), tmp_path)
    for index in range(windows.num_windows):
        assert all(torch.equal(a, b) for a, b in zip(windows.batch(index), plain.batch(index), strict=True))
    assert isinstance(row_files.read([tmp_path / "train.npy"], 256).tokens.base, np.memmap)


def test_a_safetensors_file_is_mapped_and_several_follow_one_another(tmp_path):
    rows = [{**row, "seq_start_id": [0, 5]} for row in packed_rows(6, 32)]
    for number in range(2):
        as_safetensors(tmp_path / f"train-{number}.safetensors", rows[3 * number : 3 * number + 3])
    assert isinstance(row_files.read([tmp_path / "train-0.safetensors"], 256).tokens, np.memmap)
    plain = open_windows(write_jsonl(tmp_path / "plain.jsonl", rows), tmp_path)
    windows = open_windows(replace(CONFIG, data=str(tmp_path)), tmp_path)
    for index in range(windows.num_windows):
        assert all(torch.equal(a, b) for a, b in zip(windows.batch(index), plain.batch(index), strict=True))


def test_input_ids_alone_are_one_document(tmp_path):
    path = tmp_path / "train.safetensors"
    write_tensors(path, {"input_ids": ("I32", np.arange(64, dtype="<i4"))})
    windows = open_windows(replace(CONFIG, data=str(path)), tmp_path, num_held_out=0)
    assert every(windows) == [list(range(32)), list(range(32, 64))]


def write_tensors(path, tensors, header=None):
    """tensors: name -> (dtype, array). header: instead of the one that belongs to them."""
    described, begin = {}, 0
    for name, (dtype, values) in tensors.items():
        described[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [begin, begin + values.nbytes],
        }
        begin += values.nbytes
    text = json.dumps(described).encode() if header is None else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for _, values in tensors.values()))


def test_a_parquet_file_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    config = replace(CONFIG, data=str(tmp_path))
    assert refused(config, tmp_path).endswith("needs pyarrow to be read: ./setup.sh parquet, or make a .jsonl of it")


# --- mistakes


ROW = {"input_ids": list(range(32))}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (
            [ROW, {"input_ids": [1, 256]}],
            "rows.jsonl has the token 256, beyond --vocab 256: take --vocab 257",
        ),
        ([{"input_ids": [1, -1]}], "has the token -1, which is no id"),
        ([{"input_ids": [1, 2.5]}], "has input_ids that is no list of 32-bit integers"),
        ([{"input_ids": [[1], [2, 3]]}], "has input_ids that is no list"),
        ([{"input_ids": []}], "has input_ids that is no list"),
        ([{"input_ids": [2**40]}], "has input_ids that is no list"),
        ([{**ROW, "labels": [1] * 31}], "has 32 input_ids and another number of labels"),
        ([{**ROW, "loss_mask": [1] * 33}], "has 32 input_ids and another number of labels"),
        ([{**ROW, "seq_start_id": [1]}], "seq_start_id that does not rise from 0 within its 32 tokens"),
        ([{**ROW, "seq_start_id": [0, 9, 9]}], "seq_start_id that does not rise"),
        ([{**ROW, "seq_start_id": [0, 32]}], "seq_start_id that does not rise"),
        ([ROW, {"prompt": "a", "completion": "b"}], "row 1 of .*rows.jsonl has no input_ids"),
        ([[1, 2]], "row 0 of .*rows.jsonl has no input_ids"),
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
        open_windows(config, tmp_path)


def test_documents_too_short_for_a_window_unless_it_is_one_sequence(tmp_path):
    """15 documents of 2 tokens fill 30 tokens."""
    config = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [7, 8]}] * 450)
    assert open_windows(config, tmp_path).fill == 30 / 32
    long = replace(config, sequence=64)
    assert "so short that 15 of them fill 47 % of a window: take a shorter --sequence, or" in refused(long, tmp_path)
    assert open_windows(replace(long, documents="whole"), tmp_path).fill > 0.9


def test_rows_with_nonsense_in_place_of_numbers_are_refused_in_one_line(tmp_path):
    """Check values that numpy turns into an array of objects, text or bools, or cannot convert."""
    for value in (None, "abc", {"a": 1}, ["a"], [True], [None], [[]], [2**70], [-(2**63)], [1e400], 7):
        for field in ("input_ids", "labels", "seq_start_id"):
            config = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, field: value}])
            assert f"has {field} that is no list of" in refused(config, tmp_path), (field, value)
    for value in ("abc", [[1], [2, 3]], ["a"] * 32, [[1]] * 32):
        config = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, "loss_mask": value}])
        assert "has loss_mask that is no list of numbers" in refused(config, tmp_path)


# --- files that hold other things than rows


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (np.arange(4), "is no array of integers [rows, tokens]"),
        (np.zeros((2, 32)), "is no array of integers [rows, tokens]"),
        (np.zeros((2, 3, 4), int), "is no array of integers [rows, tokens]"),
        (np.asfortranarray(np.zeros((2, 32), int)), "stored row by row"),
        (np.zeros((0, 32), int), "is no array of integers [rows, tokens] of 1 to"),
        (np.zeros((4, 0), int), "is no array of integers [rows, tokens] of 1 to"),
        (np.array(5), "is no array of integers [rows, tokens]"),
        (np.full((2, 32), 300), "has the token 300, beyond --vocab 256"),
        (np.full((2, 32), -1), "has the token -1, which is no id"),
        (np.zeros(3, [("input_ids", "<i4", (4,))]), "is no array of integers [rows, tokens]"),
    ],
)
def test_an_npy_of_something_else(tmp_path, content, told):
    np.save(tmp_path / "train.npy", content)
    assert told in refused(replace(CONFIG, data=str(tmp_path / "train.npy")), tmp_path)


@pytest.mark.parametrize("name", ["train.npy", "train.safetensors", "train.parquet", "train.jsonl"])
def test_a_file_that_is_cut_anywhere_is_one_line(tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    write = {"npy": as_npy, "safetensors": as_safetensors, "parquet": as_parquet, "jsonl": as_jsonl}
    path = tmp_path / name
    write[path.suffix[1:]](path, [{**row, "loss_mask": [1] * 32, "seq_start_id": [0]} for row in packed_rows(4, 32)])
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 20, 100, len(whole) // 2, len(whole) - 30, len(whole) - 2):
        path.write_bytes(whole[:length])
        message = refused(replace(CONFIG, data=str(path)), tmp_path)
        assert str(path) in message, length


def test_damaged_bytes_are_one_line_or_other_windows(tmp_path):
    """No position makes a traceback, and none a pickle."""
    generator = np.random.default_rng(0)
    rows = [{**row, "loss_mask": [1] * 32, "seq_start_id": [0]} for row in packed_rows(4, 32)]
    for suffix, write in ((".npy", as_npy), (".safetensors", as_safetensors), (".jsonl", as_jsonl)):
        path = tmp_path / f"train{suffix}"
        write(path, rows)
        whole = path.read_bytes()
        for _ in range(150):
            content = bytearray(whole)
            for place in generator.integers(0, min(len(whole), 400), generator.integers(1, 5)):
                content[place] = generator.integers(256)
            path.write_bytes(content)
            try:
                open_windows(replace(CONFIG, data=str(path)), tmp_path / "cache").batch(0)
            except ValueError as error:
                assert str(error).startswith("--data") and "\n" not in str(error), error


INTS, LONGS, BOOLS = np.arange(64, dtype="<i4"), np.array([0, 9], "<i8"), np.ones(64, bool)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"other": ("I32", INTS)}, "holds no tensor input_ids"),
        ({"input_ids": ("F32", INTS)}, "has input_ids of F32 [64], not what is read"),
        ({"input_ids": ("I32", INTS.reshape(2, 32))}, "has input_ids of I32 [2, 32], not what is read"),
        ({"input_ids": ("BF17", INTS)}, "has input_ids of BF17 [64], not what is read"),
        ({"input_ids": ("I32", INTS[:0])}, "has no rows"),
        ({"input_ids": ("I32", INTS + 250)}, "has the token 313, beyond --vocab 256"),
        (
            {"input_ids": ("I32", INTS), "starts": ("I64", LONGS + 1)},
            "has starts that do not rise from 0 within its 64",
        ),
        ({"input_ids": ("I32", INTS), "starts": ("I64", LONGS * 9)}, "has starts that do not rise"),
        ({"input_ids": ("I32", INTS), "starts": ("I64", LONGS[:0])}, "has starts that do not rise"),
        (
            # Their differences, as 64-bit integers, are all above 0.
            {"input_ids": ("I32", INTS), "starts": ("I64", np.array([0, 2**63 - 1, -(2**63) + 9], "<i8"))},
            "has starts that do not rise",
        ),
        ({"input_ids": ("I32", INTS), "counted": ("BOOL", BOOLS[1:])}, "another number of counted"),
        (
            {"input_ids": ("I32", INTS), "counted": ("U8", INTS.astype("u1"))},
            "has counted of U8 [64], not what is read",
        ),
    ],
)
def test_a_safetensors_file_of_something_else(tmp_path, tensors, told):
    path = tmp_path / "train.safetensors"
    write_tensors(path, tensors)
    assert told in refused(replace(CONFIG, data=str(path)), tmp_path)


def test_a_bool_of_any_byte_but_0_counts(tmp_path):
    """Numpy adds up bools by their bytes."""
    path, counted = tmp_path / "train.safetensors", np.zeros(64, "u1")
    counted[[3, 40]] = 2, 255
    write_tensors(path, {"input_ids": ("I32", INTS), "counted": ("BOOL", counted)})
    windows = open_windows(replace(CONFIG, data=str(path)), tmp_path, num_held_out=0)
    batches = [windows.batch(index) for index in range(windows.num_windows)]
    assert sorted(batch.targets[batch.loss_mask > 0].tolist() for batch in batches) == [[3], [40]]
    assert all(batch.loss_mask.sum() == 1 for batch in batches)


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b'{"a' + b"\x1b[31m" + b'":1}', b'{"__metadata__":{"a":[]}}', b'{"__metadata__":7}']
)
def test_a_header_that_is_none(tmp_path, header):
    path = tmp_path / "train.safetensors"
    write_tensors(path, {}, header)
    assert refused(replace(CONFIG, data=str(path)), tmp_path) == f"--data: the header of {path} is damaged"


def test_limits_are_one_line_that_names_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 200_000)
    assert "line 1 of" in refused(replace(CONFIG, data=str(path)), tmp_path)
    path.write_text('{"text": "' + "a" * 9 * 2**20 + '"}')
    assert "has more than 8,388,608 bytes" in refused(replace(CONFIG, data=str(path)), tmp_path)
    with open(path, "wb") as file:
        file.truncate(5 * 2**30)
    assert "has 5,368,709,120 bytes, at most 4,294,967,296 are read" in refused(
        replace(CONFIG, data=str(path)), tmp_path
    )
    monkeypatch.setattr(limits, "MAX_ROWS", 3)
    assert "has more than 3 rows" in refused(write_jsonl(path, packed_rows(4, 32)), tmp_path)
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 100)
    as_safetensors(tmp_path / "train.safetensors", packed_rows(3, 32))
    message = refused(replace(CONFIG, data=str(tmp_path / "train.safetensors")), tmp_path)
    assert "has a header of" in message and "at most 100 are read" in message


@pytest.mark.parametrize("suffix", [".jsonl", ".npy", ".safetensors", ".parquet"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    os.mkfifo(tmp_path / f"train{suffix}")
    assert "it is a pipe, a socket or a device" in refused(replace(CONFIG, data=str(tmp_path)), tmp_path)
    (tmp_path / f"train{suffix}").unlink()
    (tmp_path / f"train{suffix}").symlink_to("/dev/zero")
    assert "it is a pipe, a socket or a device" in refused(replace(CONFIG, data=str(tmp_path)), tmp_path)
    (tmp_path / f"train{suffix}").unlink()
    (tmp_path / f"train{suffix}").mkdir()
    assert "Is a directory" in refused(replace(CONFIG, data=str(tmp_path)), tmp_path)


def test_a_message_shows_no_control_characters_of_a_name(tmp_path):
    path = tmp_path / "a\n\x1b[31m.jsonl"
    path.write_text("{")
    assert r"a\n\x1b[31m.jsonl" in refused(replace(CONFIG, data=str(path)), tmp_path)


def test_other_damaged_or_missing_sources(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n\n{"inp')
    assert "line 3 of" in refused(replace(CONFIG, data=str(tmp_path / "rows.jsonl")), tmp_path)
    for name in ("none", "none.jsonl"):
        told = f"--data: cannot read {tmp_path / name} (No such file or directory)"
        assert refused(replace(CONFIG, data=str(tmp_path / name)), tmp_path) == told
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("text" * 100)
    told = f"--data {tmp_path}/books: this folder has no train file of .safetensors, .npy, .parquet, .jsonl"
    assert refused(replace(CONFIG, data=str(tmp_path / "books")), tmp_path) == told
    told = f"--data {tmp_path}/books/a.txt: takes .safetensors, .npy, .parquet, .jsonl, or a folder with train files"
    assert refused(replace(CONFIG, data=str(tmp_path / "books" / "a.txt")), tmp_path) == told


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    as_parquet(tmp_path / "train.parquet", packed_rows(4, 32))
    content = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(content[:-20])
    assert "train.parquet cannot be read: " in refused(replace(CONFIG, data=str(tmp_path)), tmp_path)


# --- one graph for all packings


def test_sixteen_packings_replay_one_capture(corpus, tmp_path):
    """Sums over the tokens that a token sees, with bounds read from cu_seqlens and positions on the device."""
    config = replace(CONFIG, sequence=128)
    windows = open_windows(config, tmp_path)
    batches = [windows.batch(index)._asdict() for index in range(16)]
    assert len({tuple(batch["cu_seqlens"].tolist()) for batch in batches}) == 16
    inputs = StaticInputs({name: tensor.clone() for name, tensor in batches[0].items()})
    place = torch.arange(config.sequence)

    def seen():
        document = (inputs["cu_seqlens"][None] <= place[:, None]).sum(1)
        mask = (document[:, None] == document) & (place[:, None] >= place)
        return (mask * inputs["tokens"]).sum(1), mask.sum(1) - 1 - inputs["positions"]

    graph, (sums, zeros) = Pool(torch.device("cpu")).capture(seen, tuple(inputs.buffers.values()))
    for batch in batches:
        inputs.load(batch)
        graph.replay()
        bounds = sorted(set(batch["cu_seqlens"].tolist()))
        expected = [batch["tokens"][begin:end].cumsum(0) for begin, end in itertools.pairwise(bounds)]
        assert torch.equal(sums, torch.cat(expected)) and not zeros.any()
