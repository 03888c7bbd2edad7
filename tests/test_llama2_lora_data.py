"""llama2_lora/data: what a window holds, packing, rows in every format, ranks and held-out windows, mistakes."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from common import token_files
from common.capture import Pool, StaticInputs
from llama2_lora.config import MAX_DOCUMENTS, Config
from llama2_lora.data import open_windows
from tests.megatron_files import write_megatron

CONFIG = Config(
    layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=64, vocab=256, sequence=32, rank=4, documents="separate"
)


def lengths_of(batch):
    """Of the documents of a window, padding among them."""
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


def test_prompts_are_masked_out(tmp_path):
    rows = [{"prompt": "abcd", "completion": "xyz" * 3}, {"input": "gr\u00fc", "output": "y" * 10}, {"text": "plain"}]
    windows = open_windows(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path, num_held_out=0)
    batches = [windows.batch(index) for index in range(windows.num_windows)]
    for batch in batches:
        assert_consistent(batch)
    counted = sorted(bytes(batch.targets[batch.loss_mask > 0].tolist()) for batch in batches)
    assert counted == sorted([b"xyzxyzxyz\0" + b"yyyyyyyyyy\0", b"lain\0"])


# --- formats


def as_npy(path, rows):
    np.save(path, rows)


def as_npy_of_arrays(path, rows):
    """As pandas' apply leaves them: input_ids an array, loss_mask a list."""
    np.save(path, [{**row, "input_ids": np.array(row["input_ids"])} for row in rows])


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
        ("train.npy", as_npy),
        ("train.npy", as_npy_of_arrays),
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


def test_a_parquet_file_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    config = replace(CONFIG, data=str(tmp_path))
    assert refused(config, tmp_path).endswith("needs pyarrow to be read: ./setup.sh parquet, or make a .jsonl of it")


def test_a_folder_of_text_is_packed_by_its_files(tmp_path):
    (tmp_path / "books").mkdir()
    for name, length in (("a", 9), ("b", 14), ("c", 50), ("d", 20)):
        (tmp_path / "books" / name).write_text(name * length)
    windows = open_windows(replace(CONFIG, data=str(tmp_path / "books")), tmp_path / "cache", num_held_out=0)
    batches = [windows.batch(index) for index in range(windows.num_windows)]
    for batch in batches:
        assert_consistent(batch)
    # A zero byte ends each: 10 + 15 and padding, 32 of 51, the other 19 and padding, 21 and padding.
    assert sorted(map(lengths_of, batches)) == [[10, 15, 7], [19, 13], [21, 11], [32]]
    (joined,) = (batch for batch in batches if lengths_of(batch) == [10, 15, 7])
    assert bytes(joined.tokens.tolist()) == b"a" * 9 + b"\0" + b"b" * 14 + b"\0" * 8


@pytest.mark.parametrize("dtype", ["uint16", "uint8"])
def test_megatron_files_are_packed_by_their_sequences(tmp_path, dtype):
    documents = [np.arange(1, 21), np.arange(0, 8), np.arange(100, 132)]
    write_megatron(tmp_path / "c4", documents, dtype)
    windows = open_windows(replace(CONFIG, data=str(tmp_path / "c4")), tmp_path, num_held_out=0)
    layouts = sorted(lengths_of(windows.batch(index)) for index in range(2))
    assert layouts == [[20, 8, 4], [32]] and windows.num_windows == 2


def test_megatron_tokens_beyond_the_vocabulary_are_found_in_their_window(tmp_path):
    write_megatron(tmp_path / "c4", [np.full(64, 300)], "uint16")
    config = replace(CONFIG, data=str(tmp_path / "c4"))
    assert "c4 has the token 300, beyond --vocab 256: take --vocab 301 or more" in refused(config, tmp_path)


# --- mistakes


ROW = {"input_ids": list(range(32))}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (
            [ROW, {"input_ids": [1, 256]}],
            "row 1 of .*rows.jsonl has the token 256, beyond --vocab 256: take --vocab 257",
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
        ([{"prompt": "a"}], "has neither input_ids, nor prompt and completion, or input and output, nor text"),
        ([{"prompt": "a", "completion": 3}], "has neither input_ids"),
        ([[1, 2]], "is no table of fields"),
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


class Foreign:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("damage", ["cut", "foreign", "numbers", "text"])
def test_a_damaged_npy_is_named_and_runs_no_code(tmp_path, capsys, damage):
    path = tmp_path / "train.npy"
    np.save(path, [{**row, "extra": Foreign()} if damage == "foreign" else row for row in packed_rows(4, 32)])
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    if damage == "numbers":
        np.save(path, np.arange(4))
    if damage == "text":
        path.write_text("hello")
    message = refused(replace(CONFIG, data=str(path)), tmp_path)
    assert str(path) in message and ("is damaged" in message or "is no array of dicts" in message)
    assert capsys.readouterr().out == ""


def test_numbers_of_a_numpy_dtype_within_a_pickled_list(tmp_path):
    rows = [{"input_ids": [np.int64(token) for token in row["input_ids"]]} for row in packed_rows(2, 32)]
    np.save(tmp_path / "train.npy", rows)
    assert b"scalar" in pickle.dumps(rows)
    windows = open_windows(replace(CONFIG, data=str(tmp_path)), tmp_path, num_held_out=0)
    assert every(windows) == sorted(row["input_ids"] for row in packed_rows(2, 32))


def test_other_damaged_or_missing_sources(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n\n{"inp')
    assert "line 3 of" in refused(replace(CONFIG, data=str(tmp_path / "rows.jsonl")), tmp_path)
    assert "neither a folder of text nor" in refused(replace(CONFIG, data=str(tmp_path / "none")), tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a").write_text("short")
    assert "has 6 tokens, fewer than one window" in refused(replace(CONFIG, data=str(tmp_path / "books")), tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow", reason="./setup.sh parquet installs pyarrow")
    as_parquet(tmp_path / "train.parquet", packed_rows(4, 32))
    content = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(content[:-20])
    assert "train.parquet is damaged" in refused(replace(CONFIG, data=str(tmp_path)), tmp_path)


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
