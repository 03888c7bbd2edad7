"""Llama 2 70B LoRA: a CUDA graph for the forward and one for the backward of every layer, or one for the whole step.

What is trained, without graphs:

    for step in range(n):
        tokens, targets, share_of_loss = window(step)       # one sequence, packed with documents
        hidden = embedding(tokens)
        for layer in layers:
            hidden = layer(hidden)
        gradient = d loss(head(hidden), targets, share_of_loss) / d hidden
        for layer in reversed(layers):
            gradient = layer.backward(gradient)             # weights are frozen: only adapters' gradients are kept
        average(adapters.gradients); clip(); adamw(); fp8_scales()

The loss is the sum over tokens of share_of_loss times cross-entropy; the share of a masked token is 0, that of each
other token 1 / their number.

`graph` captures each layer's forward and backward, 160 graphs for 80 layers. It leaves eager: the window's copy (each
window lies at another address of the host's memory), embedding, head and loss (a few kernels), and the last line of the
loop (a few kernels on flat buffers). Of these only the window's copy must be eager.
`one_graph` captures everything after the window's copy. On one rank nothing else stays out. On several ranks the last
line runs eagerly after the replay: NCCL could be captured, as in stable_diffusion, but this is a single all-reduce.

A replay reads the window, frozen weights, adapters, FP8 scales, and what dropout draws from: a count of steps on the
device (lean layers) or torch's generator (modules). It writes the adapters' gradients and the largest magnitudes that
the next FP8 scales are made from. The replay of `one_graph` also writes the loss and, on one rank, reads the learning
rate and updates adapters, FP32 masters, moments and scales. All of these lie outside the pool.

    python -m llama2_lora.train --preset tiny --variant graph
    python -m llama2_lora.train --preset bench --variant graph --record runs/graph.r1.json
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph      # data parallel
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph --cp 2
"""

from common.config import parse
from llama2_lora import config as lora_config
from llama2_lora.config import ABOUT, FP8, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("llama2_lora", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial

import torch

from common import flops

# A pool of CUDA graphs; without a GPU, of host graphs, which record operators and run them again. In
# pool.capture(fn, static), `static` are tensors that fn reads and that a step overwrites before the replay; each replay
# checks that their address, shape, strides and dtype are those of the capture.
from common.capture import Pool
from common.main import main

# They launch nothing in a timed step. section: a part of the step that a measuring pass times. mark: a place where one
# may wait for the GPU, needed every 800 launches. A replay is one launch, so `one_graph` has no marks.
from common.marks import mark, section
from common.variant import Capture, Eager, Workload, warm_up
from llama2_lora import variants
from llama2_lora.resolve import card, kind_of_layers, resolve
from llama2_lora.state import State, hyperparameters

# ------------------------------------------------------------------------------------------------
# 1. The eager step. state.stack has the layers: written by hand (lean.py), or modules under autograd (modules.py).


def eager_step(state: State, index: int):
    """Train on window `index`. Nothing here waits for the device: loss and gradient norm stay there."""
    state.load_window(index)
    forward_and_backward(state)
    update(state)
    state.note(index)


def forward_and_backward(state: State):
    """Compute the loss of the window in the static buffers, and the adapters' gradients, in adapters.grads."""
    stack = state.stack
    with section("embedding"):
        stack.embed()
    with section("forward"):
        stack.forward_all()
    mark()
    with section("loss"):
        stack.head()
    with section("backward"):
        stack.backward_all()
    mark()


def update(state: State):
    """Average the gradients over the ranks in FP32, clip them, update the FP32 masters by AdamW and the FP8 scales."""
    with section("reduction"):
        state.adapters.collect()  # from bf16 grads to FP32 main_grad
        state.reduce_gradients()
    with section("optimizer"):
        state.adam.step()  # clips; reads the learning rate on the device, where a schedule could change it
        state.stack.update_scales()


# The baseline `eager` is common.variant.Eager: it warms up, then runs eager_step, which launches kernels one by one.

# ------------------------------------------------------------------------------------------------
# 2. A forward and a backward graph for each layer


class Graphed:
    """The eager step with a replay where a layer was called. A replay copies nothing: what layer l writes is the buffer
    that layer l + 1 reads. All graphs share one pool. Of what a layer keeps for its backward, lean layers have only
    attention's output in the pool, and all else in fixed buffers; modules under autograd have all of it in the pool.
    """

    def __init__(self, state: State):
        variants.require_kept(state)
        self.state, stack, layers = state, state.stack, range(state.config.layers)
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="layer, forward and backward", pools=[self.pool])
        # Warm-up steps train; `state.reset`, which common/measure.py calls before it measures, undoes that.
        warm_up(state, self.capture, eager_step)
        # All layers read the same window: it is enough that the first graph of a step checks it.
        window = tuple(stack.inputs.values())
        # Captured in the order of a step, since a backward reads what its forward's capture has kept in the pool. In
        # stack.capturing() no update of FP8 scales is captured.
        with self.capture.timed("capture_s"), stack.capturing():
            self.forward = [
                self.pool.capture(partial(stack.forward, layer), () if layer else window)[0] for layer in layers
            ]
            self.backward = [self.pool.capture(partial(stack.backward, layer))[0] for layer in reversed(layers)]
        # From now on the memory for attention's output belongs to the pool. The eager steps that these graphs are
        # checked by compute attention again in the backward, with the same bits; the variant `eager` need not.
        stack.keeps_attention = False

    def step(self, index: int):
        state, stack = self.state, self.state.stack
        state.load_window(index)
        with section("embedding"):
            stack.embed()
        # Transformer Engine updates its FP8 scales when the context around its layers ends, so replays need it, too.
        # For other layers it does nothing.
        with section("forward"), stack.replaying_forward():
            for graph in self.forward:
                graph.replay()
        mark()
        with section("loss"):
            # The same loss, of the last graph's output buffer, which autograd does not connect to a layer.
            stack.head_of_chain()
        with section("backward"), stack.replaying_backward():
            for graph in self.backward:
                graph.replay()
        mark()
        update(state)
        state.note(index)

    def replays_of(self, index: int) -> int:
        return 2 * self.state.config.layers

    def close(self):
        self.pool.release()
        self.state.stack.keeps_attention = True


