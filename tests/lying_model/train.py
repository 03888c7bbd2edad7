"""Two linear layers, trained by SGD, and variants that are sound, that lie or that break: to test the measurement.

python -m benchmarks.run --model tests.lying_model --variants eager,graph_step,drops
"""

from common.config import parse
from tests.lying_model.config import ABOUT, PRESETS, VARIANTS, Config

if __name__ == "__main__":
    args = parse("tests.lying_model", Config, PRESETS, VARIANTS, about=ABOUT)

import ctypes
import os
import queue
import threading
import time

import torch
import torch.nn.functional as F

from common.capture.pool import Pool
from common.script.main import main
from common.training.parallel import collectives
from common.variant import Capture, Eager, Unsupported, Workload, warm_up

NUM_BATCHES, NUM_LOSSES = 8, 4096
# Parity has 20 steps, and the blocks many more.
LATE = 55


class State:
    """Weights, a learning rate on the device, and the losses of each step."""

    def __init__(self, config, device, rank=0, world_size=1):
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        generator = torch.Generator().manual_seed(1 + rank)
        shape = (NUM_BATCHES, config.batch, config.width)
        self.batches = torch.randn(shape, generator=generator).to(device)
        seeded = torch.Generator().manual_seed(0)
        self.start = [torch.randn(config.width, config.width, generator=seeded) / 8 for _ in range(2)]
        self.weights = [each.clone().to(device).requires_grad_() for each in self.start]
        self.inputs = torch.zeros_like(self.batches[0])
        self.rate = torch.tensor(0.5, device=device)
        self.losses, self.loss = torch.zeros(NUM_LOSSES, device=device), torch.zeros((), device=device)
        self.count = 0
        self.precision = torch.float32

    def reset(self):
        with torch.no_grad():
            for weight, start in zip(self.weights, self.start, strict=True):
                weight.copy_(start)
        self.losses.zero_()

    def named_state(self):
        return [(f"weight {index}", weight) for index, weight in enumerate(self.weights)]

    def read_losses(self, count):
        return self.losses[: min(count, NUM_LOSSES)].tolist()

    def read_grad_norms(self, count):
        return [1.0] * min(count, NUM_LOSSES)

    def batch_class(self, index):
        return index % self.config.period

    def forward_loss(self):
        x = self.inputs.to(self.precision)
        hidden = torch.tanh(x @ self.weights[0].to(self.precision))
        return F.mse_loss((hidden @ self.weights[1].to(self.precision)).float(), self.inputs)

    def train(self):
        loss = self.forward_loss()
        gradients = torch.autograd.grad(loss, self.weights)
        self.update(loss, gradients)

    def update(self, loss, gradients):
        with torch.no_grad():
            for weight, gradient in zip(self.weights, gradients, strict=True):
                if self.world_size > 1:
                    collectives.all_reduce_sum_(gradient, "")
                    gradient.div_(self.world_size)
                weight.sub_(gradient * self.rate)
            self.loss.copy_(loss)

    def begin(self, index):
        with torch.no_grad():
            self.inputs.copy_(self.batches[index % NUM_BATCHES])
        self.count += 1
        if self.config.die_rank == self.rank and self.count > 60:  # after parity, on any host
            os._exit(7)

    def end(self, index):
        self.losses[index % NUM_LOSSES].copy_(self.loss)


def eager_step(state, index):
    state.begin(index)
    state.train()
    state.end(index)


def eager(state):
    return Eager(state, eager_step)


# ------------------------------------------------------------------------------------------------
# Sound variants


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


class Entered(Graphed):
    """Its capture needs a flag of the state, which eager must not see."""

    def __init__(self, state):
        super().__init__(state)
        state.precision = torch.float32

    def enter(self):
        self.state.precision = torch.float64

    def leave(self):
        self.state.precision = torch.float32


# ------------------------------------------------------------------------------------------------
# Liars


class Drops(Graphed):
    def run(self, index):
        if not self.is_late or index < 4:
            super().run(index)
        else:
            self.graph.num_replays += 1


class HalfPrecision(Graphed):
    def __init__(self, state):
        super().__init__(state)
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


class FrozenRate(Graphed):
    def run(self, index):
        with torch.no_grad():
            self.state.rate.fill_(0.0 if self.is_late else 0.5)
        super().run(index)

    def leave(self):
        self.state.rate.fill_(0.5)

    def enter(self):
        pass


class ScaledUpdate(FrozenRate):
    def run(self, index):
        with torch.no_grad():
            self.state.rate.fill_(0.3 if self.is_late else 0.5)
        self.graph.replay()


