"""A generative adversarial network: two models, two optimizers, both in each step."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16)).to(device)
    judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(device)
    settings = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True, "capturable": device.type == "cuda"}
    maker_optimizer = torch.optim.Adam(maker.parameters(), **settings)
    judge_optimizer = torch.optim.Adam(judge.parameters(), **settings)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(real):
        made = maker(torch.randn(len(real), 8, device=device))
        judge_optimizer.zero_grad()
        loss = (nn.functional.softplus(-judge(real)) + nn.functional.softplus(judge(made.detach()))).mean()
        loss.backward()
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        nn.functional.softplus(-judge(made)).mean().backward()
        maker_optimizer.step()
        return loss

    return step, batches, [maker, judge, maker_optimizer, judge_optimizer]
