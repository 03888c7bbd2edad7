"""A number of tokens that becomes a tensor in the step: a copy from pageable memory (NVIDIA/Megatron-LM 5401)."""

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.Linear(16, 4)

    def forward(self, tokens):
        logits = self.gate(tokens)
        z_loss = torch.logsumexp(logits, dim=-1).square().sum()
        z_loss = z_loss / torch.tensor(float(logits.shape[0]), device=logits.device)  # <- host data
        return (self.experts(tokens) * logits.softmax(-1)).sum(-1), z_loss


def build(device):
    torch.manual_seed(0)
    model = Router().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(24, 16, device=device), torch.randn(24, device=device)) for _ in range(4)]

    def step(batch):
        tokens, targets = batch
        outputs, z_loss = model(tokens)
        loss = nn.functional.mse_loss(outputs, targets) + 1e-3 * z_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
