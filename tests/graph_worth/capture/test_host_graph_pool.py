"""common/host_graph: graphs of one pool share fate; memory and release."""

import copy
import functools
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from graph_worth.capture.host_graph import CaptureError, HostPool
from tests.helpers.host_graph_cases import X, batches, same

F = nn.functional

# --- graphs of one pool share fate

NUM_LAYERS, NUM_SLOTS = 2, 3


class Pipeline:
    """Layers as forward and backward graphs for each slot, chained: an output is the next layer's static input.

    Captured in the order of one step that holds all slots at a time: all forwards, then all backwards.
    """

    def __init__(self):
        torch.manual_seed(0)
        self.layers = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(NUM_LAYERS)]
        self.parameters = [p for layer in self.layers for p in layer.parameters()]
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter)
        self.pool = HostPool()
        self.inputs = [torch.ones(3, 4) for _ in range(NUM_SLOTS)]
        self.targets = [torch.zeros(3, 4) for _ in range(NUM_SLOTS)]
        self.gradients = [torch.zeros(3, 4) for _ in range(NUM_SLOTS)]
        self.outputs, self.forwards, self.backwards = {}, {}, {}
        chains = []
        for slot in range(NUM_SLOTS):
            x, chain = self.inputs[slot], []
            for depth, layer in enumerate(self.layers):
                x = x.detach().requires_grad_()
                graph, y = self.pool.capture(lambda layer=layer, x=x: layer(x), (x,))
                self.forwards[depth, slot] = graph
                chain.append((x, y))
                x = y
            self.outputs[slot] = y.detach()
            chains.append(chain)
        for slot in range(NUM_SLOTS):
            gradient = self.gradients[slot]
            for depth in reversed(range(NUM_LAYERS)):
                x, y = chains[slot].pop()
                backward = self.backward_of(self.layers[depth], x, y, gradient)
                self.backwards[depth, slot], gradient = self.pool.capture(backward)
                del x, y, backward

    def backward_of(self, layer, x, y, gradient):
        def backward():
            parameters = list(layer.parameters())
            grad_x, *grads = torch.autograd.grad(y, [x, *parameters], gradient)
            torch._foreach_add_([parameter.main_grad for parameter in parameters], grads)
            return grad_x

        return backward

    def forward(self, slot):
        for depth in range(NUM_LAYERS):
            self.forwards[depth, slot].replay()

    def backward(self, slot):
        torch.mul(self.outputs[slot] - self.targets[slot], 2, out=self.gradients[slot])
        for depth in reversed(range(NUM_LAYERS)):
            self.backwards[depth, slot].replay()

    def clear(self):
        for parameter in self.parameters:
            parameter.main_grad.zero_()

    def load(self, batch):
        for slot in range(NUM_SLOTS):
            self.inputs[slot].copy_(batch[2 * slot])
            self.targets[slot].copy_(batch[2 * slot + 1])

    def expected(self, batch):
        layers = copy.deepcopy(nn.Sequential(*self.layers))
        total = [torch.zeros_like(parameter) for parameter in layers.parameters()]
        for slot in range(NUM_SLOTS):
            y = layers(batch[2 * slot])
            grads = torch.autograd.grad(y, list(layers.parameters()), (y.detach() - batch[2 * slot + 1]) * 2)
            torch._foreach_add_(total, grads)
        return total

    def finite(self):
        return all(parameter.main_grad.isfinite().all() for parameter in self.parameters)


def step_batches(num_steps):
    return batches(num_steps, *[(3, 4)] * (2 * NUM_SLOTS))


def test_layers_and_slots_in_the_order_of_capture_are_eager():
    pipeline = Pipeline()
    for batch in step_batches(5):
        pipeline.clear()
        pipeline.load(batch)
        for slot in range(NUM_SLOTS):
            pipeline.forward(slot)
        for slot in range(NUM_SLOTS):
            pipeline.backward(slot)
        gradients = [parameter.main_grad for parameter in pipeline.parameters]
        assert same(gradients, pipeline.expected(batch))
        with torch.no_grad():
            torch._foreach_add_(pipeline.parameters, gradients, alpha=-0.01)


