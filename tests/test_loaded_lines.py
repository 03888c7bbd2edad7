"""The lines of ours that two steps by hand load: code for what nobody asked for stays out of a run."""

import os
import subprocess
import sys

import pytest

from graph_worth.folders import ROOT
from graph_worth.machine.source import code_files

# Runs a script as python -m does, then prints the files of all modules, the script's own among them.
PROGRAM = """
import runpy, sys
name, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print(*{module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)}, sep="\\n")
print(name.replace(".", "/") + ".py")
"""
# What they load today; 110 of these lines are the names and folders of the package (graph_worth/__init__, folders), 170
# the host graph's answer to a step that asks for a capture, and its rules for tensors that stay on the host; 45 of
# GPT-3 and Llama 2's 75 a sum of bias and residual, and launches that are prepared once.
MOST_LINES = [
    ("gpt3", "graph_layer", 5_855),
    pytest.param("llama2_lora", "graph_layer", 7_680, marks=pytest.mark.slow),
    pytest.param("llama31", "graph_fwd_bwd", 7_395, marks=pytest.mark.slow),
    pytest.param("moe", "graph_attn", 7_650, marks=pytest.mark.slow),
    pytest.param("rnnt", "graph_step", 6_055, marks=pytest.mark.slow),
    pytest.param("stable_diffusion", "graph_step", 6_285, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "variant", "most"), MOST_LINES)
def test_two_steps_by_hand_load_no_more_lines_of_ours(model, variant, most):
    flags = [f"{model}.train", "--preset", "tiny", "--variant", variant, "--steps", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *flags], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = {(ROOT / line).resolve() for line in done.stdout.splitlines() if line.endswith(".py")}
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in code_files(ROOT) if ROOT / path in loaded}
    assert f"{model}/train.py" in lines and "graph_worth/script/session.py" in lines
    largest = "\n".join(f"{count:6,} {path}" for path, count in sorted(lines.items(), key=lambda item: -item[1]))
    assert sum(lines.values()) <= most, f"{sum(lines.values()):,} lines:\n{largest}"
