"""Two captures compared word by word: the words that are addresses, and the words that nothing explains.

The parameters of all nodes of a capture lie behind one another in a blob. Two captures of the same function over other
memory have blobs of the same layout, and a word of 8 bytes that differs must be an address: it lies in the same
allocation at the same offset in both. No GPU is needed to find that out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Chunk(NamedTuple):
    """A run of parameter bytes in the blob: a parameter of a kernel, or all of a node's.

    node: index of the node. offset: in the node's parameters. start: in the blob, a multiple of 16. size: bytes.
    """

    node: int
    offset: int
    start: int
    size: int


class Slots(NamedTuple):
    """The addresses in a blob: index of the word, index of its allocation, and bytes from there."""

    position: np.ndarray
    allocation: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True)
class Unexplained:
    """A word that differs between the captures, `first` and `second`, and is no address of the region.

    offset: in the node's parameters. position: index of the word in the blob. is_suspect: memory outside of the region
    is known at one of the values.
    """

    node: int
    offset: int
    first: int
    second: int
    position: int
    is_suspect: bool = False

    @property
    def agreed(self) -> int:
        """The value with zero in the place of the bytes that differ: a flag may share its word with unused bytes."""
        differ = self.first ^ self.second
        return sum(self.first & 0xFF << bits for bits in range(0, 64, 8) if not differ >> bits & 0xFF)


def layout(nodes: list[list[tuple[int, bytes]]]) -> tuple[list[Chunk], np.ndarray]:
    """Put the parameters of all nodes, (offset, bytes) each, behind one another; gaps are zero."""
    chunks, parts, start = [], [], 0
    for node, parameters in enumerate(nodes):
        for offset, data in parameters:
            chunks.append(Chunk(node, offset, start, len(data)))
            parts.append(data.ljust(-(-len(data) // 16) * 16, b"\0"))
            start += len(parts[-1])
    return chunks, np.frombuffer(b"".join(parts), np.uint8).copy()


def explain(
    chunks: list[Chunk],
    blobs: tuple[np.ndarray, np.ndarray],
    allocations: Sequence[tuple[int, int, int]],
    is_address: Callable[[int], object],
) -> tuple[Slots, list[Unexplained]]:
    """Find the addresses among the words that differ between two captures.

    An address lies in the same allocation at the same offset in both, one byte past the end included. Half an address,
    or one at no multiple of 8, counts as unexplained: structures have some in their unused bytes.

    Args:
        chunks: layout of both blobs.
        blobs: parameters of the first and the second capture.
        allocations: (base in the first, base in the second, bytes); those of a pool may overlap, used in turn.
        is_address: tells whether memory is known at a value.
    """
    first, second = (blob.view(np.uint64) for blob in blobs)
    differs = np.flatnonzero(first != second)
    allocation, offset = _match(first[differs], second[differs], allocations)
    chunk_of = np.searchsorted([chunk.start for chunk in chunks], differs * 8, side="right") - 1
    unexplained = []
    for index in np.flatnonzero(allocation < 0):
        position, chunk = int(differs[index]), chunks[chunk_of[index]]
        values = int(first[position]), int(second[position])
        offset_in_node = chunk.offset + 8 * position - chunk.start
        unexplained.append(Unexplained(chunk.node, offset_in_node, *values, position, any(map(is_address, values))))
    hit = allocation >= 0
    return Slots(differs[hit], allocation[hit], offset[hit]), unexplained


def _match(first, second, allocations):
    """The allocation (index, -1 for none) and the offset that values of two captures have in common.

    A value inside an allocation goes before one at its end, which may be the next one's base.
    """
    allocation, offsets = np.full(len(first), -1, np.int64), np.zeros(len(first), np.int64)
    for past_end in (0, 1):
        for index, (base, second_base, size) in enumerate(allocations):
            offset = first - np.uint64(base)
            same = (offset == second - np.uint64(second_base)) & (offset < np.uint64(size + past_end))
            same &= allocation < 0
            allocation[same], offsets[same] = index, offset[same].astype(np.int64)
    return allocation, offsets


def place(blob: np.ndarray, slots: Slots, bases: np.ndarray) -> None:
    """Write the addresses of a launch into a blob, in place; `bases` are those of the allocations, int64."""
    blob.view(np.int64)[slots.position] = bases[slots.allocation] + slots.offset
