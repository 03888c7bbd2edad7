"""examples/steps: training steps of other projects, and what the doctor says of each at toy size."""

import importlib.util
import sys

import pytest
import torch

from benchmarks import ROOT
from common.your_step import doctor
from common.your_step.findings import STOPS, WRONG
from tests.helpers import gloo_ranks

ALIKE, WHOLE_IS_WRONG, NO_CAPTURE = set(), {WRONG}, {STOPS}
STEPS = {
    "nanogpt": ALIKE,
    "llama_debug": WHOLE_IS_WRONG,
    "muon": ALIKE,
    "rssm": ALIKE,
    "spiking": ALIKE,
    "detr": NO_CAPTURE,
}
NEEDS = {"spiking": "spikingjelly", "detr": "transformers"}


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


def test_replicas_and_shards_of_nanogpt_train_alike_on_two_ranks():
    ranks = gloo_ranks.run("tests.test_example_steps", "losses_of_replicas_and_shards", 2)
    for replicas, shards in ranks:
        assert replicas == pytest.approx(shards, rel=1e-3) and replicas[-1] < replicas[0]
    assert ranks[0][0] != ranks[1][0]
