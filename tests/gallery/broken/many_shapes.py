"""Images of many sizes, each with a graph and a pool of its own (roboflow/rf-detr 1490: 38 GiB over 11 shapes)."""

import torch
from torch import nn

SIZES = (8, 9, 10, 11, 12, 13)


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [  # <- shapes of batches
        (torch.randn(2, 3, size, size, device=device), torch.randint(4, (2,), device=device)) for size in SIZES
    ]

    def step(batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
