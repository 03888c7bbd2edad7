"""A stage's passes as graphs: of each layer, or of all that a stage does to a microbatch, forward and backward apart.

All have one pool and are captured in the order of the stage's schedule, in which they are replayed: what is free when a
graph is captured is free when it is replayed. A step of fewer microbatches runs a part of that order. Buffers are
chained: what a layer writes is the static input of the next one, and what is received goes into the first one's.
"""

from functools import partial

from common.capture.pool import Pool
from common.contract import variant
from common.measuring.marks import mark, section
from common.training.schedule import buffer_slots
from llama31.pipeline import stage as pipeline
from llama31.state import State
from llama31.train import GraphedPass


class Replayed:
    """The methods of llama31/pipeline/stage.py's Called by replays.

    whole: a graph has all of a pass, embedding or loss too; else there is one for each layer, and embedding and loss
    stay eager.
    """

    def __init__(self, state: State, pool: Pool, whole: bool):
        self.state, self.pool, self.whole = state, pool, whole
        config = state.config
        steps, exchanges = pipeline.schedule(config.pp, state.place.stage, config.microbatches)
        self._slots, self._buffers = buffer_slots(steps, exchanges), {}
        # By microbatch: graphs in the order of replay, what the last of them writes; and what is eager.
        self._forward, self._output, self._backward, self._gradient, self._embedded = {}, {}, {}, {}, {}
        saved = {}
        for step, microbatch in steps:
            if step > 0:
                saved[microbatch] = self._capture_forward(microbatch)
            else:
                self._capture_backward(microbatch, saved.pop(microbatch))

    def _capture_forward(self, microbatch):
        """(input, output) of each graph."""
        state, hidden, saved, graphs = self.state, None, [], []
        static = state.static if self.whole else ()
        if not self.whole or state.embedding is None:
            # Cut from autograd's graph, here and below: each backward is captured by itself.
            hidden = self.buffer(1, microbatch).detach().requires_grad_()
            static = (*static, hidden)
        units = [partial(pipeline.run_stage, state, microbatch)]
        if not self.whole:
            units = [partial(_run_layer, state, layer, microbatch) for layer in range(len(state.layers))]
        for unit in units:
            graph, output = self.pool.capture(lambda: unit(hidden), static)  # noqa: B023
            graphs.append(graph)
            saved.append((hidden, output))
            hidden, static = output.detach().requires_grad_(), ()
        self._forward[microbatch], self._output[microbatch] = graphs, self.pool.borrow(output.detach())
        return saved

    def _capture_backward(self, microbatch, saved):
        grad, static, graphs = None, (), []
        if not self.whole or self.state.head is None:
            grad = self.buffer(-1, microbatch)
            static = (grad,)
        while saved:
            x, output = saved.pop()
            graph, grad = self.pool.capture(lambda: _input_gradient(x, output, grad), static)  # noqa: B023
            graphs.append(graph)
            # What is captured next may take the activations' memory.
            del x, output
            static = ()
        self._backward[microbatch] = graphs
        self._gradient[microbatch] = None if grad is None else self.pool.borrow(grad)

    def buffer(self, step: int, microbatch: int):
        slot = self._slots[step, microbatch]
        if slot not in self._buffers:
            self._buffers[slot] = self.state.empty_hidden().zero_()
        return self._buffers[slot]

    def forward(self, microbatch: int, hidden):
        state = self.state
        if state.embedding is not None and not self.whole:
            with section("embedding"):
                self._embedded[microbatch] = state.embedding(state.inputs["tokens"][microbatch])
                self.buffer(1, microbatch).copy_(self._embedded[microbatch].detach())
        with section("forward"):
            for graph in self._forward[microbatch]:
                graph.replay()
        return self._output[microbatch]

    def backward(self, microbatch: int, gradient):
        if self.state.head is not None and not self.whole:
            hidden = self._output[microbatch].detach().requires_grad_()
            with section("loss"):
                loss = self.state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()
                self.buffer(-1, microbatch).copy_(hidden.grad)
        with section("backward"):
            for graph in self._backward[microbatch]:
                graph.replay()
            if microbatch in self._embedded:
                self._embedded.pop(microbatch).backward(self._gradient[microbatch])
        return self._gradient[microbatch]

    def replays(self, count: int) -> int:
        """Return the number of replays in a step of `count` microbatches."""
        graphs = [*self._forward.items(), *self._backward.items()]
        return sum(len(found) for microbatch, found in graphs if microbatch < count)


@variant(
    "graph_layer",
    kind="graph",
    help="a forward and a backward graph per layer and microbatch, one pool, buffers chained",
    graphs=lambda c: c.layer_passes and c.layer_passes + 1,  # and the validation's
    replays=lambda c: c.replays(c.layer_passes),
    parity="bitwise",
    formerly="layer",
)
class GraphedLayers(GraphedPass):
    """The average over ranks stays eager, and so does what stages exchange."""

    whole = False

    def capture_training(self) -> list:
        self.passes = Replayed(self.state, self.pool, self.whole)
        return []

    def replay(self, count: int):
        pipeline.forward_and_backward(self.state, count, self.passes)
        with section("reduction"):
            self.state.reduce_gradients()

    def replays_of(self, index: int) -> int:
        return self.passes.replays(self.state.num_microbatches(index)) + self.state.validates(index)


@variant(
    "graph_microbatch",
    graphs=lambda c: 2 * c.microbatches + 1,
    replays=lambda c: c.replays(2 * c.microbatches),
    when=lambda c: c.pp > 1,
)
class GraphedPasses(GraphedLayers):
    """In a pipeline a microbatch goes forward and backward at different times, so each pass has a graph."""

    whole = True


def _run_layer(state, layer, microbatch, hidden):
    with state.scaling():
        return state.run_layer(layer, hidden, microbatch == 0)


def _input_gradient(x, output, grad):
    # Not autograd.grad: the hooks that add the gradients of weights to main_grad run in backward() alone.
    if x is None:
        output.backward(grad)
        return None
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad
