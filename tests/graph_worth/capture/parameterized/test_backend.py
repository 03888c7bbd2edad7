"""torch.compile(model, backend="parameterized") on the CPU: training like eager, and the list of regions."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.host_graph import HostPool
from graph_worth.capture.parameterized import backend
from graph_worth.capture.parameterized.driver import DriverError
from graph_worth.capture.parameterized.host_region import HostRegion
from tests.helpers import shaken
from tests.helpers.host_graph_cases import same

collected = backend.Regions()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_num_made", Counter())
    with backend.collecting(collected):
        yield
    collected.release()
    collected.all.clear()
    torch._dynamo.reset()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))


def train(model, parameters, num_steps, seed=1):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(seed)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def rows():
    return [region.row() for region in collected.all]


def states():
    return [(row["region"], row["state"]) for row in rows()]


def test_training_is_bitwise_eager_with_buffers_and_dropout_and_a_parameter_that_moves():
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")
    assert same(train(compiled, model.parameters(), 5), train(eager, eager.parameters(), 5))
    assert states() == [("forward 0", "parameterized"), ("backward 0", "parameterized")]
    assert [row["launches"] for row in rows()] == [5, 5]
    model[0].weight.data = model[0].weight.data.clone()
    assert same(train(compiled, model.parameters(), 3, seed=2), train(eager, eager.parameters(), 3, seed=2))
    assert [row["launches"] for row in rows()] == [8, 8]
    assert same(model.state_dict().values(), eager.state_dict().values())
    assert states() == [("forward 0", "parameterized"), ("backward 0", "parameterized")]


def test_steps_on_a_shaken_allocator_are_bitwise_eager():
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")

    def make_input():
        return torch.randn(5, 8)

    expected, _ = shaken.train(eager, list(eager.parameters()), 6, make_input, shakes=False)
    found, addresses = shaken.train(compiled, list(model.parameters()), 6, make_input, shakes=True)
    assert same(found, expected) and same(model.state_dict().values(), eager.state_dict().values())
    assert len(addresses) > 2 and expected[0] != expected[-2]
    assert [row["launches"] for row in rows()] == [6, 6]


def test_a_graph_that_cannot_be_captured_runs_eagerly_and_is_listed_with_the_reason():
    @torch.compile(backend="parameterized", dynamic=True)
    def scaled(x):
        return x * x.shape[0]

    x = torch.randn(5, 3)
    assert torch.equal(scaled(x), x * 5)
    assert [(row["region"], row["state"]) for row in rows()] == [("inference 0", "eager")]
    assert "symbolic" in rows()[0]["reason"]


@pytest.mark.parametrize("at", ["capture", "launch"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DriverError("CUDA_ERROR_UNKNOWN"), "CUDA_ERROR_UNKNOWN"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory."),
        (KeyError(12060), "KeyError: 12060"),
        (AssertionError(), "AssertionError: "),
    ],
    ids=["driver", "memory", "pairing", "assertion"],
)
def test_any_failure_leaves_a_region_eager_with_its_reason_and_the_step_goes_on(at, error, reason, monkeypatch):
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")

    def refused(*arguments):
        raise error

    if at == "capture":
        monkeypatch.setattr(backend, "capture", refused)
    else:
        train(compiled, model.parameters(), 2)
        train(eager, eager.parameters(), 2)
        assert [row["launches"] for row in rows()] == [2, 2]
        monkeypatch.setattr(HostRegion, "launch", refused)
    assert same(train(compiled, model.parameters(), 3, seed=2), train(eager, eager.parameters(), 3, seed=2))
    assert same(model.state_dict().values(), eager.state_dict().values())
    reason = reason if at == "capture" else f"a launch failed: {reason}"
    assert [(row["state"], row["reason"]) for row in rows()] == [("eager", reason)] * 2


def test_a_failure_in_the_midst_of_a_launch_is_raised_since_what_ran_must_not_run_again():
    compiled = torch.compile(lambda x: x.add_(1) * 2, backend="parameterized")
    x = torch.zeros(3)
    compiled(x)
    region = collected.all[0].captured
    region._calls[-1].func = None
    with pytest.raises(TypeError):
        compiled(x)
    # An eager run in its place would add once more.
    assert x.tolist() == [1.0] * 3 and states() == [("inference 0", "parameterized")]


def test_a_region_inside_a_capture_is_an_error_that_names_the_line_and_stays_as_it_is():
    x, region = torch.ones(3), backend.Region("forward 0")
    for state, call in (("waiting", region.capture), ("parameterized", region.capture)):
        with pytest.raises(CaptureError, match=r" at .*:\d+ .*runs inside a capture"):
            HostPool().capture(lambda call=call: call(lambda x: [x + 1], [x]))
        assert region.state == state
        region.capture(lambda x: [x + 1], [x])
    with pytest.raises(CaptureError, match="runs inside a capture"):
        HostPool().capture(lambda: region.launch([x]))
    assert region.state == "parameterized" and same(region.launch([x])[0], [x + 1])


def test_released_regions_run_eagerly_outside_of_a_collecting_block():
    @torch.compile(backend="parameterized")
    def double(x):
        return x * 2

    x = torch.randn(3)
    double(x)
    assert states() == [("inference 0", "parameterized")]
    collected.release()
    backend._collectors.remove(collected)
    try:
        assert torch.equal(double(x), x * 2)
    finally:
        backend._collectors.append(collected)
    assert (rows()[0]["state"], rows()[0]["reason"]) == ("eager", "released")


def test_parts_of_a_split_come_back():
    compiled = torch.compile(lambda x: (x + 1).split(2), backend="parameterized", fullgraph=True)
    x = torch.randn(6, 3)
    assert same(compiled(x), (x + 1).split(2))
    assert states() == [("inference 0", "parameterized")]


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_lazily_conjugated_and_negated_tensors_are_read_as_what_they_mean(lazy):
    compiled = torch.compile(lambda x, w: x + w, backend="parameterized")
    torch.manual_seed(0)
    x, gradient, w = (torch.randn(shape, dtype=torch.complex64) for shape in ((3, 5), (3, 5), (5,)))
    w.requires_grad_()
    expected = torch.autograd.grad(x + w, w, lazy(gradient))[0].resolve_conj()
    assert same([torch.autograd.grad(compiled(x, w), w, g)[0] for g in (lazy(gradient),) * 2], [expected] * 2)
    with torch.no_grad():
        for argument in (x, lazy(x), lazy(x)):
            assert same([compiled(argument, w)], [argument + w])
    assert {state for _, state in states()} == {"parameterized"}


def test_inference_mode_and_no_grad_between_steps():
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")
    x = torch.randn(5, 8)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(2):
                assert same([compiled.eval()(x)], [eager.eval()(x)])
    assert [row["launches"] for row in rows()] == [2, 2]
    assert same(train(compiled.train(), model.parameters(), 3), train(eager.train(), eager.parameters(), 3))
    assert {state for _, state in states()} == {"parameterized"}


def test_a_checkpoint_that_saves_the_random_state_runs_eagerly_and_says_so():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    eager, model = Checkpointed(), Checkpointed()
    compiled = torch.compile(model, backend="parameterized")
    assert same(train(compiled, model.parameters(), 3), train(eager, eager.parameters(), 3))
    assert states() == [("forward 0", "eager"), ("backward 0", "eager")]
    assert all("preserve_rng_state=False" in row["reason"] for row in rows())


def test_an_operator_on_functions_is_a_reason_in_words():
    @torch.compile(backend="parameterized")
    def either(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.ones(2)
    assert torch.equal(either(x), x.sin())
    assert states() == [("inference 0", "eager")] and "calls cond" in rows()[0]["reason"]


def test_a_graph_that_no_capture_holds_stays_eager_where_released_regions_are_captured_again():
    @torch.compile(backend="parameterized", dynamic=True)
    def scaled(x):
        return x * x.shape[0]

    x = torch.randn(5, 3)
    for _ in range(2):
        assert torch.equal(scaled(x), x * 5)
        assert [(region.state, "symbolic" in region.reason) for region in collected.all] == [("eager", True)]
        collected.release()
