"""lerobot's ACT under DDP: ResNet-18 on a camera, a variational transformer, chunks of 100 actions, 8 samples a rank.

lerobot reads both losses by .item() in each step, to log them. Here they stay on the GPU.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FrozenNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("scale", torch.ones(width, 1, 1))
        self.register_buffer("shift", torch.zeros(width, 1, 1))

    def forward(self, x):
        return x * self.scale + self.shift


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = FrozenNorm(width), FrozenNorm(width), FrozenNorm(width)
        self.short = nn.Conv2d(before, width, 1, stride, bias=False) if before != width else None

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.norm3(self.short(x))))


class Backbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), FrozenNorm(width)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        self.blocks = nn.Sequential(
            *(block for a, b, stride in sizes for block in (Block(a, b, stride), Block(b, b, 1)))
        )

    def forward(self, x):
        return self.blocks(F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1))


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder, which reads a memory."""

    def __init__(self, width, heads, hidden, has_memory=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True) if has_memory else None
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if has_memory else 2))

    def forward(self, x, positions, memory=None, memory_positions=None, padding=None):
        q = x + positions
        x = self.norms[0](x + F.dropout(self.attention(q, q, x, padding, need_weights=False)[0], 0.1))
        if self.cross is not None:
            y = self.cross(x + positions, memory + memory_positions, memory, need_weights=False)[0]
            x = self.norms[1](x + F.dropout(y, 0.1))
        y = self.down(F.dropout(F.relu(self.up(x)), 0.1))
        return self.norms[-1](x + F.dropout(y, 0.1))


class ACT(nn.Module):
    def __init__(self, joints=14, chunk=100, base=64, width=512, heads=8, hidden=3200, layers=4, latent=32, grid=300):
        super().__init__()
        self.latent, self.backbone = latent, Backbone(base)
        self.style = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.encoder = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.decoder = Layer(width, heads, hidden, has_memory=True)
        self.token, self.queries = (nn.Parameter(torch.randn(n, width) * 0.02) for n in (1, chunk))
        self.style_state, self.style_action = nn.Linear(joints, width), nn.Linear(joints, width)
        self.statistics, self.z = nn.Linear(width, 2 * latent), nn.Linear(latent, width)
        self.state, self.pixel = nn.Linear(joints, width), nn.Conv2d(8 * base, width, 1)
        self.head = nn.Linear(width, joints)
        self.register_buffer("style_positions", torch.randn(chunk + 2, width))
        self.register_buffer("positions", torch.randn(grid + 2, width))

    def forward(self, image, state, actions, is_padding):
        state_token = self.style_state(state)[:, None]
        x = torch.cat((self.token.expand(len(state), 1, -1), state_token, self.style_action(actions)), 1)
        padding = F.pad(is_padding, (2, 0))
        for layer in self.style:
            x = layer(x, self.style_positions, padding=padding)
        mean, log_variance = self.statistics(x[:, 0]).chunk(2, -1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        pixels = self.pixel(self.backbone(image)).flatten(2).transpose(1, 2)
        x = torch.cat((self.z(z)[:, None], self.state(state)[:, None], pixels), 1)
        for layer in self.encoder:
            x = layer(x, self.positions)
        y = self.decoder(torch.zeros_like(actions[..., :1]) * self.queries, self.queries, x, self.positions)
        l1 = (F.l1_loss(self.head(y), actions, reduction="none") * ~is_padding[..., None]).mean()
        kl = (-0.5 * (1 + log_variance - mean.square() - log_variance.exp())).sum(-1).mean()
        return l1 + 10.0 * kl


def build(device):
    torch.manual_seed(1000)
    on_gpu = device.type == "cuda"
    small = {"chunk": 6, "base": 4, "width": 32, "heads": 2, "hidden": 64, "layers": 1, "latent": 4, "grid": 1}
    model = DistributedDataParallel((ACT() if on_gpu else ACT(**small)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-4, fused=True, capturable=on_gpu)
    torch.manual_seed(dist.get_rank())  # each rank has its own episodes
    number, height, width, chunk = (8, 480, 640, 100) if on_gpu else (2, 32, 32, 6)

    def batch():
        end = torch.randint(chunk // 2, chunk + 1, (number, 1))
        actions, is_padding = torch.randn(number, chunk, 14), torch.arange(chunk) >= end
        given = (torch.rand(number, 3, height, width), torch.randn(number, 14), actions, is_padding)
        return tuple(tensor.to(device) for tensor in given)

    def step(batch):
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, [batch() for _ in range(8)], [model, optimizer]
