"""Llama 3.1: forward and backward of all microbatches of a step in one CUDA graph, a second graph for validation.

The training loop without graphs. The loop is at the end of this file, its body is `eager_step`, or the `step` of a
variant below:

    for step in range(num_steps):
        zero(main_grad)                                       # the gradient of each parameter
        for microbatch in range(num_microbatches):
            hidden = embedding(tokens[microbatch])
            for layer in layers:
                hidden = layer(hidden)
            loss(hidden, targets[microbatch]).backward()      # weight gradients are added to main_grad
        average(main_grad)                                    # over the ranks that hold equal parameters
        clip(main_grad), adam(main_grad)

Captured by `graph_fwd_bwd`, as NVIDIA submits 405B (MLPerf v5.1): the loop over microbatches and the average after it,
with all communication, in ONE graph. FP8 scales are computed inside the layers, so the graph holds them, too. In plain
torch, the capture and a step are:

    with torch.cuda.graph(graph, pool=pool):
        forward_and_backward(state, num_microbatches)         # recorded, not run
    inputs.copy_(batch), zero(main_grad)                      # in a step: eager
    graph.replay()                                            # all microbatches: fills main_grad and the losses
    clip(main_grad), adam(main_grad)                          # eager

Not captured, and why:
    the batch's copy    each batch lies at another host address; a graph always reads the same addresses
    zero(main_grad)     one kernel for each bucket of gradients, so there is little to gain
    clip, Adam          by choice: the learning rate may then be a Python number; a graph would repeat its first value.
                        `graph_step` captures them, with the learning rate on the GPU
    storing the loss    each step stores it at another address; a graph always writes to the same ones
The validation does not run in each step, so it is not in this graph. It has a graph of its own (validation.py).

Copied in      tokens and targets of all microbatches, to state.inputs, by begin_step. A side stream copies, and the
               step's stream waits for it. begin_step also writes each microbatch's share of the loss, 1 / their number.
               Before a replay of the validation, its batch is copied to state.inputs.
Read in time   end_step reads state.microbatch_losses before the next replay overwrites them. Clip and Adam read
               main_grad before the next step zeroes it.
Freed          once a microbatch's backward is recorded, later captures may use the memory of its activations. A run
               ends by releasing all graphs and their pool, and then the communicators that the graphs hold.
All variants keep the same activations for the backward, and compute the others again (--keep, memory/plan.py).

Graphs of layers, and those of a pipeline's microbatches, are in pipeline/stage_graphs.py. other_variants.py has
torch.compile, and eager steps with NaN checks.

    python -m llama31.train --preset tiny --variant graph_fwd_bwd
    python -m llama31.train --preset bench --variant graph_fwd_bwd     # a GPU's share of 405B
    python -m llama31.train --preset full --variant graph_fwd_bwd      # 8B whole on one GPU
    torchrun --standalone --nproc-per-node 2 -m llama31.train --preset tiny --variant graph_fwd_bwd --tp 2
"""

from common.contract import Training, parse, variant
from llama31.config import FACTS, PRESETS, Config, flops_per_step, require_runnable, tokens_per_step

if __name__ == "__main__":
    # Before torch is imported and before ranks meet: --help and mistakes are answered at once.
    args = parse("llama31", Config, PRESETS, require=require_runnable, **FACTS)

import torch

# section: names a part of the step in a profile. mark: does nothing in timed steps and in captures. Where the host's
# launch time is measured, the host waits for the GPU at each mark, for its queue holds some 1,000 launches.
from common.measuring.marks import mark, section
from common.session import session
from common.training.flops import CAUSAL_HALF, peak_flops
from common.training.parallel import collectives
from llama31.device import card, resolve
from llama31.pipeline import stage as pipeline
from llama31.state import State, hyperparameters
from llama31.validation import GraphedValidation, validate

# ------------------------------------------------------------------------------------------------
# 1. The training that all variants share


