"""ViT-S/16 of timm: 32 pictures of 224 x 224, bf16 autocast, stochastic depth, label smoothing, AdamW, clipping."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    tiny = {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 2}
    size, number = (224, 32) if on_gpu else (32, 4)
    model = timm.create_model("vit_small_patch16_224", drop_path_rate=0.1, **({} if on_gpu else tiny))
    model = model.to(device).train()
    loss_fn = LabelSmoothingCrossEntropy(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True, capturable=on_gpu)
    batches = [(torch.randn(number, 3, size, size), torch.randint(1000, (number,))) for _ in range(8)]
    batches = [(pictures.to(device), labels.to(device)) for pictures, labels in batches]

    def step(batch):
        pictures, labels = batch
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_fn(model(pictures), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, batches, [model, optimizer]
