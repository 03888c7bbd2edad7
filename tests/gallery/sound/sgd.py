"""A classifier under SGD with momentum and weight decay."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    return step, batches, [model, optimizer]
