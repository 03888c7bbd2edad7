"""A stage's passes as graphs: of each layer, of a half of each layer, or of all that a stage does to a microbatch.

Forward and backward have graphs of their own. All have one pool and are captured in the order of the stage's schedule,
in which they are replayed: what is free when a graph is captured is free when it is replayed. A step of fewer
microbatches runs a part of that order. Graphs without an eager part between them are chained: what one writes is the
static input of the next one. What is received, or written by an eager part, goes into buffers.
"""

from functools import partial
from itertools import groupby

from common.schedule import buffer_slots
from graph_worth import Pool, section, variant
from llama31.model import run_again
from llama31.pipeline import stage as pipeline
from llama31.state import State
from llama31.train import GraphedTraining


class Graphed:
    """A part of a pass as two graphs, with the methods of llama31/pipeline/stage.py's Eager.

    source, gradient: buffers of its input and of its output's gradient; None where a graph before wrote them, and for
    tokens and the loss.
    """

    def __init__(self, pool: Pool, function, hidden, source, static):
        # Cut from autograd's graph, since each backward is captured by itself.
        self._pool, self.source = pool, source
        self._x = x = None if hidden is None else hidden.detach().requires_grad_()
        self._forward, self.output = pool.capture(lambda: function(x), static)

    def capture_backward(self, gradient, buffer):
        """Capture the backward and return the input's gradient, which it writes. gradient: of the output."""
        self.gradient, pool = buffer, self._pool
        x, output = self._x, self.output
        static = () if buffer is None else (buffer,)
        self._backward, grad = pool.capture(lambda: _input_gradient(x, output, gradient), static)
        # What is captured next may take the memory of the activations, of the output and of this gradient.
        self._x, self.output = None, pool.borrow(output.detach())
        self._input_gradient = None if grad is None else pool.borrow(grad)
        return grad

    def forward(self, hidden):
        _fill(self.source, hidden)
        with section("forward"):
            self._forward.replay()
        return self.output

    def backward(self, gradient):
        _fill(self.gradient, gradient)
        with section("backward"):
            self._backward.replay()
        return self._input_gradient


def _fill(buffer, value):
    """Copy a value to a buffer, unless it was received or written there."""
    if buffer is not None and buffer.data_ptr() != value.data_ptr():
        buffer.copy_(value)


class Replayed(pipeline.Called):
    """Called with graphs for the parts of a scope: "stage", all of a pass; "layer"; "attention" or "mlp", its halves.

    All else of a pass is eager.
    """

    def __init__(self, state: State, pool: Pool, scope: str):
        super().__init__(state, 0)
        self.pool, self.scope = pool, scope
        steps, exchanges = pipeline.schedule(state.config.pp, state.place.stage, state.config.microbatches)
        self._slots, self._buffers = buffer_slots(steps, exchanges), {}
        for step, microbatch in steps:
            if step > 0:
                self.parts[microbatch] = self._capture_forward(microbatch)
            else:
                self._capture_backward(microbatch)

    def _capture_forward(self, microbatch):
        state, parts = self.state, []
        static = state.static if self.scope == "stage" else ()
        for is_captured, functions in groupby(self._units(microbatch), lambda unit: unit[0]):
            if not is_captured:
                parts.append(pipeline.Eager(*(function for _, function in functions)))
                continue
            source = None
            if parts or state.embedding is None:
                source = self.buffer(1, microbatch, len(parts))
                static = (*static, source)
            hidden = source
            for _, function in functions:
                parts.append(Graphed(self.pool, function, hidden, source, static))
                hidden, source, static = parts[-1].output, None, ()
        return parts

    def _capture_backward(self, microbatch):
        gradient, after = None, None
        for part in reversed(self.parts[microbatch]):
            if isinstance(part, Graphed):
                buffer = None
                if not isinstance(after, Graphed) and (after or self.state.head is None):
                    # An eager part's gradient is read at once, so that one buffer does for all.
                    gradient = buffer = self.buffer(-1, microbatch)
                gradient = part.capture_backward(gradient, buffer)
            after = part

    def _units(self, microbatch):
        """(whether the scope holds it, function of the hidden state) of the parts of a forward pass."""
        state, first = self.state, microbatch == 0
        if self.scope == "stage":
            yield True, partial(pipeline.run_stage, state, microbatch)
            return
        if state.embedding is not None:
            yield False, partial(pipeline.embed, state, microbatch)
        for layer in range(len(state.layers)):
            if self.scope == "layer":
                yield True, partial(_run, state, state.calls[layer], first)
                continue
            for name in ("attention", "mlp"):
                half = getattr(state.layers[layer], name)
                if state.calls[layer] is not state.layers[layer]:
                    # A layer that runs again in the backward does so in halves.
                    half = run_again(half, state.scaling)
                yield name == self.scope, partial(_run, state, half, first)
        if state.head is not None:
            yield False, partial(pipeline.find_loss, state, microbatch)

    def buffer(self, step: int, microbatch: int, part_number: int = 0):
        """As Called.buffer. part_number: of the part that reads an activation; 0 for what is received."""
        key = self._slots[step, microbatch], part_number
        if key not in self._buffers:
            self._buffers[key] = self.state.empty_hidden().zero_()
        return self._buffers[key]

    def replays(self, count: int) -> int:
        """Return the number of replays in a step of `count` microbatches."""
        return 2 * sum(isinstance(part, Graphed) for microbatch in range(count) for part in self.parts[microbatch])


