"""Variants that are sound."""

import torch

from graph_worth.contract import variant
from tests.lying_model.state import eager_step

# Parity has 20 steps, and the blocks many more.
LATE = 55


@variant("graph_step", kind="graph", graphs=1, parity="bitwise", headline=True, formerly="graph")
class Graphed:
    """The whole step in one graph."""

    def __init__(self, state, capture):
        self.state, self.pool, self.steps = state, capture.pool(), 0
        capture.warm_up(eager_step)
        with capture.capturing():
            self.record()

    def record(self):
        self.graph, _ = self.pool.capture(self.state.train, (self.state.inputs,))

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


@variant("graph_fwd_bwd", kind="graph", help="forward and backward", graphs=1, parity="bitwise")
class ForwardBackward(Graphed):
    """The update stays eager."""

    def record(self):
        self.graph, (self.loss, self.gradients) = self.pool.capture(self.recorded, (self.state.inputs,))

    def recorded(self):
        loss = self.state.forward_loss()
        return loss.detach(), torch.autograd.grad(loss, self.state.weights)

    def run(self, index):
        self.graph.replay()
        self.state.update(self.loss, self.gradients)


@variant("graph_halves", kind="graph", graphs=2, parity="bitwise")
class Halves(ForwardBackward):
    """Forward and backward in one graph, the update in another."""

    def record(self):
        super().record()
        self.second, _ = self.pool.capture(lambda: self.state.update(self.loss, self.gradients))

    def run(self, index):
        self.graph.replay()
        self.second.replay()

    def replays_of(self, index):
        return 2

    def counted(self):
        """As if every step had run again, for 2 ms."""
        steps, self.steps = self.steps, 0
        return {"steps": steps, "reruns": steps, "rerun_ms": 2.0 if steps else None}


@variant("graph_entered", kind="graph", graphs=1, parity="bitwise")
class Entered(Graphed):
    """Its capture needs a flag of the state, which eager must not see."""

    def __init__(self, state, capture):
        super().__init__(state, capture)
        state.precision = torch.float32

    def enter(self):
        self.state.precision = torch.float64

    def leave(self):
        self.state.precision = torch.float32


@variant("graph_room_too", kind="graph", graphs=1, parity="bitwise")
@variant("graph_room", kind="graph", graphs=1, parity="bitwise")
class NeedsRoom(Graphed):
    """Fits by itself, and not beside another one of its kind."""

    def __init__(self, state, capture):
        if getattr(state, "rooms", 0):
            raise torch.OutOfMemoryError("out of memory: there is another one")
        super().__init__(state, capture)
        state.rooms = 1

    def close(self):
        self.state.rooms = 0


@variant("graph_alone", kind="graph", graphs=1, parity="bitwise", apart="alone")
@variant("graph_aside_too", kind="graph", graphs=1, parity="bitwise", apart="aside")
@variant("graph_aside", kind="graph", graphs=1, parity="bitwise", apart="aside")
class Aside(Graphed):
    """As graph_step, in another process than it."""


@variant(
    "graph_too_large", kind="graph", graphs=1, parity="bitwise", reference="eager_too_large", builds=("too_large",)
)
class TooLarge(Graphed):
    """The whole step of the large one."""
