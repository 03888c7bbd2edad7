"""The loss is read for the log in each step (pytorch/pytorch 63269: such calls are prohibited in a capture)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(4, 3, 8, 8, device=device), torch.randint(4, (4,), device=device)) for _ in range(3)]
    history = []

    def step(batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())  # <- host read
        return loss

    return step, batches, [model, optimizer]
