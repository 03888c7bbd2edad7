"""A graph of compiled code in three models, on a GPU: it trains as eager does, with the graphs that it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ("--layer", "torch", "--precision", "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model, variant, flags",
    [
        ("gpt3", "graph_layer_compiled", PLAIN),
        ("llama31", "graph_step_compiled", PLAIN),
        # Its tiny latents are too small for a GPU.
        ("stable_diffusion", "graph_step_compiled", ("--latent-size", "16")),
    ],
)
def test_a_graph_of_compiled_code_trains_as_eager_does(model, variant, flags, tmp_path):
    results = {}
    for name in ("eager", variant):
        path = tmp_path / f"{name}.json"
        words = ("--preset", "tiny", "--variant", name, "--steps", "6", "--parity", "--record", str(path), *flags)
        settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", f"{model}.train", *words]
        answer = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=400
        )
        assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
        results[name] = json.loads(path.read_text())
    assert results[variant]["status"] == "pass" and results[variant]["graphs"] > 0
    assert results[variant]["compile_s"] > 0
    assert results[variant]["losses"] == pytest.approx(results["eager"]["losses"], rel=1e-3)
