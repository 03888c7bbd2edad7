"""llama2_lora/data/convert_packed_text: MLPerf's pickled rows give the same batches, and nothing else unpickles."""

import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llama2_lora.data import convert_packed_text
from llama2_lora.data import rows as row_files
from llama2_lora.data.windows import open_windows
from tests.helpers import forked
from tests.llama2_lora.test_data import CONFIG, packed_rows, refused, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def rows(count=8):
    """As the submissions convert GovReport."""
    masks = np.random.default_rng(1).integers(0, 2, (count, 32)).tolist()
    return [
        {**row, "loss_mask": mask, "seq_start_id": [0]} for row, mask in zip(packed_rows(count, 32), masks, strict=True)
    ]


def as_npy(path, rows):
    np.save(path, rows)


def as_npy_of_arrays(path, rows):
    """As pandas' apply leaves them: input_ids an array, loss_mask a list."""
    np.save(path, [{**row, "input_ids": np.array(row["input_ids"])} for row in rows])


def as_npy_of_numpys_numbers(path, rows):
    np.save(path, [{**row, "input_ids": [np.int64(token) for token in row["input_ids"]]} for row in rows])


def npy_of(content):
    """An .npy file of objects with these bytes in the place of the pickle."""
    file = io.BytesIO()
    np.save(file, np.empty(1, object))
    header = file.getvalue()
    return header[: 10 + int.from_bytes(header[8:10], "little")] + content


def convert(*arguments):
    return convert_packed_text.main([str(argument) for argument in arguments])


def told(capsys, *arguments):
    """The one line of a mistake."""
    with pytest.raises(SystemExit) as ended:
        convert(*arguments)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    assert said.err.startswith("python -m llama2_lora.data.convert_packed_text: ")
    return said.err.removeprefix("python -m llama2_lora.data.convert_packed_text: ").rstrip("\n")


def same_windows(data, other, tmp_path):
    ours, theirs = (open_windows(replace(CONFIG, data=str(path)), tmp_path / "cache") for path in (data, other))
    assert (ours.num_windows, ours.num_held_out) == (theirs.num_windows, theirs.num_held_out)
    for read in ("batch", "held_out"):
        for index in range(ours.num_windows if read == "batch" else ours.num_held_out):
            pair = getattr(ours, read)(index), getattr(theirs, read)(index)
            assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("write", [as_npy, as_npy_of_arrays, as_npy_of_numpys_numbers])
def test_a_converted_file_gives_the_batches_of_its_rows(tmp_path, capsys, write):
    path, out = tmp_path / "train.npy", tmp_path / "new" / "train.safetensors"
    write(path, rows())
    assert convert("--in", path, "--out", out, "--trust-input") == 0
    counted = sum(sum(row["loss_mask"]) for row in rows())
    assert capsys.readouterr() == (f"{out}: 8 documents, 256 tokens, {counted} counted\n", "")
    assert os.listdir(out.parent) == ["train.safetensors"]
    write_jsonl(tmp_path / "plain.jsonl", rows())
    same_windows(out.parent, tmp_path / "plain.jsonl", tmp_path)


def test_documents_and_labels_are_kept(tmp_path):
    for name, given in {
        "documents": [{"input_ids": list(range(32)), "seq_start_id": [0, 5, 20]}] * 3,
        "labels": [{"input_ids": list(range(64)), "labels": [-100] * 40 + list(range(24))}] * 2,
    }.items():
        as_npy(tmp_path / f"{name}.npy", given)
        convert("--in", tmp_path / f"{name}.npy", "--out", tmp_path / f"{name}.safetensors", "--trust-input")
        write_jsonl(tmp_path / f"{name}.jsonl", given)
        same_windows(tmp_path / f"{name}.safetensors", tmp_path / f"{name}.jsonl", tmp_path)


# --- what may not be