def build(config: Config, device: torch.device, ranks) -> Training:
    # The kind of layer and the precision that run here, as many layers as fit, and what they keep for their backward.
    config, notes = resolve(config, ranks.preset, device, ranks.world_size)
    state, data_ranks = State(config, device, ranks.rank, ranks.world_size), config.ranks(ranks.world_size).dp
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Training(
        state=state,
        config=config,
        results=state.read_losses,
        grad_norms=state.read_grad_norms,
        named_state=state.named_state,
        reset=state.reset,
        batch_class=state.batch_class,
        evaluate=state.evaluate,
        items=tokens_per_step(config),
        unit="tokens",
        flops=flops_per_step(config),
        flops_convention=CAUSAL_HALF,
        peak_flops=peak_flops(gpu, config.precision),
        card=card(config, device, data_ranks),
        notes=notes,
        hyperparameters=hyperparameters(config, data_ranks),
    )


# ------------------------------------------------------------------------------------------------
# 2. The eager step. The baseline `eager` runs it as it is.


@variant(
    "eager",
    kind="eager",
    help="kernels launched one by one",
    parity="bitwise",
    headline=True,
    builds=("", "validate", "torch_bf16", "parameterized"),
)
def eager_step(state: State, index: int):
    """One training step. Nothing in it waits for the device."""
    count = state.begin_step(index)  # copies all microbatches to state.inputs, zeroes main_grad
    forward_and_backward(state, count)
    state.end_step(index)  # clips, Adam, keeps loss and gradient norm
    if state.validates(index):  # --validate-every
        validate(state)  # the mean loss of a held-out batch


def forward_and_backward(state: State, count: int):
    """All microbatches of a step, and the gradients' average over ranks: `graph_fwd_bwd` captures this function."""
    if state.config.pp > 1:
        pipeline.forward_and_backward(state, count)  # the same, in the order of a pipeline's schedule
    else:
        for microbatch in range(count):
            train_microbatch(state, microbatch)
    with section("reduction"):
        state.reduce_gradients()


def train_microbatch(state: State, microbatch: int):
    with section("forward"):
        hidden = state.embedding(state.inputs["tokens"][microbatch])
        # Weights change once a step, so only the first microbatch casts them to FP8.
        hidden = state.run_layers(hidden, first=microbatch == 0)
    with section("loss"):
        loss = state.microbatch_loss(hidden, microbatch)  # kept in state.microbatch_losses
    mark()
    with section("backward"):
        loss.backward()  # adds to main_grad, see llama31/model.py
    mark()


# ------------------------------------------------------------------------------------------------
# 3. One graph over all microbatches


