"""How a region's memory is taken from the allocator: a result by itself, so that its owner frees it by itself.

A capture's pool gives the same bytes to several tensors, one after the other. Bytes that some tensor spans stay
together; between such parts a segment may be cut. A part with a result in it becomes an allocation of its own. The
other parts of a segment share one, which is free again once the launch is queued.
"""

import bisect
from dataclasses import dataclass

_ROUND = 512


@dataclass(frozen=True)
class Plan:
    """Where the parts of the pool go.

    Attributes:
        parts: (start, end) addresses in the capture, sorted.
        arena: index of the arena of each part.
        offset: of each part in its arena.
        sizes: bytes of the arenas.
    """

    parts: list[tuple[int, int]]
    arena: list[int]
    offset: list[int]
    sizes: list[int]

    def place(self, address: int) -> tuple[int, int]:
        """Return the arena and the offset in it where an address of the capture goes."""
        index = bisect.bisect_right(self.parts, (address, 1 << 64)) - 1
        assert index >= 0 and address < self.parts[index][1], "an address of the pool in none of its blocks"
        return self.arena[index], self.offset[index] + address - self.parts[index][0]


def plan(segments: list[tuple[int, int]], blocks: list[tuple[int, int]], results: list[int]) -> Plan:
    """Cut the segments of a pool into parts and give each a place.

    Args:
        segments: (address, bytes).
        blocks: (address, requested bytes) of all tensors that the capture ever made there.
        results: addresses of the region's results.
    """
    made = Plan([], [], [], [])
    for first, size in sorted(segments):
        rest, used = [], 0
        for start, end in merge([block for block in blocks if first <= block[0] < first + size]):
            end = min(end, first + size)
            made.parts.append((start, end))
            if any(start <= address < end for address in results):
                made.arena.append(len(made.sizes))
                made.offset.append(0)
                made.sizes.append(end - start)
            else:
                rest.append(len(made.arena))
                made.arena.append(-1)
                made.offset.append(used)
                used += end - start
        for index in rest:
            made.arena[index] = len(made.sizes)
        if rest:
            made.sizes.append(used)
    return made


def merge(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end), sorted, of blocks (address, bytes), rounded up like the allocator does; overlapping ones joined."""
    merged: list[list[int]] = []
    for start, size in sorted(blocks):
        end = start + -(-max(size, 1) // _ROUND) * _ROUND
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]
