"""Counts, a history and a meter beside the training, which change nothing in it."""

import time

import torch
from torch import nn


class Trainer:
    def __init__(self, device):
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.num_steps, self.history, self.started = 0, [], time.perf_counter()
        self.meter = torch.zeros((), device=device)

    def step(self, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_steps += 1
        self.seconds = time.perf_counter() - self.started
        self.history.append(loss.detach())
        self.meter += loss.detach()
        return loss


def build(device):
    torch.manual_seed(0)
    trainer = Trainer(device)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    return trainer.step, batches, [trainer.model, trainer.optimizer]