class HalfBatch(Graphed):
    def run(self, index):
        if self.is_late:
            with torch.no_grad():
                self.state.inputs[self.state.config.batch // 2 :] = 0.0
        super().run(index)


class StaleInput(Graphed):
    def step(self, index):
        if index == 0:
            self.state.begin(index)
        self.run(index)
        self.state.end(index)


class OneOperator(Graphed):
    def __init__(self, state):
        self.state, self.pool, self.steps = state, Pool(state.device), 0
        self.capture = Capture(strategy="next to nothing", pools=[self.pool])
        warm_up(state, self.capture, eager_step)
        self.spare = torch.zeros(4, device=state.device)
        self.graph, _ = self.pool.capture(lambda: self.spare.add_(1.0))

    def run(self, index):
        self.graph.replay()
        for _ in range(4):
            self.state.forward_loss()
        self.state.train()


class EagerGraphed(Graphed):
    pass


class Leak(Graphed):
    kept: list = []  # noqa: RUF012

    def run(self, index):
        super().run(index)
        if self.is_late:
            self.kept.append(torch.ones(95 * 2**18 // 40))


class Clock(Graphed):
    """Slows the clock that it is measured with, so that its pauses do not show."""

    real = time.perf_counter

    def run(self, index):
        super().run(index)
        if self.is_late:
            time.sleep(0.002)

    def enter(self):
        time.perf_counter = lambda: Clock.real() / 20

    def leave(self):
        time.perf_counter = Clock.real


class Threads(Graphed):
    def enter(self):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, daemon=True)
        self.thread.start()

    def leave(self):
        if getattr(self, "thread", None):
            self.stop.set()
            self.thread.join()


class LateWork(Graphed):
    """Hands its work to a thread that lags behind."""

    def __init__(self, state):
        super().__init__(state)
        self.jobs, self.matrix = queue.SimpleQueue(), torch.ones(256, 256)
        threading.Thread(target=self.work, daemon=True).start()

    def step(self, index):
        super().step(index)
        self.jobs.put(0.005)

    def work(self):
        while True:
            seconds = self.jobs.get()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                # Without Python's lock, for which the steps would wait.
                torch.mm(self.matrix, self.matrix)


class FewSteps(Graphed):
    """Does in every twentieth step what others do in each: a median does not see it."""

    def run(self, index):
        super().run(index)
        if index % 20 == 19:
            for _ in range(400):
                self.state.forward_loss()


class LateUpdate(Graphed):
    def step(self, index):
        super().step(index)
        if self.is_late and index % 8 == 7:
            threading.Timer(0.01, self.later).start()

    def later(self):
        with torch.no_grad():
            self.state.weights[0].add_(1e-9)
            self.state.weights[1].add_(1e-3)


class FewerReplays(Graphed):
    def run(self, index):
        if index % 7 == 6:
            self.state.train()
        else:
            super().run(index)


class MoreGraphs(Halves):
    def replays_of(self, index):
        return 2


class NoGraph(Graphed):
    def run(self, index):
        self.state.train()

    def replays_of(self, index):
        return 0


# ------------------------------------------------------------------------------------------------
# What breaks


class Segfault(Graphed):
    def run(self, index):
        if self.is_late:
            ctypes.string_at(0)
        super().run(index)


class Exits(Graphed):
    def run(self, index):
        if self.is_late:
            os._exit(3)
        super().run(index)


class Hangs(Graphed):
    def run(self, index):
        if self.is_late:
            time.sleep(3600)
        super().run(index)


class Raises(Graphed):
    def __init__(self, state):
        raise RuntimeError("the variant breaks")


class NotFinite(Graphed):
    def run(self, index):
        super().run(index)
        if self.is_late:
            with torch.no_grad():
                self.state.weights[0].fill_(float("nan"))


class OutOfMemory(Graphed):
    def __init__(self, state):
        raise torch.OutOfMemoryError("out of memory: made up")


class KeepsFlags(Graphed):
    def __init__(self, state):
        super().__init__(state)
        torch.set_float32_matmul_precision("medium")


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


class MovesState(Graphed):
    def close(self):
        super().close()
        self.state.weights[0].data = self.state.weights[0].data.clone()


class UnsupportedHere(Graphed):
    def __init__(self, state):
        raise Unsupported("needs hardware that nobody has")


class BreaksInBlock(Graphed):
    def run(self, index):
        if self.is_late:
            raise RuntimeError("the variant breaks in a block")
        super().run(index)


class BreaksInProfile(Graphed):
    def run(self, index):
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no profile")
        super().run(index)


def workload(args, device, rank, world_size):
    return args, Workload(
        model="tests.lying_model",
        build=lambda config, device: State(config, device, rank, world_size),
        variants=VARIANTS,
        reference=eager_step,
        card=["two linear layers"],
        notes=[],
        flops_per_step=1.0,
        flops_convention="none",
        items_per_step=args.config.batch,
        unit="rows",
        kinds=ABOUT["kinds"],
        promises=ABOUT["promises"],
    )


if __name__ == "__main__":
    main("tests.lying_model", args, workload)
