"""GPT-3 175B, one GPU's share of the layers: a CUDA graph for each layer's forward and backward in each microbatch.

What is trained, without graphs:

    for step in range(num_steps):
        zero(main_grad)                                       # or microbatch 0 overwrites it
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer(hidden)
            loss(hidden, targets[microbatch]).backward()      # weight gradients are added to FP32 main_grad
        all_reduce(main_grad), clip(main_grad), adam(main_grad)

Captured: every `layer(hidden)` and its backward, 2 x layers x microbatches graphs, replayed in the order of this loop.
NVIDIA submitted this scope (MLPerf v4.1, 11,616 GPUs). The layers are nearly all of the work.

Not captured, and why:
    the batch                     it comes from the host
    embedding, final norm, loss   a few kernels a microbatch; autograd runs them around the replays
    FP8 scale updates             they belong to the recipe, not to a layer: one update after all layers of a pass
    all-reduce, clipping, Adam    left eager as in the submission, not because they must be: `graph_opt` captures
                                  clipping and Adam
There is no dropout: no graph draws random numbers.

This is a step without a pipeline. Several tensor and data ranks run it too: the collectives of --tp are in the layers,
and so in their graphs. With several stages or chunks gpt3/pipeline.py makes the step, gpt3/stage_graphs.py its graphs.

    python -m gpt3.train --preset tiny --variant graph
    python -m gpt3.train --preset bench --variant graph --record runs/graph.r1.json
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph            # data parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph --tp 2     # tensor parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny_pp --variant graph         # a pipeline
"""