# ------------------------------------------------------------------------------------------------
# 3. One graph


class OneGraph:
    """Everything after the window's copy in one graph; on several ranks, all up to the adapters' gradients."""

    def __init__(self, state: State):
        variants.require_kept(state)
        self.state = state
        self.pool = Pool(state.device)
        self.capture = Capture(strategy="the whole step", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self.captures_update = state.world_size == 1
        # Not in stack.capturing(): this graph holds the updates of the FP8 scales.
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(self._captured, tuple(state.stack.inputs.values()))
        state.stack.keeps_attention = False  # as in Graphed

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
        self.state.note(index)

    def replays_of(self, index: int) -> int:
        return 1

    def close(self):
        self.pool.release()
        self.state.stack.keeps_attention = True


# Transformer Engine's own graphs and torch.compile are in variants.py. eager_te and graph_te are declared in config.py
# to have Transformer Engine's layers; the other variants have those of --layer.
MAKE_VARIANT = {
    "eager": partial(Eager, step=eager_step),
    "graph": Graphed,
    "one_graph": OneGraph,
    "eager_te": partial(Eager, step=eager_step),
    "graph_te": partial(variants.GraphedByTransformerEngine, step=eager_step),
    "compile": partial(variants.compiled, step=eager_step, mode="default"),
    "reduce_overhead": partial(variants.compiled, step=eager_step, mode="reduce-overhead"),
}

# ------------------------------------------------------------------------------------------------
# Main


def workload(args, device, rank, world_size):
    """(arguments as they can run on this device, what is measured)"""
    args, notes = resolve(args, device, world_size)
    config, kind = args.config, kind_of_layers(args)
    count = lora_config.flops_per_step(config)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return args, Workload(
        model="llama2_lora",
        build=lambda config, device: State(config, device, kind, rank, world_size),
        variants=MAKE_VARIANT,
        reference=eager_step,
        card=card(config, kind, device),
        notes=notes,
        flops_per_step=count,
        flops_convention=flops.CAUSAL_HALF,
        items_per_step=config.tokens,
        unit="tokens",
        peak_flops=flops.peak_flops(gpu, "fp8" if config.precision in FP8 else "bf16"),
        hyperparameters=hyperparameters(config, config.ranks(world_size).dp),
        kinds=ABOUT["kinds"],
        promises=ABOUT["promises"],
    )


if __name__ == "__main__":
    main("llama2_lora", args, workload)
