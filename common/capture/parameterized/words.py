"""Two captures compared word by word: the words that are addresses, and the words that nothing explains.

The parameters of all nodes of a capture lie behind one another in a blob. Two captures of the same function over other
memory have blobs of the same layout, and a word that differs must be an address: it lies in the same allocation at the
same offset in both. No GPU is needed to find that out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ALIGNMENT = 16


@dataclass(frozen=True)
class Chunk:
    """A run of parameter bytes in the blob: a parameter of a kernel, or all of a node's.

    node: index of the node. offset: in the node's parameters. start: in the blob, a multiple of 16. size: bytes.
    """

    node: int
    offset: int
    start: int
    size: int


class Slots(NamedTuple):
    """The addresses in a blob, each of 8 bytes, and what belongs there.

    Attributes:
        position: index into the blob as 4-byte words.
        allocation: index of the allocation.
        offset: bytes from the allocation's base.
        node: index of the node.
    """

    position: np.ndarray
    allocation: np.ndarray
    offset: np.ndarray
    node: np.ndarray


@dataclass(frozen=True)
class Unexplained:
    """A 4-byte word that differs between the captures and is no part of an address.

    Attributes:
        node: index of the node.
        offset: offset in the node's parameters.
        first: value in the first capture.
        second: value in the second.
        position: index into the blob as 4-byte words.
    """

    node: int
    offset: int
    first: int
    second: int
    position: int

    @property
    def agreed(self) -> int:
        """The value with zero in the place of the bytes that differ: a flag may share its word with unused bytes."""
        differ = self.first ^ self.second
        return sum(self.first & 0xFF << bits for bits in (0, 8, 16, 24) if not differ >> bits & 0xFF)


@dataclass(frozen=True)
class Suspect:
    """An 8-byte word with an unexplained half that looks like an address of memory outside the region.

    One of `low` and `high` may be the same in both captures.
    """

    low: Unexplained
    high: Unexplained


def layout(nodes: list[list[tuple[int, bytes]]]) -> tuple[list[Chunk], np.ndarray]:
    """Put the parameters of all nodes behind one another.

    Args:
        nodes: (offset, bytes) of each parameter of each node.

    Returns:
        the chunks, and the blob as uint8; gaps are zero.
    """
    chunks, start = [], 0
    for node, parameters in enumerate(nodes):
        for offset, data in parameters:
            chunks.append(Chunk(node, offset, start, len(data)))
            start += -(-len(data) // ALIGNMENT) * ALIGNMENT
    blob = np.zeros(start, np.uint8)
    for chunk, data in zip(chunks, (data for parameters in nodes for _, data in parameters), strict=True):
        blob[chunk.start : chunk.start + chunk.size] = np.frombuffer(data, np.uint8)
    return chunks, blob


def explain(
    chunks: list[Chunk], blobs: tuple[np.ndarray, np.ndarray], allocations: Sequence[tuple[int, int, int]]
) -> tuple[Slots, list[Unexplained]]:
    """Find the addresses among the words that differ between two captures.

    An address is an 8-byte word in the same allocation at the same offset in both, one byte past the end included.
    Half an address counts as unexplained: structures have some in their unused bytes.

    Args:
        chunks: layout of both blobs.
        blobs: parameters of the first and the second capture.
        allocations: (base in the first, base in the second, bytes); those of a pool may overlap, used in turn.

    Returns:
        the slots, and the words that nothing explains.
    """
    halves = [blob.view(np.uint32) for blob in blobs]
    rest = halves[0] != halves[1]
    # End of the chunk of each 4-byte position, and its index; -1 in gaps.
    end, owner = np.zeros(len(rest), np.int64), np.full(len(rest), -1, np.int64)
    for index, chunk in enumerate(chunks):
        places = slice(chunk.start // 4, -(-(chunk.start + chunk.size) // 4))
        end[places], owner[places] = chunk.start + chunk.size, index
    found = []
    taken = np.zeros(len(rest) + 1, bool)
    # Words at multiples of 8, then those between: copied structures have addresses at multiples of 4.
    for parity in (0, 1):
        position = np.flatnonzero(rest | np.append(rest[1:], False))
        position = position[(position % 2 == parity) & (position * 4 + 8 <= end[position])]
        position = position[~(taken[position] | taken[position + 1])]
        values = [words[position] | words[position + 1].astype(np.uint64) << np.uint64(32) for words in halves]
        allocation, offset = match(values, allocations)
        hit = allocation >= 0
        nodes = np.array([chunks[index].node for index in owner[position[hit]]], np.int64)
        found.append((position[hit], allocation[hit], offset[hit], nodes))
        for half in (position[hit], position[hit] + 1):
            rest[half], taken[half] = False, True
    unexplained = [
        Unexplained(chunk.node, chunk.offset + p * 4 - chunk.start, int(halves[0][p]), int(halves[1][p]), p)
        for p in np.flatnonzero(rest).tolist()
        for chunk in (chunks[owner[p]],)
    ]
    return Slots(*map(np.concatenate, zip(*found, strict=True))), unexplained


def match(values: list[np.ndarray], allocations: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Find the allocation (index, -1 for none) and the offset that each pair of values has in common.

    A value inside an allocation goes before one at its end, which may be the next one's base.

    Args:
        values: in the first and in the second capture, uint64.
        allocations: as of `explain`.
    """
    allocation, offsets = np.full(len(values[0]), -1, np.int64), np.zeros(len(values[0]), np.int64)
    for past_end in (0, 1):
        for index, (base, other, size) in enumerate(allocations):
            offset = values[0] - np.uint64(base)
            same = (offset == values[1] - np.uint64(other)) & (offset < np.uint64(size + past_end)) & (allocation < 0)
            allocation[same], offsets[same] = index, offset[same].astype(np.int64)
    return allocation, offsets


