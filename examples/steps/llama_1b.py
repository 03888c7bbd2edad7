"""Llama 3.2 1B at 512 tokens, as in ml-engineering's benchmark: 16 layers, width 2,048, bfloat16, fused AdamW."""

import torch
import torch.nn.functional as F
from torch import nn


def rotated(x, cosine, sine):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


class Layer(nn.Module):
    def __init__(self, width, heads, groups, hidden):
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cosine, sine):
        h = self.norm1(x)
        q, k, v = (proj(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, vocabulary=128256, tokens=512, layers=16, width=2048, heads=32, groups=8, hidden=8192):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, eps=1e-5)
        self.layers = nn.ModuleList(Layer(width, heads, groups, hidden) for _ in range(layers))
        size = width // heads
        angles = torch.outer(torch.arange(tokens), 500000 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return F.linear(self.norm(x), self.embedding.weight)


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    small = {"vocabulary": 256, "tokens": 32, "layers": 2, "width": 64, "heads": 4, "groups": 2, "hidden": 128}
    with device:
        model = (Llama() if on_gpu else Llama(**small)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=on_gpu)
    vocabulary, length = (128256, 513) if on_gpu else (256, 33)
    batches = [torch.randint(vocabulary, (1, length)).to(device) for _ in range(8)]

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
