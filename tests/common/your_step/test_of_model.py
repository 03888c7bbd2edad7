"""The doctor on the models of the suite: `python -m MODEL.train --doctor`."""

import functools
import os
from pathlib import Path

import pytest
import torch

from common.contract import Training
from common.your_step.doctor import diagnosed
from common.your_step.findings import NOTE
from common.your_step.of_model import ModelState
from tests.helpers import forked

# model: (its graphs, its only finding, flags that make its steps cheaper)
MODELS = {
    "examples.minimal": (["graph_step"], "", []),
    "gpt3": (["graph_layer"], "", []),
    "llama2_lora": (["graph_layer", "graph_step"], "", []),
    "llama31": (["graph_fwd_bwd", "graph_step"], "", []),
    "moe": (["graph_layer", "graph_step"], "", []),
    # Eager trains on batches of any length, for which the graphs have buckets.
    "rnnt": (["graph_networks", "graph_step"], "shapes of batches, costs time", []),
    "stable_diffusion": (["graph_step"], "", ["--batch", "2", "--latent-size", "8", "--workers", "0"]),
}
FAST = ("examples.minimal", "gpt3")


@pytest.mark.parametrize("model", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in MODELS])
def test_nothing_stands_against_a_graph_of_a_models_step(model):
    graphs, finding, flags = MODELS[model]

    words = ["--preset", "tiny", "--doctor", *flags]
    done = forked.run(f"{model}.train", words, os.environ | {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=400)

    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"{name}: trains as eager does" for name in graphs} <= set(lines), done.stdout
    assert lines[0] == "Nothing stands against a graph." if not finding else finding in lines[0]
    assert "cannot be captured" not in done.stdout and "would train wrongly" not in done.stdout


class Model:
    """A model whose batches come in the order of its steps, two shapes in turn."""

    def __init__(self):
        self.weight, self.rows, self.losses = torch.ones(4), iter(()), []
        self.reset()

    def reset(self):
        self.weight.fill_(1.0)
        self.rows = iter(range(10**6))
        self.losses = []

    def named_state(self):
        return [("weight", self.weight)]

    def read_losses(self, count):
        return self.losses[:count]

    def batch_class(self, index):
        return index % 2


def reading_step(state: Model, index: int):
    row = next(state.rows)
    assert row == index, "batches come in order"
    x = torch.full((2 + row % 2, 4), 0.5)
    loss = (x * state.weight).square().mean()
    state.weight.sub_(0.1 * loss.item())  # <- reads
    state.losses.append(float(row))


def test_a_finding_names_the_line_of_the_model_though_batches_of_other_shapes_lie_between():
    model = Model()
    named = {name: getattr(model, name) for name in ("reset", "named_state", "batch_class")}
    training = Training(state=model, results=model.read_losses, **named)
    step = functools.partial(reading_step, model)
    found = diagnosed(ModelState(training, step, torch.device("cpu"), Path(__file__)), [])

    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith("# <- reads")]
    wanted = [each for each in found.findings if each.level != NOTE and each.kind == "host read"]
    assert [each.where for each in wanted] == [f"{__file__}:{number}"], found.text()
    assert not [each for each in found.findings if each.kind == "control flow"], found.text()
