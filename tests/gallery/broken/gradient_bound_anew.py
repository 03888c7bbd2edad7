"""Gradients that decay from step to step and are bound anew, so a replay adds to that of the capture.

NVIDIA/TransformerEngine 869: the buffer that the backward pass fills is not the buffer that the optimizer reads.
"""

import torch
from torch import nn

DECAY = 0.9


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randn(8, 1, device=device)) for _ in range(4)]

    def step(batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * DECAY  # <- gradient
        return loss

    return step, batches, [model, optimizer]