@variant(
    "graph_layer",
    kind="graph",
    help="a forward and a backward graph per layer and microbatch, one pool, buffers chained",
    graphs=lambda c: c.layer_passes and c.layer_passes + 1,  # and the validation's
    replays=lambda c: c.replays(c.layer_passes),
    parity="bitwise",
    when=lambda c: c.layer != "megatron",
    formerly="layer",
)
def graphed_layers(state: State, capture):
    return GraphedStage(state, capture, "layer")


@variant(
    "graph_attn",
    kind="graph",
    help="attention of each layer in graphs, forward and backward; MLP eager",
    graphs=lambda c: c.layer_passes and c.layer_passes + 1,
    replays=lambda c: c.replays(c.layer_passes),
    parity="bitwise",
    when=lambda c: c.layer != "megatron",
)
def graphed_attention(state: State, capture):
    return GraphedStage(state, capture, "attention")


@variant(
    "graph_mlp",
    kind="graph",
    help="the MLP of each layer in graphs, forward and backward; attention eager",
    graphs=lambda c: c.layer_passes and c.layer_passes + 1,
    replays=lambda c: c.replays(c.layer_passes),
    parity="bitwise",
    when=lambda c: c.layer != "megatron",
)
def graphed_mlp(state: State, capture):
    return GraphedStage(state, capture, "mlp")


@variant(
    "graph_microbatch",
    graphs=lambda c: 2 * c.microbatches + 1,
    replays=lambda c: c.replays(2 * c.microbatches),
    when=lambda c: c.pp > 1,
)
def graphed_passes(state: State, capture):
    """In a pipeline a microbatch goes forward and backward at different times, so each pass has a graph."""
    return GraphedStage(state, capture, "stage")


class GraphedStage(GraphedTraining):
    """The average over ranks stays eager, and so does what stages exchange. scope: as in `Replayed`."""

    def __init__(self, state: State, capture, scope: str):
        self.scope = scope
        super().__init__(state, capture, captured=(), rest=[State.reduce_gradients, State.update])

    def capture_training(self, captured):
        self.passes = Replayed(self.state, self.pool, self.scope)

    def replay(self, count: int):
        pipeline.forward_and_backward(self.state, count, self.passes)

    def replays_of(self, index: int) -> int:
        return self.passes.replays(self.state.num_microbatches(index)) + self.state.validates(index)


def _run(state, call, first, hidden):
    with section("forward"), state.scaling():
        return call(hidden, is_first_microbatch=first)


def _input_gradient(x, output, grad):
    # Not autograd.grad: the hooks that add the gradients of weights to main_grad run in backward() alone.
    if x is None:
        output.backward(grad)
        return None
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad
