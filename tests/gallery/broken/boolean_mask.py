"""A loss over the masked tokens alone, picked by a boolean index (vllm-project/vllm-omni 4562)."""

import torch
from torch import nn


def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [torch.randint(32, (4, 12), device=device) for _ in range(4)]

    def step(tokens):
        is_masked = torch.rand(tokens.shape, device=device) < 0.15
        scores = model(tokens.masked_fill(is_masked, 0))
        loss = nn.functional.cross_entropy(scores[is_masked], tokens[is_masked])  # <- shape from values
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
