"""examples/steps: training steps of other projects, and what the doctor says of each at toy size."""

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch

from graph_worth.folders import ROOT
from graph_worth.your_step import doctor
from graph_worth.your_step.findings import STOPS, WRONG
from tests.helpers import gloo_ranks

ALIKE, WHOLE_IS_WRONG, NO_CAPTURE = set(), {WRONG}, {STOPS}
STEPS = {
    "nanogpt": ALIKE,
    "llama_debug": WHOLE_IS_WRONG,
    "llama_1b": ALIKE,
    "muon": ALIKE,
    "rssm": ALIKE,
    "spiking": ALIKE,
    "detr": NO_CAPTURE,
    "gpt2_transformers": ALIKE,
    "lora_peft": ALIKE,
    "vit_timm": ALIKE,
}
NEEDS = {
    "spiking": "spikingjelly",
    "detr": "transformers",
    "gpt2_transformers": "transformers",
    "lora_peft": "peft",
    "vit_timm": "timm",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_another_project_ends_in_a_diagnosis(name):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    found = doctor.diagnose(f"examples/steps/{name}.py:build", torch.device("cpu"))
    assert {finding.level for finding in found.findings} & {STOPS, WRONG} == STEPS[name], found.text()
    assert (found.outcomes[doctor.UP_TO_OPTIMIZER.title] == "trains as eager does") == (STEPS[name] != NO_CAPTURE)


def losses_of_replicas_and_shards():
    """Return the losses of five steps of this rank, first by DDP, then by FSDP2."""
    sys.path.insert(0, str(ROOT / "examples" / "steps"))
    import nanogpt_ranks

    found = []
    for build in (nanogpt_ranks.build_ddp, nanogpt_ranks.build_fsdp):
        step, batches, _ = build(torch.device("cpu"))
        torch.manual_seed(7)  # of dropout
        found.append([step(batch).item() for batch in batches[:5]])
    return found


def losses_of_act():
    """Return the losses of five steps of this rank, and a parameter after them."""
    sys.path.insert(0, str(ROOT / "examples" / "steps"))
    import act_ranks

    step, batches, (model, _) = act_ranks.build(torch.device("cpu"))
    return [step(batch).item() for batch in batches[:5]], model.module.head.weight.flatten().tolist()


def test_act_trains_replicas_on_two_ranks():
    (first, weight), (second, other) = gloo_ranks.run("tests.test_example_steps", "losses_of_act", 2)
    assert weight == other and first != second
    assert all(map(math.isfinite, first + second))


@pytest.mark.slow
def test_a_step_ends_in_a_verdict_by_the_users_command(tmp_path):
    words = ["--step", "examples/steps/llama_1b.py:build", "--out", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    told = json.loads(done.stdout)
    assert told["verdict"] == "not measured" and done.returncode == 8, done.stderr
    assert "graph_step" in told["variants"], done.stderr


def test_replicas_and_shards_of_nanogpt_train_alike_on_two_ranks():
    ranks = gloo_ranks.run("tests.test_example_steps", "losses_of_replicas_and_shards", 2)
    for replicas, shards in ranks:
        assert replicas == pytest.approx(shards, rel=1e-3) and replicas[-1] < replicas[0]
    assert ranks[0][0] != ranks[1][0]
