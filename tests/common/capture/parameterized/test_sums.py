"""common/capture/parameterized/sums: backward regions that add gradients to main_grad, on the CPU."""

import pytest
import torch
from torch import nn

from common.capture.checks import CaptureError, RegionRefused
from common.capture.parameterized import backend, sums
from common.capture.parameterized.driver import DriverError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.hidden(x)))


def add(parameter):
    if parameter.grad is None:
        return
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def model():
    torch.manual_seed(0)
    net = nn.ModuleList(Layer() for _ in range(2)).to(torch.bfloat16)
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(add)
    return net


def layers(net):
    return [list(layer.parameters()) for layer in net]


def passes(net, functions, count=3):
    """main_grads and gradients of the input after some passes from zero."""
    torch.manual_seed(1)
    for parameter in net.parameters():
        parameter.main_grad.zero_()
        parameter.grad = None
    gradients = []
    for _ in range(count):
        x = (torch.randn(2, 4, dtype=torch.bfloat16)).requires_grad_()
        hidden = x
        for function in functions:
            hidden = function(hidden)
        hidden.sum().backward()
        gradients.append(x.grad)
    assert all(parameter.grad is None for parameter in net.parameters())
    return gradients + [parameter.main_grad.clone() for parameter in net.parameters()]


def eager(net):
    return passes(net, [layer.forward for layer in net])


@pytest.fixture
def compiled():
    """Makes the compiled layers of a model."""
    yield lambda net: [torch.compile(layer.forward, backend="parameterized", dynamic=False) for layer in net]
    torch._dynamo.reset()


def alike(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("error", [None, RegionRefused, DriverError])
def test_gradients_are_added_in_the_backward_region_of_each_layer(error, monkeypatch, compiled):
    def refused(*arguments):
        raise error("as asked\nwith more")

    if error is not None:
        monkeypatch.setattr(backend, "capture", refused)
    net = model()
    expected, functions = eager(net), compiled(net)
    sums.enter(layers(net))
    with backend.collecting(regions := backend.Regions()):
        assert alike(passes(net, functions), expected)
    rows = {region.name.split()[0]: region for region in regions.all}
    assert rows.keys() == {"forward", "backward"} and len(regions.all) == 2
    assert {(region.state, region.reason) for region in regions.all} == {
        ("parameterized", "") if error is None else ("eager", "as asked")
    }
    # Two layers share a region.
    assert rows["backward"].num_replays == (6 if error is None else 0)
    # No hook gets a gradient any more.
    given = []
    for parameter in net.parameters():
        parameter._post_accumulate_grad_hooks.clear()
        parameter.register_post_accumulate_grad_hook(lambda parameter: given.append(parameter.grad))
    passes(net, functions)
    assert given and all(gradient is None for gradient in given)
    sums.leave(layers(net))


def test_a_launch_that_the_driver_refuses_leaves_the_additions_eager(monkeypatch, compiled):
    net = model()
    expected, functions = eager(net), compiled(net)
    sums.enter(layers(net))
    with backend.collecting(regions := backend.Regions()):
        passes(net, functions, 1)
    (backward,) = [region for region in regions.all if region.name.startswith("backward")]

    def refused(*arguments):
        raise DriverError("launching a graph: CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(backward.captured, "launch", refused)
    assert alike(passes(net, functions), expected)
    assert (backward.state, backward.reason) == ("eager", "a launch failed: launching a graph: CUDA_ERROR_UNKNOWN")
    sums.leave(layers(net))


def test_layers_that_are_not_entered_keep_their_hooks(compiled):
    net = model()
    expected, functions = eager(net), compiled(net)
    assert alike(passes(net, functions), expected)
    # What is captured stays as it is, and what its backward pass captures later.
    sums.enter(layers(net))
    assert alike(passes(net, functions), expected)
    sums.leave(layers(net))


def test_a_backward_region_of_a_forward_one_that_was_captured_before_keeps_the_hooks(compiled):
    net = model()
    expected, functions = eager(net), compiled(net)
    with backend.collecting(regions := backend.Regions()):
        functions[1](functions[0](torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)))
        sums.enter(layers(net))
        assert alike(passes(net, functions), expected)
    assert [region.state for region in regions.all] == ["parameterized"] * 2
    # Released and captured again, both know of the layers.
    regions.release()
    with backend.collecting(backend.Regions()):
        assert alike(passes(net, functions), expected)
    sums.leave(layers(net))


def test_a_region_that_adds_refuses_a_layer_that_has_left(compiled):
    net = model()
    functions = compiled(net)
    sums.enter(layers(net))
    passes(net, functions, 1)
    sums.leave(layers(net))
    with pytest.raises(CaptureError, match="a layer that is not entered"):
        passes(net, functions, 1)


def test_a_parameter_without_a_hook_keeps_its_gradient(compiled):
    net = model()
    for layer in net:
        layer.last.weight._post_accumulate_grad_hooks.clear()
    functions, results = compiled(net), []
    for run in ([layer.forward for layer in net], functions):
        sums.enter(layers(net) if run is functions else [])
        for parameter in net.parameters():
            parameter.main_grad.zero_()
            parameter.grad = None
        x = torch.ones(2, 4, dtype=torch.bfloat16)
        run[1](run[0](x)).sum().backward()
        results.append([layer.last.weight.grad for layer in net] + [p.main_grad.clone() for p in net.parameters()])
        assert net[0].hidden.weight.grad is None and net[0].hidden.bias.grad is None
    sums.leave(layers(net))
    assert alike(*results) and results[0][0].abs().sum() > 0


def test_a_gradient_that_the_caller_gave_is_added_too(compiled):
    """The gradient of y = x + b with respect to b is the input of the backward graph itself."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(2, 2))

        def forward(self, x):
            return x * self.weight + self.bias

    net = nn.ModuleList([Adds()])
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(add)
    functions, results = compiled(net), []
    for run in (net[0].forward, functions[0]):
        sums.enter(layers(net) if run is functions[0] else [])
        for parameter in net.parameters():
            parameter.main_grad.zero_()
        for _ in range(2):
            run(torch.full((2, 2), 3.0, requires_grad=True)).sum().backward()
        results.append([parameter.main_grad.clone() for parameter in net.parameters()])
    sums.leave(layers(net))
    assert alike(*results) and results[0][1].tolist() == [[2, 2], [2, 2]]
