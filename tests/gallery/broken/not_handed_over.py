"""A teacher that trains along and is not handed over: warm-up steps change it for good (pytorch/torchtitan 4433)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(batch):
        wanted = teacher(batch).softmax(-1)
        loss = nn.functional.cross_entropy(model(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.05)  # <- not handed over
        return loss

    return step, batches, [model, optimizer]
