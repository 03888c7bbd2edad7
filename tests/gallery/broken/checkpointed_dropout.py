"""Checkpointing keeps the random state, which no capture may read (pytorch/pytorch 162504)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def build(device):
    torch.manual_seed(0)
    front, block = nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1))
    model = nn.ModuleDict({"front": front, "block": block, "head": nn.Linear(32, 4)}).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step(batch):
        inputs, labels = batch
        hidden = checkpoint(model["block"], model["front"](inputs), use_reentrant=False)  # <- random state
        loss = nn.functional.cross_entropy(model["head"](hidden), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