from common.config import parse
from gpt3.config import ABOUT, FP8, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("gpt3", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial
from typing import NamedTuple

import torch

from common.capture import Pool  # of torch.cuda.CUDAGraphs; without a GPU of host graphs, which record operators
from common.main import main
from common.marks import mark, section  # places that a measuring pass looks at, else nothing
from common.variant import Capture, Eager, Unsupported, warm_up
from gpt3 import variants
from gpt3.state import State
from gpt3.workload import workload

# ------------------------------------------------------------------------------------------------
# 1. The eager step


def eager_step(state: State, index: int):
    """One training step. Nothing in it waits for the device."""
    state.begin_step(index)  # copies batch `index` into state.inputs, zeroes main_grad but for the layers' weights
    for microbatch in range(state.config.microbatches):
        with section("embedding"):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        with section("forward"), state.fp8.forward():  # new FP8 scales at the end of the block
            for layer in state.layers:
                # Microbatch 0 casts the weights to FP8, which change once a step, and overwrites their main_grad.
                hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        loss = state.microbatch_loss(hidden, microbatch)  # mean over the microbatches; added to state.loss
        mark()
        with section("backward"), state.fp8.backward():
            loss.backward()  # weight gradients go to main_grad, see gpt3/model.py
        mark()
    state.end_step(index)  # all-reduces main_grad, clips, Adam, keeps loss and gradient norm


def eager(state: State) -> Eager:
    """The baseline: the eager step, kernels launched one by one."""
    return Eager(state, eager_step)


# ------------------------------------------------------------------------------------------------
# 2. The step with its layers captured


class Microbatch(NamedTuple):
    """Graphs of one microbatch in order of replay, what the forward ones write and what the backward ones write."""

    forward: list
    y: torch.Tensor
    backward: list
    grad_x: torch.Tensor


class Graphed:
    """A graph for each layer's forward and backward in each microbatch, all in one pool.

    The first microbatch's graphs do more: they cast the weights to FP8 and overwrite main_grad, later ones add to it.
    All are captured in the order in which a step replays them, so that the pool can use the memory of the previous
    microbatch's activations again. The whole process runs on one stream that is not the default one: nothing can be
    captured there, and autograd runs a backward on its forward's stream. `state.reset` undoes what the warm-up trained.

    A replay reads x, grad_y, weights, FP8 scales and the activations that its microbatch's forward left in the pool; it
    writes y or grad_x, main_grad, FP8 weights and amaxes.
    """

    def __init__(self, state: State):
        self.state, self.update = state, state.adam.step
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward and backward", pools=[self.pool])
        warm_up(state, self.capture, eager_step)  # what libraries allocate at first use must not be in a graph
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
                loss.backward()  # of the loss alone: it ends at hidden.grad
                self.grad_y.copy_(hidden.grad)
                with state.fp8.backward(replayed=True):
                    # Layers ask for the scale update from Python, in their backward; a replay runs no Python.
                    replay(graphs.backward)  # weight gradients go to main_grad inside of the graphs
                embedded.backward(graphs.grad_x)
            mark()
        state.end_step(index, self.update)  # self.update: clipping and Adam, eager here

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers * self.state.config.microbatches

    def close(self):
        for pool in self.capture.pools:
            pool.release()


def replay(graphs):
    for graph in graphs:
        graph.replay()


def capture_forward(layers, pool: Pool, x, microbatch: int):
    """A graph for the forward of each layer. Buffers are chained: what one layer writes the next one reads, no copy.

    x: [s, b, hidden], what the first layer reads. `pool.capture(fn, static)` records fn; each replay first checks that
    the tensors of `static`, which others fill, have kept address and shape. Returns the graphs in order, (input,
    output) of each layer for `capture_backward`, and the last layer's output, which every replay overwrites.
    """
    graphs, saved, hidden = [], [], x
    for layer in layers:
        static = (x,) if hidden is x else ()
        graph, output = pool.capture(lambda: layer(hidden, is_first_microbatch=microbatch == 0), static)  # noqa: B023
        graphs.append(graph)
        saved.append((hidden, output))
        # Cut from this layer's autograd graph: each layer's backward is captured by itself.
        hidden = output.detach().requires_grad_()
    return graphs, saved, hidden.detach()


def capture_backward(pool: Pool, saved, grad_y):
    """A graph for the backward of each layer, the last layer first; what one writes the next one reads.

    saved: of `capture_forward`; it is emptied, so that what is captured next may take the activations' memory. grad_y:
    gradient of the last layer's output. Returns the graphs in order of replay and the gradient of the first layer's x.
    """
    graphs, grad = [], grad_y
    while saved:
        x, output = saved.pop()
        static = (grad_y,) if grad is grad_y else ()
        graph, grad = pool.capture(lambda: _input_gradient(x, output, grad), static)  # noqa: B023
        graphs.append(graph)
        del x, output
    return graphs, grad


def _input_gradient(x, output, grad):
    # Not autograd.grad: the hooks that add the gradients of weights to main_grad run in backward() alone.
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


# ------------------------------------------------------------------------------------------------
# 3. Refinements of the capture


class GraphedOptimizer(Graphed):
    """Adds clipping and Adam in a graph of their own, one more replay a step.

    What changes from step to step is on the device, where the replay reads it: the learning rate, Adam's count of steps
    and the gradients' norm. A schedule fills `state.adam.lr` before the step. Outside stay the all-reduce of the
    gradients and the storing of the loss, whose place depends on the step's number.
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


class GraphedOverlap(Graphed):
    """Adds a second stream: the forward of microbatch m + 1 runs beside the backward of microbatch m.

    Kernels and values are those of `graph`; two kernels run at once where one does not fill the GPU. The host can feed
    two streams, since it issues replays in a tenth of the step. What runs at the same time must not share memory:
    forward graphs have one pool and backward graphs another; forward m + 1 is captured before backward m frees its
    activations, so that they lie apart; x is a pair, because backward m still reads its own.
    """

    def __init__(self, state: State):
        if state.device.type == "cuda" and not (state.config.layer == "te" and state.config.precision in FP8):
            raise Unsupported(
                "graph_overlap needs --layer te and --precision fp8 or fp8_current: other GEMMs share one workspace"
            )
        if state.config.tp > 1:
            raise Unsupported("graph_overlap needs --tp 1: two streams would use one group of ranks at a time")
        self.state = state
        ahead, behind = Pool(state.device), Pool(state.device)
        self.capture = Capture(strategy="layer x microbatch, forward beside backward", pools=[ahead, behind])
        self.side = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        warm_up(state, self.capture, eager_step)
        sample = torch.zeros_like(state.embedding(state.inputs["tokens"][0]))
        self.x = [torch.zeros_like(sample).requires_grad_() for _ in range(2)]
        self.grad_y = torch.zeros_like(sample)
        self.microbatches, last = [], state.config.microbatches - 1
        with self.capture.timed("capture_s"), state.fp8.capturing():
            following = capture_forward(state.layers, ahead, self.x[0], 0)
            for microbatch in range(last + 1):
                forward, saved, y = following
                if microbatch < last:
                    following = capture_forward(state.layers, ahead, self.x[(microbatch + 1) % 2], microbatch + 1)
                with state.fp8.other_workspace():
                    backward, grad_x = capture_backward(behind, saved, self.grad_y)
                self.microbatches.append(Microbatch(forward, y, backward, grad_x))

    def step(self, index: int):
        state, following = self.state, None
        state.begin_step(index)
        embedded = self._forward(0)
        self._loss(0)
        for microbatch, graphs in enumerate(self.microbatches):
            if microbatch + 1 < len(self.microbatches):
                following = self._forward(microbatch + 1, self.side)
            with section("backward"):
                with state.fp8.backward(replayed=True):
                    replay(graphs.backward)
                embedded.backward(graphs.grad_x)
            mark()
            if self.side:
                torch.cuda.current_stream().wait_stream(self.side)
            if microbatch + 1 < len(self.microbatches):
                self._loss(microbatch + 1)
                embedded = following
        state.end_step(index)

    def _forward(self, microbatch, stream=None):
        """Embed on the current stream, replay the layers on `stream` (None: the current one). Returns the embedding."""
        with section("embedding"):
            embedded = self.state.embedding(self.state.inputs["tokens"][microbatch])
            self.x[microbatch % 2].detach().copy_(embedded.detach())
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), section("forward"), self.state.fp8.forward():
            replay(self.microbatches[microbatch].forward)
        return embedded

    def _loss(self, microbatch):
        """The loss of what the forward graphs have written, and its gradient into grad_y."""
        hidden = self.microbatches[microbatch].y.detach().requires_grad_()
        loss = self.state.microbatch_loss(hidden, microbatch)
        with section("backward"):
            loss.backward()
            self.grad_y.copy_(hidden.grad)
        mark()


# Transformer Engine's graphs of the same layers (as submitted, with one slot, with its default flags) and torch.compile
# are in variants.py.
MAKE_VARIANT = {
    "eager": eager,
    "graph_te": partial(variants.AsSubmitted, eager_step=eager_step),
    "graph_te_slot": partial(variants.OneSlot, eager_step=eager_step),
    "graph_te_default": partial(variants.Defaults, eager_step=eager_step),
    "graph": Graphed,
    "graph_opt": GraphedOptimizer,
    "graph_overlap": GraphedOverlap,
    "compile": partial(variants.compiled, eager_step=eager_step),
    "reduce_overhead": partial(variants.compiled, eager_step=eager_step, mode="reduce-overhead"),
}

if __name__ == "__main__":
    main("gpt3", args, partial(workload, variants=MAKE_VARIANT, eager_step=eager_step))
