"""TD3 updates its actor in each second step: a graph has one of both kinds of step.

pytorch/pytorch 175001: branches of a graph need conditional nodes.
"""

import itertools

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh()).to(device)
    critic = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.01, fused=True)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01, fused=True)
    counter = itertools.count()
    batches = [
        (torch.randn(8, 8, device=device), torch.randn(8, 2, device=device), torch.randn(8, 1, device=device))
        for _ in range(4)
    ]

    def step(batch):
        states, actions, returns = batch
        loss = nn.functional.mse_loss(critic(torch.cat((states, actions), dim=-1)), returns)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        if next(counter) % 2:
            value = critic(torch.cat((states, actor(states)), dim=-1))  # <- control flow
            actor_optimizer.zero_grad()
            (-value.mean()).backward()
            actor_optimizer.step()
        return loss

    return step, batches, [actor, critic, actor_optimizer, critic_optimizer]