class Calls:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Pointer:
    """A pickle that calls ndarray((1,), dtype("O"), buffer): its element is wherever the file says."""

    def __reduce__(self):
        return np.ndarray, ((1,), np.dtype("O"), b"\x41" * 8)


def hostile(tmp_path):
    return {"calls": Calls(tmp_path / "harmed"), "pointer": Pointer()}


@pytest.mark.parametrize("kind", ["calls", "pointer"])
@pytest.mark.parametrize("name", ["train.npy", "rows.pkl", "rows", "rows.jsonl", "train.safetensors"])
def test_training_refuses_a_pickle_and_never_loads_it(tmp_path, kind, name):
    path = tmp_path / name
    content = hostile(tmp_path)[kind]
    if name == "train.npy":
        array = np.empty(1, object)
        array[0] = {"input_ids": content}
        np.save(path, array)
    else:
        path.write_bytes(pickle.dumps([{"input_ids": content}]))
    message = refused(replace(CONFIG, data=str(path)), tmp_path)
    if path.suffix in (".pkl", ""):
        assert message == f"--data {path}: takes .safetensors, .npy, .parquet, .jsonl, or a folder with train files"
    if name == "train.npy":
        assert message == (
            f"--data: {path} is pickled, which can run code, and is not read: convert it once, python -m "
            f"llama2_lora.data.convert_packed_text --in {path} --out {path.with_suffix('.safetensors')} --trust-input"
        )
    assert not (tmp_path / "harmed").exists()


def test_a_plain_pickle_beneath_the_name_of_an_npy(tmp_path):
    """Check that training refuses a pickle that the converter does not take either."""
    path = tmp_path / "train.npy"
    path.write_bytes(pickle.dumps([{"input_ids": Pointer()}]))
    assert refused(replace(CONFIG, data=str(tmp_path)), tmp_path) == (
        f"--data: {path} is pickled, which can run code, and is not read: it is no .npy, make a .jsonl of it"
    )


def test_the_command_refuses_what_used_to_follow_a_pointer(tmp_path):
    """In a process of its own: it used to die of SIGSEGV."""
    array = np.empty(1, object)
    array[0] = {"input_ids": Pointer()}
    np.save(tmp_path / "rows.npy", array)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = ["--preset", "tiny", "--variant", "eager", "--data", str(tmp_path / "rows.npy")]
    answer = forked.run("llama2_lora.train", arguments, environment, timeout_s=100)
    # It is refused before anything is built.
    assert answer.returncode == 2 and "Traceback" not in answer.stderr, answer
    said = (answer.stdout + answer.stderr).splitlines()
    assert sum("is pickled, which can run code, and is not read: convert it once" in line for line in said) == 1
    with pytest.raises(ValueError, match="is pickled, which can run code"):
        row_files.require(str(tmp_path / "rows.npy"))


def test_without_trust_one_line_says_what_unpickling_means(tmp_path, capsys):
    path = tmp_path / "train.npy"
    np.save(path, [{"input_ids": Calls(tmp_path / "harmed")}])
    assert told(capsys, "--in", path, "--out", tmp_path / "a.safetensors") == (
        "the input is pickled, and a pickle can run any code as you: where you trust who made the file and how it came "
        "to you, say so by --trust-input"
    )
    assert not (tmp_path / "harmed").exists() and os.listdir(tmp_path) == ["train.npy"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is damaged, or no .npy: "),
        (pickle.dumps(rows()), "is damaged, or no .npy: "),
        (npy_of(b""), "cannot be unpickled: Ran out of input"),
        (npy_of(b"hello"), "cannot be unpickled: "),
        (npy_of(b"\x80\x04\x95"), "cannot be unpickled: "),
        (npy_of(pickle.dumps(np.array(rows()))[:-40]), "cannot be unpickled: "),
        (npy_of(pickle.dumps(7)), "cannot be converted: AttributeError: 'int' object has no attribute 'tolist'"),
        (npy_of(pickle.dumps(np.array([], object))), "has no rows"),
        (npy_of(pickle.dumps(np.array([7], object))), "row 0 of "),
        (npy_of(pickle.dumps(np.array({"input_ids": [1]}))), "has no input_ids"),
        (npy_of(pickle.dumps(np.array([{"input_ids": [1, -1]}]))), "has the token -1, which is no id"),
        (npy_of(pickle.dumps(np.array([{"input_ids": [1, 2], "labels": [1]}]))), "has 2 input_ids and another number"),
        (b"\x93NUMPY\x01\x00\x05\x00abcde", "is damaged, or no .npy: "),
    ],
)
def test_what_cannot_be_converted(tmp_path, capsys, content, fault):
    (tmp_path / "in").write_bytes(content)
    message = told(capsys, "--in", tmp_path / "in", "--out", tmp_path / "out.safetensors", "--trust-input")
    assert message.startswith("--in: ") and str(tmp_path / "in") in message and fault in message
    assert os.listdir(tmp_path) == ["in"]


