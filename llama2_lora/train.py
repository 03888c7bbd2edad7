"""Llama 2 70B LoRA: a CUDA graph for the forward and one for the backward of every layer, or one for the whole step.

The training loop without graphs, as the loop at the end of this file and `eager_step` run it:

    for step in range(num_steps):
        tokens, targets, weights = window(step)                     # one packed sequence, from host memory
        hidden = embedding(tokens)
        for layer in layers:
            hidden = forward(layer, hidden)
        loss = sum(weights * cross_entropy(head(hidden), targets))  # weights: 0 if masked, else 1 / unmasked tokens
        gradient = d loss / d hidden
        for layer in reversed(layers):
            gradient = backward(layer, gradient)                    # and its adapters' gradients
        update(): all_reduce(gradients), clip(gradients), adamw(adapters), FP8 scales

The 69 billion base weights are frozen, so a layer's backward only has to compute its adapters' gradients and the
gradient of its input. For that it reads the layer's input, which is kept, and four more tensors of the forward, which
are kept or computed again. Autograd would keep many more, too many for one GPU. So we wrote a layer's forward and
backward by hand, two functions that call kernels on buffers allocated once, all but attention's output: the
`handwritten` layers (layers/handwritten.py). All 80 fit on one GPU of 80 GB. With modules under autograd see gpt3 for
graphs of each layer, and examples/minimal for one graph of the step.
Which to choose: in one run (docs/nvidia_rules.md) a step took 276.77 ms by graph_layer and 277.09 ms by graph_step. On
one GPU take graph_step: it is one graph, so there is no order of replays to keep.

Captured:
    graph_layer   each layer's forward, from hidden to hidden, and each layer's backward, from grad to grad, all of them
                  buffers: 160 graphs for 80 layers, which share a memory pool
    graph_step    the loop body after the window's copy: one graph. On several ranks it ends with the backward
    Both include the communication in attention (--cp) and of a layer's sums (--tp).

Not captured, and why:
    the window's copy          each window lies at another host address; a graph always reads the same addresses
    embedding, head and loss   in graph_layer: a few kernels, so a graph would save next to nothing
    update                     in graph_layer: it would save as little. On several ranks graph_step leaves it out by
                               choice: an all-reduce can be captured, see stable_diffusion
    storing the loss           each step stores it at another address; a graph always writes to the same addresses

In plain torch, graph_step is:

    torch.cuda.set_stream(torch.cuda.Stream())          # before all else: captures cannot use the default stream
    for index in range(3): eager_step(state, index)     # warm-up: libraries allocate and choose kernels
    graph = torch.cuda.CUDAGraph()                      # thread_local: NCCL's threads may call CUDA meanwhile
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        training_step(state)                            # kernels are recorded, not run. Python runs, once
    state.reset()                                       # undoes the warm-up in place, since graphs hold addresses
    for index in range(num_steps): state.load_window(index), graph.replay(), state.keep_loss(index)

and graph_layer, whose graphs share a pool:

    torch.cuda.set_stream(torch.cuda.Stream())
    for index in range(3): eager_step(state, index)
    stack, layers = state.stack, range(state.config.layers)
    hidden = stack.x[0], None                           # the first layer's input, a buffer, in two summands
    grad = stack.work["grad"], stack.work["grad_operand"]               # the last output's gradient, also quantised
    forward, backward = [], []
    shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.current_stream()}
    shared["capture_error_mode"] = "thread_local"
    for layer in layers:
        forward.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(forward[-1], **shared):
            hidden = stack.forward(layer, *hidden)      # keeps attention's output: no later capture takes its memory
    for layer in reversed(layers):
        backward.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(backward[-1], **shared):
            grad = stack.backward(layer, *grad)         # drops that output: later captures may take its memory
    state.reset()
    for index in range(num_steps):
        state.load_window(index), stack.embed()         # write what the first forward graph reads
        for graph in forward: graph.replay()            # the same kernels on the same memory
        stack.compute_loss(*hidden)                     # reads the last layer's output, writes grad
        for graph in backward: graph.replay()           # in the order of capture
        update(state), state.keep_loss(index)           # read what the graphs wrote

Copied in      the window, with the tokens' weights: `load_window` copies it from host memory into the static inputs,
               buffers that never move. All else a graph reads where it lies: weights, adapters, FP8 scales, optimizer
               state and layers' buffers, which in graph_layer the eager `embed` and `compute_loss` fill, too.
Read in time   `keep_loss` copies loss and gradient norm before the next step overwrites them. Where `update` is eager,
               it reads the adapters' gradients and the largest magnitudes for FP8 before the next replays overwrite
               them. Copies, replays and `update` use one stream, so the GPU keeps their order.
Counted        AdamW's count and learning rate lie on the GPU. A kernel of `adam.step` adds 1 to the count, in replays
               too. `state.reset` writes the rate, which is constant.
Drawn anew     `embed` counts the steps on the GPU. A dropout mask is a hash of that count, so a replay draws new masks.
               Modules (--layer te, torch) draw from torch's generator, whose offset each replay moves on.
Freed          at the end of a run `session` calls reset() of each graph and drops it. That gives back their pool, which
               holds attention's outputs and temporary tensors; with modules also what autograd saved.
Graphs of Transformer Engine's layers, torch.compile, and graphs without a pool are in other_variants.py. Several GPUs
train on windows of their own, or with --cp 2 on parts of each window, or with --tp 2 on parts of each layer.

    python -m llama2_lora.train --preset tiny --variant graph_layer
    torchrun --standalone --nproc-per-node 2 -m llama2_lora.train --preset tiny --variant graph_layer
"""

