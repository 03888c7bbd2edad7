"""Parameters, gradients and optimizers for the tests of LAMB."""

from dataclasses import replace

import torch

from common.optimizers.loss_scaler import LossScaler
from rnnt.config import PRESETS
from rnnt.lamb import Lamb

# More and fewer elements than a block, exactly one, and a parameter that starts at zero (the third).
SHAPES = [(70, 60), (5000,), (3,), (Lamb.BLOCK,), (4, 8)]
CONFIG = replace(PRESETS["tiny"], lr=0.02, beta1=0.9, beta2=0.98, eps=1e-9, weight_decay=1e-2, clip=1.0, ema=0.9)
SCALE = 512.0


def parameters(dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    params[2].zero_()
    return params


def optimizer(params, **ranks):
    return Lamb(params, LossScaler(params[0].device, SCALE, 2000, 1), CONFIG, **ranks)


def gradients(step, size=1.0, dtype=torch.bfloat16):
    """Return the gradients of the scaled loss; the fifth tensor's are zero."""
    generator = torch.Generator().manual_seed(100 + step)
    grads = [(SCALE * size * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]
    grads[4].zero_()
    return grads


def state(lamb):
    tensors = dict(lamb.named_state()) | {f"param.{i}": param for i, param in enumerate(lamb.params)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
