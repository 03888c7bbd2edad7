"""Gradients added up over two calls: the first gradient is taken over, not added (pytorch/pytorch 181723).

The capture sees one of both calls. Its replays put their gradient where the one of the call before lies.
"""

import torch
from torch import nn

MICROBATCHES = 2


class Trainer:
    def __init__(self, device):
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, fused=True)
        self.calls = 0

    def step(self, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels) / MICROBATCHES
        loss.backward()  # <- gradient
        self.calls += 1
        if self.calls % MICROBATCHES == 0:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build(device):
    torch.manual_seed(0)
    trainer = Trainer(device)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    return trainer.step, batches, [trainer.model, trainer.optimizer]
