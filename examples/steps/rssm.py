"""The world model of Dreamer: a recurrent state-space model unrolled over 50 steps, thousands of small kernels."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence


class RSSM(nn.Module):
    def __init__(self, actions=6, embedding=1024, belief=200, state=30, hidden=200):
        super().__init__()
        self.belief, self.state = belief, state
        self.into = nn.Sequential(nn.Linear(state + actions, belief), nn.ELU())
        self.cell = nn.GRUCell(belief, belief)
        self.prior = nn.Sequential(nn.Linear(belief, hidden), nn.ELU(), nn.Linear(hidden, 2 * state))
        self.posterior = nn.Sequential(nn.Linear(belief + embedding, hidden), nn.ELU(), nn.Linear(hidden, 2 * state))
        self.decoder = nn.Sequential(nn.Linear(belief + state, hidden), nn.ELU(), nn.Linear(hidden, embedding))

    def forward(self, observed, actions):
        belief = observed.new_zeros(observed.shape[1], self.belief)
        state = observed.new_zeros(observed.shape[1], self.state)
        losses = []
        for observation, action in zip(observed, actions, strict=True):
            belief = self.cell(self.into(torch.cat((state, action), -1)), belief)
            prior = self.normal(self.prior(belief))
            posterior = self.normal(self.posterior(torch.cat((belief, observation), -1)))
            state = posterior.rsample()
            error = F.mse_loss(self.decoder(torch.cat((belief, state), -1)), observation)
            losses.append(error + kl_divergence(posterior, prior).mean())
        return torch.stack(losses).mean()

    @staticmethod
    def normal(values):
        mean, deviation = values.chunk(2, -1)
        return Normal(mean, F.softplus(deviation) + 0.1, validate_args=False)


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = (RSSM() if on_gpu else RSSM(embedding=32, belief=16, state=4, hidden=16)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4, fused=True, capturable=on_gpu)
    length, width = (50, 1024) if on_gpu else (5, 32)
    batches = [(torch.randn(length, 50, width).to(device), torch.randn(length, 50, 6).to(device)) for _ in range(4)]

    def step(batch):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
