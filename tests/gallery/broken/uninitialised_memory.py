"""A workspace that is only partly written and read whole (vllm-project/vllm 45660).

Fresh memory happens to hold zeros. A graph gets memory that its own earlier kernels have used.
"""

import torch
from torch import nn

ROWS = 12


def build(device):
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randn(16, device=device)) for _ in range(4)]

    def step(batch):
        inputs, target = batch
        outputs = model(inputs)
        workspace = torch.empty(ROWS, 16, device=device)  # <- uninitialised memory
        workspace[: len(outputs)] = outputs
        loss = nn.functional.mse_loss(workspace.sum(0), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
