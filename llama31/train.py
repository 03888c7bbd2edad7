"""Llama 3.1: forward and backward of all microbatches of a step in one CUDA graph, a second graph for validation.

The training loop without graphs. `main`, called at the end of this file, runs it. Its body is `eager_step`, or the
`step` of a variant below:

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
Freed          once a microbatch's backward is recorded, later captures may use the memory of its activations. `close`,
               which a run calls at its end, releases all graphs and their pool.
All variants keep the same activations for the backward, and compute the others again (--keep, memory/plan.py).

    python -m llama31.train --preset tiny --variant graph_fwd_bwd
    python -m llama31.train --preset bench --variant graph_fwd_bwd     # a GPU's share of 405B
    python -m llama31.train --preset full --variant graph_fwd_bwd      # 8B whole on one GPU
    torchrun --standalone --nproc-per-node 2 -m llama31.train --preset tiny --variant graph_fwd_bwd --tp 2
"""

from common.config import parse
from llama31.config import ABOUT, PRESETS, Config, require_runnable
from llama31.variants import VARIANTS

if __name__ == "__main__":
    # Before torch is imported: --help, --describe and mistakes are answered at once.
    args = parse("llama31", Config, PRESETS, VARIANTS, about=ABOUT)

from functools import partial

import torch
from common.script.main import main

# Pool: CUDA graphs that share memory. Without a GPU it makes host graphs, which record operators and run them again.
# Capture: what a run reports of a capture. warm_up_all: three eager steps and a validation. section: names a part of
# the step in a profile. mark: does nothing in timed steps and in captures. Where the host's launch time is measured,
# the host waits for the GPU at each mark, for its queue holds some 1,000 launches. main: the loop, timing, checks.
from common.capture.pool import Pool
from common.measuring.marks import mark, section
from common.training.parallel import collectives
from common.variant import Capture
from llama31.pipeline import stage as pipeline
from llama31.state import State
from llama31.validation import GraphedValidation, validate, warm_up_all
from llama31.workload import workload

# ------------------------------------------------------------------------------------------------
# 1. The eager step. The baseline `eager` runs it as it is.


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
# 2. One graph over all microbatches


class Graphed:
    """One graph for forward and backward of all microbatches, and one for the validation.

    They share a pool to save memory. They may, for they never run at the same time, and losses and main_grad, which are
    read after a replay, lie outside the pool.
    """

    strategy = "forward and backward of all microbatches; validation"

    def __init__(self, state: State):
        self.state, self.count = state, state.num_microbatches(0)
        self.pool = Pool(state.device)
        self.capture = Capture(strategy=self.strategy, pools=[self.pool])
        # Libraries allocate and communicators connect at first use, which must not happen in a capture. Warm-up steps
        # train; `state.reset`, which a run calls before its first step, undoes that. Nothing can be captured on the
        # default stream, so the harness runs everything on another one.
        warm_up_all(state, self.capture, eager_step)
        barrier()  # a rank that captures sends nothing, so no other may still wait for it
        with self.capture.timed("capture_s"):
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

    def close(self):
        """Before the process group ends: the graphs hold its communicators."""
        self.pool.release()


def barrier():
    if collectives.group_size() > 1:
        torch.distributed.barrier()


# ------------------------------------------------------------------------------------------------
# 3. More in the graph, and less


class GraphedStep(Graphed):
    """Clipping and Adam in the graph as well: the host copies the batch, zeroes main_grad, replays and keeps the loss.

    Learning rate, Adam's count of steps and the gradient norm are on the device, where a replay reads them. With
    several ranks the graph holds the norm's reduction too, and with ZeRO the gathering of the parameters.
    """

    strategy = "forward and backward of all microbatches, clipping and Adam; validation"

    def capture_training(self) -> list:
        graph, _ = self.pool.capture(lambda: forward_backward_update(self.state, self.count), self.state.static)
        return [graph]

    def update(self, index: int):
        self.state.end_step(index, update=nothing)


def forward_backward_update(state: State, count: int):
    forward_and_backward(state, count)
    state.update()


def nothing():
    """The graph has clipped and applied the gradients."""


class GraphedMicrobatches(Graphed):
    """A graph per microbatch: a step of fewer microbatches (--ramp) replays fewer of them, none is captured again.

    Each replay reads its share of the loss, 1 / the number of microbatches in this step, from the GPU (state.share).
    """

    strategy = "a microbatch, forward and backward; validation"

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


# 4. All variants, declared in variants.py
#
#     eager                           eager_step above, run by common.variant.Eager
#     graph_fwd_bwd, graph_step       Graphed, GraphedStep
#     graph_microbatch                GraphedMicrobatches; in a pipeline pipeline/stage_graphs.py
#     graph_layer                     pipeline/stage_graphs.py: each layer in each microbatch
#     compile, reduce_overhead        other_variants.py: torch.compile; eager_nan_checks as well

if __name__ == "__main__":
    main("llama31", args, partial(workload, variants=VARIANTS, eager_step=eager_step), require_runnable)
