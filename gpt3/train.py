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

Captured: every `layer(hidden)` and its backward, 2 x layers x microbatches graphs. They share memory, a pool, and are
replayed in the order of this loop. The layers are nearly all of the work. NVIDIA captured the same (MLPerf v4.1, 11,616
GPUs). In plain torch, one layer's capture and replays in one microbatch are:

    x, grad_y = torch.zeros_like(hidden).requires_grad_(), torch.zeros_like(hidden)
    pool, forward, backward = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):              # warm-up: libraries allocate and choose kernels
        torch.cuda.synchronize(), layer(x).backward(grad_y)
    x.grad = None                                             # so the capture makes x.grad in the pool
    with torch.cuda.graph(forward, pool=pool):
        y = layer(x)                                          # recorded, not run
    with torch.cuda.graph(backward, pool=pool):
        y.backward(grad_y)                                    # recorded, too: fills x.grad and main_grads
    x.detach().copy_(hidden.detach()), forward.replay()       # in a step: y then holds layer(hidden)
    grad_y.copy_(gradient), backward.replay()                 # x.grad then holds the gradient of hidden
    del forward, backward                                     # frees the pool for torch once no tensor of it is alive

Not captured, and why:
    the batch's copy              each batch lies at another host address; a graph always reads the same addresses
    embedding, final norm, loss   a few kernels a microbatch, so there is little to gain; autograd runs them
    FP8 scale updates             one update for all layers at the end of a pass, not one a layer; see `eager_step`
    zero(main_grads)              a few kernels a step, so there is little to gain
    all-reduce over data ranks    one launch for each bucket, a flat buffer of many gradients: little to gain
    clipping, Adam                a few kernels for all parameters; `graph_layer_optimizer` captures them, too
    storing the loss              each step stores it at another address; a graph always writes to the same ones
There is no dropout, so no graph draws random numbers.

Copied in      the embedding's output to x, and the gradient of the loss to grad_y. All else is read where it lies.
Read in time   the loss reads y, and the embedding's backward reads grad_x, in the microbatch that wrote them. Adam
               reads main_grads and `keep_results` the gradient norm in the same step. The next step overwrites all.
Freed          once a layer's backward is captured, later captures may use the memory of its activations, but not that
               of y and grad_x: `Microbatch` refers to them. At the end of a run `session` releases graphs and pool.

The step is the same on several data and tensor ranks: the collectives of --tp are in the layers, and so in the graphs.
For a pipeline, stage.py and stage_graphs.py in gpt3/pipeline declare another `eager` and `graph_layer`; `when` selects
by the config. Graphs made by Transformer Engine and by torch.compile are in gpt3/other_variants.py.

    python -m gpt3.train --preset tiny --variant graph_layer
    python -m gpt3.train --preset bench --variant graph_layer --steps 20
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph_layer         # data parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny --variant graph_layer --tp 2  # tensor parallel
    torchrun --standalone --nproc-per-node 2 -m gpt3.train --preset tiny_pp --variant graph_layer      # a pipeline
