"""A product in the loss, whose backward pass looks for zeros on the host (pytorch/pytorch 128396)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        scores = torch.sigmoid(model(inputs))
        misses = 1 - scores.gather(1, labels[:, None])
        loss = misses.mean() + (1 - scores).prod(dim=-1).mean()  # <- host read
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
