"""How a region's memory is taken from the allocator: a result by itself, so that its owner frees it by itself.

A capture's pool gives the same bytes to several tensors, one after the other. A tensor that the region returns becomes
an allocation of its own. The others stay as they lie in the pool: those of a segment share one allocation, which is
free again once the launch is queued.
"""

from typing import NamedTuple

_ROUND = 512


class Block(NamedTuple):
    """A tensor of the pools: its address in the first and in the second capture, and the bytes that were requested."""

    address: int
    other: int
    size: int

    def is_mistakable(self, block: "Block") -> bool:
        """Return whether an address in both captures may be one of either block."""
        overlap = self.address < block.address + block.size and block.address < self.address + self.size
        return overlap and self.address - block.address == self.other - block.other


class Plan(NamedTuple):
    """Allocations of a launch for the tensors of a pool: their bytes, and (index, offset) of each block.

    results: index of the allocation of each block that holds results; both begin alike. copies: (index of a result's
    allocation, index and offset of its bytes after a launch), where they differ.
    """

    sizes: list[int]
    places: list[tuple[int, int]]
    results: dict[int, int]
    copies: list[tuple[int, int, int]]


def plan(segments: list[tuple[int, int]], blocks: list[Block], results: set[int]) -> Plan:
    """Give each block that a capture ever makes a place.

    segments: (address, bytes) of the first capture's pool. results: indices of the blocks that hold results. A result
    is copied where a temporary tensor had the same bytes in both captures: its block cannot be told from that one.
    """
    made = Plan([], [(-1, 0)] * len(blocks), {}, [])
    shared = {a for a in results if any(blocks[a].is_mistakable(b) for i, b in enumerate(blocks) if i != a)}
    for index in sorted(results - shared):
        made.places[index], made.results[index] = (len(made.sizes), 0), len(made.sizes)
        made.sizes.append(blocks[index].size)
    for start, size in segments:
        inside = [i for i, b in enumerate(blocks) if i not in made.results and start <= b.address < start + size]
        used = 0
        for first, end in merge([(blocks[index].address, blocks[index].size) for index in inside]):
            for index in inside:
                if first <= blocks[index].address < end:
                    made.places[index] = len(made.sizes), used + blocks[index].address - first
            used += end - first
        if inside:
            made.sizes.append(used)
    for index in sorted(shared):
        made.copies.append((len(made.sizes), *made.places[index]))
        made.results[index] = len(made.sizes)
        made.sizes.append(blocks[index].size)
    return made


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end), sorted, of (address, bytes), rounded up like the allocator does; overlapping ones joined."""
    merged: list[list[int]] = []
    for start, size in sorted(ranges):
        end = start + -(-max(size, 1) // _ROUND) * _ROUND
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]
