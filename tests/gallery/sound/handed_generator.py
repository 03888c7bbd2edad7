"""A denoiser whose noise comes from a generator that is handed over."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(5)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(images):
        noise = torch.randn(images.shape, generator=generator, device=device)
        share = torch.rand(len(images), 1, generator=generator, device=device)
        mixed = share.sqrt() * images + (1 - share).sqrt() * noise
        loss = nn.functional.mse_loss(model(torch.cat((mixed, share), dim=-1)), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer, generator]
