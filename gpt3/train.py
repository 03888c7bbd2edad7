"""GPT-3 175B, one GPU's share: a CUDA graph for each layer's forward and backward in each microbatch.

The training loop without graphs. The loop is at the end of this file, its body is `eager_step`:

    for step in range(num_steps):
        zero(main_grads)                                      # FP32 gradients, less those that microbatch 0 overwrites
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer(hidden)
            loss(hidden, targets[microbatch]).backward()      # adds to main_grads, or overwrites them
        all_reduce(main_grads), clip(main_grads), adam(parameters, main_grads)

Captured by `graph_layer`: every `layer(hidden)` and its backward; at bench 8 layers x 4 microbatches x 2 = 64 graphs.
They share memory, a pool, and are replayed in the order of this loop. The layers are nearly all of the work. NVIDIA
captured the same (MLPerf v4.1, 11,616 GPUs), for a pipeline: there several microbatches are between their forward and
their backward at a time, so each has its graphs. So many cost little: in one run of Llama 2 the 160 graphs of layers
were as fast as one graph of the step (docs/nvidia_rules.md, "Too many small graphs").

In plain torch, the capture of one layer, and a microbatch of a step with it as the only layer:

    torch.cuda.set_stream(torch.cuda.Stream())                # before all else: captures cannot use the default stream
    x, grad_y = torch.zeros_like(embedding(tokens)).requires_grad_(), torch.zeros_like(embedding(tokens))
    layer(x).backward(grad_y)                                 # warm-up: libraries allocate and choose kernels
    x.grad = None                                             # so the capture makes x.grad in the pool
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.current_stream()}
    with torch.cuda.graph(forward, **shared):
        y = layer(x)                                          # recorded, not run
    with torch.cuda.graph(backward, **shared):
        y.backward(grad_y)                                    # recorded, too: fills x.grad and adds to main_grads
    # If you keep plain p.grad, the graph adds to the buffer that the warm-up made: zero it in place, never to None.

    embedded = embedding(tokens)                              # in a step
    x.detach().copy_(embedded.detach())
    forward.replay()                                          # y now holds layer(embedded)
    hidden = y.detach().requires_grad_()                      # eager autograd begins here ...
    loss(hidden, targets).backward()
    grad_y.copy_(hidden.grad)
    backward.replay()                                         # x.grad now holds the gradient of embedded
    embedded.backward(x.grad)                                 # ... and goes on here

For more layers: `h = y.detach().requires_grad_()` is the next layer's x. Capture all forwards, then the backwards from
the last layer to the first, each with the next layer's x.grad as its grad_y. Replay in this order.

Not captured, and why:
    the batch's copy              each batch lies at another host address; a graph always reads the same addresses
    embedding, final norm, loss   a few kernels a microbatch, so there is little to gain; autograd runs them
    FP8 scale updates             one update for all layers at the end of a pass, not one a layer; see `eager_step`
    zero(main_grads)              a few kernels a step, so there is little to gain
    all-reduce over data ranks    one launch for each bucket, which is a flat buffer of many gradients
    clipping, Adam                a few kernels for all parameters; `graph_layer_optimizer` captures them, too
    storing the loss              each step stores it at another address; a graph always writes to the same ones
There is no dropout, so no graph draws random numbers.

Copied in      the embedding's output to x, and the gradient of the loss to grad_y. All else is read where it lies.
Read in time   all microbatches share x and grad_y: the graphs of one read them before the next one is copied in. Each
               microbatch has its y and grad_x: loss and embedding's backward read them before the next step. Adam and
               `keep_results` read main_grads and the gradient norm before the next step.
Reused         by later captures: the memory of a layer's activations, once the layer's backward is captured, but not
               that of y and grad_x, to which `Microbatch` refers.
Freed          at the end of a run `session` calls reset() of every graph and drops the variant, with y and grad_x. That
               gives the pool back.

The step is the same on several data and tensor ranks: the collectives of --tp are in the layers, and so in the graphs.
For a pipeline, stage.py and stage_graphs.py in gpt3/pipeline declare another `eager` and `graph_layer`; `when` selects
by the config. Graphs of Transformer Engine and torch.compile are in other_variants.py, Megatron-Core's in megatron.py.

    python -m gpt3.train --preset tiny --variant graph_layer
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph_layer         # data parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph_layer --tp 2  # tensor parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny_pp --variant graph_layer      # a pipeline
"""

from gpt3.config import FACTS, PRESETS, Config, card, step_flops
from graph_worth import Training, parse, variant

