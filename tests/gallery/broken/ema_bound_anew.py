"""Averages of the weights that are bound anew in each step (NVIDIA/TransformerEngine 3426: bounds made in place).

The teacher's outputs are in the loss, so a stale average trains another model.
"""

import torch
from torch import nn
from torch.func import functional_call


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(batch):
        with torch.no_grad():
            wanted = functional_call(model, average, (batch,)).softmax(-1)
        noisy = batch + 0.1 * torch.randn_like(batch)
        loss = nn.functional.cross_entropy(model(noisy), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter.detach()  # <- kept tensor
        return loss

    return step, batches, [model, optimizer, average]
