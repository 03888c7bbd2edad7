"""An evaluation after each third step, inside of the step function (NVIDIA-NeMo/Megatron-Bridge 5291)."""

import torch
from torch import nn

EVERY = 3


class Loop:
    def __init__(self, device):
        self.model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=True)
        self.held_out = (torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device))
        self.best = torch.full((), 1e9, device=device)
        self.num_steps = 0

    def step(self, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % EVERY == 0:
            self.evaluate()
        return loss

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        inputs, labels = self.held_out
        scores = self.model(inputs)  # <- control flow
        self.best.copy_(torch.minimum(self.best, nn.functional.cross_entropy(scores, labels)))
        self.model.train()


def build(device):
    torch.manual_seed(0)
    loop = Loop(device)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    return loop.step, batches, [loop.model, loop.optimizer, loop.best]
