"""Tensor parallelism (--tp): the collectives of the ranks that share each layer.

Tokens and residual stream are the same on every rank; matrices are sharded (llama2_lora/weights/frozen.py). A shard of
a row-parallel matrix gives a summand of its output, a shard of a column-parallel matrix a summand of its input's
gradient: `sum_` adds these up over the ranks, four times a layer. There is no sequence parallelism: every rank computes
all norms.
"""

import torch

from common.parallel.differentiable_collectives import own_rows
from graph_worth.parallel import collectives


class TensorRanks:
    """The ranks of `group`: their number `size`, and this one's `rank`."""

    def __init__(self, group: str = collectives.ALONE):
        self.group, self.size, self.rank = group, collectives.group_size(group), collectives.group_rank(group)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks, in its dtype."""
        if self.size > 1:
            collectives.all_reduce_sum_(tensor, self.group)

    def look_up(self, tokens, table, out) -> None:
        """Fill out [s, h] with the rows of all ranks' tables that tokens, int64 [s], name; table [rows, h]."""
        if self.size > 1:
            tokens, inside = own_rows(tokens, len(table), self.group)
        torch.index_select(table, 0, tokens, out=out)
        if self.size > 1:
            out.mul_(inside[:, None])
            self.sum_(out)

    def cross_entropy(self, logits, targets, weights, losses) -> None:
        """As Operators.cross_entropy, from logits [s, V / ranks] of this rank's part of the vocabulary.

        losses are the same on all ranks.
        """
        largest = logits.amax(1).float()
        collectives.all_reduce_max_(largest, self.group)
        shifted = logits.float().sub_(largest[:, None])
        rows, inside = own_rows(targets, logits.shape[1], self.group)
        # Compared with all columns: some deterministic kernels that scatter by an index read it on the host.
        is_target = (torch.arange(logits.shape[1], device=logits.device) == rows[:, None]) & inside[:, None]
        of_target = torch.where(is_target, shifted, 0.0).sum(1)
        powers = shifted.exp_()
        sums = torch.stack((powers.sum(1), of_target))
        self.sum_(sums)
        losses.copy_((sums[0].log() - sums[1]) * weights)
        logits.copy_(powers.div_(sums[0][:, None]).sub_(is_target.float()).mul_(weights[:, None]))
