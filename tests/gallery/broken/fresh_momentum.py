"""Every fourth step begins with a fresh momentum, in new tensors (tracel-ai/burn 5779)."""

import torch
from torch import nn


class Trainer:
    def __init__(self, device):
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.count = 0

    def step(self, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.count += 1
        if self.count % 4 == 0:
            for parameter, state in self.optimizer.state.items():
                state["momentum_buffer"] = torch.zeros_like(parameter)  # <- moved memory
        return loss


def build(device):
    torch.manual_seed(0)
    trainer = Trainer(device)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    return trainer.step, batches, [trainer.model, trainer.optimizer]
