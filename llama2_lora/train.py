"""Llama 2 70B LoRA: a CUDA graph for the forward and one for the backward of every layer, or one for the whole step.

The training loop without graphs. `main`, called at the end of this file, runs it. Its body is `eager_step`, or the
`step` of a variant below:

    for step in range(num_steps):
        tokens, targets, weights = window(step)                     # one packed sequence, from host memory
        hidden = embedding(tokens)
        for layer in layers:
            hidden = layer.forward(hidden)
        loss = sum(weights * cross_entropy(head(hidden), targets))  # weights: 0 if masked, else 1 / unmasked tokens
        gradient = d loss / d hidden
        for layer in reversed(layers):
            gradient = layer.backward(gradient)                     # and its adapters' gradients
        all_reduce(gradients), clip(gradients), adamw(adapters), update(fp8_scales)

The 69 billion base weights are frozen, so a layer's backward only has to compute its adapters' gradients and the
gradient of its input. For that it reads the layer's input, which is kept, and four more tensors of the forward, which
are kept or computed again. Autograd would keep many more, too many for one GPU. So we wrote a layer's forward and
backward by hand, two functions that call kernels on buffers allocated once: the `handwritten` layers
(layers/handwritten.py). All 80 fit on one GPU of 141 GB.

Captured:
    graph_layer   each layer's forward, and each layer's backward: 160 graphs for 80 layers, which share memory, a pool
    graph_step    the loop body after the window's copy: one graph. On several ranks it ends with the backward

Not captured, and why:
    the window's copy          each window lies at another host address; a graph always reads the same addresses
    embedding, head and loss   in graph_layer: a few kernels, so a graph would save next to nothing
    all_reduce to update       in graph_layer: a few kernels over flat buffers, so as little to save. In graph_step only
                               on several ranks: an all-reduce is one launch, and the rest needs its result
    storing the loss           each step stores loss and gradient norm at another address; a graph always writes to the
                               same ones

In plain torch, `Pool` does this:

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may call CUDA
        stack.forward(layer)                # kernels are recorded, none runs
    graph.replay()                          # in each step: the same kernels on the same memory
    del graph                               # the pool's memory is freed with its last graph

Copied in      the window: `load_window` copies it from host memory into the static inputs, buffers that never move, and
               computes the tokens' weights there. Nothing else is copied: a graph reads base weights, adapters, FP8
               scales, optimizer state and the buffers between layers where they lie.
Read in time   `keep_loss` copies loss and gradient norm before the next step overwrites them. In graph_layer `update`
               reads the adapters' gradients before the next replays overwrite them. Everything runs on one stream, so
               the GPU keeps the order of the code.
Freed          `close`, which a run calls at its end, releases all graphs and their pool, which holds attention's
               outputs and temporary tensors.

    python -m llama2_lora.train --preset tiny --variant graph_layer
    python -m llama2_lora.train --preset bench --variant graph_layer --steps 20

On several GPUs each trains on windows of its own (data parallel), or with --cp on a part of each window:

    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph_layer
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph_layer --cp 2
"""

from common.config import parse
from llama2_lora.config import ABOUT, PRESETS, Config
from llama2_lora.variants import VARIANTS

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("llama2_lora", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial

from common.script.main import main

# CUDA graphs that share memory. Without a GPU it makes host graphs, which record operators and run them again.
from common.capture.pool import Pool

# The harness. section: names a part of the step in a profile. mark: does nothing in timed steps and in captures. Where
# the host's launch time is measured, the host waits for the GPU at each mark, for its queue holds some 1,000 launches.
# Capture: what a run reports of a capture. warm_up: three eager steps. main: the loop, timing, checks.
from common.measuring.marks import mark, section
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
    if state.kind != "handwritten":  # --layer te or torch
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
            stack.backward(layer)  # from its output's gradient to its input's and its adapters'
            if layer % MARK_EVERY == 0:
                mark()
    mark()


def update(state: State):
    """Reduce, clip and apply the adapters' gradients, update FP8 scales: the loop's last line."""
    with section("reduction"):
        state.adapters.collect()  # from bf16 grads to FP32 main_grad
        state.reduce_gradients()  # over the ranks
    with section("optimizer"):
        state.adam.step()  # AdamW: clips, updates FP32 masters, copies them to the adapters. Its rate is on the GPU
        state.stack.update_scales()  # FP8 scales, from the largest magnitudes of this step


# ------------------------------------------------------------------------------------------------
# 2. graph_layer: a forward and a backward graph for each layer


class GraphedLayers:
    """The eager step with replays in the place of the layers.

    Nothing is copied between replays: layer l + 1 reads the buffers that layer l writes. All graphs share one pool. A
    forward leaves attention's output there. Once the layer's backward is captured, later captures may use its memory.
    So the graphs must be replayed in the order of their capture, which is that of a step.
    """

    def __init__(self, state: State):
        if state.kind != "handwritten":
            raise Unsupported("graph_layer captures handwritten layers: take --layer handwritten, or graph_step")
        self.state, self.pool = state, Pool(state.device)
        self.capture = Capture(strategy="layer, forward and backward", pools=[self.pool])
        # Libraries allocate and choose kernels at first use, which must not happen in a capture. Warm-up steps train;
        # `state.reset`, which a run calls before its first step, undoes that.
        warm_up(state, self.capture, eager_step)
        stack, layers = state.stack, range(state.config.layers)
        # pool.capture(fn, static) returns (graph, result of fn). Each replay of the graph checks that the tensors of
        # `static`, here filled by load_window, have kept address and shape. Layer 0's forward checks for all graphs.
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
# second by its make_graphed_callables; compile and reduce_overhead are torch.compile's, and graph_parameterized
# launches graphs without a pool on the eager step's memory (other_variants.py).

if __name__ == "__main__":
    main("llama2_lora", args, partial(workload, variants=VARIANTS, eager_step=eager_step))
