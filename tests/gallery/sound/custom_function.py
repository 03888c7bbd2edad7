"""An activation with a backward pass of its own: a spike with a surrogate gradient."""

import torch
from torch import nn


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (potential,) = ctx.saved_tensors
        return gradient / (1 + (3 * potential).square())


class Spiking(nn.Module):
    """Leaky neurons over some time steps, whose potential is reset where they fire."""

    def __init__(self, steps=4):
        super().__init__()
        self.steps = steps
        self.inputs, self.outputs = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, inputs):
        potential = torch.zeros(len(inputs), 32, device=inputs.device)
        total = 0.0
        for _ in range(self.steps):
            potential = 0.5 * potential + self.inputs(inputs)
            spikes = Spike.apply(potential - 1.0)
            potential = potential * (1 - spikes)
            total = total + self.outputs(spikes)
        return total / self.steps


def build(device):
    torch.manual_seed(0)
    model = Spiking().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
