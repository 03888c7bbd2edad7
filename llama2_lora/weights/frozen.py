"""The frozen weights: from a checkpoint or random, quantised once on the way in, stored row by row.

An FP8 GEMM on Hopper reads both operands along the dimension that it sums over, so the backward's dx = dy W needs W
transposed. Nothing here holds a transpose; handwritten layers make them (llama2_lora/layers/handwritten.py).

Tensor parallelism (--tp) splits weights and adapters as in Megatron: qkv, fc1 and head by their outputs
(column-parallel), proj and fc2 by their inputs (row-parallel), the embedding by its rows. Adapters follow their matrix,
as in PEFT and Megatron: at a column-parallel matrix a is replicated and b split by outputs, at a row-parallel matrix a
is split by inputs and b replicated.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from common.precision import nvfp4
from common.precision.fp8 import E4M3_MAX
from graph_worth.parallel import collectives
from llama2_lora.config import REPLICATED, Config
from llama2_lora.kernels.scaling import Formats

STD = 0.02
# Rows that are quantised at a time: their FP32 copy is the only memory needed besides.
CHUNK = 2048
# Matrices that tensor ranks split by their inputs.
_BY_INPUTS = ("proj", "fc2", "proj.a")


@dataclass(frozen=True)
class Matrix:
    """value [outputs, inputs]: the weight is value * inverse, FP32 [1].

    backward [outputs, inputs]: what a dgrad GEMM reads in the place of `value`: rounded along the outputs in NVFP4.
    """

    value: torch.Tensor
    inverse: torch.Tensor
    backward: torch.Tensor

    @cached_property
    def transposed(self) -> torch.Tensor:
        """A view of `value` [inputs, outputs], made once: views cost host time."""
        return self.value.t()


class RandomWeights:
    """The weights of a `checkpoint.Checkpoint`, drawn on the device: normal, those that add to the residual stream
    divided by sqrt(2 layers), and the embedding with unit variance. Each read draws anew.

    rank: tensor rank whose shards they are. Matrices are drawn whole, so that every split trains the same model.
    """

    def __init__(self, config: Config, device, rank: int = 0, seed: int = 1):
        self._config, self._device, self._rank = config, device, rank
        self._generator = torch.Generator(device).manual_seed(seed)

    def read(self, name: str, layer: int | None = None) -> torch.Tensor:
        c = self._config
        if "norm" in name:
            return torch.ones(c.hidden)
        std = 1.0 if name == "embedding" else STD / (math.sqrt(2 * c.layers) if name in ("proj", "fc2") else 1)
        whole = torch.empty(c.matrices.get(name, (c.vocab, c.hidden)), dtype=torch.bfloat16, device=self._device)
        return shard_of(self._config, name, whole.normal_(0.0, std, generator=self._generator), self._rank)


class FrozenWeights:
    """layers[i]: name -> Matrix; norms[i]: (norm before attention, norm before the MLP); embedding, head, final_norm.

    source: a Checkpoint; None: RandomWeights. rank: within `group`, the ranks that share the matrices.
    """

    def __init__(
        self, config: Config, formats: Formats, device, source=None, rank: int = 0, group: str = collectives.ALONE
    ):
        source = source or RandomWeights(config, device, rank)
        config = config.shard
        self.config, self.formats, self.device, self._group = config, formats, device, group
        # All that stays is allocated first. Between bf16 weights that come and go it would leave holes in the
        # allocator's segments, 1.8 GiB in all 80 layers.
        self.embedding, self.head = (
            torch.empty(config.vocab, config.hidden, dtype=formats.main, device=device) for _ in range(2)
        )
        names = config.matrices if config.precision == "fp8" else ()
        values = [
            {name: torch.empty(config.matrices[name], dtype=formats.operand, device=device) for name in names}
            for _ in range(config.layers)
        ]
        self.layers, self.norms = [], []
        for index, stored in enumerate(values):
            tensors = {name: source.read(name, index) for name in (*config.matrices, "norm1", "norm2")}
            self.layers.append(
                {name: self._matrix(tensors[name].to(device), stored.get(name)) for name in config.matrices}
            )
            self.norms.append(tuple(tensors[name].to(device, formats.main) for name in ("norm1", "norm2")))
            # Before the next layer is drawn, not after.
            del tensors
        self.embedding.copy_(source.read("embedding"))
        self.head.copy_(source.read("head"))
        self.final_norm = source.read("final_norm").to(device, formats.main)

    def _matrix(self, weight, value):
        """A bf16 weight [outputs, inputs] on the device as it is stored: in FP8 in `value`, else (None) as it is."""
        if value is None:
            one, weight = torch.ones(1, device=self.device), weight.to(self.formats.main)
            is_rounded = self.config.precision == "nvfp4_emulated"
            forward, backward = nvfp4.frozen_weight(weight) if is_rounded else (weight, weight)
            return Matrix(forward, one, backward)
        amax = torch.linalg.vector_norm(weight, math.inf).float().clamp(min=torch.finfo(torch.float32).tiny)
        collectives.all_reduce_max_(amax, self._group)  # one scale for the whole matrix
        scale = E4M3_MAX / amax
        for rows, stored in zip(weight.split(CHUNK), value.split(CHUNK), strict=True):
            stored.copy_((rows.float() * scale).clamp(-E4M3_MAX, E4M3_MAX))
        return Matrix(value, (1.0 / scale).reshape(1), value)


def shard_of(config: Config, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the shard of a matrix [outputs, inputs] that tensor rank `rank` has, contiguous.

    name: as in Config.matrices or Config.adapters, "embedding" or "head".
    """
    if config.tp == 1 or name in REPLICATED:
        return whole
    if name in _BY_INPUTS:
        return whole.chunk(config.tp, 1)[rank].contiguous()
    return torch.cat([matrix.chunk(config.tp)[rank] for matrix in whole.split(_stacked(config, name, len(whole)))])


def unsharded(config: Config, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the whole matrix from the shards (`shard_of`) of all tensor ranks, in the order of ranks."""
    if name in REPLICATED:
        return parts[0]
    if name in _BY_INPUTS:
        return torch.cat(parts, 1)
    rows = _stacked(config.shard, name, len(parts[0]))
    return torch.cat([torch.cat(shards) for shards in zip(*(part.split(rows) for part in parts), strict=True)])


def _stacked(config, name, rows):
    """Numbers of rows of the matrices that are stacked in a fused matrix: each of them is split."""
    if name in ("qkv", "qkv.b"):
        return [config.q_width, config.kv_width, config.kv_width]
    return [rows // 2] * 2 if name == "fc1" else [rows]
