"""Columns picked by a Python list, which is a tensor from the host in each call (deepmodeling/deepmd-kit 5432)."""

import torch
from torch import nn

COORDINATES = [0, 2, 5]


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randn(8, 3, device=device)) for _ in range(4)]

    def step(batch):
        inputs, targets = batch
        forces = model(inputs)[:, COORDINATES]  # <- host data
        loss = nn.functional.mse_loss(forces, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
