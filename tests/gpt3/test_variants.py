"""gpt3/other_variants on a GPU, Transformer Engine's graphs and a graph of the optimizer: eager's bits."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHUNKS = ("--chunks", "2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, more", [("graph_layer_te", ()), ("graph_layer_te", CHUNKS), ("graph_layer_optimizer", ())]
)
def test_on_a_gpu_twenty_steps_equal_eager_bit_for_bit(name, more):
    """--parity counts graphs and replays, too, and fails where they are not the promised ones."""
    if name == "graph_layer_te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("no Transformer Engine: make te")
    eager, graphs = hashes_of("eager", *more), hashes_of(name, *more)
    assert len(set(eager)) == 20 and eager == graphs


@functools.cache
def hashes_of(variant, *more):
    """Hashes of the state after each of 20 steps, by hand; eager's are asked for by each test."""
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        flags = ("--preset", "tiny", "--variant", variant, "--microbatches", "4", "--parity", "--record", str(path))
        command = [sys.executable, "-m", "gpt3.train", *flags, *more]
        answer = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=300
        )
        assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
        result = json.loads(path.read_text())
    assert result["status"] == "pass", answer.stdout[-500:]
    return result["state_hashes"]
