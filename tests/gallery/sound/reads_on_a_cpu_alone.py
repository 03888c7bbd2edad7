"""Operators that read on the host on a CPU alone: max, std, quantile, draws, a bounded embedding, a masked store."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(24, 16, max_norm=1.0), nn.Flatten(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda")
    batches = [torch.randint(24, (6, 4), device=device) for _ in range(4)]

    def step(tokens):
        scores = model(tokens)
        scores = scores / scores.std()
        policy = torch.distributions.Categorical(logits=scores, validate_args=False)
        rewards = scores.detach().clone()
        rewards[rewards > torch.quantile(rewards, 0.9)] = 0.0
        rows = torch.multinomial(torch.ones(6, device=tokens.device), 3)
        losses = policy.log_prob(policy.sample()) * rewards.amax(-1)
        loss = losses[rows].mean() + 0.1 * (scores.max() - scores.min()) + scores.var()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
