"""Faster R-CNN of torchvision around a backbone of the user's, as its docs build it and its reference trains it."""

import torch
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator


def build(device):
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 8, 1), torch.nn.ReLU())
    backbone.out_channels = 16
    sizes = {"min_size": 64, "max_size": 96, "rpn_pre_nms_top_n_train": 20, "rpn_post_nms_top_n_train": 10}
    model = FasterRCNN(backbone, 4, rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)), **sizes)
    model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    boxes = torch.tensor([[4.0, 6.0, 40.0, 50.0], [20.0, 8.0, 60.0, 30.0]])
    batches = [(torch.rand(2, 3, 64, 72), boxes + index, torch.tensor([1, 2])) for index in range(8)]

    def step(batch):
        images, boxes, labels = (part.to(device) for part in batch)
        targets = [{"boxes": boxes, "labels": labels} for _ in images]
        loss = sum(model(list(images), targets).values())  # <- host data at transform.py, host read, shape from values
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
