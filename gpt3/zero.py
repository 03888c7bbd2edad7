"""ZeRO stage 1: each of the ranks that hold the same parameters has a share of Adam's masters and moments.

    zero = ZeroAdam(parameters, main_grads, hyperparameters, group=groups.replicas)
    ... backward passes fill the main_grads ...
    zero.step(); zero.grads.zero_()

A step reduce-scatters the gradients' mean, updates this rank's share and all-gathers the parameters. Nothing is read on
the host: it can be captured. Bytes a parameter of a rank, with bf16 parameters and FP32 gradients: 6 + 12 / ranks.

The result is bitwise that of averaging and updating everything on every rank (`buckets.GradientBuckets` and
`Adam`) if the averages are equal and no gradient is clipped. Averages are equal on two ranks; on more, gloo adds
in one order in buckets of one layout, NCCL promises nothing. The norm adds up in another order, so that its last bit,
and with it a clipped gradient, may differ.
"""

from functools import partial

import torch

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.parallel.buckets import GradientBuckets, move_into, reduce_norm_
from graph_worth.parallel import collectives

BUCKET_BYTES = 256 * 2**20


class ZeroAdam:
    """`Adam` of which each rank of `group` has and updates an equal share.

    Args:
        params: Parameters of one floating dtype, alike on all ranks of the group. Their memory moves into a few flat
            buffers, in place.
        grads: An FP32 buffer for each, of its shape, such as its main_grad. Their memory moves too, and keeps its
            values.
        hyperparameters: Of all parameters.
        group: Ranks that hold the same parameters.
        uncounted: Parameters whose gradients another rank counts in the norm already: those that all tensor ranks have
            alike, on all but the first; a tied embedding, on the last stage.
        bucket_bytes: Size of the flat buffers.

    Attributes:
        grads: The gradients' `buckets.GradientBuckets`.
        flat_params: The flat buffers of the parameters.
        adam: `Adam` of this rank's share.
        grad_norm: FP32 0-d, the norm of the averaged gradients over all ranks of the run, before clipping.
    """

    def __init__(
        self,
        params,
        grads,
        hyperparameters: Hyperparameters,
        group: str = "",
        uncounted=(),
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.params, self.group = list(params), group
        num_parts, part = collectives.group_size(group), collectives.group_rank(group)
        self.grads = GradientBuckets(grads, bucket_bytes, group, num_parts)
        self.flat_params = []
        for flat, places in zip(self.grads.flats, self.grads.places, strict=True):
            self.flat_params.append(torch.zeros_like(flat, dtype=self.params[0].dtype))
            move_into(self.flat_params[-1], places, self.params)
        own_params, own_grads = (
            [flat.chunk(num_parts)[part] for flat in flats] for flats in (self.flat_params, self.grads.flats)
        )
        shares = self._shares_of({id(param) for param in uncounted}, num_parts, part)
        reduce_norm = partial(reduce_norm_, group="", uncounted=shares)
        self.adam = Adam(own_params, hyperparameters, own_grads, reduce_norm=reduce_norm)
        self.lr, self.grad_norm, self.step_count = self.adam.lr, self.adam.grad_norm, self.adam.step_count

    def _shares_of(self, identities, num_parts, part):
        """This rank's parts of some parameters' gradients, flat."""
        result = []
        for flat, places in zip(self.grads.flats, self.grads.places, strict=True):
            length = flat.numel() // num_parts
            for index, start in places:
                first = max(start, part * length)
                end = min(start + self.params[index].numel(), (part + 1) * length)
                if id(self.params[index]) in identities and first < end:
                    result.append(flat[first:end])
        return result

    @torch.no_grad()
    def step(self) -> None:
        """Average, clip and apply the gradients, then make the parameters whole. The gradients are undefined then."""
        for flat in self.grads.flats:
            collectives.reduce_scatter_mean_(flat, self.group)
        self.adam.step()
        for flat in self.flat_params:
            collectives.all_gather_(flat, self.group)

    def reset(self) -> None:
        """Start again, in place, from the parameters' present values, which must be alike on all ranks."""
        self.adam.reset()

    def named_state(self):
        """Yield (name, tensor) of this rank's masters and moments and of the count of steps, for hashing."""
        return self.adam.named_state()
