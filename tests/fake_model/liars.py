"""Variants of a tiny network that go through common.measure.run on the CPU: sound ones, and ones that lie.

Those that lie do so in the timed window only, which they know by the garbage collector's rest: what looks at them
before (canary, parity, settling) sees sound work. Time is simulated, so that what is judged by time does not depend on
the host.
"""

import contextlib
import gc
import io
import json
import mmap
import queue
import random
import threading
import time
from dataclasses import dataclass
from unittest import mock

import torch

from common import environment, measure, passes, proof
from common import record as records
from common.capture import Pool
from common.config import Arguments, Run

CPU = torch.device("cpu")
BATCHES, SAMPLES, INPUTS, HIDDEN = 4, 16, 8, 8
LEAK_BYTES, LEAK_STEPS = 40 * 2**20, 20


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run trains (the same for all runs of a seed) and how its host behaves."""

    seed: int = 0
    lr: float = 0.05
    noise: float = 0.5
    step_ms: tuple = (1.0,)
    skipped_step: int = -1
    bf16: bool = False
    min_steps: int = 120
    min_window_s: float = 0.0
    warmup_min_s: float = 0.05
    warmup_max_s: float = 0.1


def in_window():
    return not gc.isenabled()


class Clock:
    """A clock that goes on by what is spent; a sleep gives other threads a moment of the real one."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    monotonic = process_time = perf_counter

    def spend(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        # Long enough for a thread to get a processor that others want, too.
        time.sleep(20e-3 if seconds >= 50e-3 else 1e-3)
        # A process that sleeps is not busy: its own time, which the same clock shows, goes on by next to nothing.
        self.now += 1e-4


class State:
    """Two layers with momentum, a few rotating batches with noise in what they teach."""

    num_losses = 500

    def __init__(self, config, clock, run_seed):
        self.config, self.clock = config, clock
        self.host = random.Random(run_seed)
        self.scatter = torch.Generator().manual_seed(run_seed)
        draw = torch.Generator().manual_seed(config.seed)
        self.x = torch.randn(BATCHES, SAMPLES, INPUTS, generator=draw)
        self.y = torch.randn(BATCHES, SAMPLES, 1, generator=draw) * config.noise
        self.y += (self.x @ torch.randn(INPUTS, 1, generator=draw)).tanh()
        self.initial = [torch.randn(INPUTS, HIDDEN, generator=draw) / 3, torch.randn(HIDDEN, 1, generator=draw) / 3]
        self.weights = [torch.zeros_like(weight) for weight in self.initial]
        self.momenta = [torch.zeros_like(weight) for weight in self.initial]
        self.losses, self.norms = torch.zeros(self.num_losses), torch.zeros(self.num_losses)
        self.input, self.target = torch.zeros(SAMPLES, INPUTS), torch.zeros(SAMPLES, 1)
        self.loss, self.norm = torch.zeros(()), torch.zeros(())
        self.grads = [torch.zeros_like(weight) for weight in self.initial]
        self.reset()

    def reset(self):
        for weight, momentum, value in zip(self.weights, self.momenta, self.initial, strict=True):
            weight.copy_(value)
            momentum.zero_()

    def named_state(self):
        for name, tensors in (("weight", self.weights), ("momentum", self.momenta)):
            yield from ((f"{name}.{index}", tensor) for index, tensor in enumerate(tensors))

    def read_losses(self, count):
        return self.losses[: min(count, self.num_losses)].tolist()

    def read_grad_norms(self, count):
        return self.norms[: min(count, self.num_losses)].tolist()

    def batch_class(self, index):
        return index % len(self.config.step_ms)

    def load(self, index):
        self.input.copy_(self.x[index % BATCHES])
        self.target.copy_(self.y[index % BATCHES])

    def compute(self):
        """Loss, gradients and their norm of what is loaded; host graphs can record it."""
        a = self.input @ self.weights[0]
        h = a.tanh()
        error = h @ self.weights[1] - self.target
        self.loss.copy_(error.square().mean())
        d = error * (2 / len(error))
        self.grads[1].copy_(h.T @ d)
        self.grads[0].copy_(self.input.T @ (d @ self.weights[1].T * (1 - h * h)))
        self.norm.copy_(torch.stack([grad.norm() for grad in self.grads]).norm())

    def update(self, index):
        for weight, momentum, grad in zip(self.weights, self.momenta, self.grads, strict=True):
            if index != self.config.skipped_step:
                momentum.mul_(0.9).add_(grad)
                weight.sub_(momentum, alpha=self.config.lr)
                if self.config.bf16:
                    weight.copy_(weight.bfloat16())

    def keep(self, index):
        place = min(index, self.num_losses - 1)
        self.losses[place] = self.loss
        self.norms[place] = torch.inf if index == self.config.skipped_step else self.norm

    def spend(self, index, share=1.0):
        self.clock.spend(share * self.config.step_ms[self.batch_class(index)] * 1e-3 * self.host.gauss(1, 0.01))


def eager_step(state, index):
    state.load(index)
    state.compute()
    state.update(index)
    state.keep(index)
    state.spend(index)


class Eager:
    kind = "eager"

    def __init__(self, state):
        self.state = state
        self.capture = measure.Capture(strategy="none")

    def step(self, index):
        if in_window():
            self.timed_step(index)
        else:
            eager_step(self.state, index)

    def timed_step(self, index):
        eager_step(self.state, index)

    def replays_of(self, index):
        return 0

    def close(self):
        pass


class Graph(Eager):
    kind = "graph"

    def __init__(self, state):
        self.state, self.pool = state, Pool(CPU)
        self.capture = measure.Capture(strategy="one graph", pools=[self.pool])
        state.load(0)
        self.graph, _ = self.pool.capture(state.compute)

    def step(self, index):
        self.state.load(index)
        self.compute()
        self.state.update(index)
        self.state.keep(index)
        self.state.spend(index)

    def compute(self):
        self.graph.replay()

    def replays_of(self, index):
        return 1

    def close(self):
        self.pool.release()


# ------------------------------------------------------------------------------------------------
# Sound, each in its own way


class OtherSums(Eager):
    """Gradients with a relative scatter of 1e-6, as of sums in another order."""

    def timed_step(self, index):
        state = self.state
        state.load(index)
        state.compute()
        for grad in state.grads:
            grad.mul_(1 + 1e-6 * torch.randn(grad.shape, generator=state.scatter))
        state.update(index)
        state.keep(index)
        state.spend(index)


class Reordered(Eager):
    """The samples of a batch in another order."""

    def timed_step(self, index):
        state = self.state
        order = torch.randperm(SAMPLES, generator=state.scatter)
        state.input.copy_(state.x[index % BATCHES][order])
        state.target.copy_(state.y[index % BATCHES][order])
        state.compute()
        state.update(index)
        state.keep(index)
        state.spend(index)


class Jitters(OtherSums):
    """A host that takes the processor away: steps scatter by a third, and some take five times as long."""

    def step(self, index):
        super().step(index)
        host = self.state.host
        self.state.spend(index, abs(host.gauss(0, 0.3)) + (5.0 if host.random() < 0.05 else 0.0))


class GetsFaster(OtherSums):
    """Steps that take 20 % less once they have settled."""

    def step(self, index):
        super().step(index)
        if not in_window():
            self.state.spend(index, 0.25)


class FillsCache(OtherSums):
    """Some memory more in the first steps of the window, once."""

    def timed_step(self, index):
        if index == 3:
            self.cache = torch.ones(16 * 2**18)
        super().timed_step(index)


# name -> (class, what differs in its Config from the reference's own)
SOUND = {
    "noise": (OtherSums, {}),
    "reordered": (Reordered, {}),
    "jitter": (Jitters, {}),
    "two_kinds": (OtherSums, {"step_ms": (1.0, 3.0)}),
    "faster": (GetsFaster, {}),
    "skipped": (OtherSums, {"skipped_step": 1}),
    "decays": (OtherSums, {"noise": 0.0, "lr": 0.1}),
    "large": (OtherSums, {"min_steps": 700}),
    "bf16": (OtherSums, {"bf16": True}),
    "cache": (FillsCache, {}),
    "graph": (Graph, {}),
}

# ------------------------------------------------------------------------------------------------
# Lies


class LateThread(Eager):
    """Steps are handed to a thread, which makes them when the window is over."""

    def __init__(self, state):
        super().__init__(state)
        self.todo, self.thread = queue.SimpleQueue(), threading.Thread(target=self.work, daemon=True)
        self.ended = False
        self.thread.start()

    def work(self):
        while not self.ended:
            if in_window() or self.todo.empty():
                time.sleep(2e-4)
            else:
                eager_step(self.state, self.todo.get())
                # Not all of them before the first look.
                time.sleep(1e-3)

    def timed_step(self, index):
        self.todo.put(index)
        self.state.spend(index)

    def close(self):
        self.ended = True
        self.thread.join()


class CachedLosses(Eager):
    """Losses and norms of the steps before the window, which were honest, and no training."""

    def __init__(self, state):
        super().__init__(state)
        self.seen = {}

    def step(self, index):
        super().step(index)
        if not in_window():
            self.seen[index] = float(self.state.loss), float(self.state.norm)

    def timed_step(self, index):
        loss, norm = self.seen[min(index, max(self.seen))]
        self.state.loss.fill_(loss)
        self.state.norm.fill_(norm)
        self.state.keep(index)
        self.state.spend(index)


class Lazy(Eager):
    """Nothing is computed before somebody reads."""

    def __init__(self, state):
        super().__init__(state)
        self.todo, read = [], state.read_losses

        def read_losses(count):
            while self.todo:
                eager_step(state, self.todo.pop(0))
            return read(count)

        state.read_losses = read_losses

    def timed_step(self, index):
        self.todo.append(index)
        self.state.spend(index)


class Uninitialised(Eager):
    """Loss and norm are what lay in memory."""

    def timed_step(self, index):
        bits = torch.randint(-(2**31), 2**31 - 1, (2,), generator=self.state.scatter, dtype=torch.int32)
        super().timed_step(index)
        self.state.loss.copy_(bits.view(torch.float32)[0])
        self.state.norm.copy_(bits.view(torch.float32)[1])
        self.state.keep(index)


class Altered(Eager):
    """A step of which subclasses change a part."""

    def timed_step(self, index):
        state = self.state
        self.load(index)
        state.compute()
        self.update(index)
        self.keep(index)
        state.spend(index)

    def load(self, index):
        self.state.load(index)

    def update(self, index):
        self.state.update(index)

    def keep(self, index):
        self.state.keep(index)


class FrozenRate(Altered):
    """A learning rate of 0, baked into the graph."""

    def update(self, index):
        before = [weight.clone() for weight in self.state.weights]
        self.state.update(index)
        for weight, value in zip(self.state.weights, before, strict=True):
            weight.copy_(value)


class HalfBatches(Altered):
    """The first half of each batch, twice."""

    def load(self, index):
        half = SAMPLES // 2
        self.state.input.copy_(self.state.x[index % BATCHES][:half].repeat(2, 1))
        self.state.target.copy_(self.state.y[index % BATCHES][:half].repeat(2, 1))


class StaleOptimizer(Altered):
    """Each update applies the gradients of the step before."""

    def update(self, index):
        fresh = [grad.clone() for grad in self.state.grads]
        if index:
            for grad, value in zip(self.state.grads, self.stale, strict=True):
                grad.copy_(value)
            self.state.update(index)
        self.stale = fresh


class Leaks(Eager):
    """Memory that is never given back."""

    def __init__(self, state):
        super().__init__(state)
        self.kept = []

    def timed_step(self, index):
        super().timed_step(index)
        if index % LEAK_STEPS == 0:
            # Not of malloc, which may have as much left from what ran in the process before.
            pages = mmap.mmap(-1, LEAK_BYTES)
            with contextlib.suppress(OSError):  # a kernel without huge pages is slower
                pages.madvise(mmap.MADV_HUGEPAGE)
            self.kept.append(torch.frombuffer(pages, dtype=torch.float32).fill_(1.0))


class Drops(Eager):
    """Does nothing any more after step 50."""

    share = 0.03

    def timed_step(self, index):
        if index < 50:
            super().timed_step(index)
        else:
            self.state.keep(index)
            self.state.spend(index, self.share)


class Burns(Drops):
    """The same, and takes its time over it: loss and norm are computed, nothing is trained."""

    share = 1.0

    def timed_step(self, index):
        if index >= 50:
            self.state.load(index)
            self.state.compute()
        super().timed_step(index)


class NoNorm(Altered):
    """The gradient norm is left out."""

    def keep(self, index):
        self.state.norm.zero_()
        self.state.keep(index)


class NoGraph(Graph):
    """Made a graph, and does not replay it."""

    def compute(self):
        if in_window():
            self.state.compute()
        else:
            self.graph.replay()


class FirstBatch(Altered):
    """The batch of the capture again and again."""

    def load(self, index):
        self.state.load(0)


LIARS = {
    "late_thread": LateThread,
    "cached_losses": CachedLosses,
    "lazy": Lazy,
    "uninitialised": Uninitialised,
    "frozen_rate": FrozenRate,
    "half_batches": HalfBatches,
    "stale_optimizer": StaleOptimizer,
    "leak": Leaks,
    "drops": Drops,
    "burns": Burns,
    "no_norm": NoNorm,
    "no_graph": NoGraph,
    "first_batch": FirstBatch,
}

# ------------------------------------------------------------------------------------------------
# Running them


def promises(config, variant):
    return (1, 1) if variant == "graph" else (0, 0)


def run(make, run_seed: int, round_index: int = 1, parity: bool = False, **config) -> dict:
    """The record of one run, as it is read back from its JSON. run_seed: of what is not the same in each run."""
    clock, kind = Clock(), make.kind
    workload = measure.Workload(
        model="tests.fake_model",
        build=lambda config, device: State(config, clock, run_seed),
        variants={kind: make},
        reference=eager_step,
        card=[],
        notes=[],
        flops_per_step=1.0,
        flops_convention="none",
        items_per_step=1,
        unit="samples",
        kinds={kind: kind},
        promises=promises,
    )
    options = Run(preset="tiny", variant=kind, round=round_index, parity=parity)
    arguments = Arguments(config=Config(**config), run=options)
    env = mock.patch.object(environment, "describe_environment", lambda *_: _env())
    clocks = (mock.patch.object(module, "time", clock) for module in (passes, proof))
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
        for patch in (env, *clocks):
            stack.enter_context(patch)
        record = measure.run(workload, arguments, CPU)
    return json.loads(records.dumps(record))


def _env():
    return dict(records.TEMPLATE["env"])
