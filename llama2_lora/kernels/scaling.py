"""Scales of the operands of the frozen GEMMs, on the device and without a host read.

A layer quantises nine tensors: the inputs of its four GEMMs, fc1's output where it is kept in FP8, and the gradients
that enter the four GEMMs of the backward. Delayed scaling: the scale of this step comes from the largest magnitudes
(amax) of the last `amax_history` steps and is updated once a step. Formats as Transformer Engine's HYBRID: E4M3
forward, E5M2 for gradients.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from common.precision.fp8 import E4M3_MAX, E5M2_MAX
from graph_worth.parallel import collectives
from llama2_lora.config import FORWARD_SCALES, SCALES, Config


@dataclass(frozen=True)
class Slot:
    """One tensor's place: scale, its inverse and amax are FP32 [1]; what is stored is value * scale."""

    scale: torch.Tensor
    inverse: torch.Tensor
    amax: torch.Tensor
    largest: float


class Scaling:
    """Slots of all layers; unused without FP8. group: of ranks with parts of each tensor, which get one scale."""

    def __init__(self, config: Config, device, group: str = collectives.ALONE):
        self.is_used, self._group = config.precision == "fp8", group
        count = config.layers * len(SCALES)
        # 16 bytes apart, so that a kernel sees every pointer aligned alike and is compiled once.
        self.scale, self.inverse = torch.ones(count, 4, device=device), torch.ones(count, 4, device=device)
        self.amax = torch.zeros(count, 4, device=device)
        self.history = torch.zeros(config.amax_history, count, device=device)
        largest = [E4M3_MAX if name in FORWARD_SCALES else E5M2_MAX for name in SCALES] * config.layers
        self.largest = torch.tensor(largest, device=device)
        # Made once: a step asks for some 20 a layer, and views cost host time.
        columns = (tensor[:, :1].unbind() for tensor in (self.scale, self.inverse, self.amax))
        slots = itertools.starmap(Slot, zip(*columns, largest, strict=True))
        self._slots = dict(zip(itertools.product(range(config.layers), SCALES), slots, strict=True))

    def slot(self, layer: int, name: str) -> Slot:
        return self._slots[layer, name]

    def update(self) -> None:
        """Scales of the next step, from the amaxes of this one and of those before it."""
        if not self.is_used:
            return
        if self._group != collectives.ALONE:
            collectives.all_reduce_max_(self.amax, self._group)
        self.history.copy_(torch.cat((self.amax[:, :1].t(), self.history[:-1])))
        amax = self.history.amax(0)
        # Within FP32; as it was where nothing was recorded, or something that is not finite.
        scale = (self.largest / amax).clamp(max=torch.finfo(torch.float32).max)
        scale = torch.where((amax > 0) & (amax < math.inf), scale, self.scale[:, 0])
        self.scale.copy_(scale[:, None].expand_as(self.scale))
        torch.reciprocal(self.scale, out=self.inverse)
        self.amax.zero_()

    def reset(self) -> None:
        self.scale.fill_(1.0)
        self.inverse.fill_(1.0)
        self.amax.zero_()
        self.history.zero_()

    def named_state(self):
        """Yield (name, tensor) of the scaling state that lasts from step to step, for hashing."""
        if self.is_used:
            yield "fp8.scale", self.scale[:, 0]
            yield "fp8.amax_history", self.history


@dataclass(frozen=True)
class Formats:
    """dtypes of what GEMMs of the frozen weights read: weights and inputs, gradients, and everything else."""

    main: torch.dtype
    operand: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, config: Config, main: torch.dtype = torch.bfloat16):
        if config.precision == "fp8":
            return cls(main, torch.float8_e4m3fn, torch.float8_e5m2)
        return cls(main, main, main)
