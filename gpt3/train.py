"""GPT-3 175B, one GPU's share: a CUDA graph for each layer's forward and backward in each microbatch.

The training loop without graphs. `main`, called at the end of this file, runs it. Its body is `eager_step`, or the
`step` of a variant below:

    for step in range(num_steps):
        zero(main_grads)                                      # the FP32 gradient of each parameter
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer(hidden)
            loss(hidden, targets[microbatch]).backward()      # adds the gradients to main_grads
        all_reduce(main_grads), clip(main_grads), adam(parameters, main_grads)

Captured: every `layer(hidden)` and its backward, 2 x layers x microbatches graphs. They share memory, a pool, and are
replayed in the order of this loop. The layers are nearly all of the work. NVIDIA captured the same (MLPerf v4.1, 11,616
GPUs). In plain torch, one layer's capture and replays in one microbatch are:

    with torch.cuda.graph(forward, pool=pool):
        y = layer(x)                                          # recorded, not run
    with torch.cuda.graph(backward, pool=pool):
        y.backward(grad_y)                                    # recorded, too: fills x.grad, adds to main_grads
    x.copy_(hidden), forward.replay()                         # in a step: y then holds layer(hidden)
    grad_y.copy_(gradient), backward.replay()                 # x.grad then holds the gradient of hidden

Not captured, and why:
    the batch's copy              each batch lies at another host address; a graph always reads the same addresses
    embedding, final norm, loss   a few kernels a microbatch, so there is little to gain; autograd runs them
    FP8 scale updates             one update follows all layers of a pass, so no layer's graph can hold it
    zero(main_grads)              a few kernels a step, so there is little to gain
    all-reduce over data ranks    one launch for each bucket of gradients, so there is little to gain
    clipping, Adam                a few kernels over flat buffers; `graph_layer_optimizer` captures them, too
    storing the loss              each step stores it at another address; a graph always writes to the same ones
There is no dropout, so no graph draws random numbers.

Copied in      the embedding's output to x, and the gradient of the loss to grad_y. All else is read where it lies.
Read in time   the loss reads y, and the embedding's backward reads grad_x, both in the microbatch that wrote them. A
               replay in the next step may overwrite them.
Freed          once a layer's backward is captured, later captures may use the memory of its activations. `close`, which
               a run calls at its end, releases all graphs and their pool.

The step is the same on several data and tensor ranks: the collectives of --tp are in the layers, and so in the graphs.
A pipeline has another step and other graphs: gpt3/pipeline/stage.py and gpt3/pipeline/stage_graphs.py.

    python -m gpt3.train --preset tiny --variant graph_layer
    python -m gpt3.train --preset bench --variant graph_layer --steps 20
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph_layer         # data parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph_layer --tp 2  # tensor parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny_pp --variant graph_layer      # a pipeline
"""

