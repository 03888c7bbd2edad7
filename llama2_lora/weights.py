"""The frozen weights: from a checkpoint or random, quantised once on the way in, stored row by row.

An FP8 GEMM on Hopper reads both operands along the dimension that it sums over, so the backward's dx = dy W needs W
transposed. Nothing here holds a transpose; lean layers make them (llama2_lora/lean.py).
"""

import math
from dataclasses import dataclass

import torch

from common.precision import E4M3_MAX
from llama2_lora.config import Config
from llama2_lora.scaling import Formats

STD = 0.02
# Rows that are quantised at a time: their FP32 copy is the only memory needed besides.
CHUNK = 2048


@dataclass(frozen=True)
class Matrix:
    """value [outputs, inputs]: the weight is value * inverse, FP32 [1]. backward: of its shape, what dgrad reads."""

    value: torch.Tensor
    inverse: torch.Tensor
    backward: torch.Tensor


class FrozenWeights:
    """layers[i]: name -> Matrix; norms[i]: (norm before attention, norm before the MLP); embedding, head, final_norm.

    checkpoint: what llama2_lora/checkpoint.py opens, or None for random weights: normal, those that add to the residual
    stream divided by sqrt(2 layers), and the embedding with unit variance.
    """

    def __init__(self, config: Config, formats: Formats, device, checkpoint=None, seed: int = 1):
        self.config, self.formats, self.device = config, formats, device
        generator = torch.Generator(device).manual_seed(seed)
        self.layers, self.norms = [], []
        for index in range(config.layers):
            tensors = checkpoint.layer(index) if checkpoint else self._random_layer(generator)
            self.layers.append({name: self._matrix(tensors[name].to(device)) for name in config.matrices})
            self.norms.append(tuple(tensors[name].to(device, formats.main) for name in ("norm1", "norm2")))
        shape = (config.vocab, config.hidden)
        self.embedding = checkpoint.embedding() if checkpoint else self._normal(shape, 1.0, generator)
        self.head = checkpoint.head() if checkpoint else self._normal(shape, STD, generator)
        self.final_norm = checkpoint.final_norm() if checkpoint else torch.ones(config.hidden)
        for name in ("embedding", "head", "final_norm"):
            setattr(self, name, getattr(self, name).to(device, formats.main))

    def _random_layer(self, generator):
        depth = math.sqrt(2 * self.config.layers)
        std = {"qkv": STD, "proj": STD / depth, "fc1": STD, "fc2": STD / depth}
        layer = {name: self._normal(shape, std[name], generator) for name, shape in self.config.matrices.items()}
        return layer | {name: torch.ones(self.config.hidden) for name in ("norm1", "norm2")}

    def _normal(self, shape, std, generator):
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return tensor.normal_(0.0, std, generator=generator)

    def _matrix(self, weight):
        """A bf16 weight [outputs, inputs] on the device as it is stored."""
        if self.config.precision == "nvfp4_emulated":
            from common.nvfp4 import frozen_weight

            forward, backward = frozen_weight(weight.to(self.formats.main))
            return Matrix(forward, torch.ones(1, device=self.device), backward)
        if self.formats.operand == self.formats.main:
            weight = weight.to(self.formats.main)
            return Matrix(weight, torch.ones(1, device=self.device), weight)
        amax = torch.linalg.vector_norm(weight, math.inf).float().clamp(min=torch.finfo(torch.float32).tiny)
        scale = E4M3_MAX / amax
        value = torch.empty_like(weight, dtype=self.formats.operand)
        for rows, stored in zip(weight.split(CHUNK), value.split(CHUNK), strict=True):
            stored.copy_((rows.float() * scale).clamp(-E4M3_MAX, E4M3_MAX))
        return Matrix(value, (1.0 / scale).reshape(1), value)
