"""A small language model with dropout, causal attention and a step of Adam."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, vocabulary=64, width=32, length=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1), persistent=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def build(device):
    torch.manual_seed(0)
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda")
    batches = [torch.randint(64, (2, 17), device=device) for _ in range(3)]

    def step(tokens):
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
