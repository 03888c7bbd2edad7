"""Llama 3.1: forward and backward of all microbatches of a step in one CUDA graph, a second graph for validation.

The training loop without graphs, as the loop at the end of this file and `eager_step` run it:

    for step in range(num_steps):
        zero(main_grad)                                       # the gradient of each parameter
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer(hidden)
            loss(hidden, targets[microbatch]).backward()      # weight gradients are added to main_grad
        average(main_grad)                                    # over the ranks that hold equal parameters
        clip(main_grad), adam(main_grad)

main_grad is a buffer that every parameter has in the place of .grad. Its dtype is --main-grad, the backward adds to it
in place, and it lies in a bucket: a flat buffer that holds many main_grads, so few collectives average them all. If you
keep plain .grad, allocate it before the capture and zero it in place: zero_grad(set_to_none=False).

Read this for the technique: at bench the GPU is the limit. In an eager step of 478.8 ms an H100 is busy for 472.8 ms
(llama31/README.md), so no graph of its kernels gains more than 1.013x. On our hosts graph_step gained 1.00 to 1.01x.
Which to choose: graph_step if each step has equally many microbatches, graph_microbatch if their number changes, and
graph_fwd_bwd if the host reads the gradient norm.

Captured by `graph_fwd_bwd`, as NVIDIA submits 405B (MLPerf v5.1): the loop over microbatches and the average after it,
with all communication, in ONE graph. FP8 scales are computed inside the layers, so it holds them, too. In plain torch:

    torch.cuda.set_stream(torch.cuda.Stream())                # before all else: captures cannot use the default stream
    for index in range(3): eager_step(state, index)           # warm-up: libraries allocate and choose kernels
    graph = torch.cuda.CUDAGraph()                            # thread_local: NCCL's threads may call CUDA meanwhile
    shared = {"stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}
    with torch.cuda.graph(graph, **shared):
        forward_and_backward(state, state.num_microbatches(0))                  # recorded, not run
    state.reset()                                             # undoes the warm-up in place, since graphs hold addresses
    for index in range(num_steps):
        state.begin_step(index)                               # eager: batch to state.inputs, zero main_grad
        graph.replay()                                        # all microbatches: fills main_grad and the losses
        state.update(), state.end_step(index)                 # eager: clip, adam; stores the loss

`graph_step` captures `training_step(state, ...)` in its place, without `state.update()` in the loop.

Not captured, and why:
    the batch's copy    each batch lies at another host address; a graph always reads the same addresses
    zero(main_grad)     one call over all buckets, so there is little to gain
    clip, Adam          eager code may read the norm (--clip host). `graph_step` captures both, with the learning rate
                        on the GPU. In plain torch: Adam(capturable=True), lr a tensor, its state made by the warm-up
    storing the loss    each step stores it at another address; a graph always writes to the same ones
The validation does not run in each step, so it is not in this graph. It has a graph of its own (validation.py).

Copied in      tokens and targets of all microbatches, to state.inputs, by begin_step, on the step's stream; so is the
               validation's batch. begin_step also fills state.share, what a microbatch's loss counts for (section 1).
Read in time   end_step reads state.microbatch_losses before the next replay overwrites them, and the gradient norm
               before the next update does. Clip and Adam read main_grad before the next step zeroes it. The validation
               has losses of its own.
Reused         once a microbatch's backward is recorded, later microbatches, also in graphs of their own, and the
               validation's graph reuse the memory of its activations. These graphs may share a pool, in any order of
               replay, since they never run at the same time and nothing in the pool is read after a replay.
Freed          at the end of a run `session` calls reset() of all graphs, which gives their pool back, and then ends the
               communicators that the graphs hold.
All variants keep the same activations for the backward, and compute the others again (--keep, memory/plan.py).
In a pipeline (--pp), `graph_fwd_bwd` captures the whole schedule of a stage, sends and receives too. `graph_layer`, its
halves `graph_attn` and `graph_mlp`, and a pipeline's `graph_microbatch`, are in pipeline/stage_graphs.py; torch.compile
and NaN checks in other_variants.py.

    python -m llama31.train --preset tiny --variant graph_fwd_bwd
    python -m llama31.train --preset bench --variant graph_fwd_bwd     # a GPU's share of 405B
    python -m llama31.train --preset full --variant graph_fwd_bwd      # 8B whole on one GPU
    torchrun --standalone --nproc-per-node 2 -m llama31.train --preset tiny --variant graph_fwd_bwd --tp 2
"""

from graph_worth import Training, parse, variant
from llama31.config import FACTS, PRESETS, Config, flops_per_step, require_runnable, tokens_per_step

if __name__ == "__main__":
    args = parse("llama31", Config, PRESETS, require=require_runnable, **FACTS)  # --help comes before torch's import

from functools import partial

import torch

from common.flops import CAUSAL_HALF, peak_flops

