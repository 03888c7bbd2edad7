"""examples/steps: training steps of other projects, and what the doctor says of each at toy size."""

import importlib.util

import pytest
import torch

from common.your_step import doctor
from common.your_step.findings import STOPS, WRONG

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
