"""An LSTM over padded frames, with a mask in the place of packed sequences."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, frames):
        hidden, _ = self.lstm(frames)
        return self.head(hidden)


def build(device):
    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [
        (
            torch.randn(4, 9, 8, device=device),
            torch.randint(3, 10, (4, 1), device=device),
            torch.randint(4, (4, 9), device=device),
        )
        for _ in range(3)
    ]
    places = torch.arange(9, device=device)

    def step(batch):
        frames, lengths, labels = batch
        losses = nn.functional.cross_entropy(model(frames).transpose(1, 2), labels, reduction="none")
        is_speech = (places < lengths).float()
        loss = (losses * is_speech).sum() / is_speech.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
