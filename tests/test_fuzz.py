"""Damaged files: every reader takes what it can, or refuses in one line; no traceback, no hang, little memory.

Bytes are damaged, and values are others of any type. make test tries some dozens of each kind of file, make long 2,000.
"""

import copy
import json
import os
import re
import shutil
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from benchmarks import frame, gate, overview, publish
from benchmarks.pages import readme, tables
from common.data import safetensors_file, token_files
from common.data.checkpoint import open_checkpoint, parts_of
from graph_worth.harness import report
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.pages import run_table
from llama2_lora.config import Config
from llama2_lora.data import rows
from moe.config import PRESETS as MOE
from moe.model import YARN
from moe.state import opened
from stable_diffusion.data import shards
from tests.helpers.llama2_lora_case import write_checkpoint
from tests.helpers.made_run import HEADER, made_run

hypothesis = pytest.importorskip("hypothesis")
st, given, settings = hypothesis.strategies, hypothesis.given, hypothesis.settings

LIMIT_KIB = 300 * 1024
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
    found = frame.load(path.parent)
    for _, run in found.runs:
        run_table.report(run)
        report.page_of(run)
        publish.why_not(run)
    for fault in found.faults:
        assert fault.isprintable()
    assert all(line.isprintable() for line in tables.screen(found, found.rows).splitlines())
    tables.as_csv(found.rows)
    overview.page_of(found, path.parent / "overview.md")
    for table in readme._TABLES.values():
        table(found, path.parent / "README.md", "gpt3")
    for change in gate.changes(found, found):
        change.text()


DEEP = [[]]
for _ in range(300):
    DEEP = [DEEP]
NUMBERS = [None, True, -1, 0, 0.5, -5e-324, 1e308, 2**31, 2**63, -(2**63), 10**400, float("nan"), float("-inf")]
TEXTS = ["", "a\nb\x1b[2J", "<!-- end -->", "x" * 10_000, "NaN", "\ud800", "../a", "@HUGE@"]
ODD = [*NUMBERS, *TEXTS, [], {}, [[]], {"a": None}, DEEP, [0] * 10_000]


def as_json(data):
    """The bytes of JSON; integers of so many digits Python does not write."""
    return json.dumps(data).replace('"@HUGE@"', "9" * 5000).encode()


def with_odd_values(data, places):
    """A copy of nested values in which leaves or branches are other ones. places: (steps to it, value)."""
    data = copy.deepcopy(data)
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
    return data


def _partial(path):
    own = partial.Partial(path)
    try:
        assert all("fact" in fact for fact in own.facts)
    finally:
        own.close()


def _packed(path):
    rows.read(rows.files(str(path)), 32000)


def _shards(path):
    found = shards.Samples(path.parent, 4, 3, 2)
    for index in range(len(found)):
        try:
            found.read(index)
        except ValueError as error:
            assert str(error).startswith("--data: sample")


def _megatron(path):
    path.with_suffix(".bin").write_bytes(np.arange(64, dtype="<u2").tobytes())
    token_files.open_tokens(path).batch(0, 1, 4)


def _tensors(path):
    file = safetensors_file.open_file(path, "--checkpoint")
    for name in file.entries:
        file.read(name)


def _checkpoint(path):
    found = open_checkpoint(path.parent, LLAMA)
    found.read("qkv", 0), found.read("embedding"), found.read("head")


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
    safetensors.torch.save_file(made, folder / "train.safetensors")
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


SPEECH = "speech/1/7/1-7-0000.flac"


def _speech_file(name):
    def whole(folder):
        speech_files = pytest.importorskip("tests.helpers.speech_files")
        speech_files.write_speech(folder / "speech", [(0.3, "FIRST ONE"), (0.2, "SECOND ONE")])
        return (folder / name).read_bytes()

    return whole


def _read_speech(folder):
    from rnnt.config import Config as Speech
    from rnnt.speech import folder as speech_folder

    speech_folder.scan.cache_clear()
    utterances, _ = speech_folder.scan(Speech(data=str(folder / "speech")))
    for each in utterances:
        speech_folder.require_decodable(each.path)


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
    "FLAC": (SPEECH, _speech_file(SPEECH), lambda path: _read_speech(path.parents[3])),
    "transcripts": (
        "speech/1/7/1-7.trans.txt",
        _speech_file("speech/1/7/1-7.trans.txt"),
        lambda path: _read_speech(path.parents[3]),
    ),
    "weight map": ("llama/model.safetensors.index.json", _of_checkpoint("model.safetensors.index.json"), _checkpoint),
}


