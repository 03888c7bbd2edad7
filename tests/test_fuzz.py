"""Damaged files: every reader takes what it can, or refuses in one line; no traceback, no hang, little memory.

make test tries 50 damages of each kind of file, make long 2,000.
"""

import copy
import json
import resource
import struct
import time

import numpy as np
import pytest
import safetensors.numpy
import torch

from benchmarks import gate, overview, publish, runs
from benchmarks.files import partial, run_file
from benchmarks.pages import readme, run_table, tables
from common.training.data import safetensors_file, token_files
from common.training.data.llama_checkpoint import open_checkpoint
from llama2_lora.config import Config
from llama2_lora.data import rows
from stable_diffusion.data import shards
from tests.helpers.llama2_lora_case import write_checkpoint
from tests.helpers.made_run import HEADER, made_run

hypothesis = pytest.importorskip("hypothesis")
st, given, settings = hypothesis.strategies, hypothesis.given, hypothesis.settings

LIMIT_S, LIMIT_KIB = 2.0, 300 * 1024
LLAMA = Config(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128, sequence=32, rank=4)
NESTED = b"[" * 200_000

# An edit: where (a share of the file), what is done, with which bytes.
EDIT = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["set", "insert", "cut", "repeat", "end"]),
    st.one_of(
        st.binary(min_size=1, max_size=16),
        st.sampled_from([b"\xff" * 8, b"\0" * 8, b"[[[[", b'"', b"1e999", b"-1", b"NaN", b"null", NESTED]),
    ),
)


def damaged(data: bytes, edits) -> bytes:
    for share, what, new in edits:
        at = int(share * len(data))
        if what == "set":
            data = data[:at] + new + data[at + len(new) :]
        elif what == "insert":
            data = data[:at] + new + data[at:]
        elif what == "cut":
            data = data[:at] + data[at + 7 * len(new) :]
        elif what == "repeat":
            data = data[:at] + data[max(0, at - 200) :]
        else:
            data = data[:at]
    return data


# ------------------------------------------------------------------------------------------------
# A whole file of each kind, and its reader


def _run(path):
    """All that reads run files: tables for a screen and for pages, figures' data, the gate, publish."""
    found = runs.read(path.parent)
    for _, run in found.runs:
        run_table.report(run)
        publish.why_not(run)
    for fault in found.faults:
        assert fault.isprintable()
    assert all(line.isprintable() for line in tables.screen(found.rows, wide=True).splitlines())
    tables.as_csv(found.rows)
    overview.page_of(found, path.parent / "overview.md")
    for table in readme._TABLES.values():
        table(found.rows, path.parent / "README.md", "gpt3")
    for change in gate.changes(found.rows, found.rows):
        change.text()


ODD = [None, True, -1, 0, -5e-324, 1e308, 10**400, "", "a\nb\x1b[2J", "<!-- end -->", "x" * 10_000, [], {}, [[]], "NaN"]


def with_odd_values(text, places):
    """A run file's text in which leaves or branches are other values."""
    data = json.loads(text)
    for steps, value in places:
        branch, last = data, None
        for step in steps:
            keys = list(branch) if isinstance(branch, dict) else range(len(branch)) if isinstance(branch, list) else ()
            if not keys:
                break
            parent, last = branch, list(keys)[step % len(keys)]
            branch = parent[last]
        if last is not None:
            parent[last] = copy.deepcopy(value)
    return json.dumps(data)


def _partial(path):
    own = partial.Partial(path)
    try:
        assert all("fact" in fact for fact in own.facts)
    finally:
        own.close()


def _packed(path):
    rows.read(rows.files(str(path), "train"), 32000)


def _shards(path):
    found = shards.Samples(path.parent, 4, 3, 2)
    for index in range(len(found)):
        try:
            found.read(index)
        except ValueError as error:
            assert str(error).startswith("--data: sample")


def _megatron(path):
    path.with_suffix(".bin").write_bytes(np.arange(64, dtype="<u2").tobytes())
    token_files.megatron(path).batch(0, 1, 4)


def _tensors(path):
    file = safetensors_file.open_file(path, "--checkpoint")
    for name in file.entries:
        file.read(name)


