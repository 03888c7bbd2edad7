"""A step in the order of a pipeline's schedule (1F1B): this rank's stage runs microbatches forward and backward and
exchanges activations and gradients with the stages beside it. Nothing waits for the host, so all of it can be captured.

state: a llama31.state.State. step: 1 or -1, the forward or backward pass of a microbatch (common/training/schedule.py).
"""

import functools

import torch

from common.measuring.marks import mark, section
from common.training.parallel import collectives
from common.training.schedule import communications, numbered, order


class Called:
    """A stage's passes, kernels launched one by one. stage_graphs.py has the same methods by replays."""

    def __init__(self, state):
        self.state, self._saved = state, {}

    def buffer(self, step: int, microbatch: int):
        """Return the buffer that receives an activation (step 1) or a gradient (step -1)."""
        return self.state.empty_hidden()

    def forward(self, microbatch: int, hidden):
        """Return the activation for the next stage, or the loss. hidden: received, None for the first stage."""
        x = None if hidden is None else hidden.requires_grad_()
        output = run_stage(self.state, microbatch, x)
        self._saved[microbatch] = x, output
        return output.detach()

    def backward(self, microbatch: int, gradient):
        """Return the gradient for the previous stage. gradient: received, None for the last stage."""
        hidden, output = self._saved.pop(microbatch)
        with section("backward"):
            output.backward(gradient)
        return None if hidden is None else hidden.grad


def run_stage(state, microbatch: int, hidden):
    """This stage's output, or the loss. hidden: its input, None for the first stage."""
    with section("forward"):
        if hidden is None:
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        hidden = state.run_layers(hidden, microbatch == 0)
    if state.head is None:
        return hidden
    with section("loss"):
        return state.microbatch_loss(hidden, microbatch)


@functools.cache
def schedule(pp: int, stage: int, count: int):
    """(steps with their microbatches, what is exchanged before each of them and after all)."""
    return numbered(order(pp, stage, 1, count)), communications(pp, stage, 1, count)


def forward_and_backward(state, count: int, passes=None) -> None:
    """Add the gradients of `count` microbatches to main_grad, as llama31/train.py does without a pipeline."""
    passes = passes or Called(state)
    steps, exchanges = schedule(state.config.pp, state.place.stage, count)
    made, received = {}, {}
    # Entry i is exchanged before step i, the last one after all of them.
    for transfers, step in zip(exchanges, [*steps, None], strict=True):
        _exchange(state, transfers, passes, made, received)
        if step is None:
            break
        run = passes.forward if step[0] > 0 else passes.backward
        made[step] = run(step[1], received.pop(step, None))
        mark()


def _exchange(state, transfers, passes, made, received):
    """Send and receive in one batch: outputs forward, gradients of inputs backward."""
    sent, destinations, arriving, sources = [], [], [], []
    for transfer in transfers:
        key = transfer.step, transfer.microbatch
        if transfer.sends:
            sent.append(made.pop(key))
            destinations.append(transfer.peer)
        else:
            received[key] = passes.buffer(*key)
            arriving.append(received[key])
            sources.append(transfer.peer)
    with section("pipeline"):
        collectives.exchange_(sent, destinations, arriving, sources, state.groups.pipeline)


@torch.no_grad()
def forward_only(state) -> None:
    """The validation: each microbatch through all stages, or this process alone, into state.validation_losses."""
    pp, stage, group = state.config.pp, state.place.stage, state.groups.pipeline
    with section("validation"):
        for microbatch in range(state.config.microbatches):
            if state.embedding is not None:
                hidden = state.embedding(state.inputs["tokens"][microbatch])
            else:
                hidden = state.empty_hidden()
                collectives.exchange_(received=[hidden], sources=[(stage - 1) % pp], group=group)
            hidden = state.run_layers(hidden, microbatch == 0)
            if state.head is not None:
                state.keep_validation_loss(hidden, microbatch)
            else:
                collectives.exchange_([hidden], [(stage + 1) % pp], group=group)
