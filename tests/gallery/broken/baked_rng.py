"""Mixup whose weight comes from Python's random numbers: baked into the graph (baidu-baige/LoongForge 49).

There the loss was off by 3.47 %, with Beta samples that the capture had drawn once.
"""

import random

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randn(8, 4, device=device)) for _ in range(4)]

    def step(batch):
        inputs, targets = batch
        share = random.betavariate(0.4, 0.4)  # <- python random
        inputs = inputs * share + inputs.flip(0) * (1 - share)
        targets = targets * share + targets.flip(0) * (1 - share)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
