"""Helpers for tests of training by hand: a small training on the CPU, its variants, and a run of a variant."""

from dataclasses import dataclass

import torch

from graph_worth.capture.pool import Pool
from graph_worth.config import RunOptions
from graph_worth.contract import Training
from graph_worth.made_variant import Capture
from graph_worth.script import by_hand

CPU = torch.device("cpu")
DECAY = 0.9


@dataclass(frozen=True, kw_only=True)
class Config:
    min_steps: int = 12


class State:
    """A vector of weights that shrinks in every step; the loss depends on weights and input."""

    def __init__(self, classes=1):
        self.classes = classes
        generator = torch.Generator().manual_seed(0)
        self.batches = torch.randn(4, 8, generator=generator)
        self.weight, self.input, self.loss = torch.ones(8), torch.zeros(8), torch.zeros(())
        self.moment = torch.zeros(3)
        self.losses = {}

    def reset(self):
        self.weight.fill_(1.0)
        self.moment.zero_()
        self.losses.clear()

    def named_state(self):
        yield "weight", self.weight
        yield "moment", self.moment

    def read_losses(self, count):
        return [self.losses[index] for index in range(count)]

    def read_grad_norms(self, count):
        return [2 * self.losses[index] for index in range(count)]

    def batch_class(self, index):
        return index % self.classes

    def compute(self):
        self.loss.copy_((self.weight * self.input).square().sum())
        self.weight.mul_(DECAY)


def eager_step(state, index, compute=None):
    state.input.copy_(state.batches[index % 4])
    (compute or state.compute)()
    state.losses[index] = float(state.loss)


def expected_losses(count):
    batches = State().batches.double()
    return [float((batches[index % 4] * DECAY**index).square().sum()) for index in range(count)]


class Variant:
    """An eager variant; `before(i)` runs first in every step."""

    strategy, replays, pools = "none", 0, ()

    def __init__(self, state, before=lambda index: None):
        self.state, self.before, self.closed, self.indices = state, before, 0, []
        self.capture = Capture(strategy=self.strategy, pools=list(self.pools))
        with self.capture.timed("warmup_s"):
            for index in range(3):
                eager_step(state, index)

    def step(self, index):
        self.indices.append(index)
        self.before(index)
        eager_step(self.state, index, self.compute)

    def compute(self):
        self.state.compute()

    def replays_of(self, index):
        return self.replays

    def close(self):
        self.closed += 1


class Graphed(Variant):
    strategy, replays = "one graph", 1

    def __init__(self, state, promised=1):
        self.pools, self.replays = [Pool(CPU)], promised
        super().__init__(state)
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pools[0].capture(self.captured(state))

    def captured(self, state):
        return state.compute

    def compute(self):
        self.graph.replay()

    def close(self):
        super().close()
        self.pools[0].release()


class StaleWeights(Graphed):
    """Its graph reads the weights of the capture."""

    def captured(self, state):
        self.cache = torch.ones(8)

        def compute():
            state.loss.copy_((self.cache * state.input).square().sum())
            state.weight.mul_(DECAY)

        return compute


class Model:
    """A `graph_worth.script.session.Model` of one variant, made by `make(state)`."""

    name, world_size, device = "tests.small", 1, CPU

    def __init__(self, make, run, config=None, state=State, reference=eager_step, promise=None, rank=0, **training):
        self._make, self._state, self._reference = make, state, reference
        self.options = RunOptions(preset="tiny", variant="it", **run)
        self.config, self.rank = config or Config(), rank
        self.kinds, self._promise = ({"it": promise[0]}, promise[1:]) if promise else ({}, (None, None))
        self._training = {"items": 10, **training}

    def build(self):
        state = self._state()
        self.training = Training(
            state=state,
            results=state.read_losses,
            grad_norms=state.read_grad_norms,
            named_state=state.named_state,
            reset=state.reset,
            batch_class=state.batch_class,
            **{name: getattr(state, name, None) for name in ("finish", "close")},
            **self._training,
        )
        return self.training

    def make(self, name):
        return self._make(self.training.state)

    def promises(self, name):
        return self._promise

    def reference_step(self, name):
        return lambda index: self._reference(self.training.state, index)


def trained(model) -> dict:
    """Train a model without a script around it, and return the result."""
    running = by_hand.run(model)
    try:
        variant, loop = next(running)
        try:
            for index in loop.steps():
                variant.step(index)
        except Exception as error:
            running.throw(error)
        next(running)
    except StopIteration as end:
        return end.value
    raise AssertionError("a run has one loop")


class ByHand:
    """One run: its result, what it printed, the variant and the state it made.

    Args:
        make: constructor of the variant.
        folder: gets run.json, the file of --record.
        read_output: gives what was printed since its last call.
        promise: kind, graphs and replays a step of the variant, as a model's table has them.
        run: flags of the command line.
    """

    def __init__(
        self, make, folder, read_output, config=None, state=None, reference=eager_step, promise=None, rank=0, **run
    ):
        self.made = []
        self.path = folder / "run.json"

        def make_variant(state):
            self.made.append(make(state))
            return self.made[-1]

        about = {"card": ["a card"], "notes": ["a note"]}
        run = {"record": str(self.path), **run}
        model = Model(make_variant, run, config, state or State, reference, promise, rank, **about)
        read_output()
        self.result = trained(model)
        self.lines = read_output().splitlines()
        self.variant = self.made[0] if self.made else None


def running(folder, capsys):
    """run(make=Variant, ...): a `ByHand` in this folder, for a fixture."""

    def run(make=Variant, **more):
        return ByHand(make, folder, lambda: capsys.readouterr().out, **more)

    return run
