"""A loss with a backward pass of its own that takes one_hot, which a GPU does not check."""

import torch
from torch import nn


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, labels):
        chosen = scores.log_softmax(-1)
        ctx.save_for_backward(chosen, labels)
        return nn.functional.nll_loss(chosen, labels)

    @staticmethod
    def backward(ctx, incoming):
        chosen, labels = ctx.saved_tensors
        gradient = (chosen.exp() - nn.functional.one_hot(labels, 4)) / len(labels)
        gradient = gradient * incoming
        return gradient, None


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = Loss.apply(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
