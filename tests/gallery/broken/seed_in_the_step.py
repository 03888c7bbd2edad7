"""Dropout that saves and sets the random state around a part (Dao-AILab/flash-attention 166)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        torch.manual_seed(17)  # <- random state
        first, second = model(inputs), model(inputs)
        loss = nn.functional.cross_entropy(first, labels) + nn.functional.mse_loss(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
