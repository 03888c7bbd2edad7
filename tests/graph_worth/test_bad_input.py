"""Mistakes and faults: each is one line on stderr and a status, never a traceback and never a run."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpt3.config
import rnnt.config
import stable_diffusion.config
from common import fit
from graph_worth import config

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"gpt3": gpt3.config, "rnnt": rnnt.config, "stable_diffusion": stable_diffusion.config}
GIB = 2**30


def run(*command, timeout_s=300):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


def assert_one_line(answer, status, *told):
    assert answer.returncode == status, answer.stdout + answer.stderr
    assert answer.stderr.count("\n") == 1 and "Traceback" not in answer.stdout, answer.stderr
    for part in told:
        assert part in answer.stderr, answer.stderr


# --- answered by the command line, before torch is imported


@pytest.mark.parametrize(
    "command, told",
    [
        (["gpt3.train", "--layers=--"], ["argument --layers: expected a value, '--' is none"]),
        (["rnnt.train", "--data", "/usr/.."], ["--data /usr/..: this is the whole file system"]),
        (["rnnt.train", "--steps", str(10**30)], [f"--steps {10**30}: takes at most 1,000,000 steps"]),
        *(
            ([f"{model}.train", "--batches=100000"], ["--batches 100000: takes at most 10,000"])
            for model in ("gpt3", "llama2_lora", "llama31", "moe")
        ),
        (["rnnt.train", "--min-steps", "0"], ["--min-steps 0: takes a number from 1 up"]),
        (["gpt3.train", "--hidden", "9" * 400], ["argument --hidden: '999", "...' is beyond 9,007,199,254,740,992"]),
        (["gpt3.train", "--hidden", "9" * 5000], ["argument --hidden: '999", "...' is not of type int"]),
    ],
)
def test_a_mistake_on_the_command_line(command, told):
    answer = run("-m", *command)
    assert_one_line(answer, 2, f"python -m {command[0]}: ", *told)
    assert answer.stdout == "" and len(answer.stderr) < 300


@pytest.mark.parametrize(
    "command, told",
    [
        (["moe.train", "--preset", "tiny", "--ep", "2"], "--ep 2 needs as many ranks, this run has 1"),
        (["llama31.train", "--preset", "tiny", "--tp", "2"], "--tp 2 needs a multiple of 2 ranks, this run has 1"),
        (["llama2_lora.train", "--tp", "2", "--cp", "2"], "--tp 2 --cp 2 need a multiple of 4 ranks, this run has 1"),
        (["llama2_lora.train", "--preset", "tiny", "--tp", "4"], "--kv-heads 2 is not divisible by --tp 4: take --tp"),
        (["gpt3.train", "--preset", "tiny_pp"], "--pp 2 needs a multiple of 2 ranks, this run has 1"),
        (["llama31.train", "--preset", "tiny", "--pp", "4"], "--layers 2: takes a multiple of --pp 4"),
        (["gpt3.train", "--preset", "tiny", "--pp", "4"], "--layers 2 is not divisible by --pp x --chunks 4"),
    ],
)
def test_ranks_that_do_not_fit_are_named_before_torch_is_imported(command, told, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert_one_line(run("-m", *command), 2, f"python -m {command[0]}: ", told)


def test_values_that_look_like_it_are_taken():
    parser = config.Parser(prog="p")
    parser.add_argument("--name")
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--name=./--", "--", "--name=--"]) == parser.parse_args(
        ["--name", "./--", "--", "--name=--"]
    )
    assert parser.parse_args(["--name=---"]).name == "---"
    assert parser.parse_args(["--name=-"]).name == "-"


# --- shapes too large


def fields(model):
    """Names of all flags that take any integer."""
    every = dataclasses.fields(model.Config)
    return [field.name for field in every if type(field.default) is int and not field.metadata["choices"]]


# Their size changes no memory.
FREE = (
    "min_steps",
    "lr_warmup",
    "lr_hold",
    "lr_epoch",
    "growth_interval",
    "hysteresis",
    "max_floor_overflows",
)
# Bounded, or bound to another one.
BOUNDED = ("workers", "frames", "tokens", "res_blocks")
# Ranks and stages, which sizes are divided by.
DIVIDING = ("tp", "pp", "cp", "chunks", "pp_rank")


@pytest.mark.parametrize("model, name", [(key, name) for key in MODELS for name in fields(MODELS[key])])
def test_a_shape_too_large_blames_its_flag(model, name, value=2**53 - 2**53 % 96):
    module = MODELS[model]
    flag = config.flag_of(name)

    def ask():
        module.require(dataclasses.replace(module.PRESETS["tiny"], **{name: value}), 24 * GIB)

    if name in FREE:
        ask()
    elif name in DIVIDING:
        with pytest.raises(ValueError, match=rf"^(?=.*{flag}\b)(?=.*\b{value}\b)"):
            ask()
    elif name == "head_dim" and model == "stable_diffusion":
        with pytest.raises(ValueError, match=f"multiple of 32 and of {flag} {value}"):
            ask()
    elif name in BOUNDED:
        with pytest.raises(ValueError, match=f"{flag} {value}: takes a number .*to "):
            ask()
    else:
        before = getattr(module.PRESETS["tiny"], name)
        told = (
            rf"^{flag} {value} is too large: .* GiB are needed, 24.0 GiB are free; {flag} {before}, as in preset tiny"
        )
        with pytest.raises(ValueError, match=told):
            ask()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    width: int = 2
    depth: int = 2
    other: int = 0

    def __post_init__(self):
        if self.width % 2:
            raise ValueError("--width is even")
        if self.width != self.depth and self.other == 7:
            raise ValueError("not with --other 7")


SHAPES = {"small": Shape(), "large": Shape(width=100, depth=10)}


def need(shape):
    return shape.width * shape.depth


@pytest.mark.parametrize(
    "shape, available, told",
    [
        # One flag, though another was given too.
        (Shape(width=40, other=3), 10, "--width 40 is too large: * --width 2, as in preset small, fits"),
        # Both are needed, the one that saves most first.
        (
            Shape(width=40, depth=60),
            10,
            "--depth 60 and --width 40 are too large: * --depth 2 and --width 2,*fit",
        ),
        # On the way back fields may contradict each other.
        (Shape(width=40, depth=40, other=7), 4, "--width 40 and --depth 40 are too large*"),
        # Nearest to another preset.
        (Shape(width=100, depth=20), 1000, "--depth 20 is too large: * --depth 10, as in preset large, fits"),
        # The preset alone is too large, as it stands and with flags that help little.
        (SHAPES["large"], 10, None),
        (Shape(width=100, depth=9, other=3), 10, None),
        # What fits has no fault.
        (Shape(width=4), 8, None),
    ],
)
def test_blame(shape, available, told):
    said = fit.blame(shape, SHAPES, need, available)
    if told is None:
        assert said is None
    else:
        parts = told.split("*")
        assert said.startswith(parts[0]) and said.endswith(parts[-1]) and all(part in said for part in parts)


def test_layers_that_fit_are_found_at_once():
    """A billion of them are not tried one by one."""
    module, tiny = gpt3.config, gpt3.config.PRESETS["tiny"]
    fitted = module.fit(dataclasses.replace(tiny, layers=10**12), 24 * GIB)
    assert module.predicted_bytes(fitted) <= 24 * GIB
    assert module.predicted_bytes(dataclasses.replace(fitted, layers=fitted.layers + 1)) > 24 * GIB
    with pytest.raises(ValueError, match="--sequence 1000000000 is too large: .* --sequence 32, as in preset tiny"):
        module.fit(dataclasses.replace(tiny, sequence=10**9), 24 * GIB)


@pytest.mark.slow
def test_a_script_says_so_before_it_builds():
    answer = run("-m", "gpt3.train", "--preset", "tiny", "--hidden", "1000000000")
    assert_one_line(
        answer, 2, "python -m gpt3.train: --hidden 1000000000 is too large: ", "--hidden 64, as in preset tiny"
    )
    assert answer.stdout.splitlines()[1:] == ["building gpt3/tiny"]


# --- faults


# As a disk that is full from the moment at which --record is written; Python ignores the signal that comes with it.
FULL_DISK = """
import resource, runpy, sys
from graph_worth import files
write = files.write_text

def write_to_full_disk(path, content):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    write(path, content)

files.write_text = write_to_full_disk
sys.argv[1:] = sys.argv[2:]
runpy.run_module("gpt3.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_disk_that_fills_while_the_result_is_written(tmp_path):
    path = tmp_path / "eager.json"
    path.write_text("an earlier one\n")
    script = ["--preset", "tiny", "--layers", "1", "--parity", "--steps", "1", "--record", str(path)]
    answer = run("-c", FULL_DISK, "gpt3.train", *script)
    assert_one_line(answer, 1, f"python -m gpt3.train: --record {path}: File too large")
    assert path.read_text() == "an earlier one\n"
    assert [left.name for left in tmp_path.iterdir()] == [path.name]
