"""A step in the order of a pipeline's schedule (1F1B): this rank's stage runs microbatches forward and backward and
exchanges activations and gradients with the stages beside it. Nothing waits for the host, so all of it can be captured.

state: a llama31.state.State.
"""

import torch

from common import collectives
from common.marks import mark, section
from common.schedule import communications, numbered, order


def forward_and_backward(state, count: int) -> None:
    """What llama31/train.py does for one stage alone: gradients of `count` microbatches into main_grad."""
    pp, stage = state.config.pp, state.place.stage
    steps = numbered(order(pp, stage, 1, count))
    inputs, outputs, received, gradients = {}, {}, {}, {}
    # Entry i is exchanged before step i, the last one after all of them.
    for transfers, step in zip(communications(pp, stage, 1, count), [*steps, None], strict=True):
        _exchange(state, transfers, inputs, outputs, received, gradients)
        if step is None:
            break
        forward, microbatch = step[0] > 0, step[1]
        if forward:
            inputs[microbatch], outputs[microbatch] = _forward(state, microbatch, received.pop(microbatch, None))
        else:
            gradient = gradients.pop(microbatch, None)
            with section("backward"):
                # The last stage's output is the loss.
                outputs.pop(microbatch).backward(gradient)
        mark()


def _forward(state, microbatch, hidden):
    """(what came in, what goes out or the loss) of a microbatch on this stage; hidden: received, None on the first."""
    with section("forward"):
        first = hidden is None
        hidden = state.embedding(state.inputs["tokens"][microbatch]) if first else hidden.requires_grad_()
        output = state.run_layers(hidden, first=microbatch == 0)
    if state.head is None:
        return hidden, output
    with section("loss"):
        return hidden, state.microbatch_loss(output, microbatch)


def _exchange(state, transfers, inputs, outputs, received, gradients):
    """Send and receive in one batch: outputs forward, gradients of inputs backward."""
    sent, destinations, arriving, sources = [], [], [], []
    for transfer in transfers:
        microbatch = transfer.microbatch
        if transfer.sends:
            # The gradient of an input is ready, and its activations are no longer needed.
            sent.append(outputs[microbatch].detach() if transfer.step > 0 else inputs.pop(microbatch).grad)
            destinations.append(transfer.peer)
        else:
            place = received if transfer.step > 0 else gradients
            place[microbatch] = state.empty_hidden()
            arriving.append(place[microbatch])
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
