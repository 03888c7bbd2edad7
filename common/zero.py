"""ZeRO stage 1: masters and moments of Adam split over the ranks that hold the same parameters. And what such ranks
share beside: the norm of the gradients, whether one of them overflowed, and amaxes.

    zero = ZeroAdam(parameters, main_grads, group=groups.replicas, lr=..., ...)
    ... backward passes fill the main_grads ...
    zero.step(); zero.zero_grads()

A step reduce-scatters the gradients' mean, updates this rank's share and all-gathers the parameters. Nothing is read on
the host: it can be captured. Bytes a parameter of a rank, with bf16 parameters and FP32 gradients: 6 + 12 / ranks.

Bitwise equal to averaging all gradients and updating all of them on every rank (`collectives.GradientBuckets` and
`MasterAdam`) where the averages are, and no gradient is clipped. The averages are equal on two ranks, whose sum has one
order; on more where sums are exact, or where the backend adds in one order both ways: gloo does in buckets of one
layout, NCCL promises nothing. The norm adds up in another order, to another last bit, which scales what it clips.
"""

import torch

from common import collectives
from common.optimizers import MasterAdam

BUCKET_BYTES = 256 * 2**20


class ZeroAdam:
    """`MasterAdam` of which each rank of `group` has and updates an equal share.

    params: parameters of one floating dtype, alike on all ranks of the group; their memory moves into a few flat
    buffers, in place. grads: an FP32 buffer for each, of its shape, such as its main_grad; their memory moves too and
    keeps its values. lr, grad_norm, step_count: FP32 0-d on the device; grad_norm is that of the averaged gradients.

    norm_group: the ranks whose gradients the norm is taken of, those of `group` and those that hold other shards of the
    model: all of a run (""). uncounted: those of `params` that another rank with other shards counts already: what is
    alike on all tensor ranks, on all but the first of them; a tied embedding, on the last stage.
    """

    def __init__(
        self,
        params,
        grads,
        lr: float,
        betas,
        eps: float,
        weight_decay: float,
        clip: float,
        group: str = "",
        norm_group: str = "",
        uncounted=(),
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.params, self.group, self.norm_group = list(params), group, norm_group
        num_parts, part = collectives.group_size(group), collectives.group_rank(group)
        self.grads = collectives.GradientBuckets(grads, bucket_bytes, group, num_parts)
        self.flat_params = [
            _flatten_(self.params, places, flat.numel())
            for flat, places in zip(self.grads.flats, self.grads.places, strict=True)
        ]
        shares = [[flat.chunk(num_parts)[part] for flat in flats] for flats in (self.flat_params, self.grads.flats)]
        self._uncounted = self._shares_of({id(param) for param in uncounted}, num_parts, part)
        self.adam = MasterAdam(*shares, lr, betas, eps, weight_decay, clip, self._reduce_norm)
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

    def _reduce_norm(self, norm):
        reduce_norm_(norm, self.norm_group, self._uncounted)

    @torch.no_grad()
    def step(self) -> None:
        """Average, clip and apply the gradients, then make the parameters whole. The gradients are undefined then."""
        for flat in self.grads.flats:
            collectives.reduce_scatter_mean_(flat, self.group)
        self.adam.step()
        for flat in self.flat_params:
            collectives.all_gather_(flat, self.group)

    def zero_grads(self) -> None:
        """Clear all gradients in place."""
        self.grads.zero_()

    def reset(self) -> None:
        """In place, as after construction from the parameters' present values, which must be alike on all ranks."""
        self.adam.reset()

    def named_state(self):
        """(name, tensor) of this rank's share of masters and moments, and of the count of steps, for hashing."""
        return self.adam.named_state()


@torch.no_grad()
def _flatten_(params, places, num_elements):
    """One buffer of the parameters at these places: their memory moves into it, their values stay."""
    first = params[places[0][0]]
    flat = torch.zeros(num_elements, dtype=first.dtype, device=first.device)
    for index, start in places:
        view = collectives.place_in(flat, start, params[index])
        view.copy_(params[index])
        # The tensor object stays, so modules that hold it read the buffer from now on.
        params[index].data = view
    return flat


@torch.no_grad()
def reduce_norm_(norm: torch.Tensor, group: str = "", uncounted=()) -> None:
    """Make a norm of this rank's gradients, FP32 0-d, the norm over all ranks of `group`, in place.

    uncounted: of those gradients, the tensors that another rank of the group counts too.
    """
    norm.square_()
    if uncounted:
        norms = torch._foreach_norm(list(uncounted), 2, dtype=torch.float32)
        # What is left may round to less than nothing.
        norm.sub_(torch.stack(norms).square_().sum()).clamp_(min=0)
    collectives.all_reduce_sum_(norm, group)
    norm.sqrt_()


def reduce_overflow_(found_inf: torch.Tensor, group: str = "") -> None:
    """Make a flag, 0-d, 1 where it is 1 on any rank of `group`, in place: all ranks skip a step, or none does."""
    collectives.all_reduce_max_(found_inf, group)


@torch.no_grad()
def reduce_amax_(amaxes, group: str = "") -> None:
    """Make the largest magnitudes of FP8 scaling, FP32 tensors or one, the largest over the ranks of `group`, in place.

    One collective for all of them.
    """
    if isinstance(amaxes, torch.Tensor):
        collectives.all_reduce_max_(amaxes, group)
        return
    flat = torch.cat([amax.flatten() for amax in amaxes])
    collectives.all_reduce_max_(flat, group)
    parts = flat.split([amax.numel() for amax in amaxes])
    torch._foreach_copy_(list(amaxes), [part.view(amax.shape) for part, amax in zip(parts, amaxes, strict=True)])
