"""A step of one stage of a pipeline: its passes in the order of the schedule, and what it exchanges between them.

    for each pass (chunk, microbatch) in the stage's order:
        exchange(...)                              one batch of sends and receives
        forward or backward pass of the chunk's layers
    exchange(...), scale updates, optimizer

Interleaved 1F1B (common/schedule.py): a stage has `chunks` parts of the model, and several microbatches are on their
way through it at a time. Never captured, and why: sends and receives, whose other end is another rank's own step;
embedding, final norm and loss, as in gpt3/train.py; the FP8 scale updates, one a step, since a chunk's amaxes are
complete when its last microbatch has run; the optimizer.

A stage may run alone (--pp-rank): what it would receive is then copied from fixed tensors (gpt3/alone.py), what it
would send is dropped, and the root mean squares of that are added to its loss, which most stages have none of.
"""

from abc import ABC, abstractmethod

import torch

from common import collectives
from common.marks import mark, section
from common.schedule import origin
from common.variant import Eager
from gpt3.state import State


class Passes(ABC):
    """A stage's passes with what goes from one to another. A subclass runs the layers: `run_forward`, `run_backward`.

    received, made: {(step, microbatch): tensor}, step as in common/schedule.py: what a pass takes and what it gives,
    activations of step +c, gradients of step -c. Both are emptied within a step.
    """

    accumulate_all = False

    def __init__(self, state: State):
        self.state = state
        self.received, self.made, self.embedded = {}, {}, {}

    @abstractmethod
    def run_forward(self, chunk: int, microbatch: int, x):
        """The output of a chunk's layers, without autograd's graph. Chunks count from 1."""

    @abstractmethod
    def run_backward(self, chunk: int, microbatch: int, grad):
        """The gradient of the chunk's input; weight gradients go to main_grad."""

    def buffer(self, step: int, microbatch: int):
        """What a tensor is received into."""
        return self.state.empty_hidden()

    def step(self, index: int):
        state = self.state
        state.begin_step(index, self.accumulate_all)
        for (step, microbatch), transfers in zip(state.steps, state.transfers, strict=False):
            self._exchange(transfers)
            (self._forward if step > 0 else self._backward)(step, microbatch)
            # Behind a pass, whose tensors are sent next: never between a send and what is received with it.
            mark()
        self._exchange(state.transfers[-1])
        state.fp8.update()
        self.end_step(index)

    def end_step(self, index: int):
        self.state.end_step(index)

    def _forward(self, step, microbatch):
        x = self._input(step, microbatch)
        with section("forward"), self.state.fp8.layers(first=microbatch == 0):
            self.made[step, microbatch] = self.run_forward(step, microbatch, x)

    def _input(self, step, microbatch):
        state = self.state
        source = self._origin(step)
        if source is not None:
            return self._taken(source, step, microbatch)
        with section("embedding"):
            embedded = state.embedding(state.inputs["tokens"][microbatch])
        self.embedded[microbatch] = embedded
        return embedded.detach()

    def _backward(self, step, microbatch):
        source = self._origin(step)
        if source == (self.state.stage, -step):
            grad = self._loss_gradient(microbatch)
        else:
            grad = self._taken(source, step, microbatch)
        with section("backward"):
            grad = self.run_backward(-step, microbatch, grad)
            if microbatch in self.embedded and step == -1:
                self.embedded.pop(microbatch).backward(grad)
            else:
                self.made[step, microbatch] = grad

    def _loss_gradient(self, microbatch):
        """Of the last chunk's output."""
        hidden = self.made.pop((self.state.config.chunks, microbatch)).detach().requires_grad_()
        loss = self.state.microbatch_loss(hidden, microbatch)
        # Not the backward pass of a chunk and microbatch, which follows.
        with section("loss"):
            loss.backward()
        return hidden.grad

    def _origin(self, step):
        config = self.state.config
        return origin(config.pp, config.chunks, self.state.stage, step)

    def _taken(self, source, step, microbatch):
        """What the pass `source`, (stage, step), has made for this one: here, or received."""
        if source[0] == self.state.stage:
            return self.made.pop((source[1], microbatch))
        return self.received.pop((step, microbatch))

    def _exchange(self, transfers):
        sent, destinations, received, sources = [], [], [], []
        for transfer in transfers:
            key = transfer.step, transfer.microbatch
            if transfer.sends:
                sent.append(self.made.pop(key))
                destinations.append(transfer.peer)
            else:
                self.received[key] = self.buffer(*key)
                received.append(self.received[key])
                sources.append(transfer.peer)
        with section("pipeline"):
            if self.state.edges:
                self._feed(transfers, sent)
            else:
                collectives.exchange_(sent, destinations, received, sources, self.state.groups.pipeline)

    @torch.no_grad()
    def _feed(self, transfers, sent):
        """In the place of an exchange: copies of what the other stages would send; the size of what they would get."""
        for tensor in sent:
            share = 1.0 / (tensor.numel() ** 0.5 * self.state.config.microbatches)
            self.state.loss.add_(torch.linalg.vector_norm(tensor, dtype=torch.float32), alpha=share)
        for transfer in transfers:
            if not transfer.sends:
                edges = self.state.edges.activations if transfer.step > 0 else self.state.edges.gradients
                self.received[transfer.step, transfer.microbatch].copy_(edges[transfer.microbatch])


class Called(Passes):
    """Layers that are called, with autograd from one to the next; kernels launched one by one."""

    def __init__(self, state: State):
        super().__init__(state)
        self._saved = {}

    def layers(self, chunk: int, microbatch: int):
        """What is called for a chunk's layers, in order."""
        return self.state.chunks[chunk - 1]

    def run_forward(self, chunk, microbatch, x):
        x = x.detach().requires_grad_()
        hidden = x
        for layer in self.layers(chunk, microbatch):
            hidden = layer(hidden, is_first_microbatch=microbatch == 0)
        self._saved[chunk, microbatch] = x, hidden
        return hidden.detach()

    def run_backward(self, chunk, microbatch, grad):
        x, hidden = self._saved.pop((chunk, microbatch))
        hidden.backward(grad)
        return x.grad


def eager_step(state: State, index: int):
    """One training step of this rank. Nothing in it waits for the device."""
    Called(state).step(index)


def eager(state: State) -> Eager:
    """The baseline: kernels launched one by one."""
    return Eager(state, eager_step)
