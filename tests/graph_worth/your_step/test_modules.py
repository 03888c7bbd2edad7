"""graph_worth/your_step/modules.py: graphs of the modules around a host read train bit for bit as eager does."""

from types import SimpleNamespace

import pytest
import torch

from graph_worth.capture.pool import CaptureError
from graph_worth.made_variant import Unsupported, enter, leave
from graph_worth.your_step.doctor import MODULES, diagnose, making
from graph_worth.your_step.graphs import CompiledModules, eager_step
from graph_worth.your_step.modules import GraphedModules
from graph_worth.your_step.state import StepState
from graph_worth.your_step.trial import NUM_STEPS, Trial

STEP = """
import torch
from torch import nn
import torch.nn.functional as F

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        if x.abs().max() > 1e6:
            raise FloatingPointError
        return TWICE

def build(device):
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = [torch.randn(8, 16) for _ in range(3)]
    def step(batch):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = (model(batch.to(device)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""


def made(tmp_path, last):
    path = tmp_path / "step.py"
    path.write_text(STEP.replace("TWICE", last))
    state = StepState(f"{path}:build", torch.device("cpu"), "test")
    return state, making(GraphedModules)(state)


def course(state, step, count=6):
    state.reset()
    for index in range(count):
        step(index)
    return state.results(count), [tensor.clone() for _, tensor in state.named_state()]


def test_the_modules_around_a_host_read_are_graphs_and_train_as_eager_does(tmp_path):
    state, variant = made(tmp_path, "self.layers[2](x)")
    assert variant.capture.strategy == "forward and backward of layers.0, layers.1, layers.2"
    wanted = course(state, lambda index: eager_step(state, index))
    enter(variant)
    found = course(state, variant.step)
    assert variant.capture.num_replays == 6 * variant.replays_of(0) == 36
    leave(variant)
    again = course(state, lambda index: eager_step(state, index))
    for each in (found, again):
        assert each[0] == wanted[0] and all(map(torch.equal, each[1], wanted[1]))
    variant.close()


def test_a_module_that_is_called_twice_stays_eager(tmp_path):
    _, variant = made(tmp_path, "self.layers[2](self.layers[2](x))")
    assert variant.capture.strategy == "forward and backward of layers.0, layers.1"


def test_batches_of_two_shapes_are_unsupported(tmp_path):
    path = tmp_path / "step.py"
    source = STEP.replace("TWICE", "x").replace("torch.randn(8, 16) for _ in", "torch.randn(8 + i, 16) for i in")
    path.write_text(source)
    with pytest.raises(Unsupported, match="several shapes"):
        making(GraphedModules)(StepState(f"{path}:build", torch.device("cpu"), "test"))


@pytest.mark.gpu
def test_compiled_modules_drop_what_eager_drops(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(STEP.replace("TWICE", "self.layers[2](x)").replace(", 0.1,", ", 0.5,"))
    state = StepState(f"{path}:build", torch.device("cuda", 0), "test")
    compiled = making(CompiledModules)(state)
    expected, _ = course(state, lambda index: eager_step(state, index))
    enter(compiled)
    try:
        losses, _ = course(state, compiled.step)
    finally:
        leave(compiled)
    torch.testing.assert_close(torch.as_tensor(losses), torch.as_tensor(expected), rtol=1e-2, atol=0)


VARYING = """count[0] += 1
        rows = x[: 4 + count[0] % 3] if count[0] > 4 else x
        return self.layers[2](rows)"""


@pytest.mark.parametrize("steps_before", [4, 400])
def test_a_module_whose_arguments_change_their_shape_is_no_candidate_and_copies_nothing_wrong(tmp_path, steps_before):
    last = VARYING.replace("> 4", f"> {steps_before}")
    path = tmp_path / "step.py"
    path.write_text(STEP.replace("return TWICE", last).replace("class Model", "count = [0]\n\nclass Model"))
    state = StepState(f"{path}:build", torch.device("cpu"), "test")
    variant = making(GraphedModules)(state)
    assert ("layers.2" in variant.capture.strategy) == (steps_before == 400)
    if steps_before == 400:
        enter(variant)
        state.step.__globals__["count"][0] = 500
        with pytest.raises(CaptureError, match=r"layers\.2 gets arguments of other shapes"):
            variant.step(0)
    variant.close()


def test_what_a_trial_raises_costs_the_trial_and_no_finding(tmp_path, monkeypatch):
    path = tmp_path / "step.py"
    path.write_text(STEP.replace("TWICE", "self.layers[2](x)"))

    def broken(self, index):
        raise IndexError("of the graph")

    monkeypatch.setattr(GraphedModules, "step", broken)
    found = diagnose(f"{path}:build", torch.device("cpu"))
    assert found.outcomes[MODULES.title] == "failed: of the graph"
    assert [finding.kind for finding in found.findings] == ["host read"]


@pytest.mark.parametrize(
    ("factor", "may_round", "is_apart"), [(4e-7, True, False), (4e-7, False, True), (1e-3, True, True)]
)
def test_graphs_of_modules_may_be_as_far_from_eager_as_one_rounding_takes_it(tmp_path, factor, may_round, is_apart):
    """A detector's gradients lay otherwise in memory, and their sum was 3.0e-07 of the largest value apart."""
    state, _ = made(tmp_path, "self.layers[2](x)")
    weight = state.modules[0].layers[0].up.weight

    def step(index):
        state.train(index)
        if index == 0:
            weight.data.mul_(1 + factor)

    places, original = ["entered"], state.step
    state.step = lambda batch: steps.append(places[-1]) or original(batch)
    enter_and_leave = {"enter": lambda: places.append("entered"), "leave": lambda: places.append("left")}
    steps, variant = [], SimpleNamespace(step=step, may_round=may_round, **enter_and_leave)
    assert GraphedModules.may_round and bool(Trial(state, changes_host=False).apart(variant)) == is_apart
    # Eager steps run without the variant's graphs.
    assert steps.count("entered") == NUM_STEPS and steps.count("left") >= 3 * NUM_STEPS