@pytest.mark.parametrize("order", ["F0 F1 F2 F0 B0 B1 B2", "F1 F0 F2 B0 B1 B2", "F0 F1 F2 B1 B0 B2"])
def test_a_wrong_order_of_slots_gives_nan(order):
    pipeline = Pipeline()
    batch = step_batches(1)[0]
    for steps, right in (("F0 F1 F2 B0 B1 B2", True), (order, False)):
        pipeline.clear()
        pipeline.load(batch)
        for step in steps.split():
            getattr(pipeline, {"F": "forward", "B": "backward"}[step[0]])(int(step[1]))
        assert pipeline.finite() == right


def test_an_output_kept_over_the_next_steps_first_replay_is_lost():
    pool = HostPool()
    x = torch.ones(4)
    first, hidden = pool.capture(lambda: x * 2)
    second, y = pool.capture(lambda: hidden + 1)
    flags = pool.capture(lambda: (y > 0, y.long()))[1]
    first.replay()
    assert hidden.tolist() == [2] * 4
    assert y.isnan().all() and flags[0].view(torch.uint8).tolist() == [1] * 4
    assert flags[1].view(torch.uint8).tolist() == [0x5A] * 32
    second.replay()
    assert y.tolist() == [3] * 4


def test_memory_dead_at_a_capture_is_spoilt_and_living_memory_is_not():
    pool = HostPool()
    x = torch.ones(4, requires_grad=True)
    leaked = {}

    def forward():
        leaked["hidden"] = x.exp()
        return leaked["hidden"].sin()

    first, y = pool.capture(forward)
    # A tensor that does not keep the memory alive, as a stale address on a GPU does not.
    address = leaked.pop("hidden").data_ptr()
    stale = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), 16)
    hidden = torch.empty(0).set_(stale, 0, (4,), (1,))
    second, gradient = pool.capture(lambda: torch.autograd.grad(y, x, torch.ones_like(y))[0])
    third, _ = pool.capture(lambda: x.detach() + 1)
    expected = (x.exp() * x.exp().cos()).detach()
    for _ in range(2):
        first.replay()
        assert torch.equal(hidden, x.exp())
        second.replay()
        # Autograd held it at the start of the second capture and not at its end.
        assert hidden.isnan().all()
        third.replay()
        assert torch.equal(gradient, expected) and torch.equal(y, x.exp().sin())
    first.replay()
    third.replay()
    assert hidden.isnan().all() and torch.equal(y, x.exp().sin())


def test_a_storage_that_a_later_graph_wrote_is_spoilt_again():
    pool = HostPool()
    first, _ = pool.capture(lambda: X + 1)
    _, y = pool.capture(lambda: X * 2)
    third, _ = pool.capture(lambda: y.copy_(X))
    for _ in range(2):
        first.replay()
        assert y.isnan().all()
        third.replay()
        assert torch.equal(y, X)


def test_every_kind_of_number_is_spoilt():
    pool = HostPool()
    kinds = (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)
    first, _ = pool.capture(lambda: X + 1)
    _, results = pool.capture(lambda: [X.to(kind) for kind in kinds])
    first.replay()
    for result in results:
        assert result.to(torch.complex128 if result.is_complex() else torch.float64).isnan().all(), result.dtype


# --- memory and release


def test_release_frees_memory_and_ends_replays():
    pool = HostPool()
    first, y = pool.capture(lambda: (X + 1) * 2)
    second, z = pool.capture(functools.partial(torch.add, y, 1))
    assert pool.bytes() == 3 * X.nbytes
    references = [StorageWeakRef(storage.bytes.untyped_storage()) for storage in pool.owned.values()]
    expected = z.clone()
    first.release()
    # What the second graph does not read is free at once.
    assert [reference.expired() for reference in references] == [True, False, False]
    with pytest.raises(CaptureError, match="released"):
        first.replay()
    second.replay()
    assert torch.equal(z, expected) and pool.bytes() == z.nbytes
    pool.release()
    pool.release()
    assert pool.bytes() == 0
    assert y.tolist() == ((X + 1) * 2).tolist() and torch.equal(z, expected)
    del y, z
    gc.collect()
    assert all(reference.expired() for reference in references)
    assert torch.equal(pool.capture(lambda: X + 5)[1], X + 5)