from graph_worth import Training, parse, variant
from llama2_lora.config import FACTS, PRESETS, Config, flops_per_step

if __name__ == "__main__":
    args = parse("llama2_lora", Config, PRESETS, **FACTS)  # before torch is imported: --help and mistakes at once

from functools import partial

import torch

from common.flops import CAUSAL_HALF, peak_flops

# section names a part of the step in a profile, at a mark the harness times the host. In a capture both do nothing.
from graph_worth import Capture, Unsupported, mark, section, session
from llama2_lora.plan import card
from llama2_lora.state import State, resolve

MARK_EVERY = 16  # layers between two marks: some 400 launches

# ------------------------------------------------------------------------------------------------
# 1. Build. State makes once, and never moves, all that eager code and graphs share. s: tokens of a window.
#     state.inputs       tokens, targets, positions, bounds of documents, and weights of tokens: the static inputs
#     state.stack        frozen weights, FP8 scales, loss, and the buffers of handwritten layers [s, hidden]:
#         x[layer]       a layer's input, kept for its backward, as is what --keep says
#         hidden         a layer's output in two summands, residual and MLP's output: the next layer adds them to x
#         grad           the gradient of a layer's output, also quantised: the backward overwrites it by its input's
#     state.adapters     the trained weights, grads (bf16) and main_grad (FP32), flat buffers
#     state.adam         FP32 masters, moments, gradient norm, count of steps and learning rate


def build(config: Config, device: torch.device, ranks) -> Training:
    kind = ranks.traits.get("layer", config.layer)  # of layers: eager_te sets another than --layer
    config, notes = resolve(config, ranks.preset, kind, device)  # as many layers as fit, and what they keep
    state = State(config, device, kind, ranks.rank, ranks.world_size)  # all of the above
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        finish=state.finish,
        items=config.tokens / config.tp,
        unit="tokens",
        flops=flops_per_step(config),
        flops_convention=CAUSAL_HALF,
        peak_flops=peak_flops(gpu, config.precision),
        card=card(config, kind, on_gpu=device.type == "cuda"),
        notes=[*notes, *state.notes],
    )


# ------------------------------------------------------------------------------------------------
# 2. The eager step. The baselines run it as it is, `eager` on layers of --layer, `eager_te` on Transformer Engine's.
# @variant registers code for command line and harness (docs/reading_a_script.md): skip it at first reading.


@variant(
    "eager_te",
    kind="eager",
    help="eager, with Transformer Engine's modules",
    parity="bitwise",
    reference="eager_te",
    headline=True,
    builds=("te",),
    traits={"layer": "te"},
)
@variant(
    "eager",
    kind="eager",
    help="kernels launched one by one",
    parity="bitwise",
    headline=True,
    builds=("", "torch_bf16", "nvfp4_emulated"),
)
def eager_step(state: State, index: int):
    """Train on window `index`. Nothing in it waits for the GPU: losses are read after the loop."""
    state.load_window(index)  # copies tokens, targets, the tokens' weights, positions and documents' bounds
    training_step(state)
    state.keep_loss(index)  # copies loss and gradient norm to their history on the GPU


def training_step(state: State):
    """From the loaded window to new adapters: on one rank `graph_step` captures it."""
    forward_and_backward(state)
    update(state)


def forward_and_backward(state: State):
    """Overwrite stack.loss and adapters.grads with the loss and the gradients of the loaded window."""
    stack, layers = state.stack, range(state.config.layers)
    if state.kind != "handwritten":  # --layer te or torch: modules under autograd (layers/module_stack.py)
        stack.forward_and_backward()  # zeroes adapters.grads; loss.backward() adds to its views, the .grad tensors
        return
    with section("embedding"):
        hidden = stack.embed()  # counts the step on the GPU, for dropout's masks
    with section("forward"):
        for layer in layers:
            hidden = stack.forward(layer, *hidden)  # overwrites hidden's buffers
            if layer % MARK_EVERY == 0:
                mark()
    mark()
    with section("loss"):
        grad = stack.compute_loss(*hidden)  # final norm, logits, cross-entropy, gradient of the last layer's output
    with section("backward"):
        for layer in reversed(layers):
            grad = stack.backward(layer, *grad)  # in place; also overwrites its part of adapters.grads
            if layer % MARK_EVERY == 0:
                mark()
    mark()


