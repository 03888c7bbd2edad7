"""A captured forward and backward pair: equal to eager, never aliased, errors instead of wrong gradients."""

import copy

import pytest
import torch
from torch import nn

from common.capture import CaptureError, Pool
from common.graphed_module import GraphedModule

CPU = torch.device("cpu")


class Block(nn.Module):
    """Two linears with dropout, a residual and an unused parameter."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.down(self.dropout(torch.relu(self.up(x))))


def make(accumulate=False, **options):
    torch.manual_seed(0)
    eager = Block()
    ours = copy.deepcopy(eager)
    if accumulate:
        for parameter in ours.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    sample = torch.randn(4, 16, requires_grad=True)
    return eager, ours, GraphedModule(ours, (sample,), Pool(CPU), accumulate=accumulate, **options)


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def one_pass(module, call, index):
    """Forward and backward on input `index`; (output, input gradient)."""
    torch.manual_seed(100 + index)
    x = torch.randn(4, 16, requires_grad=True)
    y = call(x)
    (y.square().sum() + 3 * y.sum()).backward()
    return y.detach().clone(), x.grad


def test_training_steps_equal_eager_bit_for_bit():
    eager, ours, graphed = make()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (eager, ours)]
    for index in range(5):
        outputs = [one_pass(eager, eager, index), one_pass(ours, graphed, index)]
        assert_same(outputs[1], outputs[0])
        assert_same(gradients(ours), gradients(eager))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(list(ours.parameters()), list(eager.parameters()))


def test_gradients_accumulate_over_microbatches():
    """pytorch issue 181723: with aliased buffers the second microbatch doubles instead of adds."""
    eager, ours, graphed = make()
    for index in range(3):
        one_pass(eager, eager, index)
        one_pass(ours, graphed, index)
    assert_same(gradients(ours), gradients(eager))


def test_main_grad_accumulates_inside_the_graph():
    eager, ours, graphed = make(accumulate=True)
    assert all(torch.count_nonzero(p.main_grad) == 0 for p in ours.parameters()), "the capture left a trace"
    for index in range(3):
        one_pass(eager, eager, index)
        one_pass(ours, graphed, index)
    assert all(p.grad is None for p in ours.parameters())
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in eager.parameters()]
    assert_same([p.main_grad for p in ours.parameters()], expected)


def test_outputs_and_input_gradients_outlive_the_next_call():
    _, ours, graphed = make()
    first, first_gradient = None, None
    x = torch.randn(4, 16, requires_grad=True)
    first = graphed(x)
    first.sum().backward()
    kept, first_gradient = first.detach().clone(), x.grad
    kept_gradient = first_gradient.clone()
    one_pass(ours, graphed, 7)
    assert torch.equal(first.detach(), kept)
    assert torch.equal(first_gradient, kept_gradient)


def test_without_copies_outputs_are_the_static_ones():
    _, ours, graphed = make(copies=False)
    first = graphed(torch.randn(4, 16))
    assert first.data_ptr() == graphed.outputs[0].data_ptr()
    first.sum().backward()
    statics = {g.data_ptr() for g in graphed.grad_inputs if g is not None}
    assert statics.isdisjoint(p.grad.data_ptr() for p in ours.parameters() if p.grad is not None)


def test_late_backward_is_an_error():
    _, _, graphed = make()
    first = graphed(torch.randn(4, 16, requires_grad=True))
    graphed(torch.randn(4, 16, requires_grad=True))
    with pytest.raises(CaptureError, match="backward of call 1 after call 2"):
        first.sum().backward()


def test_replaced_accumulation_buffer_is_an_error():
    _, ours, graphed = make(accumulate=True)
    y = graphed(torch.randn(4, 16))
    ours.up.weight.main_grad = torch.zeros_like(ours.up.weight)
    with pytest.raises(ValueError, match="was replaced after the capture"):
        y.sum().backward()


def test_accumulate_needs_buffers():
    with pytest.raises(ValueError, match="needs main_grad or grad"):
        GraphedModule(Block(), (torch.randn(4, 16),), Pool(CPU), accumulate=True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.randn(5, 16),), r"argument 0 is \(5, 16\)"),
        ((torch.randn(4, 16, dtype=torch.float64),), "torch.float64"),
        ((torch.randn(4, 16), torch.randn(4, 16)), "captured with 1 arguments, called with 2"),
    ],
)
def test_calls_that_do_not_fit(args, message):
    _, _, graphed = make()
    with pytest.raises(ValueError, match=message):
        graphed(*args)


def test_other_training_mode_is_an_error():
    _, ours, graphed = make()
    ours.eval()
    with pytest.raises(ValueError, match="captured in train mode"):
        graphed(torch.randn(4, 16))