if __name__ == "__main__":
    args = parse("gpt3", Config, PRESETS, **FACTS)  # before torch is imported: --help and mistakes are answered at once

from functools import partial
from typing import NamedTuple

import torch

from common.flops import CAUSAL_HALF, peak_flops
from gpt3.state import State, resolve

# A Pool holds graphs that share memory; without a GPU host graphs stand in for them. section names a part of the step
# in a profile, at a mark the harness times the host. In a capture both do nothing.
from graph_worth import Capture, Pool, mark, section, session

# ------------------------------------------------------------------------------------------------
# 1. The eager step. The baseline `eager` runs it as it is.


# Registers the step for command line and harness (docs/reading_a_script.md). Skip at first reading.
@variant(
    "eager",
    kind="eager",
    help="kernels launched one by one",
    parity="bitwise",
    headline=True,
    builds=("", "torch_bf16"),
    when=lambda c: c.is_plain,
)
def eager_step(state: State, index: int):
    """Train on batch `index`. Nothing in it waits for the GPU.

    fp8.forward() and fp8.backward(): layers inside compute in FP8, and the scales of all layers are updated once in
    each block. Other precisions have no such update.
    """
    state.begin_step(index)  # copies the batch to state.inputs; zeroes main_grads that microbatch 0 does not overwrite
    for microbatch in range(state.config.microbatches):
        with section("embedding"):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        with section("forward"), state.fp8.forward():
            for layer in state.layers:
                # Microbatch 0 casts the weights to FP8, since they change once a step, and overwrites the main_grads
                # of weight matrices where the layer's own backward writes them.
                hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        loss = state.microbatch_loss(hidden, microbatch)  # cross-entropy / microbatches; also added to state.loss
        mark()
        with section("backward"), state.fp8.backward():
            loss.backward()  # each gradient is written or added to its main_grad by kernels (gpt3/model.py)
        mark()
    with section("optimizer"):
        state.reduce_gradients()  # all-reduces main_grads
        state.adam.step()  # clips the gradients, too
    state.keep_results(index)  # loss and gradient norm


# ------------------------------------------------------------------------------------------------
# 2. graph_layer: the same step with its layers captured


class Microbatch(NamedTuple):
    """Graphs of one microbatch in order of replay. The forward ones end by writing y, the backward ones grad_x."""

    forward: list
    y: torch.Tensor
    backward: list
    grad_x: torch.Tensor


@variant(
    "graph_layer",
    kind="graph",
    help="our own forward and backward graphs per layer and microbatch, one pool, buffers chained",
    graphs=lambda c: c.layer_passes,  # 2 x layers x microbatches
    parity="bitwise",
    headline=True,
    formerly="graph",
    when=lambda c: c.is_plain,
)
class GraphedLayers:
    """A forward and a backward graph for each layer in each microbatch, all in one pool.

    A capture may use memory that earlier captures have freed: the activations of a microbatch lie where those of the
    one before lay. That is safe because the order of replays is the order of captures. The forwards of a microbatch
    are captured before its backwards, so its activations stay allocated until then. Weights, FP8 copies of them,
    main_grads and FP8 scales lie outside the pool and never move.
    """

    def __init__(self, state: State, capture: Capture):
        self.state, self.pool = state, capture.pool()  # the pool: memory that the graphs share
        capture.warm_up(eager_step)  # three steps, which train; `session` undoes that, in place, before step 0
        self.x = torch.zeros_like(state.embedding(state.inputs["tokens"][0])).requires_grad_()
        self.grad_y = torch.zeros_like(self.x)  # static buffers: layer 0 reads x, the last layer's backward grad_y
        self.microbatches = []
        # capturing() counts the block's seconds and memory. fp8.capturing(): layers in FP8, no update of scales.
        with capture.capturing(), state.fp8.capturing():
            for microbatch in range(state.config.microbatches):
                forward, saved, y = capture_forward(state.layers, self.pool, self.x, microbatch)
                backward, grad_x = capture_backward(self.pool, saved, self.grad_y)
                self.microbatches.append(Microbatch(forward, y, backward, grad_x))

    def step(self, index: int):
        """`eager_step`, with replays in place of the layers."""
        state = self.state
        state.begin_step(index)
        for microbatch, graphs in enumerate(self.microbatches):
            with section("embedding"):
                embedded = state.embedding(state.inputs["tokens"][microbatch])
                self.x.detach().copy_(embedded.detach())
            with section("forward"), state.fp8.forward():
                replay(graphs.forward)
            hidden = graphs.y.detach().requires_grad_()  # a new leaf each step, so hidden.grad starts empty
            loss = state.microbatch_loss(hidden, microbatch)
            mark()
            with section("backward"):
                loss.backward()  # fills hidden.grad and ends there: y was detached
                self.grad_y.copy_(hidden.grad)
                # Eager Transformer Engine updates the scales by Python in a module's backward. A replay runs no Python,
                # so here the end of the block does it. fp8.forward() always does it at its end.
                with state.fp8.backward(replayed=True):
                    replay(graphs.backward)  # the graphs also fill main_grads
                embedded.backward(graphs.grad_x)
            mark()
        with section("optimizer"):
            state.reduce_gradients()
            self.update()
        state.keep_results(index)

    def update(self):
        self.state.adam.step()


