"""A language model whose head is its embedding."""

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, vocabulary=48, width=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens))[0])


def build(device):
    torch.manual_seed(0)
    model = Tied().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [torch.randint(48, (4, 9), device=device) for _ in range(4)]

    def step(tokens):
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