def told(read, *args):
    """Read, and return the refusal in one line, or ""; all memory of the process counts, that of C libraries too."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_kib, said = _kib("VmRSS"), ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            read(*args)
        except ValueError as error:
            said = str(error)
            assert said, "an empty message"
    for line in (said, *(str(each.message) for each in warned)):
        assert line.isprintable() or not line, f"not in one printable line: {line!a}"
    kib = _kib("VmHWM") - before_kib
    assert kib < LIMIT_KIB, f"{kib / 1024:.0f} MiB: {said}"
    return said


def _kib(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def tried(examples, strategy, once):
    """Call once(example) for examples of a strategy."""
    checks = list(hypothesis.HealthCheck)
    settings(max_examples=examples, deadline=None, database=None, suppress_health_check=checks)(given(strategy)(once))()


def fuzz(kind, folder, examples):
    name, whole, read = READERS[kind]
    made = whole(folder)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made)
    read(path)

    def once(edits):
        path.unlink(missing_ok=True)
        path.write_bytes(damaged(made, edits))
        told(read, path)

    tried(examples, st.lists(EDIT, min_size=1, max_size=4), once)


# ------------------------------------------------------------------------------------------------
# Values of other types. kind: (values of a whole file, writes them into a folder, reads the folder)


def _run_values(folder):
    run = made_run(cycles=8, issue=(12.0, 8.0), unsupported=("graph_x",))
    for variant in run.builds[""].variants.values():
        variant.profile.timeline_us, variant.profile.timeline_step_us = [[0.0, 5.0], [6.0, 9.0]], 10.0
    return json.loads(run_file.as_bytes(run))


def _json_at(name):
    def write(folder, data):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(as_json(data))

    return write


def _moe_values(family):
    """config.json, header and bytes of a checkpoint."""

    def values(folder):
        c = MOE["tiny" if family == "qwen3" else "tiny_gpt_oss"]
        described = {
            **{"hidden_size": c.hidden, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads},
            **{"head_dim": c.head_dim, "num_experts": c.experts, "num_experts_per_tok": c.top_k},
            **{"moe_intermediate_size": c.ffn, "intermediate_size": c.ffn, "vocab_size": c.vocab},
            **{"sliding_window": c.window, "rope_theta": c.rope_theta, "rms_norm_eps": c.norm_eps},
            **{"num_hidden_layers": c.layers, "model_type": "qwen3_moe" if family == "qwen3" else "gpt_oss"},
        }
        if family == "gpt_oss":
            described["rope_parameters"] = {"rope_type": "yarn", "truncate": False, **YARN}
        shapes = {}
        for name in ("embedding", "final_norm", "head"):
            shapes |= parts_of(family, c, name, None)
        for layer in range(c.layers):
            names = ["norm1", "norm2", "qkv", "proj", "router", "w1", "w2"]
            more = {"qwen3": ["q_norm", "k_norm"], "gpt_oss": ["qkv_bias", "proj_bias", "sinks", "router_bias"]}
            more["gpt_oss"] += ["bias1", "bias2"]
            for name in names + more[family]:
                shapes |= parts_of(family, c, name, layer)
        tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        safetensors.torch.save_file(tensors, folder / "whole.safetensors")
        return {"config.json": described, "header": _header(folder / "whole.safetensors")}

    return values


def _header(path):
    """The header of a safetensors file as values."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def _write_tensors(folder, header, name="a.safetensors"):
    """A file with a header, over the bytes of whole.safetensors."""
    data = (folder / "whole.safetensors").read_bytes()
    text = as_json(header)
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + struct.unpack("<Q", data[:8])[0] :])


def _write_moe(folder, values):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    shutil.copy(folder / "whole.safetensors", model)
    if not isinstance(values, dict):
        values = {"config.json": values, "header": values}
    _json_at("config.json")(model, values.get("config.json"))
    _write_tensors(model, values.get("header"), "model.safetensors")
    (model / "whole.safetensors").unlink()


def _read_moe(preset):
    def read(folder):
        config = replace(MOE[preset], checkpoint=str(folder / "model"))
        found, target = opened(config), torch.empty(config.vocab, config.hidden)
        found.read_into("embedding", None, target)

    return read


def _shard_values(folder):
    (folder / "whole.safetensors").write_bytes(_shard(folder))
    (folder / "a.safetensors").unlink()
    return _header(folder / "whole.safetensors")


def _read_shards(folder):
    shutil.move(folder / "whole.safetensors", folder / "whole")
    try:
        _shards(folder / "a.safetensors")
    finally:
        shutil.move(folder / "whole", folder / "whole.safetensors")


def _llama_values(folder):
    write_checkpoint(folder / "llama", LLAMA, shards=2)
    names = ("config.json", "model.safetensors.index.json")
    return {name: json.loads((folder / "llama" / name).read_text()) for name in names}


