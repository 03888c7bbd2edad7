"""GPT-3 175B, one GPU's share: a CUDA graph for each layer's forward and backward in each microbatch.

The loop that is trained, without graphs; `main` (common/script/main.py) runs it, and its body is `eager_step`:

    for step in range(num_steps):
        zero(main_grads)                                      # an FP32 buffer for each parameter
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer(hidden)
            loss(hidden, targets[microbatch]).backward()      # adds the gradients to main_grads
        all_reduce(main_grads), clip(main_grads), adam(parameters, main_grads)

Captured: every `layer(hidden)` and its backward, 2 x layers x microbatches graphs in one pool of memory, replayed in
the order of this loop. The layers are nearly all of the work. NVIDIA submitted this scope (MLPerf v4.1, 11,616 GPUs).
In plain PyTorch the capture of one layer in one microbatch comes to:

    with torch.cuda.graph(forward, pool=pool):
        y = layer(x)                                          # recorded, not run
    with torch.cuda.graph(backward, pool=pool):
        y.backward(grad_y)                                    # fills x.grad, adds to main_grads
    x.copy_(hidden), forward.replay()                         # in a step: y then holds layer(hidden)
    grad_y.copy_(gradient), backward.replay()                 # x.grad then holds the gradient of hidden

Not captured, and why:
    the batch                     each step's lies elsewhere on the host; the eager embedding and loss read it
    embedding, final norm, loss   a few kernels a microbatch, so there is little to gain; autograd runs them
    FP8 scale updates             one update follows all layers of a pass, so no layer's graph can hold it
    clipping, Adam                a few kernels over flat buffers; `graph_layer_optimizer` captures them, too
    all-reduce over data ranks    one call a step, so a graph saves one launch
    zero(main_grads), the loss    a step begins with the first and ends by storing the second, at its own place
There is no dropout, so no graph draws random numbers.

Copied in before a replay: the embedding's output to x, the gradient of the loss to grad_y. The rest is read in place.
Read in the same step, before these graphs or others that share their memory are replayed in the next: each microbatch's
y, by the loss, and its grad_x, by the embedding's backward.
Freed: a layer's activations, for later captures, once its backward is captured; graphs and pool in `close`.

Several data and tensor ranks run this step, too: the collectives of --tp are in the layers, and so in their graphs.
With several stages or chunks gpt3/pipeline/stage.py makes the step and gpt3/pipeline/stage_graphs.py its graphs.

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

# The harness: Pool makes graphs that share memory (without a GPU it records operators), Capture reports them, warm_up
# runs three eager steps. section names a part of the step in a profile. mark does nothing in timed steps and captures;
# where the host's time is measured, the launch queue, which holds some 1,000 launches, is drained there.
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
    state.begin_step(index)  # copies the batch to state.inputs, zeroes main_grads except those of the layers' weights
    for microbatch in range(state.config.microbatches):
        with section("embedding"):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        with section("forward"), state.fp8.forward():  # new FP8 scales at the end of the block
            for layer in state.layers:
                # Microbatch 0 casts the weights to FP8, since they change once a step, and overwrites their main_grads.
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

    They are captured in the order in which a step replays them, so that each microbatch reuses the memory of the
    activations of the one before. The first microbatch's graphs also cast the weights to FP8, and overwrite main_grads
    where later ones add. The harness runs everything on one stream that is not the default stream, on which nothing can
    be captured. Weights, main_grads and FP8 scales lie outside of the pool and keep their addresses.
    """

    update = None

    def __init__(self, state: State):
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward and backward", pools=[self.pool])
        # Libraries allocate at first use, which must not be in a graph. Warm-up trains; a run begins by `state.reset`.
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
                loss.backward()  # of the loss only: it ends at hidden.grad
                self.grad_y.copy_(hidden.grad)
                # In an eager step Python code in a layer's backward asks for the update of FP8 scales. A replay runs no
                # Python, so `replayed` asks in its place.
                with state.fp8.backward(replayed=True):
                    replay(graphs.backward)  # gradients go to main_grads inside of the graphs
                embedded.backward(graphs.grad_x)
            mark()
        state.end_step(index, self.update)  # self.update: what clips and runs Adam, None for the eager functions

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers * self.state.config.microbatches

    def close(self):
        for pool in self.capture.pools:
            pool.release()


def replay(graphs):
    for graph in graphs:
        graph.replay()


def capture_forward(layers, pool: Pool, x, microbatch: int, is_chained: bool = False):
    """Capture the forward of each layer. Buffers are chained: a layer's output is the next layer's static input.

    x: [s, b, hidden], the first layer's input. Here the step copies into it, and `pool.capture(fn, (x,))` lets each
    replay check that it has kept its address and shape. is_chained: an earlier graph writes it (a pipeline's chunks),
    so there is nothing to check. Returns the graphs in order, (input, output) of each layer for `capture_backward`, and
    the last layer's output.
    """
    graphs, saved, hidden, static = [], [], x, () if is_chained else (x,)
    for layer in layers:
        graph, output = pool.capture(partial(layer, hidden, is_first_microbatch=microbatch == 0), static)
        graphs.append(graph)
        saved.append((hidden, output))
        # Cut from this layer's autograd graph: each layer's backward is captured by itself.
        hidden, static = output.detach().requires_grad_(), ()
    return graphs, saved, hidden.detach()


def capture_backward(pool: Pool, saved, grad_y, is_chained: bool = False):
    """Capture the backward of each layer, the last layer first. Buffers are chained as in `capture_forward`.

    saved: of `capture_forward`. It is emptied: with its last references activations go, and later captures may use
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
    """Run the backward from `output` to x. Not by autograd.grad: the hooks that fill main_grads run in backward()."""
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


# ------------------------------------------------------------------------------------------------
# 3. graph_layer_optimizer: clipping and Adam in one more graph


class GraphedOptimizer(Graphed):
    """Numbers that change from step to step are on the GPU, where a replay reads them: the learning rate, Adam's count
    of steps, the gradient norm. A schedule fills `state.adam.lr` before the step. Eager remain the all-reduce of the
    gradients, and storing the loss, whose place depends on the step's number.
    """

    def __init__(self, state: State):
        super().__init__(state)
        self.capture.strategy += "; clipping and Adam"
        # Last in the step and last in the pool: it may take memory that the layers' graphs no longer need.
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
#     graph_layer_overlap                     overlap.py: the next forward beside the backward, on a second stream
#     graph_layer_te, _te_slot, _te_default   other_variants.py: Transformer Engine's make_graphed_callables
#     compile, reduce_overhead                other_variants.py: torch.compile

if __name__ == "__main__":
    main("gpt3", args, partial(workload, variants=VARIANTS, eager_step=eager_step))
