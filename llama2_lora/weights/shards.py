"""Tensor parallelism (--tp): the parts of the matrices that each rank has, as Megatron splits them.

qkv, fc1 and head are split by their outputs (column-parallel), proj and fc2 by their inputs (row-parallel), the
embedding by its rows. Adapters follow their matrix, as in PEFT and Megatron. Beside a column-parallel matrix every rank
has all of a, and its rows of b; beside a row-parallel one its columns of a, and all of b.
"""

import torch

from llama2_lora.config import ALIKE, Config

_BY_INPUTS = ("proj", "fc2", "proj.a")


def part_of(config: Config, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of a matrix [outputs, inputs] that tensor rank `rank` has, contiguous.

    name: as in Config.matrices or Config.adapters, "embedding" or "head".
    """
    if config.tp == 1 or name in ALIKE:
        return whole
    if name in _BY_INPUTS:
        return whole.chunk(config.tp, 1)[rank].contiguous()
    return torch.cat([each.chunk(config.tp)[rank] for each in whole.split(_stacked(config, name, len(whole)))])


def joined(config: Config, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the matrix whose parts (`part_of`) the tensor ranks have, in their order."""
    if name in ALIKE:
        return parts[0]
    if name in _BY_INPUTS:
        return torch.cat(parts, 1)
    rows = _stacked(config.own, name, len(parts[0]))
    return torch.cat([torch.cat(each) for each in zip(*(part.split(rows) for part in parts), strict=True)])


def _stacked(config, name, rows):
    """Rows of the matrices that a fused one has below each other: each of them is split."""
    if name in ("qkv", "qkv.b"):
        return [config.q_width, config.kv_width, config.kv_width]
    return [rows // 2] * 2 if name == "fc1" else [rows]
