"""Noise with a tensor of deviations: normal() checks them on the host (pytorch/pytorch 134442 is of its kind)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        noisy = torch.normal(inputs, 0.1 * inputs.abs())  # <- host read
        loss = nn.functional.cross_entropy(model(noisy), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