# section names a part of the step in a profile, at a mark the harness times the host. In a capture both do nothing.
from graph_worth import Capture, mark, section, session
from graph_worth.parallel import collectives
from llama31.device import card, resolve
from llama31.pipeline import stage as pipeline
from llama31.state import State
from llama31.validation import GraphedValidation, validate

# ------------------------------------------------------------------------------------------------
# 1. Build. State makes once, and never moves, all that eager code and graphs share:
#     state.inputs                tokens and targets int64 [microbatches, s, b]: the static inputs, of validation too
#     state.share                 FP32: what a microbatch's loss counts for, 1 / number of microbatches
#     weights, main_grad          of layers, embedding and head; main_grad lies in state.buckets
#     state.adam                  FP32 masters, moments, gradient norm, count of steps and learning rate
#     state.microbatch_losses, state.validation_losses            FP32 [microbatches]


def build(config: Config, device: torch.device, ranks) -> Training:
    config, notes = resolve(config, ranks.preset, device, ranks.world_size)  # what runs here, and fits
    if config.layer == "megatron":
        from llama31.megatron import megatron_state

        state, more = megatron_state(config, device), {}
    else:
        state = State(config, device, ranks.rank, ranks.world_size)  # all of the above
        notes, more = [*notes, *state.notes], {"batch_class": state.batch_class}
    data_ranks = config.ranks(ranks.world_size).dp
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        items=tokens_per_step(config),
        unit="tokens",
        flops=flops_per_step(config),
        flops_convention=CAUSAL_HALF,
        peak_flops=peak_flops(gpu, config.precision),
        card=card(config, device, data_ranks),
        notes=notes,
        **more,
    )


# ------------------------------------------------------------------------------------------------
# 2. The eager step. The baseline `eager` runs it as it is. @variant registers it for the command line and the harness
# (graph_worth/contract.py, docs/reading_a_script.md): skip @variant at first reading.


@variant(
    "eager",
    kind="eager",
    help="kernels launched one by one",
    parity="bitwise",
    headline=True,
    builds=("", "validate", "torch_bf16", "nvfp4_emulated"),
    when=lambda c: c.layer != "megatron",
)
def eager_step(state: State, index: int):
    """One training step. The host waits for the GPU only with --clip host or --nan-checks; losses are read later."""
    count = state.begin_step(index)  # copies all microbatches to state.inputs, fills share, zeroes main_grad
    training_step(state, count)
    state.end_step(index)  # stores loss and gradient norm
    if state.validates(index):  # --validate-every
        validate(state)  # the mean loss of a held-out batch


def training_step(state: State, count: int):
    """From state.inputs to new weights: `graph_step` captures this function."""
    forward_and_backward(state, count)
    state.update()  # clips, Adam, writes the weights


def forward_and_backward(state: State, count: int):
    """All microbatches of a step, and the gradients' average over ranks: `graph_fwd_bwd` captures this function."""
    if state.config.pp > 1:
        pipeline.forward_and_backward(state, count)  # this stage's part, in the order of the schedule
    else:
        for microbatch in range(count):
            train_microbatch(state, microbatch)
    state.reduce_gradients()


def train_microbatch(state: State, microbatch: int):
    """Add a microbatch's gradients to main_grad: `graph_microbatch` captures this function."""
    with section("forward"):
        hidden = state.embedding(state.inputs["tokens"][microbatch])
        # Weights change once a step, so only the first microbatch casts them to FP8. Forward and backward of all
        # microbatches read the FP8 copies, which are allocated before the captures. --weights fp8 needs no casts.
        hidden = state.run_layers(hidden, first=microbatch == 0)
    with section("loss"):
        loss = state.microbatch_loss(hidden, microbatch)  # kept in state.microbatch_losses
    mark()
    with section("backward"):
        loss.backward()  # adds to main_grad, see llama31/model.py
    mark()


# ------------------------------------------------------------------------------------------------
# 3. Three variants. `captured` lists functions, with a graph for each, and `rest` those that a step calls eagerly after
# the replays. All read and write the buffers of section 1, so no tensor goes in or out.


@variant(
    "graph_fwd_bwd",
    kind="graph",
    help="NVIDIA's submission: forward and backward of all microbatches, with their communication, in one graph",
    graphs=2,  # training, validation
    replays=lambda c: c.replays(1),
    parity="bitwise",
    headline=True,
    builds=("", "validate"),
    formerly="graph",
    when=lambda c: c.layer != "megatron",
)
def graphed_pass(state: State, capture: Capture):
    """A replay reads state.inputs, state.share and weights, and writes main_grad and state.microbatch_losses."""
    count = state.num_microbatches(0)  # one graph holds one number: `replay` refuses a step of another
    return GraphedTraining(state, capture, [partial(forward_and_backward, state, count)], rest=[State.update])


