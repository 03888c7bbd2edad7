"""A step in the order of a pipeline's schedule (1F1B): this rank's stage runs microbatches forward and backward and
exchanges activations and gradients with the stages beside it. Nothing waits for the host, so all of it can be captured.

state: a llama31.state.State.
"""

import torch

from common import collectives
from common.marks import mark, section
from common.schedule import communications, numbered, order


class Called:
    """A stage's passes, kernels launched one by one. llama31/stage_graphs.py has the same methods by replays."""

    def __init__(self, state):
        self.state, self._saved = state, {}

    def buffer(self, step: int, microbatch: int):
        """What an activation (step 1) or a gradient (step -1) is received into."""
        return self.state.empty_hidden()

    def forward(self, microbatch: int, hidden):
        """What goes to the next stage, or the loss. hidden: received, None on the first stage."""
        state = self.state
        with section("forward"):
            first = hidden is None
            hidden = state.embedding(state.inputs["tokens"][microbatch]) if first else hidden.requires_grad_()
            output = state.run_layers(hidden, first=microbatch == 0)
        if state.head is not None:
            with section("loss"):
                output = state.microbatch_loss(output, microbatch)
        self._saved[microbatch] = hidden, output
        return output.detach()

    def backward(self, microbatch: int, gradient):
        """What goes to the stage before. gradient: received, None on the last stage, whose output is the loss."""
        hidden, output = self._saved.pop(microbatch)
        with section("backward"):
            output.backward(gradient)
        return hidden.grad


def forward_and_backward(state, count: int, passes=None) -> None:
    """What llama31/train.py does for one stage alone: gradients of `count` microbatches into main_grad."""
    pp, stage = state.config.pp, state.place.stage
    passes = passes or Called(state)
    steps = numbered(order(pp, stage, 1, count))
    made, received = {}, {}
    # Entry i is exchanged before step i, the last one after all of them.
    for transfers, step in zip(communications(pp, stage, 1, count), [*steps, None], strict=True):
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
    """The validation: each microbatch through all stages, its loss kept on the last one."""
    stage, group = state.place.stage, state.groups.pipeline
    for microbatch in range(state.config.microbatches):
        if stage == 0:
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        else:
            hidden = state.empty_hidden()
            collectives.exchange_(received=[hidden], sources=[stage - 1], group=group)
        hidden = state.run_layers(hidden, first=microbatch == 0)
        if state.head is None:
            collectives.exchange_([hidden], [stage + 1], group=group)
        else:
            state.keep_validation_loss(hidden, microbatch)
