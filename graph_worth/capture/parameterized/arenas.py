"""Takes the memory of a region from the allocator, with one block for each result, so that its owner can free it.

All other tensors of a launch share one allocation, which is free again once the launch is queued. Two have the same
bytes where the capture had freed one before it made the other on the same stream.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

_ROUND = 512


class Block(NamedTuple):
    """A tensor that a capture made: its address and the bytes that were requested.

    born, freed: when it was made and freed, in events of the allocator. stream: on which.
    """

    address: int
    size: int
    born: float
    freed: float
    stream: int

    def is_beside(self, block: "Block") -> bool:
        """Return whether both may be alive at one time."""
        return self.stream != block.stream or (self.born < block.freed and block.born < self.freed)


def read(events: list[dict[str, Any]]) -> list[Block]:
    """Return the tensors that were made in a trace of torch's allocator."""
    blocks: list[Block] = []
    alive: dict[int, int] = {}
    for now, event in enumerate(events):
        if event["action"] == "alloc":
            alive[event["addr"]] = len(blocks)
            blocks.append(Block(event["addr"], event["size"], now, math.inf, event["stream"]))
        elif event["action"] == "free_completed" and event["addr"] in alive:
            index = alive.pop(event["addr"])
            blocks[index] = blocks[index]._replace(freed=now)
    return blocks


class ArenaPlan(NamedTuple):
    """Allocations of a launch for the tensors of a pool: their bytes, and (index, offset) of each block.

    results: index of the allocation of each block that holds results; both begin alike. copies: (index of a result's
    allocation, index and offset of its bytes after a launch), where they differ.
    """

    sizes: list[int]
    places: list[tuple[int, int]]
    results: dict[int, int]
    copies: list[tuple[int, int, int]]


def plan(blocks: list[Block], others: list[int], results: set[int]) -> ArenaPlan:
    """Give each block that a capture ever makes a place.

    others: addresses of the blocks in another capture. results: indices of those that hold results. A result is copied
    where a temporary tensor had the same bytes in both captures: no address tells its block from that one.
    """
    arena_plan = ArenaPlan([], [(-1, 0)] * len(blocks), {}, [])
    packed = []
    for unit in _units(blocks, others):
        if len(unit) == 1 and unit[0] in results:
            arena_plan.places[unit[0]], arena_plan.results[unit[0]] = (len(arena_plan.sizes), 0), len(arena_plan.sizes)
            arena_plan.sizes.append(blocks[unit[0]].size)
        else:
            packed.append(unit)
    places = dict(_pack(packed, blocks))
    for index, start in places.items():
        arena_plan.places[index] = len(arena_plan.sizes), start
    if places:
        arena_plan.sizes.append(max(start + _rounded(blocks[index].size) for index, start in places.items()))
    for index in sorted(results - arena_plan.results.keys()):
        arena_plan.copies.append((len(arena_plan.sizes), *arena_plan.places[index]))
        arena_plan.results[index] = len(arena_plan.sizes)
        arena_plan.sizes.append(blocks[index].size)
    return arena_plan


def _units(blocks, others) -> list[list[int]]:
    """Indices of blocks that keep their distances: an address in both captures may be one of any of a unit's."""
    by_shift = defaultdict(list)
    for index, (block, other_address) in enumerate(zip(blocks, others, strict=True)):
        by_shift[block.address - other_address].append(index)
    units: list[list[int]] = []
    for alike in by_shift.values():
        end = 0
        for index in sorted(alike, key=lambda index: blocks[index].address):
            if blocks[index].address >= end:
                units.append([])
            units[-1].append(index)
            end = max(end, blocks[index].address + blocks[index].size)
    return units


def _pack(units, blocks):
    """Each block and where it begins: the largest unit first, at the lowest bytes that are free while it is alive."""
    placed: list[tuple[int, int]] = []
    for unit in sorted(units, key=lambda unit: -_extent([blocks[index] for index in unit])):
        first = min(blocks[index].address for index in unit)
        # A unit that begins between two such numbers has a block over one that is placed.
        barred = sorted(
            (at - (one.address - first) - _rounded(one.size), at - (one.address - first) + _rounded(blocks[fixed].size))
            for one in (blocks[index] for index in unit)
            for fixed, at in placed
            if one.is_beside(blocks[fixed])
        )
        start = 0
        for below, above in barred:
            if start <= below:
                break
            start = max(start, above)
        placed += [(index, start + blocks[index].address - first) for index in unit]
    return placed


def _extent(unit):
    return max(block.address + block.size for block in unit) - min(block.address for block in unit)


def _rounded(size):
    return -(-max(size, 1) // _ROUND) * _ROUND
