"""torch.compile(model, backend="parameterized") on the CPU: training like eager, and the list of regions."""

from collections import Counter

import pytest
import torch
from torch import nn

from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.host_graph import HostPool
from graph_worth.capture.parameterized import backend
from graph_worth.capture.parameterized.driver import DriverError
from graph_worth.capture.parameterized.region import HostRegion
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


def launches():
    return {row["region"]: row["launches"] for row in (region.row() for region in collected.graphs)}


def test_training_is_bitwise_eager_with_buffers_and_dropout_and_a_parameter_that_moves():
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")
    assert same(train(compiled, model.parameters(), 5), train(eager, eager.parameters(), 5))
    assert launches() == {"forward 0": 5, "backward 0": 5}
    model[0].weight.data = model[0].weight.data.clone()
    assert same(train(compiled, model.parameters(), 3, seed=2), train(eager, eager.parameters(), 3, seed=2))
    assert launches() == {"forward 0": 8, "backward 0": 8}
    assert same(model.state_dict().values(), eager.state_dict().values())


def test_steps_on_a_shaken_allocator_are_bitwise_eager():
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")

    def make_input():
        return torch.randn(5, 8)

    expected, _ = shaken.train(eager, list(eager.parameters()), 6, make_input, shakes=False)
    found, addresses = shaken.train(compiled, list(model.parameters()), 6, make_input, shakes=True)
    assert same(found, expected) and same(model.state_dict().values(), eager.state_dict().values())
    assert len(addresses) > 2 and expected[0] != expected[-2]
    assert launches() == {"forward 0": 6, "backward 0": 6}


def test_a_graph_that_cannot_be_captured_is_an_error_with_the_reason():
    compiled = torch.compile(lambda x: x[x > 0], backend="parameterized")
    dynamic = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with dynamic, pytest.raises(RegionRefused, match="shape that depends"):
        compiled(torch.randn(5, 3))
    assert not collected.graphs


@pytest.mark.parametrize("error", [DriverError("CUDA_ERROR_UNKNOWN"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_a_launch_that_fails_is_an_error_and_no_eager_run(error, monkeypatch):
    def refused(*arguments):
        raise error

    compiled = torch.compile(lambda x: x.add_(1) * 2, backend="parameterized")
    x = torch.zeros(3)
    compiled(x)
    monkeypatch.setattr(HostRegion, "launch", refused)
    with pytest.raises(type(error), match=str(error)):
        compiled(x)
    # An eager run in its place would add once more.
    assert x.tolist() == [1.0] * 3 and launches() == {"forward 0": 1}


def test_a_region_inside_a_capture_is_an_error_that_names_the_line():
    x = torch.ones(3)
    compiled = torch.compile(lambda x: x + 1, backend="parameterized")
    compiled(x)
    (region,) = collected.graphs
    for call in (lambda: backend.capture(lambda x: [x + 1], [x]), lambda: region.launch([x])):
        with pytest.raises(CaptureError, match=r" at .*:\d+ .*runs inside a capture"):
            HostPool().capture(call)
    assert same([compiled(x)], [x + 1]) and launches() == {"forward 0": 2}


def test_what_is_not_captured_runs_eagerly_outside_of_a_collecting_block_and_is_captured_inside():
    @torch.compile(backend="parameterized")
    def double(x):
        return x * 2

    x = torch.randn(3)
    double(x)
    assert launches() == {"forward 0": 1}
    (region,) = collected.graphs
    collected.release()
    backend._collectors.remove(collected)
    try:
        assert torch.equal(double(x), x * 2)
    finally:
        backend._collectors.append(collected)
    assert region.num_replays == 0 and not collected.graphs
    assert torch.equal(double(x), x * 2)
    assert launches() == {"forward 0": 1}


def test_parts_of_a_split_come_back():
    compiled = torch.compile(lambda x: (x + 1).split(2), backend="parameterized", fullgraph=True)
    x = torch.randn(6, 3)
    assert same(compiled(x), (x + 1).split(2))
    assert launches() == {"forward 0": 1}


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


def test_an_input_that_shares_memory_with_a_written_one_is_right():
    def add(x, y):
        return x.add_(y * 1)

    compiled, results = torch.compile(add, backend="parameterized"), []
    for function in (compiled, compiled, add):
        x = torch.arange(4.0)
        function(x[:3], x[1:])
        results.append(x)
    assert same(results[:2], [results[2]] * 2) and launches() == {"forward 0": 2}


def test_passes_without_gradients_between_steps():
    eager, model = build(), build()
    compiled = torch.compile(model, backend="parameterized")
    x = torch.randn(5, 8)
    with torch.no_grad():
        for _ in range(2):
            assert same([compiled.eval()(x)], [eager.eval()(x)])
    assert launches() == {"forward 0": 2}
    assert same(train(compiled.train(), model.parameters(), 3), train(eager.train(), eager.parameters(), 3))
