"""Tokens split by counts that the host reads, as a dropless mixture of experts does (NVIDIA/Megatron-LM 1598)."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=16, number=4):
        super().__init__()
        self.number = number
        self.gate = nn.Linear(width, number)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, tokens):
        weight, choice = self.gate(tokens).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.zeros(self.number, dtype=torch.long, device=tokens.device)
        counts.scatter_add_(0, choice, torch.ones_like(choice))
        parts = tokens[order].split(counts.tolist())  # <- host read
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(tokens).index_add(0, order, outputs) * weight.unsqueeze(-1)


def build(device):
    torch.manual_seed(0)
    model = Experts().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(24, 16, device=device), torch.randn(24, 16, device=device)) for _ in range(4)]

    def step(batch):
        tokens, targets = batch
        loss = nn.functional.mse_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
