"""llama2_lora/data/convert_packed_text: MLPerf's pickled rows give the same windows, and nothing else unpickles."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llama2_lora.data import convert_packed_text
from llama2_lora.data import rows as row_files
from tests.helpers.hostile_pickles import Calls, Pointer

ROOT = Path(__file__).resolve().parents[2]


def rows(count=8):
    """As the submissions convert GovReport, with documents and labels, too."""
    generator = np.random.default_rng(1)
    made = [{"input_ids": generator.integers(1, 256, 32).tolist(), "seq_start_id": [0]} for _ in range(count)]
    for row in made:
        row["loss_mask"] = generator.integers(0, 2, 32).tolist()
    return [*made, {"input_ids": list(range(9)), "labels": [-100] * 4 + [1] * 5, "seq_start_id": [0, 5]}]


def npy_of(content, array=np.empty(1, object)):  # noqa: B008
    """An .npy file of objects with these bytes in the place of the pickle."""
    file = io.BytesIO()
    np.save(file, array)
    header = file.getvalue()
    return header[: 10 + int.from_bytes(header[8:10], "little")] + content


def told(capsys, *arguments):
    """The one line of a mistake."""
    with pytest.raises(SystemExit) as ended:
        convert_packed_text.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    return said.err.removeprefix("python -m llama2_lora.data.convert_packed_text: ").rstrip("\n")


def test_the_command_writes_rows_as_training_reads_them(tmp_path):
    """Lists, arrays as pandas' apply leaves them, and numpy's numbers."""
    given = rows()
    given[1] = {**given[1], "input_ids": np.array(given[1]["input_ids"])}
    given[2] = {**given[2], "input_ids": [np.int64(token) for token in given[2]["input_ids"]]}
    np.save(tmp_path / "train.npy", given)
    out = tmp_path / "new" / "train.jsonl"
    command = [sys.executable, "-m", "llama2_lora.data.convert_packed_text", "--in", str(tmp_path / "train.npy")]
    done = subprocess.run([*command, "--out", out, "--trust-input"], cwd=ROOT, capture_output=True, text=True)
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, rows())))
    ours, plain = (row_files.read([path], 256) for path in (out, tmp_path / "plain.jsonl"))
    assert all(np.array_equal(a, b) for a, b in zip(ours[1:], plain[1:], strict=True)) and len(plain.tokens) == 265
    told = f"{out}: 10 documents, 265 tokens, {plain.counted.sum()} counted\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")
    assert os.listdir(out.parent) == ["train.jsonl"]


@pytest.mark.parametrize("name", ["train.npy", "rows.pkl", "rows.jsonl"])
def test_training_refuses_a_pickle_and_never_loads_it(tmp_path, name):
    path = tmp_path / name
    for content in (Calls(tmp_path / "harmed"), Pointer()):
        np.save(tmp_path / "made.npy", np.array([{"input_ids": content}, None], object))
        path.write_bytes((tmp_path / "made.npy").read_bytes() if name == "train.npy" else pickle.dumps(content))
        with pytest.raises(ValueError, match="^--data") as error:
            row_files.require(str(path))
            row_files.read([path], 256)
        if name == "train.npy":
            command = f"llama2_lora.data.convert_packed_text --in {path} --out {path.with_suffix('.jsonl')}"
            assert "is a pickle, which can run code" in str(error.value) and command in str(error.value)
    assert not (tmp_path / "harmed").exists()


def test_without_trust_one_line_says_what_unpickling_means(tmp_path, capsys):
    path = tmp_path / "train.npy"
    np.save(path, [{"input_ids": Calls(tmp_path / "harmed")}])
    assert "a pickle can run any code as you" in told(capsys, "--in", path, "--out", tmp_path / "a.jsonl")
    assert os.listdir(tmp_path) == ["train.npy"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is damaged, or no .npy: "),
        (pickle.dumps(rows()), "is damaged, or no .npy: "),
        (npy_of(pickle.dumps(np.array(rows()))[:-40]), "cannot be unpickled: "),
        (npy_of(b"", np.zeros(2)), "holds no pickled objects"),
        (npy_of(pickle.dumps(7)), "cannot be converted: AttributeError: "),
        (npy_of(pickle.dumps(np.array([], object))), ": it has no rows"),
        (npy_of(pickle.dumps(np.array([7], object))), "row 0 of it has no input_ids"),
        (npy_of(pickle.dumps(np.array([{"input_ids": [1, 2], "labels": [1]}]))), "has 2 input_ids and another number"),
    ],
)
def test_what_cannot_be_converted(tmp_path, capsys, content, fault):
    (tmp_path / "in").write_bytes(content)
    message = told(capsys, "--in", tmp_path / "in", "--out", tmp_path / "out.jsonl", "--trust-input")
    assert message.startswith(f"--in: {tmp_path}/in: ") and fault in message
    assert os.listdir(tmp_path) == ["in"]


def test_paths_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "in").write_bytes(npy_of(pickle.dumps(np.array(rows()))))
    (tmp_path / "there.jsonl").write_text("")
    for given, out, fault in (
        ("none", "out.jsonl", f"--in: cannot read {tmp_path}/none (No such file or directory)"),
        ("in", "out.npy", f"--out {tmp_path}/out.npy: takes a name that ends in .jsonl"),
        ("in", "there.jsonl", f"--out {tmp_path}/there.jsonl: is there already, take another"),
        ("in", "in/a.jsonl", f"--out {tmp_path}/in/a.jsonl: cannot write in {tmp_path}/in ("),
    ):
        assert told(capsys, "--in", tmp_path / given, "--out", tmp_path / out, "--trust-input").startswith(fault)
    assert sorted(os.listdir(tmp_path)) == ["in", "there.jsonl"]
