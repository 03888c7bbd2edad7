"""llama2_lora/attention_check: it counts calls with other bits, of attention that repeats itself and of one that does
not."""

import os
from dataclasses import replace

import pytest
import torch

from llama2_lora import attention_check
from llama2_lora.config import PRESETS
from tests import forked

CPU = torch.device("cpu")


def run(*arguments):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return forked.run("llama2_lora.attention_check", arguments, environment, timeout_s=100)


def test_plain_attention_repeats_itself():
    answer = run("--calls", "3")
    assert answer.returncode == 0, answer.stderr
    where, counted, head, row = answer.stdout.splitlines()
    assert "64 tokens, 4 heads in 2 groups" in where and "Of 3 calls" in counted
    assert head.split()[2:] == ["output", "dq", "dk", "dv", "us,", "alone"]
    assert row.split()[:6] == ["plain", "eager", "0", "0", "0", "0"] and float(row.split()[6]) > 0


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--calls", "1"], "--calls 1: takes a number from 2 up"),
        (["--preset", "mlperf_cp8"], "--cp 8: one rank is checked, take --cp 1"),
        (["--preset", "huge"], "unknown preset 'huge', --preset takes one of"),
        (["--heads", "3"], "--heads"),
    ],
)
def test_what_it_refuses(arguments, told):
    answer = run(*arguments)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert answer.stderr.startswith("python -m llama2_lora.attention_check: ") and told in answer.stderr


def test_calls_that_differ_are_counted_for_each_result():
    results = [torch.zeros(4) for _ in attention_check.NAMES]
    calls = []

    def sometimes():
        calls.append(None)
        # A bit of dq in each fifth call.
        results[1][2] = float(len(calls) % 5 == 0)
        return results

    counts, usual = attention_check.differing(sometimes, 20)
    assert counts == [0, 4, 0, 0]

    # Other calls are compared with what most of these gave, however often they repeat themselves.
    results = [torch.zeros(4) for _ in attention_check.NAMES]
    results[3][0] = 1.0
    assert attention_check.differing(lambda: results, 5, usual) == ([0, 0, 0, 5], usual)


def test_one_input_for_all_and_grouped_heads():
    config = replace(PRESETS["tiny"], sequence=32)
    (_, attention, _), *none = attention_check.cases(config, CPU)
    assert not none
    run = attention_check.call(config, attention, CPU)
    output, dq, dk, dv = run()
    assert output.shape == (32, config.heads * config.head_dim) and dq.shape[0] == config.heads
    assert dk.shape == dv.shape and dk.shape[0] == config.kv_heads
    again = attention_check.call(config, attention, CPU)()
    assert all(map(torch.equal, (output, dq, dk, dv), again))


def test_a_kind_that_cannot_run_is_a_line_and_the_flags_are_put_back(monkeypatch):
    plain = attention_check.cases(PRESETS["tiny"], CPU)[0]

    class Missing:
        def forward(self, q, k, v):
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("no such kernel\nand a trace")

    monkeypatch.setattr(attention_check, "cases", lambda config, device: [("other", Missing(), True), plain])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines, fill = [], torch.utils.deterministic.fill_uninitialized_memory
    attention_check.report(PRESETS["tiny"], 2, lines.append)
    assert lines[3].endswith("cannot run: no such kernel") and lines[3].startswith("other, told to be deterministic ")
    assert lines[4].split()[:6] == ["plain", "eager", "0", "0", "0", "0"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is fill


@pytest.mark.gpu
def test_the_kernels_of_a_gpu():
    """All of cuDNN's results but dq repeat, and all of flash attention's where torch is deterministic."""
    lines = []
    config = replace(PRESETS["tiny"], sequence=1024, hidden=1024, heads=8, head_dim=128)
    attention_check.report(config, 50, lines.append)
    rows = [(line[:32].strip(), line[32:].split()) for line in lines[3:]]
    assert [row[0] for _, row in rows] == ["eager", "behind", "replayed"] * 4
    for name, row in rows:
        assert (row[1], row[3], row[4]) == ("0", "0", "0"), lines
        assert row[2] == "0" or name != "flash, told to be deterministic", lines
