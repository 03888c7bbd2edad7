"""A pipeline's stage with its layers captured: graphs for each chunk and microbatch, forward and backward.

All graphs have one pool and are captured in the order of the stage's passes, which is the order of their replay: what
is free when a graph is captured is free when it is replayed, however many microbatches are in flight. Buffers are
chained. What is received goes straight into the first graph's static input, what is sent is the last one's output;
nothing is copied but the embedding and the gradient of the loss. --graph-unit says whether a graph holds a layer or a
chunk.
"""

from typing import NamedTuple

import torch

from common.capture.pool import Pool
from common.training.schedule import buffer_slots
from common.variant import Capture, warm_up
from gpt3.pipeline.stage import Stage, eager_step
from gpt3.state import State
from gpt3.train import capture_backward, capture_forward, replay


class Pass(NamedTuple):
    """Graphs of a pass in order of replay, the tensor that they read, and the one that they write.

    read: None where an earlier pass writes it. written: borrowed from the pool.
    """

    graphs: list
    read: torch.Tensor | None
    written: torch.Tensor


class Graphed(Stage):
    """See the top of this file."""

    def __init__(self, state: State):
        super().__init__(state)
        self.pool = Pool(state.device)
        strategy = f"{state.config.unit} x chunk x microbatch, forward and backward, in the stage's order"
        self.capture = Capture(strategy=strategy, pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self._loss_grad = torch.zeros_like(state.empty_hidden())
        self._buffers = receive_buffers(state)
        self.passes: dict[tuple[int, int], Pass] = {}
        # (input, output) of each unit until its backward is captured; the gradient that was captured last.
        self._activations, self._gradient = {}, None
        with self.capture.timed("capture_s"), state.fp8.capturing():
            for step, microbatch in state.steps:
                self._capture(step, microbatch)
        self._gradient = None

    def _capture(self, step, microbatch):
        read, is_chained = self._input(step, microbatch)
        if step > 0:
            layers = self.state.chunks[step - 1]
            units = layers if self.state.config.unit == "layer" else [_Chain(layers)]
            read = read.detach().requires_grad_()
            graphs, saved, written = capture_forward(units, self.pool, read, microbatch, is_chained)
            self._activations[step, microbatch] = saved
        else:
            saved = self._activations.pop((-step, microbatch))
            graphs, written = capture_backward(self.pool, saved, read, is_chained)
            self._gradient = written
        self.passes[step, microbatch] = Pass(graphs, None if is_chained else read, self.pool.borrow(written))

    def _input(self, step, microbatch):
        """Return the tensor that a pass reads, and whether an earlier graph writes it."""
        source = self._origin(step)
        if source is None:
            return torch.zeros_like(self._loss_grad), False
        if source == (self.state.stage, -step):
            return self._loss_grad, False
        if source[0] != self.state.stage:
            return self._buffers[step, microbatch], False
        return (self._activations[source[1], microbatch][-1][1] if step > 0 else self._gradient), True

    def buffer(self, step, microbatch):
        return self._buffers[step, microbatch]

    def run_forward(self, chunk, microbatch, x):
        return _run(self.passes[chunk, microbatch], x)

    def run_backward(self, chunk, microbatch, grad):
        return _run(self.passes[-chunk, microbatch], grad)

    def replays_of(self, index: int) -> int:
        return sum(len(each.graphs) for each in self.passes.values())

    def close(self):
        self.passes.clear()
        self.pool.release()


def _run(captured: Pass, tensor):
    # A tensor that was received is in place already.
    if captured.read is not None and captured.read.data_ptr() != tensor.data_ptr():
        captured.read.detach().copy_(tensor)
    replay(captured.graphs)
    return captured.written


class _Chain:
    """Layers one after the other."""

    def __init__(self, layers):
        self._layers = layers

    def __call__(self, x, is_first_microbatch: bool):
        for layer in self._layers:
            x = layer(x, is_first_microbatch=is_first_microbatch)
        return x


def receive_buffers(state: State) -> dict[tuple[int, int], torch.Tensor]:
    """{(step, microbatch): static buffer} of all that a stage receives in a step; used again where it is free."""
    slots = buffer_slots(state.steps, state.transfers)
    received = [(each.step, each.microbatch) for batch in state.transfers for each in batch if not each.sends]
    buffers = {slot: torch.zeros_like(state.empty_hidden()) for slot in {slots[key] for key in received}}
    return {key: buffers[slots[key]] for key in received}
