"""Muon: momentum that five Newton-Schulz iterations make orthogonal, for each matrix of an MLP mixer."""

import torch
import torch.nn.functional as F
from torch import nn


def orthogonal(gradient, steps=5):
    x = gradient.bfloat16()
    x = x.mT if gradient.size(-2) > gradient.size(-1) else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if gradient.size(-2) > gradient.size(-1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.02, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["buffer"] = torch.zeros_like(parameter.grad)
                state["buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["buffer"], group["momentum"])
                scale = max(1, parameter.size(-2) / parameter.size(-1)) ** 0.5
                parameter.add_(orthogonal(update).to(parameter.dtype), alpha=-group["lr"] * scale)


def build(device, size=768):
    torch.manual_seed(0)
    width, layers = (size, 12) if device.type == "cuda" else (min(size, 64), 2)
    blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    model = nn.Sequential(*blocks, nn.Linear(width, width)).to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    muon = Muon(matrices)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.01, momentum=0.9)
    batches = [torch.randn(512, width).to(device) for _ in range(8)]

    def step(batch):
        muon.zero_grad()
        sgd.zero_grad()
        loss = F.mse_loss(model(batch), batch.roll(1, 0))
        loss.backward()
        muon.step()
        sgd.step()
        return loss

    return step, batches, [model, muon, sgd]
