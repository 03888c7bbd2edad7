"""Context parallelism (--cp): the part of a window that a rank has, and attention to the keys of all ranks.

Of 2 cp runs of a window's tokens a rank has one from the front and one from the back, so that all see equally many keys
(`places`). Layers work on these tokens only. Attention gathers keys and values of all ranks, in the backward once more,
and gives each rank the sum of their gradients.
"""

import torch

from common.parallel.differentiable_collectives import places
from graph_worth.parallel import collectives
from llama2_lora.config import Config
from llama2_lora.data.windows import PackedBatch
from llama2_lora.kernels.attention import Attention, FlashAttention


def own_part(window: PackedBatch, config: Config, rank: int) -> dict[str, torch.Tensor]:
    """The part of a window that context rank `rank` has, by name.

    cu_seqlens, cu_seqlens_k: int32 [2 MAX_DOCUMENTS + 1], bounds of the documents' parts in this rank's two runs of
    queries, and in the keys that each run may see: the keys from the window's first token on (`_keys_of_runs`).
    """
    part = window._asdict()
    if config.cp == 1:
        return part
    local_places = places(config.sequence, config.cp, rank)
    bounds, length = part.pop("cu_seqlens"), config.tokens // 2
    part = {name: tensor[local_places] for name, tensor in part.items()}
    queries, keys = [], []
    for number, start in enumerate(local_places[::length].tolist()):
        queries.append((bounds - start).clamp(0, length) + number * length)
        keys.append(bounds.clamp(0, start + length) + (keys[0][-1] if keys else 0))
    for name, (first, second) in (("cu_seqlens", queries), ("cu_seqlens_k", keys)):
        part[name] = torch.cat((first, second[1:]))
    return part


def _keys_of_runs(config, rank):
    """Places of the keys that a rank's two runs of queries may see, those of the first run, then of the second."""
    queries, length = places(config.sequence, config.cp, rank), config.tokens // 2
    return torch.cat([torch.arange(start + length) for start in queries[::length].tolist()])


class AcrossRanks(Attention):
    """Attention of this rank's queries to the keys of all ranks of `group`, computed by `attention`, a class of
    llama2_lora/kernels/attention.py."""

    def __init__(self, attention, config: Config, inputs, group: str, rank: int):
        super().__init__(config)
        self.group, device = group, inputs["positions"].device
        gathered = torch.cat([places(config.sequence, config.cp, context_rank) for context_rank in range(config.cp)])
        keys = _keys_of_runs(config, rank) if attention is FlashAttention else gathered
        # Where the gathered tensor has the keys that `attention` takes.
        self._rows = gathered.argsort()[keys].to(device)
        queries = places(config.sequence, config.cp, rank)
        self.attention = attention(config, inputs, queries.to(device), keys.to(device))

    def forward(self, q, k, v):
        return self.attention.forward(q, *self._gathered(k, v))

    def backward(self, grad, q, k, v, out, rest):
        grad_q, *grads = self.attention.backward(grad, q, *self._gathered(k, v), out, rest)
        grads = torch.stack([gradient.transpose(0, 1) for gradient in grads], 1).float()
        # FP32, in which the order of the two runs' summands does not matter.
        whole = grads.new_zeros(self.config.sequence, *grads.shape[1:]).index_add_(0, self._rows, grads)
        part = k.new_empty(self.config.tokens, *grads.shape[1:])
        collectives.reduce_scatter_sum_(part, whole.to(k.dtype), self.group)
        return grad_q, *(gradient.transpose(0, 1) for gradient in part.unbind(1))

    def _gathered(self, k, v):
        part = torch.stack((k, v), 1)
        whole = part.new_empty(self.config.sequence, *part.shape[1:])
        collectives.all_gather_into_(whole, part, self.group)
        return whole.index_select(0, self._rows).unbind(1)
