"""Gradients of several ranks: in a few flat buffers, each of which one collective reduces, and their norm.

buckets = GradientBuckets(main_grads, bucket_bytes=64 << 20)
loss.backward(); buckets.all_reduce_mean(); optimizer.step(); buckets.zero_()
"""

from functools import partial

import torch

from graph_worth.parallel import collectives

# What the CUDA caching allocator gives a tensor of its own, so that kernels choose the same vector width in a bucket.
_ALIGNMENT_BYTES = 512


class GradientBuckets:
    """Gradients laid out in a few contiguous buffers, reduced without a copy.

    Args:
        tensors: Gradients, such as FP32 main_grads. Their memory moves into the buckets and keeps its values.
        bucket_bytes: Most of a bucket that holds several tensors.
        group: As for the operators of collectives.py.
        parts: Each bucket has so many equal parts, which begin and end as aligned as a gradient does.

    Attributes:
        flats: The buckets in the order of reduction, of one dtype and device each. Padding between gradients is zero.
        all_reduce_mean: Called without arguments, averages all buckets over the group, in the order of `flats`.
        places: For each of flats (index of a tensor, its first element) of all that lies in it.
    """

    def __init__(self, tensors, bucket_bytes, group="", parts=1):
        self.tensors, self.group = list(tensors), group
        self.flats: list[torch.Tensor] = []
        self.places: list[list[tuple[int, int]]] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), indices in kinds.items():
            self._fill(indices, bucket_bytes, dtype, device, parts)
        # The operator itself: a rank that waits in it is told to be at its caller's line.
        self.all_reduce_mean = partial(collectives.all_reduce_mean_, self.flats, group)

    def _fill(self, indices, bucket_bytes, dtype, device, parts):
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        while indices:
            places: list[tuple[int, int]] = []
            num_elements = 0
            for index in indices:
                padded = -(-self.tensors[index].numel() // unit) * unit
                if places and (num_elements + padded) * dtype.itemsize > bucket_bytes:
                    break
                places.append((index, num_elements))
                num_elements += padded
            # Whole units for each part.
            num_elements = -(-num_elements // (unit * parts)) * unit * parts
            self.flats.append(torch.zeros(num_elements, dtype=dtype, device=device))
            self.places.append(places)
            move_into(self.flats[-1], places, self.tensors)
            indices = indices[len(places) :]

    def zero_(self) -> None:
        """Clear all gradients in place."""
        for flat in self.flats:
            flat.zero_()


@torch.no_grad()
def move_into(flat, places, tensors) -> None:
    """Move the memory of tensors[index], for each (index, first element) of places, into `flat`; their values stay."""
    for index, start in places:
        view = flat[start : start + tensors[index].numel()]
        # Strides are kept (channels_last): copies between lists of tensors are one kernel only where they agree.
        view = view.as_strided(tensors[index].shape, torch.empty_like(tensors[index], device="meta").stride())
        view.copy_(tensors[index])
        # The tensor object stays, so whoever holds it (a module, param.main_grad) uses the flat buffer from now on.
        tensors[index].data = view


@torch.no_grad()
def reduce_norm_(norm: torch.Tensor, group: str = "", uncounted=()) -> None:
    """Make the norm of this rank's gradients the norm over all ranks of a group, in place.

    Args:
        norm: FP32 0-d.
        group: Ranks that hold other gradients.
        uncounted: Gradients of this rank that another rank of the group counts too.
    """
    norm.square_()
    if uncounted:
        norms = torch._foreach_norm(list(uncounted), 2, dtype=torch.float32)
        # The rest may round to less than zero.
        norm.sub_(torch.stack(norms).square_().sum()).clamp_(min=0)
    collectives.all_reduce_sum_(norm, group)
    norm.sqrt_()
