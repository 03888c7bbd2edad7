"""Each parameter has its own optimizer, which steps in the backward pass as soon as the gradient is there."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizers = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9, fused=True) for each in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    return step, batches, [model, *optimizers.values()]
