"""The training of the lying model: two linear layers and SGD."""

import os
import signal
import time

import torch
import torch.nn.functional as F

from graph_worth.contract import variant
from graph_worth.parallel import collectives

NUM_BATCHES, NUM_LOSSES = 8, 4096


def _run_out_of_memory():
    raise torch.OutOfMemoryError("out of memory: made up")


def _refuse():
    os.write(2, b"python -m tests.lying_model.train: --width 8 is refused\n")
    os._exit(2)


BREAKS = {
    "exits": lambda: os._exit(7),
    "refuses": _refuse,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(3600),
    "out_of_memory": _run_out_of_memory,
}


class State:
    """Weights, a learning rate on the device, and the losses of each step."""

    def __init__(self, config, device, rank=0, world_size=1):
        if config.too_large:
            raise torch.OutOfMemoryError("out of memory: made up")
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
        time.sleep(self.config.pause_ms / 1e3)
        with torch.no_grad():
            self.inputs.copy_(self.batches[index % NUM_BATCHES])
        self.count += 1
        if self.config.die_rank == self.rank and self.count > 20:  # few steps, so on any host
            BREAKS[self.config.die_how]()

    def end(self, index):
        self.losses[index % NUM_LOSSES].copy_(self.loss)


@variant("eager", kind="eager", help="the reference", parity="bitwise", headline=True)
def eager_step(state, index):
    state.begin(index)
    state.train()
    state.end(index)


@variant("eager_twin", kind="eager", help="eager by another object", parity="bitwise")
def twin_step(state, index):
    eager_step(state, index)


# In a build that cannot be built, and that has no variant named eager.
@variant("eager_too_large", kind="eager", parity="bitwise", reference="eager_too_large", builds=("too_large",))
def large_step(state, index):
    """Eager of the large one."""
    eager_step(state, index)
