"""Momentum kept in a Python list and replaced in each step (microsoft/dion 104 makes such state persistent)."""

import torch
from torch import nn


class Momentum:
    def __init__(self, parameters, lr=0.05, beta=0.9):
        self.parameters, self.lr, self.beta = list(parameters), lr, beta
        self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self):
        for index, parameter in enumerate(self.parameters):
            self.buffers[index] = self.beta * self.buffers[index] + parameter.grad  # <- kept tensor
            parameter.sub_(self.lr * self.buffers[index])
            parameter.grad = None


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    momentum = Momentum(model.parameters())
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        momentum.step()
        return loss

    return step, batches, [model]
