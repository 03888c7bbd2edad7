"""Gradients of four microbatches added up inside of one step."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(4, 8, 16, device=device), torch.randint(4, (4, 8), device=device)) for _ in range(3)]

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for inputs, labels in zip(*batch, strict=True):
            loss = nn.functional.cross_entropy(model(inputs), labels) / len(batch[0])
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step, batches, [model, optimizer]
