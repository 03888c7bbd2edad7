"""A flag of the wrapper scales gradients after the last of four microbatches (pytorch/torchtitan 4658)."""

import torch
from torch import nn


class Accumulated(nn.Module):
    def __init__(self, inner, number=4):
        super().__init__()
        self.inner, self.number, self.count, self.is_last = inner, number, 0, False

    def forward(self, inputs):
        self.count += 1
        self.is_last = self.count % self.number == 0
        return self.inner(inputs)

    def update(self, optimizer):
        if self.is_last:
            for parameter in self.inner.parameters():
                parameter.grad.div_(self.number)  # <- control flow
            optimizer.step()
            optimizer.zero_grad()


def build(device):
    torch.manual_seed(0)
    model = Accumulated(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        model.update(optimizer)
        return loss

    return step, batches, [model, optimizer]
