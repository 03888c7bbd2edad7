"""Tensor parallelism (--tp): the shards of frozen weights and adapters, split as in Megatron.

qkv, fc1 and head are split by their outputs (column-parallel), proj and fc2 by their inputs (row-parallel), the
embedding by its rows. Adapters follow their matrix, as in PEFT and Megatron: at a column-parallel matrix a is
replicated and b split by outputs, at a row-parallel matrix a is split by inputs and b replicated.
"""

import torch

from llama2_lora.config import REPLICATED, Config

_BY_INPUTS = ("proj", "fc2", "proj.a")


def shard_of(config: Config, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the shard of a matrix [outputs, inputs] that tensor rank `rank` has, contiguous.

    name: as in Config.matrices or Config.adapters, "embedding" or "head".
    """
    if config.tp == 1 or name in REPLICATED:
        return whole
    if name in _BY_INPUTS:
        return whole.chunk(config.tp, 1)[rank].contiguous()
    return torch.cat([each.chunk(config.tp)[rank] for each in whole.split(_stacked(config, name, len(whole)))])


def unsharded(config: Config, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the whole matrix from the shards (`shard_of`) of all tensor ranks, in the order of ranks."""
    if name in REPLICATED:
        return parts[0]
    if name in _BY_INPUTS:
        return torch.cat(parts, 1)
    rows = _stacked(config.shard, name, len(parts[0]))
    return torch.cat([torch.cat(each) for each in zip(*(part.split(rows) for part in parts), strict=True)])


def _stacked(config, name, rows):
    """Numbers of rows of the matrices that are stacked in a fused matrix: each of them is split."""
    if name in ("qkv", "qkv.b"):
        return [config.q_width, config.kv_width, config.kv_width]
    return [rows // 2] * 2 if name == "fc1" else [rows]
