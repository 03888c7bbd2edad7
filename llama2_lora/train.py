"""Llama 2 70B LoRA: a CUDA graph for the forward and one for the backward of every layer, or one for the whole step.

The training loop without graphs. `main`, called at the end of this file, runs it; its body is `eager_step`, or the
`step` of a variant below:

    for step in range(num_steps):
        tokens, targets, weights = window(step)                     # one packed sequence, from host memory
        hidden = embedding(tokens)
        for layer in layers:
            hidden = layer.forward(hidden)
        loss = sum(weights * cross_entropy(head(hidden), targets))  # weights: 0 if masked, else 1 / unmasked tokens
        gradient = d loss / d hidden
        for layer in reversed(layers):
            gradient = layer.backward(gradient)                     # and the gradients of the layer's adapters
        all_reduce(gradients), clip(gradients), adamw(adapters), update(fp8_scales)

The 69 billion base weights are frozen, so a layer's backward only has to compute its adapters' gradients and the
gradient of its input. For that it reads five tensors of the forward, each of which it may compute again. Autograd would
keep many more, too many for one GPU. So we wrote a layer's forward and backward by hand, two functions that call
kernels on buffers allocated once: `handwritten layers` (layers/handwritten.py). All 80 fit on one GPU of 141 GB.

Captured:
    graph_layer   each layer's forward, and each layer's backward: 160 graphs for 80 layers, in one pool of memory
    graph_step    the loop body after the window's copy: one graph. On several ranks it ends with the backward

Not captured, and why:
    the window's copy          each window lies at another host address, and a graph reads from fixed ones
    embedding, head and loss   in graph_layer: a few kernels, on which a graph saves next to nothing
    the loop's last line       in graph_layer: a few kernels over flat buffers, so as little to save. In graph_step on
                               several ranks: the step's one all-reduce would bring NCCL into the graph and save one
                               launch; clipping and AdamW need its result
    the loss's history         loss and gradient norm go to another place in each step, and a graph writes to fixed ones

In plain torch, what `Pool` does is

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        stack.forward(layer)                # kernels are recorded, none runs
    graph.replay()                          # in each step: the same kernels on the same memory
    del graph                               # frees it; with the pool's last graph goes the pool's memory

Copied in      the window, from host memory into static inputs (`load_window`). Nothing else: weights, adapters, FP8
               scales, optimizer state and the buffers between layers never move, and a graph reads them where they lie.
Read in time   the next step overwrites loss and gradient norm, so `keep_loss` copies them after each step. Where
               `update` is not captured, the next replays overwrite the adapters' gradients, which it has read. All of
               it is launched on one stream, so its order is the order of these lines.
Freed          `close`, which a run calls at its end, releases all graphs and the pool. The pool holds attention's
               output and temporary tensors.

    python -m llama2_lora.train --preset tiny --variant graph_layer
    python -m llama2_lora.train --preset bench --variant graph_layer --steps 20
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph_layer   # data parallel
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph_layer --cp 2
"""

