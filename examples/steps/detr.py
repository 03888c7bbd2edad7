"""A detector like rf-detr: a DINOv2 backbone, object queries, and the matching on the host."""

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn
from transformers import Dinov2Config, Dinov2Model


class Detector(nn.Module):
    def __init__(self, size, width, layers, heads, queries, classes=91):
        super().__init__()
        shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        self.backbone = Dinov2Model(Dinov2Config(image_size=size, patch_size=14, **shape))
        self.queries = nn.Parameter(torch.randn(queries, width) / width**0.5)
        layer = nn.TransformerDecoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 3)
        self.classes, self.boxes = nn.Linear(width, classes), nn.Linear(width, 4)

    def forward(self, images):
        memory = self.backbone(images).last_hidden_state
        decoded = self.decoder(self.queries.expand(len(images), -1, -1), memory)
        return self.classes(decoded), self.boxes(decoded).sigmoid()


def loss_of(logits, boxes, labels, targets):
    """The Hungarian matching runs on the host, as in DETR: no graph holds it."""
    total = 0.0
    for scores, predicted, label, target in zip(logits, boxes, labels, targets, strict=True):
        cost = torch.cdist(predicted, target, p=1) - scores.softmax(-1)[:, label]
        rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
        total = total + F.l1_loss(predicted[rows], target[columns]) + F.cross_entropy(scores[rows], label[columns])
    return total / len(logits)


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    size, rows = (560, 4) if on_gpu else (56, 2)
    model = Detector(size, 384, 12, 6, queries=300) if on_gpu else Detector(size, 32, 2, 4, queries=10)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=on_gpu)
    images, labels, targets = (rows, 3, size, size), (rows, 8), (rows, 8, 4)
    batches = [
        tuple(t.to(device) for t in (torch.randn(images), torch.randint(91, labels), torch.rand(targets)))
        for _ in range(4)
    ]

    def step(batch):
        images, labels, targets = batch
        optimizer.zero_grad()
        loss = loss_of(*model(images), labels, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
