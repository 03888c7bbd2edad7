"""Noise from a generator that the graph does not know (pytorch/pytorch 114068 registers them)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    generator = torch.Generator(device).manual_seed(5)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(batch):
        noise = torch.randn(batch.shape, generator=generator, device=device)  # <- unknown generator
        loss = nn.functional.mse_loss(model(batch + noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
