"""A memory plan: what each layer keeps from its forward to its backward, so that a step fits into given bytes.

A model describes one layer by its items; `configurations` are the ways to run that layer; `choose` mixes them over
identical layers. The plan depends on its arguments alone and knows neither a GPU nor torch, so every variant of a model
that is given the same numbers gets the same plan. See docs/memory_plan.md.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import NamedTuple

GIB = 2**30
# What becomes of an item in a layer. UNUSED: nothing that is recomputed needs it.
KEPT, FP8, RECOMPUTED, UNUSED = "kept", "fp8", "recomputed", "unused"

# Measured on an H200 at 690 W with the shapes of Llama 2 70B: FP8 GEMMs 1,400 to 1,600 TFLOP/s, cuDNN's causal
# attention 644 forward, elementwise kernels and transposes at 4 of the 4.8 TB/s of the data sheet. bf16: H200's usual
# 750.
FP8_TFLOPS, BF16_TFLOPS, ATTENTION_TFLOPS, COPY_GB_PER_S = 1500.0, 750.0, 644.0, 4000.0

# torch's caching allocator (c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp), default settings.
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_BYTES = 2**20  # kSmallSize: the largest size that the pool of small blocks serves
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer: a segment of that pool
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer, large_segment_size: a segment for sizes below MIN_LARGE_BYTES
MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc: from here up a segment is made for one size,
ROUND_LARGE_BYTES = 2 * 2**20  # kRoundLarge: rounded up to a multiple of this


@dataclass(frozen=True)
class Item:
    """A tensor of a layer that its backward may find kept or may compute again."""

    name: str
    bytes: int
    # Of its FP8 copy; None: there is none.
    fp8_bytes: int | None
    # Milliseconds to compute it again from `needs`; None: that is impossible, it is always kept.
    recompute_ms: float | None
    # Names of items before it from which it is recomputed: each is kept, or recomputed first.
    needs: tuple[str, ...] = ()
    # Kept for the whole run, once for all microbatches, as a transposed weight is.
    permanent: bool = False
    # The backward reads it. False: it only serves to recompute others.
    read: bool = True


class Choice(NamedTuple):
    """One item in one configuration: KEPT, FP8, RECOMPUTED or UNUSED, and what that costs a layer."""

    item: str
    how: str
    bytes: int
    ms: float


@dataclass(frozen=True)
class Configuration:
    """One way to run a layer. bytes: that it keeps; ms: that a microbatch takes longer than with everything kept.

    keeps, keeps_fp8, recomputes: names of the items of which that is true, in the order of the forward.
    """

    name: str
    bytes: int
    ms: float
    permanent_bytes: int = 0
    choices: tuple[Choice, ...] = ()

    def items(self, how: str) -> tuple[str, ...]:
        """Names of the items that are KEPT, FP8, RECOMPUTED or UNUSED, in the order of the forward."""
        return tuple(choice.item for choice in self.choices if choice.how == how)

    keeps = property(lambda self: self.items(KEPT))
    keeps_fp8 = property(lambda self: self.items(FP8))
    recomputes = property(lambda self: self.items(RECOMPUTED))


def configurations(
    items: Sequence[Item], *, in_flight: int = 1, allow_fp8: Collection[str] = ()
) -> list[Configuration]:
    """Every consistent way to run a layer of these items, the one that keeps all first.

    An item's bytes are those that one of many such allocations takes of torch's segments (`share_bytes`).

    Args:
        items: In the order of the layer's forward.
        in_flight: Microbatches whose kept items are held at the same time; permanent items count once.
        allow_fp8: Names of items that the model stores in FP8. They are kept in FP8 or recomputed, and nothing is
            recomputed from an FP8 copy. A layer that recomputes one must round it to FP8 as well, so that gradients
            depend on the model's configuration and not on the plan.
    """
    names = [item.name for item in items]
    ways = [
        (FP8 if item.name in allow_fp8 else KEPT,) + (() if item.recompute_ms is None else (RECOMPUTED,))
        for item in items
    ]
    found = (_configuration(items, dict(zip(names, hows, strict=True)), in_flight) for hows in product(*ways))
    return [configuration for configuration in found if configuration is not None]


def _configuration(items, how, in_flight) -> Configuration | None:
    """None where something is recomputed from an FP8 copy. An item that several need is recomputed once."""
    wanted = {item.name for item in items if item.read}
    choices, permanent_bytes = [], 0
    for item in reversed(items):
        state, num_bytes, ms = how[item.name], 0, 0.0
        if state == RECOMPUTED and item.name not in wanted:
            state = UNUSED
        elif state == RECOMPUTED:
            if any(how[name] == FP8 for name in item.needs):
                return None
            wanted.update(item.needs)
            ms = item.recompute_ms
        else:
            num_bytes = share_bytes(item.fp8_bytes if state == FP8 else item.bytes)
            num_bytes *= 1 if item.permanent else in_flight
            permanent_bytes += num_bytes if item.permanent else 0
        choices.append(Choice(item.name, state, num_bytes, ms))
    choices.reverse()
    kept = [choice.item + (":fp8" if choice.how == FP8 else "") for choice in choices if choice.how in (KEPT, FP8)]
    return Configuration(
        name=" ".join(kept) or "nothing",
        bytes=sum(choice.bytes for choice in choices),
        ms=math.fsum(choice.ms for choice in choices),
        permanent_bytes=permanent_bytes,
        choices=tuple(choices),
    )


@dataclass(frozen=True)
class Plan:
    """The name of each layer's configuration (layers), the configurations in use by name, and the bytes around them."""

    layers: tuple[str, ...]
    configurations: dict[str, Configuration]
    budget_bytes: int
    fixed_bytes: int

    def of(self, layer: int) -> Configuration:
        """The configuration of layer 0, 1, ..."""
        return self.configurations[self.layers[layer]]

    @property
    def counts(self) -> dict[str, int]:
        """Layers of each configuration."""
        return dict(Counter(self.layers))

    @property
    def bytes(self) -> int:
        """Peak of the bytes that torch reserves: fixed, and what all layers keep."""
        return self.fixed_bytes + sum(self.configurations[name].bytes for name in self.layers)

    @property
    def ms(self) -> float:
        """Milliseconds by which a microbatch takes longer than with everything kept."""
        return math.fsum(self.configurations[name].ms for name in self.layers)

    def items(self) -> dict[str, dict]:
        """By item: the layers that keep it, keep it in FP8, recompute it or do neither; bytes and ms of all layers."""
        table: dict[str, dict[str, float]] = {}
        for name, num_layers in self.counts.items():
            for choice in self.configurations[name].choices:
                row = table.setdefault(choice.item, {KEPT: 0, FP8: 0, RECOMPUTED: 0, UNUSED: 0, "bytes": 0, "ms": 0.0})
                row[choice.how] += num_layers
                row["bytes"] += num_layers * choice.bytes
                row["ms"] += num_layers * choice.ms
        return table

    def text(self) -> str:
        """A table of few lines; items that are treated alike in every layer share one."""
        alike: dict[tuple[int, int, int], list[tuple[str, dict]]] = {}
        for name, row in self.items().items():
            alike.setdefault((row[KEPT], row[FP8], row[RECOMPUTED]), []).append((name, row))
        rows: list[tuple[str, ...]] = [("layers that", "keep it", "in FP8", "recompute", "GiB", "ms")]
        for counts, found in alike.items():
            num_bytes, ms = (sum(row[key] for _, row in found) for key in ("bytes", "ms"))
            names = ", ".join(name for name, _ in found)
            rows.append((names, *map(str, counts), f"{num_bytes / GIB:.2f}", f"{ms:.1f}"))
        rows.append(("fixed", "", "", "", f"{self.fixed_bytes / GIB:.2f}", ""))
        total = f"sum, of {self.budget_bytes / GIB:.2f} GiB"
        rows.append((total, "", "", "", f"{self.bytes / GIB:.2f}", f"{self.ms:.1f}"))
        width = max(len(row[0]) for row in rows)
        return "\n".join(row[0].ljust(width) + "".join(cell.rjust(11) for cell in row[1:]) for row in rows)


