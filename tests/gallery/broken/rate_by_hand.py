"""A rate by hand, from a count in a dict, as nanoGPT sets it: a graph keeps one (pytorch/pytorch 106802)."""

import math

import torch
from torch import nn


def get_lr(iteration):
    return 0.1 * (iteration + 1) / 10 if iteration < 10 else 0.05 * (1 + math.cos(math.pi * min(iteration, 90) / 90))


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    state = {"iteration": 0}

    def step(batch):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(state["iteration"])  # <- rate by hand
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["iteration"] += 1
        return loss

    return step, batches, [model, optimizer]