def _checkpoint(path):
    found = open_checkpoint(path.parent, LLAMA)
    found.layer(0), found.embedding(), found.head()


def _json_lines():
    lines = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [4, 5], "loss_mask": [1, 0], "seq_start_id": [0, 1]},
        {"input_ids": [6], "text": "c"},
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def _parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2], [3, 4, 5]]}), folder / "train.parquet")
    return (folder / "train.parquet").read_bytes()


def _packed_tensors(folder):
    torch.manual_seed(0)
    made = {"input_ids": torch.arange(9, dtype=torch.int32), "starts": torch.tensor([0, 4])}
    safetensors_file.write_file(folder / "train.safetensors", made, {})
    return (folder / "train.safetensors").read_bytes()


def _shard(folder):
    made = {"moments": np.ones((3, 8, 4, 4), np.float32), "context": np.ones((3, 3, 2), np.float32)}
    safetensors.numpy.save_file(made, folder / "a.safetensors")
    return (folder / "a.safetensors").read_bytes()


def _index(folder):
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    return header + struct.pack("<2i", 24, 40) + struct.pack("<2q", 0, 48) + struct.pack("<3q", 0, 1, 2)


def _facts(folder):
    facts = [{"fact": "header", **HEADER}, {"fact": "plan", "build": "", "base": "eager", "steps": {}, "paces": {}}]
    return b"".join(json.dumps(fact).encode() + b"\n" for fact in facts)


def _of_checkpoint(name):
    def whole(folder):
        write_checkpoint(folder / "llama", LLAMA, shards=2)
        return (folder / "llama" / name).read_bytes()

    return whole


# name: (file, its whole content, reader)
READERS = {
    "run file": ("h200x1/gpt3-bench/a.json", lambda folder: run_file.as_bytes(made_run(cycles=2)), _run),
    "partial run": (f"a{partial.SUFFIX}", _facts, _partial),
    "JSON lines": ("train.jsonl", lambda folder: _json_lines(), _packed),
    "parquet": ("train.parquet", _parquet, _packed),
    "latents": ("a.safetensors", _shard, _shards),
    "Megatron index": ("a.idx", _index, _megatron),
    "safetensors": ("a.safetensors", _packed_tensors, _tensors),
    "config.json": ("llama/config.json", _of_checkpoint("config.json"), _checkpoint),
    "weight map": ("llama/model.safetensors.index.json", _of_checkpoint("model.safetensors.index.json"), _checkpoint),
}


def fuzz(kind, folder, examples):
    name, whole, read = READERS[kind]
    made = whole(folder)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made)
    read(path)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(st.lists(EDIT, min_size=1, max_size=4))
    def once(edits):
        path.unlink(missing_ok=True)
        path.write_bytes(damaged(made, edits))
        start = time.process_time()  # a busy neighbour costs none
        try:
            read(path)
        except ValueError as error:
            assert str(error) and "\n" not in str(error)
        assert time.process_time() - start < LIMIT_S

    once()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < LIMIT_KIB


def fuzz_values(folder, monkeypatch, examples):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    made = run_file.as_bytes(made_run(cycles=8, issue=(12.0, 8.0), unsupported=("graph_x",))).decode()
    path = folder / "h200x1/gpt3-bench/a.json"
    path.parent.mkdir(parents=True)
    place = st.tuples(st.lists(st.integers(0, 10**6), min_size=1, max_size=7), st.sampled_from(ODD))

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(st.lists(place, min_size=1, max_size=3))
    def once(places):
        path.write_text(with_odd_values(made, places))
        # No error at all: what is no run is a line beside the others.
        _run(path)

    once()


def test_odd_values_in_a_run_file_break_no_reader(tmp_path, monkeypatch):
    fuzz_values(tmp_path, monkeypatch, 200)


@pytest.mark.long
def test_two_thousand_odd_values_break_no_reader(tmp_path, monkeypatch):
    fuzz_values(tmp_path, monkeypatch, 2000)


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, kind):
    fuzz(kind, tmp_path, 50)


@pytest.mark.long
@pytest.mark.parametrize("kind", READERS)
def test_two_thousand_damaged_files_are_refused_in_one_line(tmp_path, kind):
    fuzz(kind, tmp_path, 2000)