@variant(
    "graph_fwd_bwd",
    kind="graph",
    help="NVIDIA's submission: forward and backward of all microbatches, with their communication, in one graph",
    graphs=2,  # and the validation's
    replays=lambda c: c.replays(1),
    parity="bitwise",
    headline=True,
    builds=("", "validate"),
    formerly="graph",
)
class GraphedPass:
    """One graph for forward and backward of all microbatches, and one for the validation.

    They share a pool to save memory. They may, for they never run at the same time, and losses and main_grad, which are
    read after a replay, lie outside the pool.
    """

    def __init__(self, state: State, capture):
        self.state, self.count, self.capture = state, state.num_microbatches(0), capture
        # A pool makes graphs that share memory. Without a GPU they record operators and run them again.
        self.pool = capture.pool()
        # Libraries allocate and communicators connect at first use, which must not happen in a capture. Warm-up steps
        # train; `state.reset`, which a run calls before its first step, undoes that. Nothing can be captured on the
        # default stream, so the harness runs everything on another one.
        capture.warm_up(eager_step)
        with capture.timed("warmup_s"):
            # Before the first capture, which empties the allocator's cache: no memory of an eager pass lies beside the
            # graphs'.
            pipeline.forward_only(state)
        barrier()  # a rank that captures sends nothing, so no other may still wait for it
        with capture.capturing():
            self.graphs = self.capture_training()
            self.validation = GraphedValidation(state, self.pool)
        barrier()

    def capture_training(self) -> list:
        # Weights, main_grad, losses and state.inputs lie outside the pool and never move. pool.capture(fn, static)
        # returns (graph, result of fn). Each replay checks that `static`, here state.inputs, kept address and shape.
        graph, _ = self.pool.capture(lambda: forward_and_backward(self.state, self.count), self.state.static)
        return [graph]

    def step(self, index: int):
        """`eager_step` with one replay in the place of all microbatches."""
        count = self.state.begin_step(index)
        self.replay(count)
        self.update(index)  # also copies the losses, before the next replay overwrites them
        if self.state.validates(index):
            self.validation.run()

    def replay(self, count: int):
        if count != self.count:
            raise ValueError(
                f"a step of {count} microbatches, the graph holds {self.count}: it must be captured again, which took "
                f"{self.capture.capture_s:.1f} s and {self.pool.bytes() / 2**30:.2f} GiB; take --microbatches {count}, "
                "or --variant graph_microbatch, whose graphs are replayed as often as asked"
            )
        with section("replay"):
            self.graphs[0].replay()
        mark()

    def update(self, index: int):
        self.state.end_step(index)

    def evaluate(self) -> float:
        """The validation, for a log: by its graph."""
        return self.validation.evaluate()

    def replays_of(self, index: int) -> int:
        return 1 + self.state.validates(index)


def barrier():
    if collectives.group_size() > 1:
        torch.distributed.barrier()


# ------------------------------------------------------------------------------------------------
# 4. More in the graph, and less


@variant(
    "graph_step",
    kind="graph",
    help="graph_fwd_bwd, with clipping and Adam in it",
    graphs=2,
    replays=lambda c: c.replays(1),
    parity="bitwise",
    headline=True,
    formerly="full_step",
)
class GraphedStep(GraphedPass):
    """Clipping and Adam in the graph as well: the host copies the batch, zeroes main_grad, replays and keeps the loss.

    Learning rate, Adam's count of steps and the gradient norm are on the device, where a replay reads them. With
    several ranks the graph holds the norm's reduction too, and with ZeRO the gathering of the parameters.
    """

    def capture_training(self) -> list:
        graph, _ = self.pool.capture(lambda: training_step(self.state, self.count), self.state.static)
        return [graph]

    def update(self, index: int):
        self.state.end_step(index, update=nothing)


def training_step(state: State, count: int):
    forward_and_backward(state, count)
    state.update()


def nothing():
    """The graph has clipped and applied the gradients."""


@variant(
    "graph_microbatch",
    kind="graph",
    help="a graph per microbatch, forward and backward",
    graphs=lambda c: c.microbatches + 1,
    replays=lambda c: c.replays(c.microbatches),
    parity="bitwise",
    formerly="chunk",
    when=lambda c: c.pp == 1,
)
class GraphedMicrobatches(GraphedPass):
    """A graph per microbatch: a step of fewer microbatches (--ramp) replays fewer of them, none is captured again.

    Each replay reads its share of the loss, 1 / the number of microbatches in this step, from the GPU (state.share).
    """

    def capture_training(self) -> list:
        state, graphs = self.state, []
        for microbatch in range(state.config.microbatches):
            # The lambda is called at once, so it reads this microbatch.
            graph, _ = self.pool.capture(lambda: train_microbatch(state, microbatch), state.static)  # noqa: B023
            graphs.append(graph)
        return graphs

    def replay(self, count: int):
        for graph in self.graphs[:count]:
            with section("replay"):
                graph.replay()
            mark()
        with section("reduction"):
            self.state.reduce_gradients()

    def replays_of(self, index: int) -> int:
        return self.state.num_microbatches(index) + self.state.validates(index)


# ------------------------------------------------------------------------------------------------
# 5. The loop. A variant's `step` is all that it runs.

if __name__ == "__main__":
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)
