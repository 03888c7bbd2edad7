"""A router counts tokens in training, and its graph counts on in validation (NVIDIA/Megatron-LM 6992).

On a CPU the router in training mode stands for its graph, which keeps the mode of its capture.
"""

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, tokens):
        scores = self.inner(tokens)
        if self.training:
            self.counts += (scores.argmax(-1)[:, None] == torch.arange(4, device=tokens.device)).sum(0)
        return scores


def build(device):
    torch.manual_seed(0)
    model = Router().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 16, device=device), torch.randint(4, (8,), device=device)) for _ in range(4)]

    def step_of(router, validate):
        def step(batch):
            inputs, labels = batch
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(router(inputs), labels).backward()
            optimizer.step()
            with torch.no_grad():
                return nn.functional.cross_entropy(validate(inputs), labels)

        return step

    def validate(inputs):
        model.eval()
        try:
            return model(inputs)
        finally:
            model.train()

    def mine():  # <- your capture
        graphed = torch.cuda.make_graphed_callables(model, (batches[0][0],)) if device.type == "cuda" else model
        return step_of(graphed, graphed)

    return {"eager": step_of(model, validate), "mine": mine}, batches, [model, optimizer]