def choose(configurations: Sequence[Configuration], num_layers: int, budget_bytes: int, fixed_bytes: int) -> Plan:
    """The mixture of configurations over identical layers that fits and costs the fewest milliseconds.

    All layers climb the lower convex hull of (bytes, ms) together, the most milliseconds saved per byte first, as far
    as the budget goes. Then the configurations of any two layers are exchanged as long as that saves time. The last
    layers keep the most: their backward comes first, and frees it before the first layers need memory to recompute.

    Args:
        configurations: Of `configurations`.
        num_layers: Identical layers.
        budget_bytes: That torch may reserve, fixed_bytes included, the CUDA context not.
        fixed_bytes: Weights, workspaces, what a layer needs while it runs.

    Raises:
        ValueError: The budget is below the smallest plan.
    """
    frontier = _frontier(configurations)
    smallest = frontier[0]
    needed = fixed_bytes + num_layers * smallest.bytes
    if budget_bytes < needed:
        raise ValueError(
            f"{budget_bytes:,} bytes ({budget_bytes / GIB:.1f} GiB) of memory are given, the smallest plan needs "
            f"{needed:,}: {fixed_bytes:,} fixed and {num_layers} layers of {smallest.bytes:,}; "
            f"--memory-gib {math.ceil(needed / GIB * 10) / 10:.1f} is enough"
        )
    counts, room = Counter({smallest: num_layers}), budget_bytes - needed
    for low, high in pairwise(_hull(frontier)):
        climb = min(num_layers, room // (high.bytes - low.bytes))
        counts[low], counts[high] = num_layers - climb, climb
        room -= climb * (high.bytes - low.bytes)
        if climb < num_layers:
            break
    _exchange(counts, frontier, room)
    used = sorted(+counts, key=lambda c: (c.bytes - c.permanent_bytes, c.bytes, c.name))
    layers = tuple(c.name for c in used for _ in range(counts[c]))
    return Plan(layers, {c.name: c for c in used}, budget_bytes, fixed_bytes)


def _frontier(configurations) -> list[Configuration]:
    """By growing bytes, those that no other beats in both bytes and ms."""
    found: list[Configuration] = []
    for configuration in sorted(configurations, key=lambda c: (c.bytes, c.ms, c.name)):
        if not found or configuration.ms < found[-1].ms:
            found.append(configuration)
    return found


def _hull(frontier) -> list[Configuration]:
    """The lower convex hull of the frontier: each step saves fewer ms per byte than the one before."""

    def saved_per_byte(low, high):
        return (low.ms - high.ms) / (high.bytes - low.bytes)

    hull: list[Configuration] = []
    for configuration in frontier:
        while len(hull) >= 2 and saved_per_byte(*hull[-2:]) <= saved_per_byte(hull[-1], configuration):
            hull.pop()
        hull.append(configuration)
    return hull


def _exchange(counts, frontier, room):
    """Give two layers (or the only one) other configurations within `room` bytes, those that save most; in place.

    Of two layers the second gets the fastest configuration that fits beside each one of the first.
    """
    sizes = [c.bytes for c in frontier]
    while True:
        most, exchange = 1e-6, None  # less is a rounding error of the sums
        layers = [c for c in sorted(+counts, key=lambda c: c.name) for _ in range(min(2, counts[c]))]
        for old in combinations(layers, min(2, len(layers))):
            space = room + sum(c.bytes for c in old)
            for first in combinations(frontier, len(old) - 1):
                index = bisect_right(sizes, space - sum(c.bytes for c in first)) - 1
                if index < 0:
                    continue
                new = (*first, frontier[index])
                saved = sum(c.ms for c in old) - sum(c.ms for c in new)
                if saved > most:
                    most, exchange, left = saved, (old, new), space - sum(c.bytes for c in new)
        if exchange is None:
            return
        counts.subtract(exchange[0])
        counts.update(exchange[1])
        room = left


def gemm_ms(flop: float, tflops: float) -> float:
    """Milliseconds of `flop` operations at 10^12 `tflops` a second."""
    return flop / tflops / 1e9


def copy_ms(num_bytes: float, gb_per_s: float) -> float:
    """Milliseconds to move bytes (read and written ones counted) at 10^9 `gb_per_s` bytes a second."""
    return num_bytes / gb_per_s / 1e6


# ------------------------------------------------------------------------------------------------
# torch's caching allocator


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments that torch's caching allocator makes for these allocations, in this order, none freed.

    As `torch.cuda.memory_reserved` says for one stream of a fresh process with default settings: the smallest free
    block that fits is taken and split; where none fits, a segment is made.
    """
    total = 0
    pools: dict[str, list[int]] = {"small": [], "large": []}
    for asked in sizes:
        size = _round_up(asked, MIN_BLOCK_BYTES)
        if size == 0:
            continue
        blocks = pools["small" if size <= SMALL_BYTES else "large"]
        index = bisect_left(blocks, size)
        if index < len(blocks):
            block = blocks.pop(index)
        else:
            block = _segment_bytes(size)
            total += block
        # A rest of up to SMALL_BYTES is not split off a large block, but no later size is small enough for it either.
        if block > size:
            insort(blocks, block - size)
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
