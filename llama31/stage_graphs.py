"""A stage's passes as graphs: of each layer, or of all that the stage does to a microbatch, forward and backward apart.

All have one pool and are captured in the order of the stage's schedule, in which they are replayed: what is free when a
graph is captured is free when it is replayed. A step of fewer microbatches runs a part of that order. Buffers are
chained: what a layer writes is the static input of the next one, and what is received goes into the first one's.
"""

from functools import partial

from common.capture import Pool
from common.marks import mark, section
from common.schedule import numbered, order
from common.variant import Capture, warm_up
from llama31 import pipeline
from llama31.state import State
from llama31.validation import GraphedValidation


class GraphedPasses:
    """The methods of llama31/pipeline.py's Called by replays.

    whole: a graph has all of a stage's pass, embedding or loss too; else there is one for each layer, and embedding and
    loss stay eager.
    """

    def __init__(self, state: State, pool: Pool, whole: bool):
        self.state, self.pool, self.whole = state, pool, whole
        self.first, self.last = state.embedding is not None, state.head is not None
        # A stage receives no more than pp activations before it has used the first, and gradients likewise.
        self._x, self._grad = ([state.empty_hidden().zero_() for _ in range(state.config.pp)] for _ in range(2))
        # By microbatch: graphs in the order of replay, what the last of them writes; and what is eager.
        self._forward, self._output, self._backward, self._gradient, self._embedded = {}, {}, {}, {}, {}
        saved = {}
        for step, microbatch in numbered(order(state.config.pp, state.place.stage, 1, state.config.microbatches)):
            if step > 0:
                saved[microbatch] = self._capture_forward(microbatch)
            else:
                self._capture_backward(microbatch, saved.pop(microbatch))

    def _capture_forward(self, microbatch):
        """(input, output) of each graph."""
        state, hidden, saved, graphs = self.state, None, [], []
        static = state.static if self.whole else ()
        if not (self.whole and self.first):
            # Cut from autograd's graph, here and below: each backward is captured by itself.
            hidden = self.buffer(1, microbatch).detach().requires_grad_()
            static = (*static, hidden)
        units = [partial(_run_stage, state, microbatch)]
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
        if not (self.whole and self.last):
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
        return (self._x if step > 0 else self._grad)[microbatch % self.state.config.pp]

    def forward(self, microbatch: int, hidden):
        state = self.state
        if self.first and not self.whole:
            with section("embedding"):
                self._embedded[microbatch] = state.embedding(state.inputs["tokens"][microbatch])
                self.buffer(1, microbatch).copy_(self._embedded[microbatch].detach())
        with section("forward"):
            for graph in self._forward[microbatch]:
                graph.replay()
        return self._output[microbatch]

    def backward(self, microbatch: int, gradient):
        if self.last and not self.whole:
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
        """Of a step of `count` microbatches."""
        return sum(len(self._forward[each]) + len(self._backward[each]) for each in range(count))


class StageGraphs:
    """The variant of these graphs. The average over ranks stays eager, and so does what stages exchange."""

    def __init__(self, state: State, step, whole: bool = False):
        self.state, self.pool = state, Pool(state.device)
        what = "a microbatch" if whole else "layer x microbatch"
        self.capture = Capture(strategy=f"{what}, forward and backward; validation", pools=[self.pool])
        warm_up(state, self.capture, step)
        with self.capture.timed("capture_s"):
            self.passes = GraphedPasses(state, self.pool, whole)
            self.validation = GraphedValidation(state, self.pool)

    def step(self, index: int):
        state = self.state
        pipeline.forward_and_backward(state, state.begin_step(index), self.passes)
        with section("reduction"):
            state.reduce_gradients()
        state.end_step(index)
        if state.validates(index):
            self.validation.run()

    def evaluate(self) -> float:
        return self.validation.evaluate()

    def replays_of(self, index: int) -> int:
        return self.passes.replays(self.state.num_microbatches(index)) + self.state.validates(index)

    def close(self):
        self.pool.release()


def _run_stage(state, microbatch, hidden):
    if state.embedding is not None:
        hidden = state.embedding(state.inputs["tokens"][microbatch])
    hidden = state.run_layers(hidden, first=microbatch == 0)
    return hidden if state.head is None else state.microbatch_loss(hidden, microbatch)


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
