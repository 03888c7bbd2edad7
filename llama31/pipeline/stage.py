"""A step in the order of a pipeline's schedule (1F1B, interleaved with --chunks): this rank's stage runs microbatches
forward and backward and exchanges activations and gradients with the stages beside it. Nothing waits for the host, so
all of it can be captured.

state: a llama31.state.State. step, chunk: as in common/training/schedule.py; chunks count from 1.
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
        """Return the buffer that receives an activation (step +chunk) or a gradient (step -chunk)."""
        return self.state.empty_hidden()

    def forward(self, chunk: int, microbatch: int, hidden):
        """Return the activation for the next stage, or the loss. hidden: received, None for a chunk with embedding."""
        x = None if hidden is None else hidden.requires_grad_()
        output = run_chunk(self.state, chunk, microbatch, x)
        self._saved[chunk, microbatch] = x, output
        return output.detach()

    def backward(self, chunk: int, microbatch: int, gradient):
        """Return the gradient for the previous stage. gradient: received, None for a chunk with the loss."""
        hidden, output = self._saved.pop((chunk, microbatch))
        with section("backward"):
            output.backward(gradient)
        return None if hidden is None else hidden.grad


def run_chunk(state, chunk: int, microbatch: int, hidden):
    """A chunk's output, or the loss. hidden: its input, None for a chunk with the embedding."""
    with section("forward"):
        if hidden is None:
            hidden = state.embedding(state.inputs["tokens"][microbatch])
        hidden = state.run_layers(hidden, microbatch == 0, chunk)
    if not state.is_last(chunk):
        return hidden
    with section("loss"):
        return state.microbatch_loss(hidden, microbatch)


@functools.cache
def schedule(pp: int, stage: int, chunks: int, count: int):
    """(steps with their microbatches, what is exchanged before each of them and after all)."""
    return numbered(order(pp, stage, chunks, count)), communications(pp, stage, chunks, count)


def forward_and_backward(state, count: int, passes=None) -> None:
    """Add the gradients of `count` microbatches to main_grad, as llama31/train.py does without a pipeline."""
    passes = passes or Called(state)
    steps, exchanges = schedule(state.config.pp, state.place.stage, state.config.chunks, count)
    made, received = {}, {}
    # Entry i is exchanged before step i, the last one after all of them.
    for transfers, step in zip(exchanges, [*steps, None], strict=True):
        _exchange(state, transfers, passes, made, received)
        if step is None:
            break
        run = passes.forward if step[0] > 0 else passes.backward
        made[step] = run(abs(step[0]), step[1], received.pop(step, None))
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
    """The validation: each microbatch through all chunks of all stages, or of this process alone.

    Losses go into state.validation_losses behind the last chunk.
    """
    pp, stage, group = state.config.pp, state.place.stage, state.groups.pipeline
    with section("validation"):
        for microbatch in range(state.config.microbatches):
            for chunk in range(1, state.config.chunks + 1):
                if state.is_first(chunk):
                    hidden = state.embedding(state.inputs["tokens"][microbatch])
                else:
                    hidden = state.empty_hidden()
                    collectives.exchange_(received=[hidden], sources=[(stage - 1) % pp], group=group)
                hidden = state.run_layers(hidden, microbatch == 0, chunk)
                if state.is_last(chunk):
                    state.keep_validation_loss(hidden, microbatch)
                else:
                    collectives.exchange_([hidden], [(stage + 1) % pp], group=group)
