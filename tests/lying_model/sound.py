"""Variants that are sound."""

import torch

from common.capture.pool import Pool
from common.variant import Capture, Eager, warm_up
from tests.lying_model.state import eager_step

# Parity has 20 steps, and the blocks many more.
LATE = 55


def eager(state):
    return Eager(state, eager_step)


class Graphed:
    """The whole step in one graph."""

    def __init__(self, state):
        self.state, self.pool, self.steps = state, Pool(state.device), 0
        self.capture = Capture(strategy="whole step", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(state.train, (state.inputs,))

    def step(self, index):
        self.steps += 1
        self.state.begin(index)
        self.run(index)
        self.state.end(index)

    def run(self, index):
        self.graph.replay()

    @property
    def is_late(self):
        return self.steps > LATE

    def replays_of(self, index):
        return 1

    def close(self):
        self.pool.release()


class ForwardBackward(Graphed):
    """The update stays eager."""

    def __init__(self, state):
        self.state, self.pool, self.steps = state, Pool(state.device), 0
        self.capture = Capture(strategy="forward and backward", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        with self.capture.timed("capture_s"):
            self.graph, (self.loss, self.gradients) = self.pool.capture(self.recorded, (state.inputs,))

    def recorded(self):
        loss = self.state.forward_loss()
        return loss.detach(), torch.autograd.grad(loss, self.state.weights)

    def run(self, index):
        self.graph.replay()
        self.state.update(self.loss, self.gradients)


class Halves(Graphed):
    """Forward and backward in one graph, the update in another."""

    def __init__(self, state):
        self.state, self.pool, self.steps = state, Pool(state.device), 0
        self.capture = Capture(strategy="halves", pools=[self.pool])
        warm_up(state, self.capture, eager_step)

        def recorded():
            loss = state.forward_loss()
            return loss.detach(), torch.autograd.grad(loss, state.weights)

        self.graph, (loss, gradients) = self.pool.capture(recorded, (state.inputs,))
        self.second, _ = self.pool.capture(lambda: state.update(loss, gradients))

    def run(self, index):
        self.graph.replay()
        self.second.replay()

    def replays_of(self, index):
        return 2

    def counted(self):
        """As if every step had run again, for 2 ms."""
        steps, self.steps = self.steps, 0
        return {"steps": steps, "reruns": steps, "rerun_ms": 2.0 if steps else None}


class Entered(Graphed):
    """Its capture needs a flag of the state, which eager must not see."""

    def __init__(self, state):
        super().__init__(state)
        state.precision = torch.float32

    def enter(self):
        self.state.precision = torch.float64

    def leave(self):
        self.state.precision = torch.float32


class NeedsRoom(Graphed):
    """Fits by itself, and not beside another one of its kind."""

    def __init__(self, state):
        if getattr(state, "rooms", 0):
            raise torch.OutOfMemoryError("out of memory: there is another one")
        super().__init__(state)
        state.rooms = 1

    def close(self):
        super().close()
        self.state.rooms = 0
