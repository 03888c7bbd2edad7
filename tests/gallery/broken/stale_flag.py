"""Weights that are rounded again only where a flag on the host says so (deepseek-ai/DeepGEMM 451: stale flags)."""

import torch
from torch import nn

REFRESH = 4


class Rounded(nn.Module):
    """A linear layer in bfloat16, whose copy of the weight is refreshed in each fourth call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16) * 0.2)
        self.register_buffer("rounded", self.weight.detach().bfloat16())
        self.calls = 0

    def forward(self, inputs):
        if self.calls % REFRESH == 0:
            self.rounded.copy_(self.weight.detach())  # <- control flow
        self.calls += 1
        exact = inputs @ self.weight.T
        return exact + (inputs.bfloat16() @ self.rounded.T).float() - exact.detach()


def build(device):
    torch.manual_seed(0)
    model = Rounded().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
