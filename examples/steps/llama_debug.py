"""torchtitan's debug Llama: 6 layers, width 256, 16 heads, 8 sequences of 2,048 tokens, AdamW, a warm-up schedule."""

import torch
import torch.nn.functional as F
from torch import nn


def rotated(x, angles):
    cosine, sine = angles
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).type_as(x)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, hidden = heads, 256 * ((8 * width // 3 + 255) // 256)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, angles):
        b, t, c = x.shape
        h = self.norm1(x)
        q, k, v = (proj(h).view(b, t, self.heads, c // self.heads) for proj in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, vocabulary=2048, width=256, layers=6, heads=16, tokens=2048):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer(width, heads) for _ in range(layers)), nn.RMSNorm(width)
        size = width // heads
        rates = 500000 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens), rates)
        self.register_buffer("angles", torch.stack((angles.cos(), angles.sin()))[:, :, None], persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles[:, : tokens.shape[1]])
        return self.head(self.norm(x))


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = Llama() if on_gpu else Llama(width=64, layers=2, heads=4, tokens=64)
    model = model.to(device)
    rate = torch.tensor(8e-4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 200))
    batches = [torch.randint(2048, (8, 2049) if on_gpu else (2, 65)).to(device) for _ in range(8)]

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return step, batches, [model, optimizer, schedule]
