"""The step hands out the loss of the step before, so as never to wait (pytorch/pytorch 169545: outputs overwritten)."""

import torch
from torch import nn


class Lazy:
    def __init__(self, model, optimizer, device):
        self.model, self.optimizer = model, optimizer
        self.pending = torch.zeros((), device=device)

    def __call__(self, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        earlier, self.pending = self.pending, loss.detach()  # <- kept tensor
        return earlier


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    return Lazy(model, optimizer, device), batches, [model, optimizer]