"""

from common.contract import Training, parse, variant
from gpt3.config import FACTS, FP8, PRESETS, Config, card, step_flops

if __name__ == "__main__":
    args = parse("gpt3", Config, PRESETS, **FACTS)  # before torch is imported: --help and mistakes are answered at once

from functools import partial
from typing import NamedTuple

import torch

# Pool: CUDA graphs that share memory. Without a GPU it makes host graphs, which record operators and run them again.
# section: names a part of the step for --profile. mark: the host may wait here for the GPU while its launch time is
# measured; else a full launch queue (about 1,000 launches) makes it wait elsewhere. Otherwise both do nothing.
from common.capture.pool import Pool
from common.measuring.marks import mark, section
from common.session import session
from common.training.flops import CAUSAL_HALF, peak_flops
from gpt3.state import State, hyperparameters, resolve

# ------------------------------------------------------------------------------------------------
# 1. The training that all variants share


def build(config: Config, device: torch.device, ranks) -> Training:
    data_ranks = config.ranks(ranks.world_size).dp
    config, notes = resolve(config, device, data_ranks)  # the kind of layer that runs here, as many layers as fit
    state = State(config, device, ranks.rank, ranks.world_size)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        evaluate=state.evaluate,
        items=config.sequence * config.microbatch * config.microbatches // (state.ranks.tp * state.ranks.pp),
        unit="tokens",
        flops=step_flops(config),
        flops_convention=CAUSAL_HALF,
        peak_flops=peak_flops(gpu, "fp8" if config.precision in FP8 else config.precision),
        card=card(config, data_ranks, on_gpu=device.type == "cuda"),
        notes=notes,
        hyperparameters=hyperparameters(config, data_ranks),
    )


# ------------------------------------------------------------------------------------------------
# 2. The eager step. The baseline `eager` runs it as it is.


# Registers the step for command line and harness (common/contract.py, docs/reading_a_script.md). Skip at first reading.
@variant(
    "eager",
    kind="eager",
    help="kernels launched one by one",
    parity="bitwise",
    headline=True,
    builds=("", "torch_bf16", "parameterized"),
    when=lambda c: not c.staged,
)
def eager_step(state: State, index: int):
    """Train on batch `index`. Nothing in it waits for the GPU.

    Delayed FP8 scaling updates the scales of all layers once a pass: fp8.forward() at the end of its block. In the
    backward pass Transformer Engine updates by Python code in the first module's backward, emulated FP8 at the end of
    fp8.backward()'s block. A replay runs no Python, so with backward(replayed=True) both update at the end of the
    block. Inside fp8.capturing() no update is recorded. Without delayed scaling there are no updates.
    """
    state.begin_step(index)  # copies the batch to state.inputs; zeroes main_grads that microbatch 0 does not overwrite
    for microbatch in range(state.config.microbatches):
        with section("embedding"):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        with section("forward"), state.fp8.forward():
            for layer in state.layers:
                # Microbatch 0 casts the weights to FP8, since they change once a step. It overwrites the main_grads
                # of the weight matrices of FP8 and Transformer Engine layers; all other gradients are added.
                hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        loss = state.microbatch_loss(hidden, microbatch)  # cross-entropy / microbatches; also added to state.loss
        mark()
        with section("backward"), state.fp8.backward():
            loss.backward()  # gradients go to main_grads, see gpt3/model.py
        mark()
    with section("optimizer"):
        state.reduce_gradients()  # all-reduces main_grads
        state.adam.step()  # clips the gradients, too
    state.keep_results(index)  # loss and gradient norm


# ------------------------------------------------------------------------------------------------
# 3. graph_layer: the same step with its layers captured


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
    when=lambda c: not c.staged,
)
class GraphedLayers:
    """A forward and a backward graph for each layer in each microbatch, all in one pool.

    The order of capture is the order of replay. So a microbatch takes the memory of the activations before it.
    Weights, main_grads and FP8 scales lie outside the pool and never move. A capture needs a side stream. pool.capture
    uses the current stream; torch.cuda.graph would switch. So the whole process runs on a side stream, eager steps too,
    which must not differ (common/measuring/torch_settings.py).
    """

    def __init__(self, state: State, capture):
        self.state, self.pool = state, capture.pool()  # the pool: memory that the graphs share
        # warm_up makes three eager steps on the state: libraries allocate at first use, which must not happen in a
        # capture. `state.reset`, which a run calls before its first step, undoes them in place: graphs hold addresses.
        capture.warm_up(eager_step)
        # Static buffers: layer 0 reads x, the last layer's backward reads grad_y.
        self.x = torch.zeros_like(state.embedding(state.inputs["tokens"][0])).requires_grad_()
        self.grad_y = torch.zeros_like(self.x)
        self.microbatches = []
        with capture.capturing(), state.fp8.capturing():  # the first only counts seconds and memory of the block
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
                with state.fp8.backward(replayed=True):  # new FP8 scales at the end of the block
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
    and returns (graph, fn's result). Each replay checks that the tensors of `static` kept address, shape and strides.
    x: [s / tp, b, hidden], the first layer's input, which the step fills. is_chained: an earlier graph fills x (a
    pipeline's chunks), so there is nothing to check. Returns the graphs in order, (input, output) of each layer for
    `capture_backward`, and the last layer's output.
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

    saved: from `capture_forward`. A layer's activations are free when its pool.capture has returned: backward frees
    what autograd saved, and at most y still refers to the popped output. grad_y: gradient of the last layer's
    output. Returns the graphs in order of replay, and the gradient of the first layer's input.
    """
    graphs, grad, static = [], grad_y, () if is_chained else (grad_y,)
    while saved:
        graph, grad = pool.capture(partial(input_gradient, *saved.pop(), grad), static)
        graphs.append(graph)
        static = ()
    return graphs, grad


def input_gradient(x, output, grad):
    """Return x's gradient, and fill main_grads, in part by hooks, which run in backward() but not in autograd.grad."""
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


# ------------------------------------------------------------------------------------------------
# 4. graph_layer_optimizer: clipping and Adam in one more graph


@variant(
    "graph_layer_optimizer",
    kind="graph",
    help="graph_layer, with clipping and Adam in a graph of their own",
    graphs=lambda c: c.layer_passes + 1,
    parity="bitwise",
    formerly="graph_opt",
    when=lambda c: not c.staged,
)
class GraphedLayersOptimizer(GraphedLayers):
    """Adam's count of steps, the gradient norm and the learning rate are on the GPU, where a replay reads them. The
    learning rate is constant here; a schedule would fill `state.adam.lr` before the step. The all-reduce of the
    gradients (with --zero1 a part of adam.step, so captured) and storing the loss stay eager.
    """

    def __init__(self, state: State, capture):
        super().__init__(state, capture)
        # Captured last because replayed last: it may use memory that the layers' graphs no longer need.
        with capture.capturing():
            self.optimizer, _ = self.pool.capture(state.adam.step)

    def update(self):
        self.optimizer.replay()


# ------------------------------------------------------------------------------------------------
# 5. The loop. run.step is the step of the variant that --variant names.

if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
