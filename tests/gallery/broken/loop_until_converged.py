"""A deep equilibrium layer that iterates until it has converged (pytorch/pytorch 130386: loops need the host)."""

import torch
from torch import nn


class Equilibrium(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        nn.init.orthogonal_(self.inner.weight, gain=0.4)

    def forward(self, inputs):
        state = torch.zeros_like(inputs)
        for _ in range(30):
            following = torch.tanh(self.inner(state) + inputs)
            if (following - state).abs().max() < 1e-3:  # <- host read
                break
            state = following
        return following


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Equilibrium(16), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
