"""A model whose labels vary, and what its encoder gives, for the tests of greedy decoding."""

import dataclasses

import torch

from rnnt.config import PRESETS
from rnnt.model import RNNT, initialise

CONFIG = dataclasses.replace(
    PRESETS["tiny"], prediction_hidden=24, prediction_layers=2, joint_hidden=20, vocab=30, joint_dropout=0.5
)
BLANK = CONFIG.vocab - 1


def model(blank_bias, config=CONFIG, dtype=torch.float32, device="cpu"):
    """In training mode, with dropout. Random weights, in which the likeliest class follows frame and label alike.

    PyTorch's own ranges do not: a search falls into one label that it repeats, or finds none.
    """
    net = RNNT(config)
    initialise(net, config, 3)
    generator = torch.Generator().manual_seed(5)
    hidden = config.prediction_hidden
    weights = {net.joint.linear.weight: 20 / config.joint_hidden, net.prediction.linear.weight: 64 / hidden}
    for layer in net.prediction.layers:
        weights |= {layer.weight_ih_l0: 24 / hidden, layer.weight_hh_l0: 24 / hidden}
    with torch.no_grad():
        for weight, variance in weights.items():
            weight.normal_(generator=generator).mul_(variance**0.5)
        for layer in net.prediction.layers:
            layer.bias_ih_l0[hidden : 2 * hidden] = -2
        net.joint.linear.bias.zero_()
        net.joint.linear.bias[-1] = blank_bias
    return net.to(device, dtype).train()


def encoded(batch, frames, seed=0, config=CONFIG):
    return torch.randn(batch, frames, config.joint_hidden, generator=torch.Generator().manual_seed(seed))
