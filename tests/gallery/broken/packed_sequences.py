"""An LSTM over packed sequences, whose lengths must lie on the host (NVIDIA/Megatron-LM 3869 pads them instead)."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)  # <- host read
        _, (last, _) = self.lstm(packed)
        return self.head(last[0])


def build(device):
    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [
        (
            torch.randn(4, 9, 8, device=device),
            torch.randint(3, 10, (4,), device=device),
            torch.randint(4, (4,), device=device),
        )
        for _ in range(3)
    ]

    def step(batch):
        frames, lengths, labels = batch
        loss = nn.functional.cross_entropy(model(frames, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
