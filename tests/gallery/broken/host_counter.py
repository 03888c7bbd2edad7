"""Adam written by hand, whose bias correction counts steps on the host (tracel-ai/burn 5779, cause 1)."""

import torch
from torch import nn


class Adam:
    def __init__(self, parameters, lr=1e-2):
        self.parameters, self.lr, self.count = list(parameters), lr, 0
        self.first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.second = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self):
        self.count += 1
        rate = self.lr * (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count)
        for parameter, first, second in zip(self.parameters, self.first, self.second, strict=True):
            first.lerp_(parameter.grad, 0.1)
            second.lerp_(parameter.grad.square(), 0.001)
            parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-rate)  # <- host value
            parameter.grad = None


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    adam = Adam(model.parameters())
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        adam.step()
        return loss

    return step, batches, [model, adam.first, adam.second]
