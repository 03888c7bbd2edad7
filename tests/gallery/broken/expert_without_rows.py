"""A grouped product leaves the gradient of an expert without rows unwritten (tgale96/grouped_gemm 36)."""

import torch
from torch import nn

COUNTS = ((2, 3, 3), (4, 0, 4), (1, 6, 1))


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, counts):
        ctx.save_for_backward(weights, *rows.split(counts))
        return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])

    @staticmethod
    def backward(ctx, incoming):
        weights, *parts = ctx.saved_tensors
        gradients = torch.empty_like(weights)  # <- uninitialised memory
        incoming = incoming.split([len(part) for part in parts])
        for gradient, part, given in zip(gradients, parts, incoming, strict=True):
            if len(part):
                torch.mm(part.T, given, out=gradient)
        rows = [given @ weight.T for given, weight in zip(incoming, weights, strict=True)]
        return torch.cat(rows), gradients, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(0.1 * torch.randn(3, 16, 4))

    def forward(self, rows, counts):
        return Grouped.apply(rows, self.weights, counts)


def build(device):
    torch.manual_seed(0)
    model = Experts().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device), each) for each in COUNTS]

    def step(batch):
        rows, labels, counts = batch
        loss = nn.functional.cross_entropy(model(rows, list(counts)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
