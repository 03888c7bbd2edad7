"""Gradients of two losses, projected on each other where the host finds them opposed (wandb/senpai 1597)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5)).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        outputs = model(inputs)
        first = nn.functional.cross_entropy(outputs[:, :4], labels)
        second = (outputs[:, 4] - inputs[:, 0]).square().mean()
        ours = torch.autograd.grad(first, parameters, retain_graph=True)
        theirs = torch.autograd.grad(second, parameters)
        for parameter, a, b in zip(parameters, ours, theirs, strict=True):
            if (a * b).sum() < 0:  # <- host read
                a = a - (a * b).sum() / b.square().sum() * b
            parameter.grad = a + b
        optimizer.step()
        return (first + second).detach()

    return step, batches, [model, optimizer]
