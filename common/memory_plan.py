"""The items that layers keep from their forward to their backward, the bytes that torch then reserves, and their fit.

A model lists the items of a layer, and for each preset what layers keep on cards of some sizes (docs/memory_plan.md).
The choice depends on its arguments alone, so all ranks and variants that are given the same numbers keep the same.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.fit import gib

GIB = 2**30

# torch's caching allocator (c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp), default settings.
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_BYTES = 2**20  # kSmallSize: the largest size that the pool of small blocks serves
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer: a segment of that pool
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer, large_segment_size: a segment for sizes below MIN_LARGE_BYTES
MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc: from here up a segment is made for one size,
ROUND_LARGE_BYTES = 2 * 2**20  # kRoundLarge: rounded up to a multiple of this


@dataclass(frozen=True)
class MemoryPlan:
    """The items that each layer keeps, and the bytes around them.

    items: {name: bytes that a layer takes of torch's segments to keep it}, in the order of the forward. layers: names
    of the items that layer 0, 1, ... keeps. fixed_bytes: weights, workspaces, what a layer needs while it runs.
    """

    items: dict[str, int]
    layers: tuple[frozenset[str], ...]
    fixed_bytes: int

    @property
    def bytes(self) -> int:
        """Peak of the bytes that torch reserves: fixed, and what all layers keep."""
        return self.fixed_bytes + sum(self.items[name] for kept in self.layers for name in kept)

    def text(self) -> str:
        """A table of few lines; items that equally many layers keep share a line."""
        alike: dict[int, list[str]] = {}
        for name in self.items:
            if self.items[name]:
                alike.setdefault(sum(name in kept for kept in self.layers), []).append(name)
        rows = [("layers that", "keep it", "compute it again", "GiB")]
        for count, names in alike.items():
            size = count * sum(self.items[name] for name in names)
            rows.append((", ".join(names), str(count), str(len(self.layers) - count), f"{size / GIB:.2f}"))
        rows.append(("fixed", "", "", f"{self.fixed_bytes / GIB:.2f}"))
        rows.append(("predicted", "", "", f"{self.bytes / GIB:.2f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *others = widths
        return "\n".join(
            row[0].ljust(first) + "".join(cell.rjust(width + 3) for cell, width in zip(row[1:], others, strict=True))
            for row in rows
        )


def kept_by_layers(keep: str, names: Sequence[str], num_layers: int) -> tuple[frozenset[str], ...]:
    """Return the items that layer 0, 1, ... keeps.

    Args:
        keep: all (auto means the same); least; or groups of the last layers in their order. With "5 qkv fc1, 75 all"
            the last 75 layers keep all items, the 5 before them two, and any others none. ValueError for anything else.
        names: the items that a layer may keep.
        num_layers: of the model, or of a stage of a pipeline.
    """
    everything = frozenset(names)
    kept: list[frozenset[str]] = []
    if keep in ("auto", "all"):
        return (everything,) * num_layers
    for group in () if keep == "least" else keep.split(","):
        count, _, items = group.strip().partition(" ")
        chosen = everything if items.strip() == "all" else frozenset(items.split())
        if not count.isdecimal() or not chosen or not chosen <= everything:
            raise ValueError(
                f"--keep {keep}: takes auto, all, least, or numbers of the last layers with items, such as "
                f"'2 {names[0]}, 1 all'; items are {', '.join(names)}"
            )
        kept += [chosen] * min(int(count), num_layers)
    kept = kept[-num_layers:]
    return (frozenset(),) * (num_layers - len(kept)) + tuple(kept)


def choose(keep: str, cards: dict[int, str], total_bytes: int, budget_bytes: int, predict: Callable[[str], int]) -> str:
    """Return what layers keep on a GPU: `keep`, unless it is auto; ValueError where that is not predicted to fit.

    For auto the first that is predicted to fit: all, the choices for cards that are not larger than this one, from the
    largest down, least.

    Args:
        keep: of --keep.
        cards: {GB of a card: what layers of the preset keep on it}.
        total_bytes: of the GPU.
        budget_bytes: that torch may reserve.
        predict: predict(keep) -> bytes that torch reserves.
    """
    if keep != "auto":
        if predict(keep) > budget_bytes:
            raise ValueError(
                f"--keep {keep}: {gib(predict(keep))} GiB are predicted, {gib(budget_bytes)} GiB are free: keep less"
            )
        return keep
    choices = [cards[size] for size in sorted(cards, reverse=True) if size * 10**9 <= total_bytes]
    return next((choice for choice in ("all", *choices) if predict(choice) <= budget_bytes), "least")


def budget_bytes(free_bytes: int, context_bytes: int) -> int:
    """Return the bytes torch may reserve of a GPU's free memory, in whole GiB: runs of one session keep the same.

    context_bytes: what CUDA and its libraries take outside of torch's allocator.
    """
    return max(1, (free_bytes - context_bytes) // GIB) * GIB


# ------------------------------------------------------------------------------------------------
# torch's caching allocator


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments that torch's caching allocator makes for these allocations, in this order, none freed.

    As `torch.cuda.memory_reserved` says for one stream of a fresh process with default settings: the smallest free
    block that fits is taken and split; where none fits, a segment is made.
    """
    total = 0
    pools: dict[str, list[int]] = {"small": [], "large": []}
    for size in sizes:
        rounded = _round_up(size, MIN_BLOCK_BYTES)
        if rounded == 0:
            continue
        blocks = pools["small" if rounded <= SMALL_BYTES else "large"]
        index = bisect_left(blocks, rounded)
        if index < len(blocks):
            block = blocks.pop(index)
        else:
            block = _segment_bytes(rounded)
            total += block
        # A rest of up to SMALL_BYTES is not split off a large block, but no later size is small enough for it either.
        if block > rounded:
            insort(blocks, block - rounded)
    return total


def share_bytes(size: int) -> int:
    """Bytes of segments that one of many allocations of `size` bytes takes: a segment over those that fit into it."""
    if size == 0:
        return 0
    rounded = _round_up(size, MIN_BLOCK_BYTES)
    segment = _segment_bytes(rounded)
    return math.ceil(segment / (segment // rounded))


def _segment_bytes(size):
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < MIN_LARGE_BYTES else _round_up(size, ROUND_LARGE_BYTES)


def _round_up(size, multiple):
    return -(-size // multiple) * multiple
