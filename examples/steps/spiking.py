"""A spiking network of SpikingJelly: leaky integrate-and-fire neurons, 16 time steps, a small kernel for each."""

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, neuron, surrogate


def build(device):
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    width, times, rows = (128, 16, 8) if on_gpu else (8, 4, 2)
    fires = {"surrogate_function": surrogate.ATan(), "detach_reset": True}
    model = torch.nn.Sequential(
        layer.Conv2d(2, width, 3, padding=1, bias=False),
        layer.BatchNorm2d(width),
        neuron.LIFNode(**fires),
        layer.MaxPool2d(2),
        layer.Conv2d(width, width, 3, padding=1, bias=False),
        layer.BatchNorm2d(width),
        neuron.LIFNode(**fires),
        layer.AdaptiveAvgPool2d(1),
        layer.Flatten(),
        layer.Linear(width, 11),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=on_gpu)
    shape = (times, rows, 2, 32, 32) if on_gpu else (times, rows, 2, 8, 8)
    batches = [(torch.rand(shape).to(device), torch.randint(11, (rows,)).to(device)) for _ in range(4)]

    def step(batch):
        frames, labels = batch
        optimizer.zero_grad()
        rate = sum(model(frame) for frame in frames) / len(frames)
        loss = F.cross_entropy(rate, labels)
        loss.backward()
        optimizer.step()
        functional.reset_net(model)
        return loss

    return step, batches, [model, optimizer]
