"""A variational autoencoder whose KL weight grows on the host (ooples/AiDotNet.Tensors 549: schedules freeze)."""

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 8)
        self.decoder = nn.Linear(4, 16)
        self.kl_weight = 0.0

    def forward(self, inputs):
        mean, log_variance = self.encoder(inputs).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean()
        self.kl_weight = min(1.0, self.kl_weight + 0.01)
        return nn.functional.mse_loss(self.decoder(code), inputs) + self.kl_weight * divergence  # <- host value


def build(device):
    torch.manual_seed(0)
    model = VAE().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]

    def step(batch):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
