"""Two captures compared word by word: the words that are addresses, and the words that nothing explains.

The parameters of all nodes of a capture lie behind one another in a blob. Two captures of the same function over other
memory have blobs of the same layout, and a word that differs must be an address: it lies in the same allocation at the
same offset in both. No GPU is needed to find that out.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
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
        position: index into the blob as 8-byte words.
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
    """An 8-byte word that differs between the captures and is no address of the region.

    Attributes:
        node: index of the node.
        offset: offset in the node's parameters.
        first: value in the first capture.
        second: value in the second.
        position: index into the blob as 8-byte words.
        is_suspect: memory outside of the region is known at one of the values.
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
    chunks: list[Chunk],
    blobs: tuple[np.ndarray, np.ndarray],
    allocations: Sequence[tuple[int, int, int]],
    is_address: Callable[[int], bool],
) -> tuple[Slots, list[Unexplained]]:
    """Find the addresses among the words that differ between two captures.

    An address is an 8-byte word in the same allocation at the same offset in both, one byte past the end included.
    Half an address, or one at no multiple of 8, counts as unexplained: structures have some in their unused bytes.

    Args:
        chunks: layout of both blobs.
        blobs: parameters of the first and the second capture.
        allocations: (base in the first, base in the second, bytes); those of a pool may overlap, used in turn.
        is_address: returns whether memory is known at an 8-byte value.

    Returns:
        the slots, and the words that nothing explains.
    """
    wide = [blob.view(np.uint64) for blob in blobs]
    differs = np.flatnonzero(wide[0] != wide[1])
    allocation, offset = match([words[differs] for words in wide], allocations)
    owner = np.searchsorted([chunk.start for chunk in chunks], differs * 8, side="right") - 1
    node = np.array([chunks[index].node for index in owner], np.int64)
    hit = allocation >= 0
    unexplained = [
        Unexplained(chunk.node, chunk.offset + 8 * p - chunk.start, *pair, p, any(map(is_address, pair)))
        for p, chunk in zip(differs[~hit].tolist(), [chunks[index] for index in owner[~hit]], strict=True)
        for pair in ([int(words[p]) for words in wide],)
    ]
    return Slots(differs[hit], allocation[hit], offset[hit], node[hit]), unexplained


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


class Patcher:
    """Writes new addresses into the blob of a capture, in place."""

    def __init__(self, blob: np.ndarray, slots: Slots):
        self._words = memoryview(blob).cast("Q")
        self._bases: list[int] = []
        # By allocation: position and offset of its slots, and its nodes. Most have few; an array of NumPy costs more.
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._nodes: dict[int, set[int]] = defaultdict(set)
        for position, allocation, offset, node in zip(*(column.tolist() for column in slots), strict=True):
            self._places[allocation].append((position, offset))
            self._nodes[allocation].add(node)

    def patch(self, bases: list[int]) -> list[int]:
        """Write the addresses of allocations that moved since the last call; return the changed nodes, by index."""
        if bases == self._bases:
            return []
        before = self._bases or [-1] * len(bases)
        self._bases = list(bases)
        nodes: set[int] = set()
        for index, (base, old) in enumerate(zip(bases, before, strict=True)):
            if base != old and index in self._nodes:
                for position, offset in self._places[index]:
                    self._words[position] = base + offset
                nodes |= self._nodes[index]
        return sorted(nodes)

    def overwrite(self, words: list[Unexplained], values: list[int]) -> list[int]:
        """Write other values in the place of unexplained words; return the nodes that changed, by index."""
        for word, value in zip(words, values, strict=True):
            self._words[word.position] = value
        return sorted({word.node for word in words})
