"""The warm-up of a capture in build moves the statistics of a BatchNorm (LibreYOLO/libreyolo 671).

On a CPU three forward passes stand for those of make_graphed_callables.
"""

import torch
from torch import nn


def graphed(front, sample):
    if sample.is_cuda:
        return torch.cuda.make_graphed_callables(front, (sample,))  # <- warm-up (note)
    for _ in range(3):
        front(sample)
    return front


def build(device):
    torch.manual_seed(0)
    front = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()).to(device)
    head = nn.Linear(32, 4).to(device)
    optimizer = torch.optim.SGD([*front.parameters(), *head.parameters()], lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]
    front = graphed(front, batches[0][0])

    def step(batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(head(front(inputs)), labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [front, head, optimizer]
