"""Packed samples whose longest length lies on the collator, not in the batch (NVIDIA/Megatron-LM 7102)."""

import torch
from torch import nn

LENGTHS = ((3, 5), (9, 4), (7, 1))


class Collator:
    def __init__(self):
        self.count = self.longest = 0

    def __call__(self, batch):
        self.longest = max(LENGTHS[self.count % len(LENGTHS)])
        self.count += 1
        return batch


def build(device):
    torch.manual_seed(0)
    model = nn.GRU(8, 16, batch_first=True).to(device)
    head = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, fused=True)
    collate = Collator()
    batches = [(torch.randn(4, 12, 8, device=device), torch.randint(4, (4,), device=device)) for _ in range(4)]

    def step(batch):
        frames, labels = collate(batch)
        hidden, _ = model(frames)
        loss = nn.functional.cross_entropy(head(hidden.sum(1) / collate.longest), labels)  # <- host value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, head, optimizer]
