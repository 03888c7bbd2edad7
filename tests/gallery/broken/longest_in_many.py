"""Fourteen packed batches of one shape with eight longest lengths (NVIDIA/Megatron-LM 4359)."""

import torch
from torch import nn

LONGEST = (5, 9, 7, 6, 8, 10, 11, 12, 5, 6, 7, 9, 8, 10)


def build(device):
    torch.manual_seed(0)
    model = nn.GRU(8, 16, batch_first=True).to(device)
    head = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, fused=True)
    batches = [  # <- shapes of batches
        {
            "frames": torch.randn(4, 12, 8, device=device),
            "labels": torch.randint(4, (4,), device=device),
            "longest": longest,
        }
        for longest in LONGEST
    ]

    def step(batch):
        hidden, _ = model(batch["frames"])
        loss = nn.functional.cross_entropy(head(hidden[:, : batch["longest"]].mean(1)), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, head, optimizer]
