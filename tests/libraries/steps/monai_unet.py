"""A segmentation with MONAI's UNet and Dice loss."""

import torch
from monai.losses import DiceLoss
from monai.networks.nets import UNet


def build(device):
    torch.manual_seed(0)
    model = UNet(3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1).to(device)
    loss_function = DiceLoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True, capturable=device.type == "cuda")
    batches = [{"image": torch.randn(2, 1, 16, 16, 16), "label": torch.randint(0, 2, (2, 1, 16, 16, 16))}] * 2
    batches += [{"image": torch.randn(2, 1, 16, 16, 16), "label": batches[0]["label"].flip(0)}]
    model.train()

    def step(batch_data):
        inputs, labels = batch_data["image"].to(device), batch_data["label"].to(device)
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