def replay(graphs):
    for graph in graphs:
        graph.replay()


def capture_forward(layers, pool: Pool, x, microbatch: int, is_chained: bool = False):
    """Capture the forward of each layer. Buffers are chained: a layer's output is the next layer's static input.

    pool.capture(fn, static) is the `with torch.cuda.graph(...)` block at the top of this file: it records fn's launches
    and returns (graph, fn's result). `static`: what the step fills; each replay checks that it kept address, shape and
    strides. x: [s / tp, b, hidden], the first layer's input. is_chained: an earlier graph fills x (a pipeline's
    chunks). Returns the graphs in order, (input, output) of each layer for `capture_backward`, and the last output.
    """
    graphs, saved, hidden, static = [], [], x, () if is_chained else (x,)
    for layer in layers:
        graph, output = pool.capture(partial(layer, hidden, is_first_microbatch=microbatch == 0), static)
        graphs.append(graph)
        saved.append((hidden, output))
        # detach: the next layer's backward ends at its input, so each layer's backward is a graph of its own.
        hidden, static = output.detach().requires_grad_(), ()  # (): the step fills only the first layer's input
    return graphs, saved, hidden.detach()


def capture_backward(pool: Pool, saved, grad_y, is_chained: bool = False):
    """Capture the backward of each layer, the last layer first. Buffers are chained as in `capture_forward`.

    saved: from `capture_forward`. A captured backward frees what autograd saved, and the popped input and output were
    the last references, but for y. Returns the graphs in order of replay, and the gradient of the first layer's input.
    """
    graphs, grad, static = [], grad_y, () if is_chained else (grad_y,)
    while saved:
        graph, grad = pool.capture(partial(input_gradient, *saved.pop(), grad), static)
        graphs.append(graph)
        static = ()
    return graphs, grad


def input_gradient(x, output, grad):
    """Return x's gradient, and fill main_grads.

    Some by the layer's own backward, in place; the others by hooks that add p.grad to main_grad and set p.grad to None.
    Hooks run in backward() but not in autograd.grad. Both launch kernels, so the capture records them.
    """
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


# ------------------------------------------------------------------------------------------------
# 3. graph_layer_optimizer: clipping and Adam in one more graph


@variant(
    "graph_layer_optimizer",
    kind="graph",
    help="graph_layer, with clipping and Adam in a graph of their own",
    graphs=lambda c: c.layer_passes + 1,
    parity="bitwise",
    formerly="graph_opt",
    when=lambda c: c.is_plain,
)
class GraphedLayersOptimizer(GraphedLayers):
    """Adam's count of steps, gradient norm and learning rate, which is constant here, are on the GPU. A schedule would
    fill `state.adam.lr` before the step. With --zero1 adam.step also all-reduces, so that is captured.
    """

    def __init__(self, state: State, capture: Capture):
        super().__init__(state, capture)
        # Captured last because replayed last: it may use memory that the layers' graphs no longer need.
        with capture.capturing():
            self.optimizer, _ = self.pool.capture(state.adam.step)

    def update(self):
        self.optimizer.replay()


# ------------------------------------------------------------------------------------------------
# 4. Build and loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset,
# and after the loop releases the graphs and their pool. run.step is the variant's step.


def build(config: Config, device: torch.device, ranks) -> Training:
    parts = config.ranks(ranks.world_size)
    config, notes = resolve(config, device, parts.dp)  # the kind of layer that runs here, as many layers as fit
    if config.layer == "megatron":
        from gpt3.megatron import megatron_state

        state = megatron_state(config, device)
    else:
        state = State(config, device, ranks.rank, ranks.world_size)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        items=config.sequence * config.microbatch * config.microbatches // (parts.tp * parts.pp),
        unit="tokens",
        flops=step_flops(config),
        flops_convention=CAUSAL_HALF,
        peak_flops=peak_flops(gpu, config.precision),
        card=card(config, parts.dp, on_gpu=device.type == "cuda"),
        notes=notes,
    )


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