def update(state: State):
    """Reduce, clip and apply the adapters' gradients, make new FP8 scales."""
    with section("reduction"):
        state.adapters.collect()  # from bf16 grads to FP32 main_grad
        state.reduce_gradients()  # sum over the ranks of a layer and a window, mean over windows
    with section("optimizer"):
        state.adam.step()  # AdamW: clips, counts the step, updates FP32 masters, copies them to the adapters
        state.stack.update_scales()  # FP8 scales, from the largest magnitudes of this step


# ------------------------------------------------------------------------------------------------
# 3. graph_layer: a forward and a backward graph for each layer


@variant(
    "graph_layer",
    kind="graph",
    help="a forward and a backward graph per layer, one pool, buffers chained",
    graphs=lambda c: 2 * c.layers,
    parity="bitwise",
    headline=True,
    formerly="graph",
)
class GraphedLayers:
    """The eager step with replays in the place of the layers.

    Nothing is copied between replays: layer l + 1 reads the buffers that layer l writes. All graphs share one pool, and
    they are replayed in the order of their capture, that of a step. That matters for attention's outputs, which lie in
    the pool. Capturing backward(l) drops stack.attended[l], and what is captured next, backward(l - 1), may take its
    memory. Replayed earlier, backward(l - 1) would overwrite what backward(l) still has to read.
    """

    def __init__(self, state: State, capture: Capture):
        if state.kind != "handwritten":
            raise Unsupported("graph_layer captures handwritten layers: take --layer handwritten, or graph_step")
        self.state, pool = state, capture.pool()  # memory that graphs share
        capture.warm_up(eager_step)  # three eager steps on the state; `session` calls state.reset before step 0
        stack, layers = state.stack, range(state.config.layers)
        # pool.capture(fn, static) is the `with torch.cuda.graph(...)` block of the docstring: it records fn's launches
        # and returns (graph, fn's result). Each replay checks that the tensors of `static` kept address, shape and
        # strides. load_window fills them; layer 0's forward, which is replayed first, checks them for all graphs.
        window = tuple(stack.inputs.values())
        self.forward, self.backward = [], []
        hidden, grad = (stack.x[0], None), (stack.work["grad"], stack.work["grad_operand"])  # as in eager
        with capture.capturing():  # counts the seconds and the memory of the block
            for layer in layers:
                graph, hidden = pool.capture(partial(stack.forward, layer, *hidden), window if layer == 0 else ())
                self.forward.append(graph)
            for layer in reversed(layers):
                graph, grad = pool.capture(partial(stack.backward, layer, *grad))
                self.backward.append(graph)
        self.hidden = hidden  # the buffers that the last forward graph writes

    def step(self, index: int):
        state, stack = self.state, self.state.stack
        state.load_window(index)
        with section("embedding"):
            stack.embed()  # writes x[0], which the first forward graph reads
        with section("forward"):
            for graph in self.forward:
                graph.replay()
        mark()
        with section("loss"):
            stack.compute_loss(*self.hidden)  # writes grad, which the first backward graph reads
        with section("backward"):
            for graph in self.backward:  # captured from the last layer to the first
                graph.replay()
        mark()
        update(state)
        state.keep_loss(index)


# ------------------------------------------------------------------------------------------------
# 4. graph_step: one graph


@variant(
    "graph_step",
    kind="graph",
    help="the whole step in one graph: all layers, loss, clipping and AdamW",
    graphs=1,
    parity="bitwise",
    headline=True,
    formerly="one_graph",
)
class GraphedStep:
    """All from the embedding to the update in one graph; on several ranks the update is eager, after the replay."""

    def __init__(self, state: State, capture: Capture):
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)
        captured = training_step if state.world_size == 1 else forward_and_backward
        with capture.capturing():
            self.graph, _ = pool.capture(partial(captured, state), tuple(state.stack.inputs.values()))

    def step(self, index: int):
        self.state.load_window(index)
        with section("replay"):
            self.graph.replay()
        if self.state.world_size > 1:
            update(self.state)
        self.state.keep_loss(index)


# ------------------------------------------------------------------------------------------------
# 5. The loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset, and
# after the loop releases the graphs and their pool. `make bench` calls run.step itself, and times these calls alone.


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
