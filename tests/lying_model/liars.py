"""Variants that lie about their work."""

import subprocess
import threading

import torch

from graph_worth.contract import variant
from tests.lying_model.sound import Graphed, Halves


@variant("drops", kind="graph", help="liars", graphs=1)
class Drops(Graphed):
    def run(self, index):
        if not self.is_late or index < 4:
            super().run(index)
        else:
            self.graph.num_replays += 1


@variant("half_precision", kind="graph", help="liars", graphs=1)
class HalfPrecision(Graphed):
    def __init__(self, state, capture):
        super().__init__(state, capture)
        state.precision = torch.bfloat16
        self.other, _ = self.pool.capture(state.train, (state.inputs,))
        state.precision = torch.float32
        self.pool.graphs.remove(self.other)

    def run(self, index):
        if self.is_late:
            self.graph.num_replays += 1
            self.other.replay()
        else:
            super().run(index)


@variant("frozen_rate", kind="graph", help="liars", graphs=1)
class FrozenRate(Graphed):
    late_rate = 0.0

    def run(self, index):
        with torch.no_grad():
            self.state.rate.fill_(self.late_rate if self.is_late else 0.5)
        super().run(index)

    def leave(self):
        self.state.rate.fill_(0.5)

    def enter(self):
        pass


@variant("scaled_update", kind="graph", help="liars", graphs=1)
class ScaledUpdate(FrozenRate):
    late_rate = 0.3


@variant("half_batch", kind="graph", help="liars", graphs=1)
class HalfBatch(Graphed):
    def run(self, index):
        if self.is_late:
            with torch.no_grad():
                self.state.inputs[self.state.config.batch // 2 :] = 0.0
        super().run(index)


@variant("stale_input", kind="graph", help="liars", graphs=1)
class StaleInput(Graphed):
    def step(self, index):
        if index == 0:
            self.state.begin(index)
        self.run(index)
        self.state.end(index)


@variant("one_operator", kind="graph", help="liars", graphs=1)
class OneOperator(Graphed):
    def record(self):
        self.spare = torch.zeros(4, device=self.state.device)
        self.graph, _ = self.pool.capture(lambda: self.spare.add_(1.0))

    def run(self, index):
        self.graph.replay()
        for _ in range(4):
            self.state.forward_loss()
        self.state.train()


@variant("eager_graphed", kind="eager", help="liars", graphs=1)
class EagerGraphed(Graphed):
    pass


@variant("leak", kind="graph", help="liars", graphs=1)
class Leak(Graphed):
    kept: list = []  # noqa: RUF012

    def run(self, index):
        super().run(index)
        if self.is_late:
            self.kept.append(torch.ones(95 * 2**18 // 40))


@variant("grows_in_enter", kind="graph", help="liars", graphs=1)
class GrowsInEnter(Graphed):
    """Keeps memory that it takes before a block, where no step is looked at."""

    kept: list = []  # noqa: RUF012

    def enter(self):
        self.kept.append(torch.ones(95 * 2**18))

    def leave(self):
        pass


@variant("threads", kind="graph", help="liars", graphs=1)
class Threads(Graphed):
    def enter(self):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, daemon=True)
        self.thread.start()

    def leave(self):
        if getattr(self, "thread", None):
            self.stop.set()
            self.thread.join()


@variant("late_update", kind="graph", help="liars", graphs=1)
class LateUpdate(Graphed):
    def step(self, index):
        super().step(index)
        if self.is_late and index % 8 == 7:
            threading.Timer(0.01, self.later).start()

    def later(self):
        with torch.no_grad():
            self.state.weights[0].add_(1e-9)
            self.state.weights[1].add_(1e-3)


@variant("fewer_replays", kind="graph", help="liars", graphs=1)
class FewerReplays(Graphed):
    def run(self, index):
        if index % 7 == 6:
            self.state.train()
        else:
            super().run(index)


@variant("more_graphs", kind="graph", help="liars", graphs=1)
class MoreGraphs(Halves):
    pass


@variant("no_graph", kind="graph", help="liars", graphs=1)
class NoGraph(Graphed):
    def run(self, index):
        self.state.train()

    def replays_of(self, index):
        return 0


class Ahead(Graphed):
    """Knows the losses and weights of coming steps, and only copies them: `known` maps a step's number to them."""

    def __init__(self, state, capture):
        super().__init__(state, capture)
        self.known: dict[int, tuple] = {}

    def make(self, index):
        self.state.begin(index)
        self.graph.replay()
        self.known[index] = self.state.loss.clone(), [weight.detach().clone() for weight in self.state.weights]

    def copy(self, index):
        self.graph.num_replays += 1
        loss, weights = self.known[index]
        with torch.no_grad():
            self.state.loss.copy_(loss)
            torch._foreach_copy_(self.state.weights, weights)
        self.state.end(index)

    def enter(self):
        pass

    def leave(self):
        pass


@variant("remembers", kind="graph", help="liars", graphs=1)
class Remembers(Ahead):
    """Makes each step once, and copies what it came to in every later block."""

    def step(self, index):
        if self.is_late and index in self.known:
            self.copy(index)
            return
        self.steps += 1
        self.make(index)
        self.state.end(index)


@variant("grows_in_leave", kind="graph", help="liars", graphs=1)
class GrowsInLeave(GrowsInEnter):
    """Keeps memory that it takes when it is left."""

    def enter(self):
        pass

    def leave(self):
        self.kept.append(torch.ones(95 * 2**18))


@variant("grows_untimed", kind="graph", help="liars", graphs=1)
class GrowsUntimed(GrowsInLeave):
    """Keeps memory that it takes in the first step of a block, which is not timed."""

    def step(self, index):
        if self.is_first:
            self.kept.append(torch.ones(95 * 2**18))
        self.is_first = False
        super().step(index)

    def enter(self):
        self.is_first = True

    def leave(self):
        pass


@variant("slower_rate", kind="graph", help="liars", graphs=1)
class SlowerRate(FrozenRate):
    """Trains with 0.95 of the learning rate."""

    late_rate = 0.475


@variant("hands_in", kind="graph", help="liars", graphs=1)
class HandsIn(Graphed):
    """Hands in what the block before its own, which is of the same cycle, has trained."""

    def step(self, index):
        self.steps += 1
        if not self.is_late or self.found is None:
            self.state.begin(index)
            self.run(index)
            self.state.end(index)
            return
        self.graph.num_replays += 1
        losses, weights = self.found
        with torch.no_grad():
            self.state.losses.copy_(losses)
            torch._foreach_copy_(self.state.weights, weights)

    def enter(self):
        trained = [weight.detach().clone() for weight in self.state.weights]
        self.found = self.state.losses.clone(), trained

    def leave(self):
        self.found = None


@variant("bends_state", kind="graph", help="liars", graphs=1)
class BendsState(Graphed):
    """Lets all others learn nothing, so that it has nothing to do."""

    def step(self, index):
        if self.is_late:
            self.state.rate.zero_()
        super().step(index)


@variant("starts_process", kind="graph", help="liars", graphs=1)
class StartsProcess(Graphed):
    """Starts a process that nobody is the parent of."""

    def __init__(self, state, capture):
        super().__init__(state, capture)
        subprocess.run(["sh", "-c", "sleep 30 &"], check=True)
