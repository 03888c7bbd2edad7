"""common/capture/parameterized on the CPU: regions on other tensors, what is refused, bad input."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.capture.checks import CaptureError
from common.capture.parameterized import region as regions
from common.capture.parameterized.errors import RegionRefused
from common.capture.parameterized.region import parameterize
from tests.helpers.host_graph_cases import same

F = nn.functional


def tensors(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


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
    region = parameterize(run, tensors(0, (4, 8), (4, 8)))
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
    parameterize(lambda x: F.dropout(x.mul_(2), 0.5), examples)
    assert torch.equal(examples[0], before)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_input_written_in_place_views_of_inputs_numbers_and_weights_come_back():
    weight = torch.ones(3)

    def run(x, y):
        x.add_(y)
        return x[1:], y.t(), x * weight, weight, 7, None, x.new_empty(0)

    region = parameterize(run, tensors(0, (3, 3), (3, 3)))
    x, y = tensors(1, (3, 3), (3, 3))
    expected = x + y
    version = x._version
    view, turned, product, same_weight, number, nothing, empty = region(x, y)
    assert torch.equal(x, expected) and x._version > version
    assert view.data_ptr() == x[1:].data_ptr() and torch.equal(view, expected[1:])
    assert turned.data_ptr() == y.data_ptr() and turned.stride() == (1, 3)
    assert torch.equal(product, expected)
    assert same_weight.data_ptr() == weight.data_ptr()
    assert (number, nothing, empty.shape) == (7, None, (0,))
    weight.fill_(2)
    assert torch.equal(region(x, y)[2], x * 2)


def test_memory_of_a_call_is_new_each_time_and_starts_spoiled():
    def run(x):
        scratch = torch.empty_like(x)
        scratch[0].copy_(x[0])
        return scratch

    region = parameterize(run, tensors(0, (2, 3)))
    first, second = (region(x) for x in tensors(1, (2, 3), (2, 3)))
    assert first.data_ptr() != second.data_ptr()
    assert first[1].isnan().all()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: x * x.sum().item(), "reads a value"),
        (lambda x: x[x > 0], "shape that depends"),
    ],
)
def test_a_function_that_no_graph_can_hold_is_refused(run, message):
    with pytest.raises(RegionRefused, match=message):
        parameterize(run, tensors(0, (3, 3)))


def bad_calls():
    x, y = tensors(1, (4, 8), (4, 8))
    both = torch.zeros(5, 8)
    yield "one tensor", (x,), "1 inputs where the region was captured with 2"
    yield "a number", (x, 3), "input 1 is a int: a region takes tensors alone"
    yield "another shape", (x, y[:3]), r"input 1 is not as captured: shape .*4, 8.* -> .*3, 8"
    yield "another dtype", (x, y.double()), "input 1 is not as captured: dtype torch.float32 -> torch.float64"
    yield "other strides", (x, y.t().contiguous().t()), "strides"
    yield "another device", (x, y.to("meta")), "device cpu -> meta"
    yield "an alias", (both[:4], both[1:]), "inputs 0 and 1 share memory"


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in bad_calls()], ids=[c[0] for c in bad_calls()])
def test_a_bad_call_is_one_clear_error_and_runs_nothing(arguments, message):
    region = parameterize(lambda x, y: x.add_(y), tensors(0, (4, 8), (4, 8)))
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "cpu"]
    with pytest.raises(ValueError, match=message):
        region(*arguments)
    assert same([a for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "cpu"], before)
    assert region.report["launches"] == 0


def test_a_tensor_that_aliases_another_only_later_is_refused_too():
    region = parameterize(lambda x, y: x + y, tensors(0, (4, 8), (4, 8)))
    x, y = tensors(1, (4, 8), (4, 8))
    region(x, y)
    with pytest.raises(ValueError, match="share memory"):
        region(x, x)
    region(x, y)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "at least one"),
        ([torch.ones(2), 3.0], "example 1 is a float"),
        ([torch.ones(2), torch.ones(2, device="meta")], "example 1 is on meta"),
        ([torch.ones(2, 2).to_sparse()], "strided"),
        ([torch.ones(4)] * 2, "share memory"),
    ],
)
def test_bad_examples_are_one_clear_error(examples, message):
    with pytest.raises(ValueError, match=message):
        parameterize(lambda *inputs: inputs[0] + 1, examples)


def test_a_tensor_that_only_the_closure_holds_lives_as_long_as_the_region():
    def make():
        three = torch.full((4,), 3.0)
        return parameterize(lambda x: x * three, [torch.ones(4)]), weakref.ref(three)

    region, three = make()
    gc.collect()
    assert three() is not None and torch.equal(region(torch.ones(4)), torch.full((4,), 3.0))
    region.release()
    gc.collect()
    assert three() is None


def test_a_call_after_release_is_refused_and_earlier_results_stay():
    region = parameterize(lambda x: x + 1, tensors(0, (3,)))
    (x,) = tensors(1, (3,))
    result = region(x)
    region.release()
    region.release()
    assert torch.equal(result, x + 1)
    with pytest.raises(CaptureError, match="released"):
        region(x)


@pytest.mark.parametrize(("verify", "encoded", "runs"), [(0, 0, 0), (1, 0, 1), (0, 3, 2), (5, 3, 5)])
def test_addresses_in_a_code_are_always_compared_with_eager(verify, encoded, runs):
    calls = []
    check = SimpleNamespace(
        spoil=lambda memory: calls.append("spoil"), run=lambda inputs: calls.append("run"),
        prove_unread=lambda analysis, inputs: calls.append("prove"),
    )  # fmt: skip
    analysis = SimpleNamespace(encoded=encoded, unexplained=[], all_bytes=list)
    regions._prove(check, analysis, [], verify)
    assert calls == ["spoil"] * bool(runs) + ["run"] * runs + ["prove"]
