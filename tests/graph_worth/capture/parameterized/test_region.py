"""graph_worth/capture/parameterized on the CPU: regions on other tensors, what is refused."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.parameterized import driver
from tests.helpers.host_graph_cases import same
from tests.helpers.regions import Captured

F = nn.functional


def tensors(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))


def forward_backward(net):
    parameters = list(net.parameters())

    def run(x, gradient):
        x = x.detach().requires_grad_()
        y = net(x)
        return {"y": y.detach(), "gradients": torch.autograd.grad(y, [x, *parameters], gradient)}

    return run


def test_results_equal_eager_on_other_tensors_with_dropout_and_belong_to_the_caller():
    run = forward_backward(block())
    torch.manual_seed(3)
    region = Captured(run, tensors(0, (4, 8), (4, 8)))
    assert torch.initial_seed() == 3
    kept = []
    for seed in range(1, 5):
        x, gradient = tensors(seed, (6, 8), (4, 8))
        x = x[1:5]
        state = torch.get_rng_state()
        result = region(x, gradient)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        eager = run(x, gradient)
        assert torch.equal(after, torch.get_rng_state())
        kept.append((result, eager))
    for result, eager in kept:
        assert same([result["y"], *result["gradients"]], [eager["y"], *eager["gradients"]])
    assert region.report["launches"] == 4


def test_examples_stay_as_they_are_and_capturing_draws_nothing():
    examples = tensors(0, (4, 8))
    before = examples[0].clone()
    state = torch.get_rng_state()
    Captured(lambda x: F.dropout(x.mul_(2), 0.5), examples)
    assert torch.equal(examples[0], before)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_input_written_in_place_views_of_inputs_numbers_and_weights_come_back():
    weight = torch.ones(3)

    def run(x, y):
        x.add_(y)
        return x[1:], y.t(), x * weight, 7, None, x.new_empty(0)

    region = Captured(run, tensors(0, (3, 3), (3, 3)))
    x, y = tensors(1, (3, 3), (3, 3))
    expected = x + y
    version = x._version
    view, turned, product, number, nothing, empty = region(x, y)
    assert torch.equal(x, expected) and x._version > version
    assert view.data_ptr() == x[1:].data_ptr() and torch.equal(view, expected[1:])
    assert turned.data_ptr() == y.data_ptr() and turned.stride() == (1, 3)
    assert torch.equal(product, expected)
    assert (number, nothing, empty.shape) == (7, None, (0,))
    weight.fill_(2)
    assert torch.equal(region(x, y)[2], x * 2)


def test_memory_of_a_result_is_new_each_time():
    region = Captured(lambda x: x + 1, tensors(0, (2, 3)))
    (x,) = tensors(1, (2, 3))
    first, second = region(x), region(x * 2)
    assert first.data_ptr() != second.data_ptr() and same([first, second], [x + 1, x * 2 + 1])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: x * x.sum().item(), "reads a value"),
        (lambda x: x[x > 0], "shape that depends"),
    ],
)
def test_a_function_that_no_graph_can_hold_is_refused(run, message):
    with pytest.raises(RegionRefused, match=message):
        Captured(run, tensors(0, (3, 3)))


def test_a_tensor_that_only_the_closure_holds_lives_as_long_as_the_region():
    def make():
        three = torch.full((4,), 3.0)
        return Captured(lambda x: x * three, [torch.ones(4)]), weakref.ref(three)

    region, three = make()
    gc.collect()
    assert three() is not None and torch.equal(region(torch.ones(4)), torch.full((4,), 3.0))
    del region
    gc.collect()
    assert three() is None


def test_a_call_after_release_is_refused_and_earlier_results_stay():
    region = Captured(lambda x: x + 1, tensors(0, (3,)))
    (x,) = tensors(1, (3,))
    result = region(x)
    region.region.release()
    region.region.release()
    assert torch.equal(result, x + 1)
    with pytest.raises(CaptureError, match="released"):
        region(x)


def test_a_region_inside_another_is_refused_with_the_users_line():
    inner = Captured(lambda x: x + 1, [ones(3)])
    with pytest.raises(RegionRefused, match=r"a parameterized region at .*regions\.py:\d+ .*runs inside a capture"):
        Captured(lambda x: inner(x) * 2, [ones(3)])
    with pytest.raises(RegionRefused, match=r"the capture of a region at .*regions\.py:\d+ .*runs inside a capture"):
        Captured(lambda x: Captured(lambda y: y + 1, [x])(x), [ones(3)])
    assert same([inner(ones(3))], [ones(3) * 2])


@pytest.mark.parametrize("bindings", [None, SimpleNamespace(CUDA_VERSION=12090)])
def test_without_cuda_bindings_13_a_region_is_refused_in_one_line(monkeypatch, bindings):
    monkeypatch.setattr(driver, "cu", bindings)
    with pytest.raises(
        RegionRefused, match="^parameterized launches need cuda-bindings: pip install 'cuda-bindings==13"
    ):
        driver.require()