from common.config import parse
from llama2_lora.config import ABOUT, PRESETS, Config
from llama2_lora.variants import VARIANTS

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("llama2_lora", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial

# A pool of CUDA graphs; without a GPU, of host graphs, which record operators and run them again.
from common.capture.pool import Pool

# The harness. section: names a part of the step in a profile. mark: does nothing in timed steps and in captures; where
# the host's time is measured, the launch queue, which holds some 1,000 launches, is drained there. Capture: what a
# run reports of a capture. warm_up: three eager steps. main: the loop, timing, checks.
from common.measuring.marks import mark, section
from common.script.main import main
from common.variant import Capture, Unsupported, warm_up
from llama2_lora.state import State
from llama2_lora.workload import workload

# Layers between two marks: some 400 launches.
MARK_EVERY = 16

# ------------------------------------------------------------------------------------------------
# 1. The eager step. The baseline `eager` runs it as it is: common.variant.Eager warms up and calls it.


def eager_step(state: State, index: int):
    """Train on window `index`. Nothing in it waits for the GPU."""
    state.load_window(index)  # copies tokens, targets, mask, positions and bounds of documents into the static inputs
    forward_and_backward(state)
    update(state)
    state.keep_loss(index)  # copies loss and gradient norm to their history on the GPU


def forward_and_backward(state: State):
    """Compute the loss of the loaded window, stack.loss, and the adapters' gradients, adapters.grads."""
    stack, layers = state.stack, range(state.config.layers)
    if state.kind != "handwritten":
        stack.forward_and_backward()  # modules under autograd, loss.backward(): layers/module_stack.py
        return
    with section("embedding"):
        stack.embed()
    with section("forward"):
        for layer in layers:
            stack.forward(layer)  # reads the buffers that the layer before wrote
            if layer % MARK_EVERY == 0:
                mark()
    mark()
    with section("loss"):
        stack.compute_loss()  # final norm, logits, cross-entropy, and the gradient of the last layer's output
    with section("backward"):
        for layer in reversed(layers):
            stack.backward(layer)  # reads the gradient of its output; writes that of its input, and its adapters'
            if layer % MARK_EVERY == 0:
                mark()
    mark()


def update(state: State):
    """The loop's last line."""
    with section("reduction"):
        state.adapters.collect()  # from bf16 grads to FP32 main_grad
        state.reduce_gradients()  # over the ranks
    with section("optimizer"):
        state.adam.step()  # AdamW: clips, updates FP32 masters, copies them to the adapters; its rate lies on the GPU
        state.stack.update_scales()  # of FP8, from the largest magnitudes that the step has seen


# ------------------------------------------------------------------------------------------------
# 2. graph_layer: a forward and a backward graph for each layer


class GraphedLayers:
    """The eager step with replays in the place of the layers.

    Nothing is copied between replays: layer l + 1 reads the buffers that layer l writes. All graphs share one pool. The
    capture of a forward leaves attention's output there, and the capture of its backward drops it, so that later
    captures use its memory. The graphs are right in the order of their capture only: that of a step.
    """

    def __init__(self, state: State):
        if state.kind != "handwritten":
            raise Unsupported("graph_layer captures handwritten layers: take --layer handwritten, or graph_step")
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="layer, forward and backward", pools=[self.pool])
        # Libraries allocate and choose kernels at first use, which must not be in a graph. Warm-up steps train;
        # `state.reset`, which a run calls before its first step, undoes that.
        warm_up(state, self.capture, eager_step)
        stack, layers = state.stack, range(state.config.layers)
        # pool.capture(fn, static) gives (graph, what fn returned). Each replay checks that the tensors of `static`,
        # which others fill, have kept address and shape. The first graph of a step checks the window for all layers.
        window = tuple(stack.inputs.values())
        with self.capture.timed("capture_s"):  # in the order of a step, in which they will be replayed
            self.forward = [
                self.pool.capture(partial(stack.forward, layer), () if layer else window)[0] for layer in layers
            ]
            self.backward = [self.pool.capture(partial(stack.backward, layer))[0] for layer in reversed(layers)]

    def step(self, index: int):
        state, stack = self.state, self.state.stack
        state.load_window(index)
        with section("embedding"):
            stack.embed()
        with section("forward"):
            for graph in self.forward:
                graph.replay()
        mark()
        with section("loss"):
            stack.compute_loss()
        with section("backward"):
            for graph in self.backward:
                graph.replay()
        mark()
        update(state)
        state.keep_loss(index)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers

    def close(self):
        self.pool.release()  # frees all graphs and the pool's memory


# ------------------------------------------------------------------------------------------------
# 3. graph_step: one graph


class GraphedStep:
    """Everything after the window's copy in one graph; with several ranks, everything up to the adapters' gradients."""

    def __init__(self, state: State):
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="the whole step", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self.captures_update = state.world_size == 1
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(self._captured, tuple(state.stack.inputs.values()))

    def _captured(self):
        forward_and_backward(self.state)
        if self.captures_update:
            update(self.state)

    def step(self, index: int):
        self.state.load_window(index)
        with section("replay"):
            self.graph.replay()
        if not self.captures_update:
            update(self.state)
        self.state.keep_loss(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()


# ------------------------------------------------------------------------------------------------
# 4. The other variants, declared in variants.py: eager_te and graph_layer_te run Transformer Engine's layers, the
# second by its make_graphed_callables; compile and reduce_overhead are torch.compile's (other_variants.py).

if __name__ == "__main__":
    main("llama2_lora", args, partial(workload, variants=VARIANTS, eager_step=eager_step))
