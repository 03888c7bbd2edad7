"""A ResNet of timm with its optimizer, its label smoothing and its clipping of gradients."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import adaptive_clip_grad


def build(device):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10).to(device).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    loss_fn = LabelSmoothingCrossEntropy(smoothing=0.1)
    batches = [(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))) for _ in range(4)]

    def step(batch):
        input, target = (part.to(device) for part in batch)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        adaptive_clip_grad(model.parameters(), 0.01)
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
