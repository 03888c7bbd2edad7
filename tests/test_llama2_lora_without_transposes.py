"""llama2_lora/without_transposes: it prints times, says that its numbers are wrong, and records nothing."""

import os
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.llama2_lora_case import make_stack, run_step, with_fields

RESULTS = Path(__file__).resolve().parent.parent / "results"
# Enough for the tiny preset, and not for a transpose to be held.
NONE_HELD = ("--memory-gib", "0.0842")


def run(*arguments):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return forked.run("llama2_lora.without_transposes", arguments, environment, timeout_s=200)


@pytest.mark.parametrize("transposes", ["inline", "own"])
def test_times_are_printed_and_nothing_is_recorded(transposes):
    before = sorted(RESULTS.rglob("*"))
    answer = run(*NONE_HELD, "--transposes", transposes, "--steps", "1")
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0] == f"0 of 3 layers hold their transposes; --transposes {transposes}"
    assert "without, WRONG" in lines[1] and "wrong numbers" in lines[-1] and "nothing was recorded" in lines[-1]
    for line, name in zip(lines[2:4], ("eager", "graph"), strict=True):
        assert line.split()[0] == name and float(line.split()[1]) > 0 and float(line.split()[2]) > 0
    assert sorted(RESULTS.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--precision", "bf16"], "--precision bf16 has no transposes: take fp8 or fp8_current"),
        (["--layer", "torch"], "--layer torch: only lean layers"),
        (["--steps", "0"], "--steps 0: takes a number from 1 up"),
        (["--record", "results/x.json"], "unknown argument '--record'"),
        ([], "all 3 layers hold their transposes and make none: take a smaller --memory-gib"),
    ],
)
def test_what_it_refuses(arguments, told):
    answer = run(*arguments)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert answer.stderr.startswith("python -m llama2_lora.without_transposes: ") and told in answer.stderr


def test_gradients_are_wrong_without_transposes():
    right, wrong = (make_stack(with_fields(), ["nothing"] * 3) for _ in range(2))
    wrong.transpose = lambda weight, out: None
    (loss, grads), (same_loss, other) = run_step(right), run_step(wrong)
    assert torch.equal(loss, same_loss) and not torch.equal(grads, other)