def test_numbers_need_no_converter(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.zeros((2, 32), int))
    message = told(capsys, "--in", tmp_path / "a.npy", "--out", tmp_path / "out.safetensors", "--trust-input")
    assert message == f"--in: {tmp_path}/a.npy holds no pickled objects: it is read as it is"


def test_paths_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "in").write_bytes(npy_of(pickle.dumps(np.array(rows()))))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there.safetensors").write_text("")
    out = tmp_path / "out.safetensors"
    for given, fault in {
        ("none", out): f"--in: cannot read {tmp_path}/none (No such file or directory)",
        ("pipe", out): f"--in: cannot read {tmp_path}/pipe (it is a pipe, a socket or a device)",
        ("in", tmp_path / "out.npy"): f"--out {tmp_path}/out.npy: takes a name that ends in .safetensors",
        ("in", tmp_path / "there.safetensors"): f"--out {tmp_path}/there.safetensors: is there already, take another",
        ("in", tmp_path / "in" / "a.safetensors"): f"--out {tmp_path}/in/a.safetensors: cannot write there (",
    }.items():
        path, target = given
        assert told(capsys, "--in", tmp_path / path, "--out", target, "--trust-input").startswith(fault)
    assert not out.exists()


def test_limits_of_the_child_are_one_line(tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    (tmp_path / "large").write_bytes(npy_of(b"cbuiltins\nbytearray\n(I2000000000\ntR."))
    arguments = ["--in", tmp_path / "large", "--out", out, "--trust-input", "--memory-gib", "0.5"]
    assert told(capsys, *arguments) == (
        f"--in: {tmp_path}/large takes more than 0.5 GiB to unpickle: give a larger --memory-gib"
    )
    (tmp_path / "slow").write_bytes(npy_of(b"ctime\nsleep\n(I100\ntR."))
    arguments = ["--in", tmp_path / "slow", "--out", out, "--trust-input", "--minutes", "0.03"]
    assert told(capsys, *arguments) == (
        f"--in: {tmp_path}/slow not converted after 0.03 minutes: give a larger --minutes"
    )
    (tmp_path / "dies").write_bytes(npy_of(b"cos\nabort\n(tR."))
    message = told(capsys, "--in", tmp_path / "dies", "--out", out, "--trust-input")
    assert message == f"--in: {tmp_path}/dies the process that unpickles died of SIGABRT"
    assert sorted(os.listdir(tmp_path)) == ["dies", "large", "slow"]


def test_the_command_as_a_process_of_its_own(tmp_path):
    as_npy(tmp_path / "train.npy", rows())
    command = [sys.executable, "-m", "llama2_lora.data.convert_packed_text", "--in", str(tmp_path / "train.npy")]
    command += ["--out", str(tmp_path / "train.safetensors")]
    refusal = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (refusal.returncode, refusal.stdout, refusal.stderr.count("\n")) == (2, "", 1)
    done = subprocess.run([*command, "--trust-input"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "8 documents" in done.stdout
