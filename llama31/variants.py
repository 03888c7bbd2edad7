"""Peers of train.py's graphs: graphs of single layers, torch.compile, and eager with the checks that no graph can hold.

Each is made of a state and of train.py's eager step.
"""

from functools import partial

from common.capture import Pool
from common.marks import mark, section
from common.variant import Capture, Compiled, Eager, Unsupported, require_compiler, warm_up
from llama31.state import State
from llama31.validation import GraphedValidation


class GraphedLayers:
    """A graph for each layer's forward and backward in each microbatch, replayed in the order of a step, in one pool.

    Buffers are chained: what a layer writes is the static input of the next one. Embedding, loss and the average over
    ranks stay eager.
    """

    def __init__(self, state: State, step):
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward and backward; validation", pools=[self.pool])
        warm_up(state, self.capture, step)
        # Static buffers: layer 0 reads x, the last layer's backward reads grad_y.
        self.x = state.empty_hidden().zero_().requires_grad_()
        self.grad_y = state.empty_hidden().zero_()
        with self.capture.timed("capture_s"):
            self.microbatches = [self._capture(index) for index in range(state.config.microbatches)]
            self.validation = GraphedValidation(state, self.pool)

    def _capture(self, microbatch: int):
        """(forward graphs, what they write, backward graphs, the gradient of x that they write) of one microbatch."""
        forward, saved, y = self._capture_forward(microbatch)
        backward, grad = [], self.grad_y
        while saved:
            x, output = saved.pop()
            graph, grad = self.pool.capture(lambda: _input_gradient(x, output, grad))  # noqa: B023
            backward.append(graph)
            # What is captured next may take the activations' memory.
            del x, output
        return forward, y, backward, grad

    def _capture_forward(self, microbatch: int):
        """(graphs, (input, output) of each layer, what the last layer's graph writes)."""
        graphs, saved, hidden = [], [], self.x
        for layer in range(len(self.state.layers)):
            run = partial(_run, self.state, layer, hidden, microbatch)
            graph, output = self.pool.capture(run, (self.x,))
            graphs.append(graph)
            saved.append((hidden, output))
            # Cut from this layer's autograd graph: each layer's backward is captured by itself.
            hidden = output.detach().requires_grad_()
        return graphs, saved, hidden.detach()

    def step(self, index: int):
        state = self.state
        count = state.begin_step(index)
        for microbatch, (forward, y, backward, grad_x) in enumerate(self.microbatches[:count]):
            with section("embedding"):
                embedded = state.embedding(state.inputs["tokens"][microbatch])
                self.x.detach().copy_(embedded.detach())
            with section("forward"):
                for graph in forward:
                    graph.replay()
            hidden = y.detach().requires_grad_()
            with section("loss"):
                loss = state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()
                self.grad_y.copy_(hidden.grad)
                for graph in backward:
                    graph.replay()
                embedded.backward(grad_x)
            mark()
        with section("reduction"):
            state.reduce_gradients()
        state.end_step(index)
        if state.validates(index):
            self.validation.run()

    def evaluate(self) -> float:
        return self.validation.evaluate()

    def replays_of(self, index: int) -> int:
        state = self.state
        return 2 * len(state.layers) * state.num_microbatches(index) + state.validates(index)

    def close(self):
        self.pool.release()


def _run(state, layer, hidden, microbatch):
    with state.scaling():
        return state.run_layer(layer, hidden, microbatch == 0)


def _input_gradient(x, output, grad):
    # Not autograd.grad: the hooks that add the gradients of weights to main_grad run in backward() alone.
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


class CheckedEager(Eager):
    """Eager with Megatron's NaN checks: each microbatch's loss and the gradient norm are read on the host."""

    def __init__(self, state: State, step):
        state.nan_checks = True
        super().__init__(state, step)

    def close(self):
        self.state.nan_checks = self.state.config.nan_checks


def compiled(state: State, step, mode: str) -> Compiled:
    """torch.compile of each layer, called by the eager step."""
    require_compiler(state.device)
    if state.config.layer != "torch" or state.config.precision != "bf16":
        raise Unsupported(
            "te, FP8 and FP4 modules leave the compiler: compare all variants with --layer torch --precision bf16"
        )
    return Compiled(state, step, [(layer, "forward") for layer in state.layers], "each layer", mode)