@variant(
    "graph_step",
    kind="graph",
    help="graph_fwd_bwd, with clipping and Adam in it",
    graphs=2,
    replays=lambda c: c.replays(1),
    parity="bitwise",
    headline=True,
    formerly="full_step",
    when=lambda c: c.layer != "megatron",
)
def graphed_step(state: State, capture: Capture):
    """A replay also writes weights, masters, moments, gradient norm and count of steps, and reads the learning rate.

    The rate is constant: state.reset writes it, in place. A schedule would write it before each replay. With several
    ranks the graph holds the norm's reduction too. --clip host cannot be captured.
    """
    return GraphedTraining(state, capture, [partial(training_step, state, state.num_microbatches(0))], rest=[])


@variant(
    "graph_microbatch",
    kind="graph",
    help="a graph per microbatch, forward and backward",
    graphs=lambda c: c.microbatches + 1,
    replays=lambda c: c.replays(c.microbatches),
    parity="bitwise",
    formerly="chunk",
    when=lambda c: c.pp == 1 and c.layer != "megatron",
)
def graphed_microbatches(state: State, capture: Capture):
    """A graph per microbatch, up to --microbatches. A step of fewer (--ramp) replays only the first graphs.

    The number of replays may change, so the average after them stays eager. It is a few launches.
    """
    captured = [partial(train_microbatch, state, microbatch) for microbatch in range(state.config.microbatches)]
    return GraphedTraining(state, capture, captured, rest=[State.reduce_gradients, State.update])


class GraphedTraining:
    """A step by graphs, and one more graph for the validation. They share a pool to save memory."""

    def __init__(self, state: State, capture: Capture, captured, rest):
        self.state, self.rest, self.count, self.capture = state, rest, state.num_microbatches(0), capture
        self.pool = capture.pool()  # memory that the graphs share; without a GPU the graphs are host graphs
        capture.warm_up(eager_step)  # three steps; communicators connect. `session` calls state.reset before step 0
        with capture.timed("warmup_s"):
            # Warm-up for the validation's pass without gradients. The first capture empties the allocator's cache,
            # since graphs cannot use that memory. An eager pass after the first capture would fill the cache again.
            pipeline.forward_only(state)
        barrier()  # a rank that captures sends nothing, so no other may still wait for it
        with capture.capturing():  # counts the seconds and the memory of this block
            self.capture_training(captured)
            self.validation = GraphedValidation(state, self.pool)
        barrier()  # no rank starts a step, with its communication, while another still captures

    def capture_training(self, captured):
        # pool.capture(fn, static) is the docstring's `with torch.cuda.graph(...)`: it records fn's launches and returns
        # (graph, fn's result). Each replay checks that the tensors of static (here state.inputs) kept address, shape
        # and strides. A replay also reads state.share, unchecked: begin_step fills it in place.
        self.graphs = [self.pool.capture(function, self.state.static)[0] for function in captured]

    def step(self, index: int):
        """`eager_step` with replays in the place of what they hold."""
        count = self.state.begin_step(index)
        self.replay(count)
        for function in self.rest:
            function(self.state)
        self.state.end_step(index)
        if self.state.validates(index):
            self.validation.run()

    def replay(self, count: int):
        if len(self.graphs) == 1 and count != self.count:
            raise ValueError(
                f"a step of {count} microbatches, the graph holds {self.count}: it must be captured again, which took "
                f"{self.capture.capture_s:.1f} s and {self.pool.bytes() / 2**30:.2f} GiB; take --microbatches {count}, "
                "or --variant graph_microbatch, whose graphs are replayed as often as asked"
            )
        for graph in self.graphs[:count]:  # the one, or one for each microbatch
            with section("replay"):
                graph.replay()
            mark()

    def evaluate(self) -> float:
        """The validation, for a log: by its graph."""
        return self.validation.evaluate()

    def replays_of(self, index: int) -> int:
        return min(len(self.graphs), self.state.num_microbatches(index)) + self.state.validates(index)


def barrier():
    if collectives.group_size() > 1:
        torch.distributed.barrier()


# ------------------------------------------------------------------------------------------------
# 4. Clipping and Adam alone


@variant(
    "graph_optimizer",
    kind="graph",
    help="clipping and Adam in one graph, beside an eager forward and backward",
    graphs=1,
    parity="bitwise",
    traits={"part": "clipping and Adam"},
    when=lambda c: c.layer != "megatron",
)
class GraphedOptimizer:
    """A replay reads main_grad, and writes weights, masters, moments, gradient norm and count of steps."""

    def __init__(self, state: State, capture: Capture):
        self.state, pool = state, capture.pool()
        capture.warm_up(eager_step)
        barrier()
        with capture.capturing():
            self.graph, _ = pool.capture(state.update, tuple(state.buckets.flats))
        barrier()

    def step(self, index: int):
        state = self.state
        forward_and_backward(state, state.begin_step(index))
        with section("optimizer"):
            self.graph.replay()
        state.end_step(index)
        if state.validates(index):
            validate(state)


# ------------------------------------------------------------------------------------------------
# 5. The loop. session builds, makes the variant of --variant (which warms up and captures), calls state.reset, and
# after the loop releases the graphs and their pool. `make bench` calls run.step itself, and times these calls alone.


if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
