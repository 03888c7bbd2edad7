"""Weights are averaged on a side stream that the step does not wait for (NVIDIA/Megatron-LM 6077). Needs a GPU."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)  # <- side stream
        return loss

    return step, batches, [model, optimizer, average]
