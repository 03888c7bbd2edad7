"""Llama 2 70B LoRA: a CUDA graph for the forward and one for the backward of every layer, or one for the whole step.

The loop that is trained, without graphs:

    for step in range(num_steps):
        tokens, targets, weights = window(step)                     # one packed sequence, from host memory
        hidden = embedding(tokens)
        for layer in layers:
            hidden = layer(hidden)
        loss = sum(weights * cross_entropy(head(hidden), targets))  # weights: 0 if masked, else 1 / unmasked tokens
        gradient = d loss / d hidden
        for layer in reversed(layers):
            gradient = layer.backward(gradient)                     # base weights are frozen: adapters' gradients only
        all_reduce(gradients), clip(gradients), adamw(adapters), update(fp8_scales)

The layers are written by hand (`--layer handwritten`, layers/handwritten.py): two functions each, forward and backward,
that call kernels on preallocated buffers, without autograd. The 69 billion base weights are frozen, so a backward only
has to compute the adapters' gradients and the gradient of its layer's input. It reads five tensors of the forward, and
each of them may be computed again. So all 80 layers fit on one GPU of 141 GB, at 8192 tokens too. No tensor moves
between steps, so a capture needs no copies. The same script also runs two kinds of modules under autograd:
Transformer Engine's (`--layer te`) and plain PyTorch's (`--layer torch`).

Captured:
    graph_layer   each layer's forward and backward: 160 graphs for 80 layers, in one pool of memory
    graph_step    the whole loop body but for the window's copy: one graph

Not captured, and why:
    the window's copy          every window lies at another host address, and a graph reads from fixed ones
    embedding, head and loss   graph_layer only: a few kernels
    the loop's last line       graph_layer: a few kernels on flat buffers. graph_step captures it on one rank; with
                               several it stays eager after the replay, as it is one all-reduce for the whole step

A capture comes to

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        stack.forward(layer)                # kernels are recorded, none runs
    graph.replay()                          # later, each step: the same kernels on the same memory

Each replay reads the static window, the weights, adapters and FP8 scales, and draws dropout from a count of steps on
the device. It overwrites the adapters' gradients and the largest magnitudes (for the next FP8 scales); the replay of
graph_step also overwrites loss, gradient norm, adapters, moments and scales. Loss and gradient norm must be read before
the next step: `state.keep_loss` copies them. The activations' memory belongs to the pool until `close` releases it.

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

from common.capture.pool import Pool  # of torch.cuda.CUDAGraphs; without a GPU of host graphs, which record operators
from common.measuring.marks import mark, section  # places where the host is timed; ranges in a profile
from common.script.main import main
from common.variant import Capture, warm_up
from llama2_lora.state import State
from llama2_lora.workload import workload

# ------------------------------------------------------------------------------------------------
# 1. The eager step. The baseline `eager` runs it as it is: common.variant.Eager warms up and calls it.


def eager_step(state: State, index: int):
    """Train on window `index`. Nothing in it waits for the GPU."""
    state.load_window(index)  # copies tokens, targets, mask, positions and bounds of documents into static buffers
    forward_and_backward(state)
    update(state)
    state.keep_loss(index)


def forward_and_backward(state: State):
    """Compute the loss of the loaded window, stack.loss, and the adapters' gradients, adapters.grads."""
    stack = state.stack
    with section("embedding"):
        stack.embed()
    with section("forward"):
        stack.forward_all()  # for layer in range(layers): stack.forward(layer)
    mark()
    with section("loss"):
        stack.head()  # final norm, logits, cross-entropy, gradient of the last layer's output
    with section("backward"):
        stack.backward_all()  # for layer in reversed(range(layers)): stack.backward(layer)
    mark()


def update(state: State):
    """The loop's last line."""
    with section("reduction"):
        state.adapters.collect()  # from bf16 grads to FP32 main_grad
        state.reduce_gradients()  # over the ranks
    with section("optimizer"):
        state.adam.step()  # clips, updates FP32 masters, copies them to the adapters; reads its rate on the GPU
        state.stack.update_scales()


# ------------------------------------------------------------------------------------------------
# 2. graph_layer: a forward and a backward graph for each layer


class GraphedLayers:
    """The eager step with replays in the place of the layers.

    A replay copies nothing: layer l + 1 reads the buffer that layer l writes. All graphs share one pool. Attention's
    output lies in the pool; the other tensors that handwritten layers keep lie in fixed buffers outside. Modules under
    autograd have everything that they keep in the pool.
    """

    def __init__(self, state: State):
        self.state, stack, layers = state, state.stack, range(state.config.layers)
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="layer, forward and backward", pools=[self.pool])
        # Libraries allocate and choose kernels at first use, which must not be in a graph. Warm-up steps train;
        # `state.reset`, which a run calls before its first step, undoes that.
        warm_up(state, self.capture, eager_step)
        # pool.capture(fn, static): each replay checks that the tensors of `static`, which others fill, have kept
        # address and shape. All layers read one window, so the first graph of a step checks it for all.
        window = tuple(stack.inputs.values())
        # In the order of a step: a backward reads tensors that its forward's capture has left in the pool, and frees
        # them for later captures. In stack.capturing() no update of FP8 scales is captured.
        with self.capture.timed("capture_s"), stack.capturing():
            self.forward = [
                self.pool.capture(partial(stack.forward, layer), () if layer else window)[0] for layer in layers
            ]
            self.backward = [self.pool.capture(partial(stack.backward, layer))[0] for layer in reversed(layers)]

    def step(self, index: int):
        state, stack = self.state, self.state.stack
        state.load_window(index)
        with section("embedding"):
            stack.embed()
        # Transformer Engine updates FP8 scales when the context around its layers ends, so replays need it, too. For
        # other layers it does nothing.
        with section("forward"), stack.replaying_forward():
            for graph in self.forward:
                graph.replay()
        mark()
        with section("loss"):
            stack.head_of_chain()  # head() on the last graph's output, which no autograd graph connects to a layer
        with section("backward"), stack.replaying_backward():
            for graph in self.backward:
                graph.replay()
        mark()
        update(state)
        state.keep_loss(index)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers

    def close(self):
        self.pool.release()


# ------------------------------------------------------------------------------------------------
# 3. graph_step: one graph


class GraphedStep:
    """Everything after the window's copy in one graph; with several ranks, everything up to the adapters' gradients."""

    def __init__(self, state: State):
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="the whole step", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self.captures_update = state.world_size == 1
        # Not in stack.capturing(): this graph holds the updates of the FP8 scales.
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
# 4. All variants, declared in variants.py
#
#     eager, eager_te            eager_step above
#     graph_layer                GraphedLayers
#     graph_step                 GraphedStep
#     graph_layer_te             other_variants.py: Transformer Engine's make_graphed_callables
#     compile, reduce_overhead   other_variants.py: torch.compile
#
# eager_te and graph_layer_te run Transformer Engine's layers, the other variants those of --layer.

if __name__ == "__main__":
    main("llama2_lora", args, partial(workload, variants=VARIANTS, eager_step=eager_step))
