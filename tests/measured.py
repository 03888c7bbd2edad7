"""What tests of common/measure share: a small training on the CPU, its variants, and what measures one of them."""

import gc
import time
from dataclasses import dataclass

import torch

from common import measure, passes, proof
from common.capture import Pool
from common.config import Arguments, Run

CPU = torch.device("cpu")
DECAY = 0.9


@dataclass(frozen=True, kw_only=True)
class Config:
    min_steps: int = 12
    min_window_s: float = 0.0
    warmup_min_s: float = 0.0
    warmup_max_s: float = 0.0


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
        self.capture = measure.Capture(strategy=self.strategy, pools=list(self.pools))
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


class Measured:
    """One `measure.run`: its record, what it printed, the variant and the state it made."""

    def __init__(
        self, make, folder, read_output, config=None, state=None, reference=eager_step, promise=None, rank=0, **run
    ):
        self.made, self.states = [], []
        self.path = folder / "run.json"

        def build(config, device):
            self.states.append((state or State)())
            return self.states[-1]

        def make_variant(state):
            self.made.append(make(state))
            return self.made[-1]

        workload = measure.Workload(
            model="tests.fake_model",
            build=build,
            variants={"it": make_variant},
            reference=reference,
            card=["a card"],
            notes=["a note"],
            flops_per_step=1e9,
            flops_convention="none",
            items_per_step=10,
            unit="samples",
            kinds={"it": promise[0]} if promise else {},
            promises=(lambda config, variant: promise[1:]) if promise else None,
        )
        options = Run(preset="tiny", variant="it", record=str(self.path), **run)
        read_output()
        try:
            self.record = measure.run(workload, Arguments(config=config or Config(), run=options), CPU, rank)
        finally:
            torch.use_deterministic_algorithms(False)
        self.lines = read_output().splitlines()
        self.variant = self.made[0] if self.made else None


def measuring(folder, capsys):
    """run(make=Variant, ...): a `Measured` in this folder, for a fixture."""

    def run(make=Variant, **more):
        return Measured(make, folder, lambda: capsys.readouterr().out, **more)

    return run


class Clock:
    """time as passes sees it: steps take what they say, whatever the host does."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        for module in (passes, proof):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self):
        return self.now

    monotonic = process_time = perf_counter

    def sleep(self, seconds):
        """Nobody works meanwhile."""

    def steps_of(self, seconds_of, base=Variant):
        """A variant of which step i in the window takes seconds_of(i), and any other seconds_of(None)."""

        class Takes(base):
            def step(variant, index):
                super().step(index)
                self.now += seconds_of(index if not gc.isenabled() else None)

        return Takes


def last(seconds, start=None):
    """Wait until `seconds` after the call, or after `start`, to some microseconds."""
    end = (time.perf_counter() if start is None else start) + seconds
    time.sleep(max(0.0, end - time.perf_counter() - 1e-3))
    while time.perf_counter() < end:
        pass


class Lasting(Variant):
    """Its steps take `seconds_of(index)`, however long this machine needs for what is computed in them."""

    def __init__(self, state, seconds_of):
        super().__init__(state)
        self.seconds_of = seconds_of

    def step(self, index):
        start = time.perf_counter()
        super().step(index)
        last(self.seconds_of(index), start)


def sleeping(seconds_of):
    return lambda state: Lasting(state, seconds_of)