def suspects(
    unexplained: list[Unexplained], blobs: tuple[np.ndarray, np.ndarray], slots: Slots, is_address
) -> list[Suspect]:
    """Find the unexplained words that look like addresses, in either capture.

    Args:
        unexplained: of `explain`, as `slots`.
        blobs: parameters of the first and the second capture.
        slots: the addresses. A word that shares its 8 bytes with half of a slot is no suspect.
        is_address: is_address(value), whether memory is known at an 8-byte value.
    """
    taken = {*slots.position.tolist(), *(slots.position + 1).tolist()}
    halves = [blob.view(np.uint32) for blob in blobs]
    found: dict[int, Suspect] = {}
    for word in unexplained:
        low = word.position & ~1
        if low in found or low in taken or low + 1 in taken:
            continue
        if any(is_address(int(blob.view(np.uint64)[low // 2])) for blob in blobs):
            low_half, high_half = (
                Unexplained(word.node, word.offset + 4 * (p - word.position), int(halves[0][p]), int(halves[1][p]), p)
                for p in (low, low + 1)
            )
            found[low] = Suspect(low_half, high_half)
    return list(found.values())


class Patcher:
    """Writes new addresses into the blob of a capture, in place."""

    def __init__(self, blob: np.ndarray, slots: Slots):
        self._words = blob.view(np.uint32)
        self._bases: list[int] = []
        order = np.argsort(slots.allocation, kind="stable")
        # By allocation: positions and offsets of its slots, and its nodes.
        self._own = {
            int(slots.allocation[which[0]]): (
                slots.position[which],
                slots.offset[which].astype(np.uint64),
                np.unique(slots.node[which]).tolist(),
            )
            for which in np.split(order, np.flatnonzero(np.diff(slots.allocation[order])) + 1)
            if len(which)
        }

    def patch(self, bases: list[int]) -> list[int]:
        """Write the addresses of allocations that moved since the last call; return the changed nodes, by index."""
        if bases == self._bases:
            return []
        before = self._bases or [-1] * len(bases)
        self._bases = list(bases)
        nodes: set[int] = set()
        for index, (base, old) in enumerate(zip(bases, before, strict=True)):
            if base != old and index in self._own:
                position, offset, own_nodes = self._own[index]
                values = offset + np.uint64(base)
                self._words[position] = values & np.uint64(0xFFFFFFFF)
                self._words[position + 1] = values >> np.uint64(32)
                nodes.update(own_nodes)
        return sorted(nodes)

    def overwrite(self, words: list[Unexplained], values: list[int]) -> list[int]:
        """Write other values in the place of unexplained words; return the nodes that changed, by index."""
        for word, value in zip(words, values, strict=True):
            self._words[word.position] = value
        return sorted({word.node for word in words})
