"""A step in the order of a pipeline's schedule (1F1B): this rank's stage runs microbatches forward and backward and
exchanges activations and gradients with the stages beside it. Nothing waits for the host, so all of it can be captured.

state: a llama31.state.State. step: 1 or -1, the forward or backward pass of a microbatch (common/schedule.py).
"""

import functools
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from common.schedule import communications, numbered, order
from graph_worth import mark, section
from graph_worth.parallel import collectives


class Eager:
    """A part of a pass, kernels launched one by one. Autograd's graph begins at its input."""

    def __init__(self, *functions):
        self.functions = functions

    def forward(self, hidden):
        """The part's output. hidden: its input, None where it takes tokens."""
        self._x = x = None if hidden is None else hidden.detach().requires_grad_()
        for function in self.functions:
            x = function(x)
        mark()
        # The place in autograd's graph, without the tensor: whoever reads the output has a copy or the memory itself.
        self._output = get_gradient_edge(x)
        return x.detach()

    def backward(self, gradient):
        """The gradient of the input, None for tokens. gradient: of the output, None for the loss."""
        x, output, self._x, self._output = self._x, self._output, None, None
        with section("backward"):
            torch.autograd.backward(output, gradient)
        mark()
        return None if x is None else x.grad


class Called:
    """A stage's passes, kernels launched one by one. stage_graphs.py has the same methods by replays.

    parts: by microbatch, in the order of the forward pass.
    """

    def __init__(self, state, count: int):
        self.state = state
        self.parts: dict[int, list] = {index: [Eager(partial(run_stage, state, index))] for index in range(count)}

    def buffer(self, step: int, microbatch: int):
        """Return the buffer that receives an activation (step 1) or a gradient (step -1)."""
        return self.state.empty_hidden()

    def forward(self, microbatch: int, hidden):
        """Return the activation for the next stage, or the loss. hidden: received, None for the first stage."""
        for part in self.parts[microbatch]:
            hidden = part.forward(hidden)
        return hidden

    def backward(self, microbatch: int, gradient):
        """Return the gradient for the previous stage. gradient: received, None for the last stage."""
        for part in reversed(self.parts[microbatch]):
            gradient = part.backward(gradient)
        return gradient


def run_stage(state, microbatch: int, hidden):
    """This stage's output, or the loss. hidden: its input, None for the first stage."""
    if hidden is None:
        hidden = embed(state, microbatch)
    with section("forward"):
        hidden = state.run_layers(hidden, microbatch == 0)
    return hidden if state.head is None else find_loss(state, microbatch, hidden)


def embed(state, microbatch: int, hidden=None):
    """A microbatch's tokens as what the first layer reads."""
    with section("forward"):
        return state.embedding(state.inputs["tokens"][microbatch])


def find_loss(state, microbatch: int, hidden):
    """A microbatch's part of the step's loss, of the last layer's output."""
    with section("loss"):
        return state.microbatch_loss(hidden, microbatch)


@functools.cache
def schedule(pp: int, stage: int, count: int):
    """(steps with their microbatches, what is exchanged before each of them and after all)."""
    return numbered(order(pp, stage, 1, count)), communications(pp, stage, 1, count)


def forward_and_backward(state, count: int, passes=None) -> None:
    """Add the gradients of `count` microbatches to main_grad, as llama31/train.py does without a pipeline."""
    passes = passes or Called(state, count)
    steps, exchanges = schedule(state.config.pp, state.place.stage, count)
    results, received = {}, {}
    # Entry i is exchanged before step i, the last one after all of them.
    for transfers, step in zip(exchanges, [*steps, None], strict=True):
        _exchange(state, transfers, passes, results, received)
        if step is None:
            break
        run = passes.forward if step[0] > 0 else passes.backward
        results[step] = run(step[1], received.pop(step, None))
        mark()


def _exchange(state, transfers, passes, results, received):
    """Send and receive in one batch: outputs forward, gradients of inputs backward."""
    sent, destinations, arriving, sources = [], [], [], []
    for transfer in transfers:
        key = transfer.step, transfer.microbatch
        if transfer.sends:
            sent.append(results.pop(key))
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
