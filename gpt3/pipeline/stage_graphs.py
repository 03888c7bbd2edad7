"""A pipeline's stage with its layers captured: graphs for each chunk and microbatch, forward and backward.

All graphs have one pool and are captured in the order of the stage's passes, which is the order of their replay: what
is free when a graph is captured is free when it is replayed, however many microbatches are in flight. Buffers are
chained. What is received goes straight into the first graph's static input, what is sent is the last one's output;
nothing is copied but the embedding and the gradient of the loss.

--graph-unit: a graph for each layer or for each chunk. --graph-scope attn or mlp: half of each layer is captured and
the other half called in between, which costs a copy into the static input at each change.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.capture.pool import Pool
from common.training.schedule import buffer_slots
from common.variant import Capture, Unsupported, warm_up
from gpt3.pipeline.stage import Stage, eager_step
from gpt3.state import State


@dataclass
class Part:
    """One unit of a chunk in one microbatch: its graphs, or None for what is called.

    x, grad_y: static inputs, None where a graph writes them. y, grad_x: what the graphs write, borrowed from the pool.
    saved: (input, output), from the forward pass or its capture to the backward.
    """

    function: Callable
    forward: object = None
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None
    backward: object = None
    grad_y: torch.Tensor | None = None
    grad_x: torch.Tensor | None = None
    saved: tuple | None = None


class Graphed(Stage):
    """See the top of this file."""

    def __init__(self, state: State):
        super().__init__(state)
        if state.config.unit == "none":
            raise Unsupported("graph_layer captures nothing with --graph-scope none: that is --variant eager")
        self.pool = Pool(state.device)
        strategy = f"{state.config.unit} x chunk x microbatch, forward and backward, in the stage's order"
        self.capture = Capture(strategy=strategy, pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self._loss_grad = torch.zeros_like(state.empty_hidden())
        self._buffers = receive_buffers(state)
        # Of each (chunk, microbatch) its parts in order.
        self.parts: dict[tuple[int, int], list[Part]] = {}
        # The gradient that the last backward pass was captured to write.
        self._latest = None
        with self.capture.timed("capture_s"), state.fp8.capturing():
            for step, microbatch in state.steps:
                if step > 0:
                    self._capture_forward(step, microbatch)
                else:
                    self._capture_backward(-step, microbatch)
        self._latest = None

    # ------------------------------------------------------------------------------------------------
    # Capture

    def _units(self, chunk):
        """(callable, whether it is captured) in the order of a forward pass."""
        layers, unit = self.state.chunks[chunk - 1], self.state.config.unit
        if unit == "layer":
            return [(layer, True) for layer in layers]
        if unit == "chunk":
            return [(_Chain(layers), True)]
        return [half for layer in layers for half in ((layer.attention, unit == "attn"), (layer.mlp, unit == "mlp"))]

    def _capture_forward(self, chunk, microbatch):
        first = microbatch == 0
        parts, hidden, static = [], *self._input_of_first(chunk, microbatch)
        for function, is_captured in self._units(chunk):
            part = Part(function)
            parts.append(part)
            if not is_captured:
                hidden, static = None, True
                continue
            if hidden is None:
                hidden = torch.zeros_like(self._loss_grad)
            # Cut from autograd's graph: each unit's backward is captured by itself.
            hidden = hidden.detach().requires_grad_()
            if static:
                part.x = hidden
            inputs = (hidden,) if static else ()
            part.forward, y = self.pool.capture(lambda: function(hidden, is_first_microbatch=first), inputs)  # noqa: B023
            part.saved, part.y = (hidden, y), self.pool.borrow(y)
            hidden, static = y, False
        self.parts[chunk, microbatch] = parts

    def _input_of_first(self, chunk, microbatch):
        """Return the input of the chunk's first unit (None: own buffer), and whether it is filled before replays."""
        source = self._origin(chunk)
        if source is None:
            return None, True
        if source[0] != self.state.stage:
            return self._buffers[chunk, microbatch], True
        last = self.parts[source[1], microbatch][-1]
        return (last.saved[1], False) if last.forward else (None, True)

    def _capture_backward(self, chunk, microbatch):
        grad, static = self._gradient_of_last(chunk, microbatch)
        for part in reversed(self.parts[chunk, microbatch]):
            if part.forward is None:
                grad, static = None, True
                continue
            if grad is None:
                grad = torch.zeros_like(self._loss_grad)
            if static:
                part.grad_y = grad
            part.backward, grad = self._capture_part(part, grad)
            part.grad_x, static = self.pool.borrow(grad), False
        # Held for the next capture, which may read it.
        self._latest = grad

    def _gradient_of_last(self, chunk, microbatch):
        """Return the input of the chunk's last unit in its backward pass, as `_input_of_first`."""
        source = self._origin(-chunk)
        if source == (self.state.stage, chunk):
            return self._loss_grad, True
        if source[0] != self.state.stage:
            return self._buffers[-chunk, microbatch], True
        return (self._latest, False) if self.parts[-source[1], microbatch][0].forward else (None, True)

    def _capture_part(self, part, grad):
        # Its activations are free when this returns: what is captured next may take their memory.
        (x, y), part.saved = part.saved, None
        return self.pool.capture(lambda: _input_gradient(x, y, grad))

    # ------------------------------------------------------------------------------------------------
    # A step

    def buffer(self, step, microbatch):
        return self._buffers[step, microbatch]

    def run_forward(self, chunk, microbatch, x):
        for part in self.parts[chunk, microbatch]:
            if part.forward is None:
                x = x.detach().requires_grad_()
                y = part.function(x, is_first_microbatch=microbatch == 0)
                part.saved, x = (x, y), y.detach()
                continue
            if part.x is not None:
                _fill(part.x, x)
            part.forward.replay()
            x = part.y
        return x

    def run_backward(self, chunk, microbatch, grad):
        for part in reversed(self.parts[chunk, microbatch]):
            if part.backward is None:
                (x, y), part.saved = part.saved, None
                y.backward(grad)
                grad = x.grad
                continue
            if part.grad_y is not None:
                _fill(part.grad_y, grad)
            part.backward.replay()
            grad = part.grad_x
        return grad

    def replays_of(self, index: int) -> int:
        return 2 * sum(part.forward is not None for parts in self.parts.values() for part in parts)

    def close(self):
        self.parts.clear()
        self.pool.release()


class _Chain:
    """Layers one after the other."""

    def __init__(self, layers):
        self._layers = layers

    def __call__(self, x, is_first_microbatch: bool):
        for layer in self._layers:
            x = layer(x, is_first_microbatch=is_first_microbatch)
        return x


def _input_gradient(x, output, grad):
    # Not autograd.grad: the hooks that add the gradients of weights to main_grad run in backward() alone.
    x.grad = None
    output.backward(grad)
    grad, x.grad = x.grad, None
    return grad


def _fill(static, tensor):
    """Copy, unless it is the static tensor's memory, into which it was received."""
    if static.data_ptr() != tensor.data_ptr():
        static.detach().copy_(tensor)


def receive_buffers(state: State) -> dict[tuple[int, int], torch.Tensor]:
    """{(step, microbatch): static buffer} of all that a stage receives in a step; used again where it is free."""
    slots = buffer_slots(state.steps, state.transfers)
    received = [(each.step, each.microbatch) for batch in state.transfers for each in batch if not each.sends]
    buffers = {slot: torch.zeros_like(state.empty_hidden()) for slot in {slots[key] for key in received}}
    return {key: buffers[slots[key]] for key in received}
