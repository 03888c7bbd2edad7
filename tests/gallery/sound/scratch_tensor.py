"""A tensor of build that each step overwrites before it reads it, and a thread of build's that draws nothing."""

import threading

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    scratch = torch.empty(8, 16, device=device)
    threading.Thread(target=threading.Event().wait, daemon=True).start()

    def step(batch):
        inputs, labels = batch
        torch.mul(inputs, 2.0, out=scratch)
        loss = nn.functional.cross_entropy(model(scratch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
