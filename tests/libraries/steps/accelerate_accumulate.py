"""accelerate's gradient accumulation, as its docs write it: every second call makes the optimizer's step."""

import torch
from accelerate import Accelerator


def build(device):
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=device.type == "cpu")
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda")
    model, optimizer = accelerator.prepare(model.to(device), optimizer)
    batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(8)]

    def step(batch):
        with accelerator.accumulate(model):
            inputs, targets = (part.to(device) for part in batch)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)  # <- gradient
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
