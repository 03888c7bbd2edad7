"""A learning rate that is refreshed except while a stream captures: never in a replay (microsoft/dion 104)."""

import torch
from torch import nn


def is_capturing(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    rate = torch.full((), 0.1, device=device)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if not is_capturing(device):
            rate.mul_(0.95)  # <- capture-aware code
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
                parameter.grad = None
        return loss

    return step, batches, [model, rate]
