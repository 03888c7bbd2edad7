"""Activations that are computed again in the backward pass."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, hidden):
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
        return hidden


def build(device):
    torch.manual_seed(0)
    model = Deep().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda")
    batches = [(torch.randn(8, 24, device=device), torch.randn(8, 24, device=device)) for _ in range(3)]

    def step(batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