from common.config import parse
from gpt3.config import ABOUT, PRESETS, Config
from gpt3.variants import VARIANTS

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("gpt3", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial
from typing import NamedTuple

import torch

# Pool: CUDA graphs that share memory. Without a GPU it makes host graphs, which record operators and run them again.
# Capture: what a run reports of a capture. warm_up: three eager steps. section: names a part of the step in a profile.
# mark: does nothing in timed steps and in captures. Where the host's launch time is measured, the host waits for the
# GPU at each mark, for its queue holds some 1,000 launches. main: the loop, timing, checks.
from common.capture.pool import Pool
from common.measuring.marks import mark, section
from common.script.main import main
from common.variant import Capture, warm_up
from gpt3.state import State
from gpt3.workload import workload

# ------------------------------------------------------------------------------------------------
# 1. The eager step. The baseline `eager` runs it as it is.


def eager_step(state: State, index: int):
    """Train on batch `index`. Nothing in it waits for the GPU."""
    state.begin_step(index)  # copies the batch to state.inputs; zeroes main_grads that microbatch 0 does not overwrite
    for microbatch in range(state.config.microbatches):
        with section("embedding"):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        with section("forward"), state.fp8.forward():  # new FP8 scales at the end of the block
            for layer in state.layers:
                # Microbatch 0 casts the weights to FP8, since they change once a step. It overwrites the main_grads
                # of the layers' weights, and later microbatches add to them.
                hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        loss = state.microbatch_loss(hidden, microbatch)  # cross-entropy / microbatches; also added to state.loss
        mark()
        with section("backward"), state.fp8.backward():
            loss.backward()  # gradients go to main_grads, see gpt3/model.py
        mark()
    state.end_step(index)  # all-reduces and clips main_grads, runs Adam, keeps loss and gradient norm


# ------------------------------------------------------------------------------------------------
# 2. graph_layer: the same step with its layers captured


class Microbatch(NamedTuple):
    """Graphs of one microbatch in order of replay. The forward ones end by writing y, the backward ones grad_x."""

    forward: list
    y: torch.Tensor
    backward: list
    grad_x: torch.Tensor


class Graphed:
    """A forward and a backward graph for each layer in each microbatch, all in one pool.

    The order of capture is the order of replay. So a microbatch takes the memory of the activations before it.
    The first microbatch's graphs also cast the weights to FP8. Nothing can be captured on the default stream, so the
    harness runs everything on another one. Weights, main_grads and FP8 scales lie outside the pool and never move.
    """

    update = None

    def __init__(self, state: State):
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward and backward", pools=[self.pool])
        # Libraries allocate at first use, which must not happen in a capture. Warm-up steps train; `state.reset`, which
        # a run calls before its first step, undoes that.
        warm_up(state, self.capture, eager_step)
        # Static buffers: layer 0 reads x, the last layer's backward reads grad_y.
        self.x = torch.zeros_like(state.embedding(state.inputs["tokens"][0])).requires_grad_()
        self.grad_y = torch.zeros_like(self.x)
        self.microbatches = []
        with self.capture.timed("capture_s"), state.fp8.capturing():  # no scale update is captured
            for microbatch in range(state.config.microbatches):
                forward, saved, y = capture_forward(state.layers, self.pool, self.x, microbatch)
                backward, grad_x = capture_backward(self.pool, saved, self.grad_y)
                self.microbatches.append(Microbatch(forward, y, backward, grad_x))

    def step(self, index: int):
        """`eager_step` with replays in the place of the layers."""
        state = self.state
        state.begin_step(index)
        for microbatch, graphs in enumerate(self.microbatches):
            with section("embedding"):
                embedded = state.embedding(state.inputs["tokens"][microbatch])
                self.x.detach().copy_(embedded.detach())
            with section("forward"), state.fp8.forward():
                replay(graphs.forward)
            hidden = graphs.y.detach().requires_grad_()
            loss = state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()  # fills hidden.grad and ends there: y was detached
                self.grad_y.copy_(hidden.grad)
                # In an eager step, Python code in a layer's backward updates the FP8 scales. A replay runs no Python.
                # So with `replayed` the end of the block updates them.
                with state.fp8.backward(replayed=True):
                    replay(graphs.backward)  # the graphs add the weights' gradients to main_grads
                embedded.backward(graphs.grad_x)
            mark()
        state.end_step(index, self.update)  # update: the replay that clips and runs Adam; None: eager

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers * self.state.config.microbatches

    def close(self):
        self.pool.release()


def replay(graphs):
    for graph in graphs:
        graph.replay()


def capture_forward(layers, pool: Pool, x, microbatch: int, is_chained: bool = False):
    """Capture the forward of each layer. Buffers are chained: a layer's output is the next layer's static input.

    x: [s, b, hidden], the first layer's input, which the step fills. pool.capture(fn, static) returns (graph, result of
    fn). Each replay of the graph checks that the tensors of `static`, here x, have kept address and shape. is_chained:
    an earlier graph fills x (a pipeline's chunks), so there is nothing to check. Returns the graphs in order, (input,
    output) of each layer for `capture_backward`, and the last layer's output.
    """
    graphs, saved, hidden, static = [], [], x, () if is_chained else (x,)
    for layer in layers:
        graph, output = pool.capture(partial(layer, hidden, is_first_microbatch=microbatch == 0), static)
        graphs.append(graph)
        saved.append((hidden, output))
        # detach: the next layer's backward ends at its input, so each layer's backward is a graph of its own.
        hidden, static = output.detach().requires_grad_(), ()
    return graphs, saved, hidden.detach()


def capture_backward(pool: Pool, saved, grad_y, is_chained: bool = False):
    """Capture the backward of each layer, the last layer first. Buffers are chained as in `capture_forward`.

    saved: from `capture_forward`. Each pop drops the last reference to a layer's activations, so later captures may use
    their memory. grad_y: gradient of the last layer's output. Returns the graphs in order of replay, and the gradient
    of the first layer's input.
    """
    graphs, grad, static = [], grad_y, () if is_chained else (grad_y,)
    while saved:
        graph, grad = pool.capture(partial(input_gradient, *saved.pop(), grad), static)
        graphs.append(graph)
        static = ()
    return graphs, grad


def input_gradient(x, output, grad):
    """Return x's gradient, and fill main_grads: by hooks, which run in backward() and not in autograd.grad."""
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


# ------------------------------------------------------------------------------------------------
# 3. graph_layer_optimizer: clipping and Adam in one more graph


class GraphedOptimizer(Graphed):
    """Numbers that change from step to step are on the GPU, where a replay reads them: the learning rate, Adam's count
    of steps, the gradient norm. A schedule would fill `state.adam.lr` before the step. The all-reduce of the gradients
    and storing the loss stay eager.
    """

    def __init__(self, state: State):
        super().__init__(state)
        self.capture.strategy += "; clipping and Adam"
        # Captured last because replayed last: it may use memory that the layers' graphs no longer need.
        with self.capture.timed("capture_s"):
            graph, _ = self.pool.capture(state.adam.step)
        self.update = graph.replay

    def replays_of(self, index: int) -> int:
        return super().replays_of(index) + 1


# ------------------------------------------------------------------------------------------------
# 4. All variants, declared in variants.py
#
#     eager                                   eager_step above, run by common.variant.Eager
#     graph_layer, graph_layer_optimizer      Graphed, GraphedOptimizer
#     graph_layer_te, _te_slot, _te_default   other_variants.py: Transformer Engine's make_graphed_callables
#     compile, reduce_overhead                other_variants.py: torch.compile
#     graph_parameterized                     other_variants.py: graphs without a pool (docs/parameterized.md)

if __name__ == "__main__":
    main("gpt3", args, partial(workload, variants=VARIANTS, eager_step=eager_step))
