"""graph_worth/capture/parameterized/sums: backward regions that add gradients to main_grad, on the CPU."""

import pytest
import torch
from torch import nn

from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.parameterized import backend, sums


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


@pytest.fixture(autouse=True)
def regions():
    with backend.collecting(regions := backend.Regions()):
        yield regions
    regions.release()


@pytest.fixture
def compiled():
    """Makes the compiled layers of a model."""
    yield lambda net: [torch.compile(layer.forward, backend="parameterized", dynamic=False) for layer in net]
    torch._dynamo.reset()


def no_hook_gets_a_gradient(net, functions):
    given, handles = [], []
    for parameter in net.parameters():
        # Before the model's own, which drops the gradient. Autograd reads this very dict, in the order of insertion.
        hooks, own = parameter._post_accumulate_grad_hooks, dict(parameter._post_accumulate_grad_hooks)
        hooks.clear()
        handles.append(parameter.register_post_accumulate_grad_hook(lambda parameter: given.append(parameter.grad)))
        hooks.update(own)
    passes(net, functions)
    for handle in handles:
        handle.remove()
    return bool(given) and all(gradient is None for gradient in given)


def alike(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_gradients_are_added_in_the_backward_region_of_each_layer(compiled, regions):
    net = model()
    expected, functions = eager(net), compiled(net)
    sums.enter(layers(net))
    assert alike(passes(net, functions), expected)
    rows = {region.name.split()[0]: region for region in regions.graphs}
    assert rows.keys() == {"forward", "backward"} and len(regions.graphs) == 2
    # Two layers share a region.
    assert rows["backward"].num_replays == 6
    assert no_hook_gets_a_gradient(net, functions)
    sums.leave(layers(net))


def test_layers_that_are_not_entered_keep_their_hooks(compiled):
    net = model()
    expected, functions = eager(net), compiled(net)
    assert alike(passes(net, functions), expected)
    # What is captured stays as it is, and what its backward pass captures later.
    sums.enter(layers(net))
    assert alike(passes(net, functions), expected)
    sums.leave(layers(net))


def test_a_backward_region_of_a_forward_one_that_was_captured_before_keeps_the_hooks(compiled, regions):
    net = model()
    expected, functions = eager(net), compiled(net)
    functions[1](functions[0](torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)))
    sums.enter(layers(net))
    assert alike(passes(net, functions), expected)
    assert len(regions.graphs) == 2 and not no_hook_gets_a_gradient(net, functions)
    # Released and captured again, both know of the layers.
    regions.release()
    assert alike(passes(net, functions), expected)
    assert no_hook_gets_a_gradient(net, functions)
    # Released outside of a block, they run eagerly, with the layers or without.
    regions.release()
    backend._collectors.remove(regions)
    assert alike(passes(net, functions), expected) and not no_hook_gets_a_gradient(net, functions)
    sums.leave(layers(net))
    assert alike(passes(net, functions), expected) and not regions.graphs
    backend._collectors.append(regions)


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


def trained(net, functions, x):
    """main_grads after a pass from zero."""
    for parameter in net.parameters():
        parameter.main_grad.zero_()
        parameter.grad = None
    for function in functions:
        x = function(x)
    x.sum().backward()
    return [parameter.main_grad.clone() for parameter in net.parameters()]


def test_a_function_over_two_layers_keeps_their_hooks(compiled, monkeypatch):
    """Its backward pass may read parameters of one of them alone."""
    net = model()
    monkeypatch.setattr(sums, "adding", lambda *arguments: pytest.fail("gradients of two layers are added"))

    def both(x):
        return net[1](torch.tanh(net[0](x)))

    x = torch.ones(2, 4, dtype=torch.bfloat16)
    expected = trained(net, [both], x)
    sums.enter(layers(net))
    assert alike(trained(net, [torch.compile(both, backend="parameterized", dynamic=False)], x), expected)
    sums.leave(layers(net))


def test_a_layer_in_two_functions_and_one_with_a_parameter_that_no_function_reads(compiled):
    net = model()
    for layer in net:
        layer.register_parameter("unread", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
        layer.unread.main_grad = torch.zeros(3)
        layer.unread.register_post_accumulate_grad_hook(add)
    parts = [part for layer in net for part in (layer.hidden, layer.last)]
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    expected = trained(net, [part.forward for part in parts], x)
    sums.enter(layers(net))
    functions = [torch.compile(part.forward, backend="parameterized", dynamic=False) for part in parts]
    assert alike(trained(net, functions, x), expected)
    assert no_hook_gets_a_gradient(net, compiled(net))
    sums.leave(layers(net))


@pytest.mark.parametrize("change", ["format", "strides", "hook"])
def test_a_layer_unlike_the_one_that_was_captured_is_an_error_and_never_other_numbers(change, compiled):
    net = model()
    functions = compiled(net)
    if change == "format":
        net[0].last.weight.main_grad = torch.zeros(4, 4, dtype=torch.bfloat16)
    elif change == "strides":
        net[0].last.weight.main_grad = torch.zeros(4, 4).t()
    else:
        # The first layer's forward region is captured, the last one's backward region is the first to be called.
        net[1].last.weight._post_accumulate_grad_hooks.clear()
    sums.enter(layers(net))
    # Else the last layer's backward region is captured, which the first one is launched by.
    with pytest.raises(CaptureError, match="no hook" if change == "hook" else "of another kind"):
        passes(net, functions, 1)
    sums.leave(layers(net))


def test_two_parameters_at_one_address_keep_their_hooks(compiled):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Parameter(torch.ones(4, 4))
            self.some = nn.Parameter(self.all.data[:2])

        def forward(self, x):
            return (x @ self.all).sum() + (x[:, :2] @ self.some).sum()

    net = nn.ModuleList([Views()])
    for parameter in net.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(add)
    expected = trained(net, [net[0].forward], torch.ones(2, 4))
    sums.enter(layers(net))
    assert alike(trained(net, compiled(net), torch.ones(2, 4)), expected)
    sums.leave(layers(net))