def _write_llama(folder, values):
    for name in ("config.json", "model.safetensors.index.json"):
        _json_at(name)(folder / "llama", values.get(name) if isinstance(values, dict) else values)


def _write_index(folder, values):
    """The fields of a Megatron index; ones that its format cannot hold are cut to its size."""
    fields = {"version": 1, "code": 8, "sequences": 2, "documents": 3, "lengths": [24, 40]}
    fields |= values if isinstance(values, dict) else {}

    def whole(value, bits):
        is_number = isinstance(value, (int, float)) and value == value and abs(value) < float("inf")
        return int(value) % 2**bits if is_number else 0

    lengths = fields["lengths"] if isinstance(fields["lengths"], list) else [fields["lengths"]]
    head = [whole(fields[name], bits) for name, bits in (("version", 64), ("code", 8))]
    head += [whole(fields[name], 64) for name in ("sequences", "documents")]
    body = np.array([whole(each, 32) for each in lengths], np.uint32).tobytes() + struct.pack("<2q3q", 0, 48, 0, 1, 2)
    (folder / "a.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", *head) + body)


def _parquet_columns():
    """Columns of two rows, of all kinds of types; some take few bytes in the file and very many in memory."""
    pyarrow = pytest.importorskip("pyarrow")
    many = 20_000_000

    def lists(values, ends=None, kind=pyarrow.ListArray):
        ends = ends or [0, 1, len(values)]
        return kind.from_arrays(pyarrow.array(ends), values)

    zeros = pyarrow.array(np.zeros(many, np.int32))
    text = pyarrow.array(["x" * 10_000]).take(pyarrow.array(np.zeros(20_000, np.int32)))
    empty = pyarrow.ListArray.from_arrays(np.zeros(many // 2, np.int32), zeros.slice(0, 0))
    plain = [[[1, 2], [3, 4, 5]], [[], [1]], [None, [1]], [[None], [1]], [[-1], [2**62]], [[0.5], [float("nan")]]]
    plain += [[1, 2], ["a\x1b", "b"], [None, None], [[["a"]], [[]]], [{"a": 1}, {"a": 2}], [[True], [False]]]
    plain += [[b"a", b"b"], [[{"a": 1}], []], [[1] * 70_000, [2]], [[0], [0]], [[0, 1], [0, 2]]]
    made = [pyarrow.array(values) for values in plain]
    made += [
        pyarrow.array([[1], [2]], pyarrow.list_(getattr(pyarrow, kind)()))
        for kind in ("uint8", "uint64", "float16", "date32")
    ]
    made += [
        pyarrow.array([[1], [2]], pyarrow.large_list(pyarrow.int64())),
        pyarrow.array([[1], [2]], pyarrow.list_(pyarrow.int8(), 1)),
    ]
    made += [
        pyarrow.array(["a", "b"]).dictionary_encode(),
        pyarrow.array([[(1, 2)], []], pyarrow.map_(pyarrow.int8(), pyarrow.int8())),
    ]
    return [*made, lists(zeros), lists(zeros.cast("int64")), lists(text), lists(empty)]


def _columns(folder):
    return {"input_ids": 0, "labels": 0, "seq_start_id": 15, "a": 0}


def _write_parquet(folder, columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    known = _parquet_columns.made
    named = columns if isinstance(columns, dict) else {"input_ids": columns}
    arrays = {name: known[each % len(known)] if type(each) is int else known[0] for name, each in named.items()}
    compression = "zstd" if len(arrays) % 2 else "none"
    parquet.write_table(pyarrow.table(arrays), folder / "train.parquet", compression=compression)


NAMES = ["a.txt", "b/c/d.txt", ".hidden", "e\x1b[2J\nf", "\udcff", "x" * 200, "<b>", "|", "a.bin"]
CONTENTS = [
    "text",
    "",
    "\udcff\udcfe",
    "\0",
    "pipe",
    "/proc/self/mem",
    "/dev/zero",
    "/",
    "a.txt",
    "nothing",
    "closed",
    "sparse",
]


def _write_texts(folder, files):
    shutil.rmtree(folder / "texts", ignore_errors=True)
    (folder / "texts").mkdir()
    for name, content in files:
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            continue
        if content == "pipe":
            os.mkfifo(path)
        elif content.startswith("/") or content in ("a.txt", "nothing"):
            path.symlink_to(content)
        else:
            path.write_bytes(content.encode(errors="surrogateescape"))
        if content == "closed":
            path.chmod(0)
        if content == "sparse":
            os.truncate(path, 20 * 2**30)


RECORDINGS = ["1-7-0000", "b/c-1", "e\x1b[2J", "<b>", "x" * 200, "\udcff"]
SOUNDS = [*CONTENTS, (16000, 1, 8000), (16000, 2, 8000), (8000, 1, 8000), (96000, 8, 10), (16000, 1, 0), (16000, 1, 9)]


def _write_speech(folder, files):
    """Recordings and the files of their transcripts, both of any kind."""
    soundfile = pytest.importorskip("soundfile")
    shutil.rmtree(folder / "texts", ignore_errors=True)
    sounds = [(f"{name}.flac", sound) for name, sound, _ in files if isinstance(sound, str)]
    words = [(f"{name}.trans.txt", said) for name, _, said in files]
    _write_texts(folder, sounds + words)
    for name, sound, _ in files:
        path = folder / "texts" / f"{name}.flac"
        if not isinstance(sound, str) and not os.path.lexists(path):
            rate, channels, samples = sound
            with open(path, "wb") as file:
                soundfile.write(file, np.zeros((samples, channels)), rate, format="FLAC", subtype="PCM_16")
    shutil.rmtree(folder / "speech", ignore_errors=True)
    (folder / "texts").rename(folder / "speech")


def _read_texts(folder):
    token_files.open_tokens(str(folder / "texts")).batch(0, 1, 4)


PLACES = st.tuples(st.lists(st.integers(0, 10**6), min_size=1, max_size=7), st.sampled_from(ODD))
COLUMNS = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=1), st.integers(0, 10**6))
VALUES = {
    "run file": (_run_values, _json_at("h200x1/gpt3-bench/a.json"), lambda folder: _run(folder / RUN)),
    "JSON lines": (lambda folder: json.loads(_json_lines().splitlines()[1]), _json_at("train.jsonl"), None),
    "parquet": (_columns, _write_parquet, lambda folder: _packed(folder / "train.parquet")),
    "latents": (_shard_values, _write_tensors, _read_shards),
    "Megatron index": (
        lambda folder: {"version": 1, "code": 8, "sequences": 2, "documents": 3, "lengths": [24, 40]},
        _write_index,
        lambda folder: _megatron(folder / "a.idx"),
    ),
    "Llama": (_llama_values, _write_llama, lambda folder: _checkpoint(folder / "llama/config.json")),
    "Qwen3": (_moe_values("qwen3"), _write_moe, _read_moe("tiny")),
    "GPT-OSS": (_moe_values("gpt_oss"), _write_moe, _read_moe("tiny_gpt_oss")),
    "text folder": (st.tuples(st.sampled_from(NAMES), st.sampled_from(CONTENTS)), _write_texts, _read_texts),
    "speech folder": (
        st.tuples(
            st.sampled_from(RECORDINGS),
            st.sampled_from(SOUNDS),
            st.sampled_from([*CONTENTS, *(f"{Path(name).name} WORDS\n" for name in RECORDINGS), "1-7-0000 a\x1b[2J"]),
        ),
        _write_speech,
        _read_speech,
    ),
}
RUN = "h200x1/gpt3-bench/a.json"


def fuzz_values(kind, folder, monkeypatch, examples):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    whole, write, read = VALUES[kind]
    read = read or (lambda folder: _packed(folder / "train.jsonl"))
    if kind == "parquet":
        _parquet_columns.made = _parquet_columns()
    if kind.endswith("folder"):

        def each(files):
            write(folder, files)
            told(read, folder)

        tried(examples, st.lists(whole, max_size=4), each)
        return
    made = whole(folder)
    write(folder, made)
    assert told(read, folder) == ""

    def once(places):
        write(folder, with_odd_values(made, places))
        said = told(read, folder)
        # What is no run is a line beside the others.
        assert kind != "run file" or not said

    tried(examples, st.lists(COLUMNS if kind == "parquet" else PLACES, min_size=1, max_size=3), once)


@pytest.mark.parametrize("kind", VALUES)
def test_odd_values_break_no_reader(tmp_path, monkeypatch, kind):
    fuzz_values(kind, tmp_path, monkeypatch, 40)


@pytest.mark.long
@pytest.mark.parametrize("kind", VALUES)
def test_two_thousand_odd_values_break_no_reader(tmp_path, monkeypatch, kind):
    fuzz_values(kind, tmp_path, monkeypatch, 2000)


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, kind):
    fuzz(kind, tmp_path, 50)


@pytest.mark.long
@pytest.mark.parametrize("kind", READERS)
def test_two_thousand_damaged_files_are_refused_in_one_line(tmp_path, kind):
    fuzz(kind, tmp_path, 2000)
