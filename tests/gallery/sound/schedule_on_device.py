"""A learning rate in a tensor that the step fills from a count on the device."""

import torch
from torch import nn

WARM_UP = 20


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    rate = torch.full((), 0.1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
    count = torch.zeros((), device=device)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        count.add_(1)
        optimizer.param_groups[0]["lr"].copy_(0.1 * (count / WARM_UP).clamp(max=1.0))
        optimizer.step()
        return loss

    return step, batches, [model, optimizer, count]
