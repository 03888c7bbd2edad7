"""Two captures compared word by word: the words that are addresses, and the words that nothing explains.

The parameters of all nodes of a capture lie behind one another in a blob. Two captures of the same function over other
memory have blobs of the same layout, and a word that differs must be an address: it lies in the same allocation at the
same offset in both. No GPU is needed to find that out.
"""

import itertools
import operator
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 16
# Allocations that are patched one by one; for more, one pass over all slots costs less.
_FEW = 8


@dataclass(frozen=True)
class Chunk:
    """A run of parameter bytes in the blob: a parameter of a kernel, or all of a node's.

    node: index of the node. offset: in the node's parameters. start: in the blob, a multiple of 16. size: bytes.
    """

    node: int
    offset: int
    start: int
    size: int


@dataclass(frozen=True)
class Slots:
    """The addresses in a blob, by 4-byte position, and what belongs there.

    Attributes:
        position: index into the blob as 4-byte words.
        width: 8 for an address, 4 for its lower half (the rest of a copied structure).
        allocation: index of the allocation.
        offset: bytes from the allocation's base.
        node: index of the node.
    """

    position: np.ndarray
    width: np.ndarray
    allocation: np.ndarray
    offset: np.ndarray
    node: np.ndarray

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True)
class Unexplained:
    """A 4-byte word that differs between the captures and is no address.

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


def _wide_positions(differs) -> np.ndarray:
    """4-byte positions at which an 8-byte word begins that differs."""
    either = differs.copy()
    either[:-1] |= differs[1:]
    either[-1:] = False
    return np.flatnonzero(either)


def _wide(blob, position) -> np.ndarray:
    halves = blob.view(np.uint32).astype(np.uint64)
    return halves[position] | halves[position + 1] << np.uint64(32)


def explain(
    chunks: list[Chunk], blobs: tuple[np.ndarray, np.ndarray], allocations: list[tuple[int, int, int]]
) -> tuple[Slots, list[Unexplained]]:
    """Find the addresses among the words that differ between two captures.

    An address is an 8-byte word in the same allocation at the same offset in both, one byte past the end included;
    then the lower half of one, which a structure's unused bytes may hold.

    Args:
        chunks: layout of both blobs.
        blobs: parameters of the first and the second capture.
        allocations: (base in the first, base in the second, bytes); those of a pool may overlap, used in turn.

    Returns:
        the slots, and the words that nothing explains.
    """
    first, second = (blob.view(np.uint32) for blob in blobs)
    rest = first != second
    # End of the chunk of each 4-byte position, and its node; -1 in gaps.
    end, owner = np.zeros(len(first), np.int64), np.full(len(first), -1, np.int64)
    for index, chunk in enumerate(chunks):
        words = slice(chunk.start // 4, -(-(chunk.start + chunk.size) // 4))
        end[words], owner[words] = chunk.start + chunk.size, index
    found: list[tuple[np.ndarray, int, np.ndarray, np.ndarray]] = []
    taken = np.zeros(len(first) + 1, bool)
    for parity in (0, 1):
        position = _wide_positions(rest)
        position = position[(position % 2 == parity) & (position * 4 + 8 <= end[position])]
        position = position[~(taken[position] | taken[position + 1])]
        values = _wide(blobs[0], position), _wide(blobs[1], position)
        allocation, offset = match(values, allocations, bits=64)
        hit = allocation >= 0
        found.append((position[hit], 8, allocation[hit], offset[hit]))
        rest[position[hit]] = rest[position[hit] + 1] = False
        taken[position[hit]] = taken[position[hit] + 1] = True
    position = np.flatnonzero(rest)
    position = position[position * 4 + 4 <= end[position]]
    values = first[position].astype(np.uint64), second[position].astype(np.uint64)
    allocation, offset = match(values, allocations, bits=32)
    hit = allocation >= 0
    found.append((position[hit], 4, allocation[hit], offset[hit]))
    rest[position[hit]] = False
    slots = _slots(found, chunks, owner)
    return slots, [
        Unexplained(chunk.node, chunk.offset + int(p) * 4 - chunk.start, int(first[p]), int(second[p]), int(p))
        for p in np.flatnonzero(rest)
        for chunk in (chunks[owner[p]],)
    ]


def suspects(
    unexplained: list[Unexplained], blobs: tuple[np.ndarray, np.ndarray], slots: Slots, is_address
) -> tuple[list[Suspect], list[Unexplained]]:
    """Find the unexplained words that look like addresses, in either capture.

    Args:
        unexplained: of `explain`, as `slots`.
        blobs: parameters of the first and the second capture.
        slots: the addresses.
        is_address: is_address(value), whether memory is known at an 8-byte value.

    Returns:
        the suspects, and words of `unexplained` that are a half of one and share the other with a slot: nothing can be
        written there without changing that address.
    """
    taken = {*slots.position.tolist(), *(slots.position[slots.width == 8] + 1).tolist()}
    halves = tuple(blob.view(np.uint32) for blob in blobs)
    found: dict[int, Suspect] = {}
    tied: list[Unexplained] = []
    for word in unexplained:
        low = word.position & ~1
        if low in found or not any(is_address(int(blob.view(np.uint64)[low // 2])) for blob in blobs):
            continue
        if low in taken or low + 1 in taken:
            tied.append(word)
            continue
        low_half, high_half = (
            Unexplained(word.node, word.offset + 4 * (p - word.position), int(halves[0][p]), int(halves[1][p]), p)
            for p in (low, low + 1)
        )
        found[low] = Suspect(low_half, high_half)
    return list(found.values()), tied


def _slots(found, chunks, owner) -> Slots:
    position = np.concatenate([places for places, *_ in found])
    order = np.argsort(position, kind="stable")
    nodes = np.array([chunk.node for chunk in chunks], np.int64)
    return Slots(
        position[order],
        np.concatenate([np.full(len(places), width) for places, width, *_ in found])[order],
        np.concatenate([allocation for *_, allocation, _ in found])[order],
        np.concatenate([offset for *_, offset in found])[order],
        nodes[owner[position[order]]] if len(position) else np.zeros(0, np.int64),
    )


def match(
    values: tuple[np.ndarray, np.ndarray], allocations: list[tuple[int, int, int]], bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the allocation (index, -1 for none) and the offset that each pair of values has in common.

    A value inside an allocation goes before one at its end, which may be the next one's base.

    Args:
        values: in the first and in the second capture, uint64.
        allocations: (base in the first, base in the second, bytes).
        bits: lower bits of an address that the values hold.
    """
    mask = np.uint64(2**bits - 1)
    allocation = np.full(len(values[0]), -1, np.int64)
    offsets = np.zeros(len(values[0]), np.int64)
    for past_end in (0, 1):
        for index, (base_a, base_b, size) in enumerate(allocations):
            offset = (values[0] - np.uint64(base_a)) & mask
            same = (offset == (values[1] - np.uint64(base_b)) & mask) & (offset < np.uint64(size + past_end))
            same &= allocation < 0
            allocation[same], offsets[same] = index, offset[same].astype(np.int64)
    return allocation, offsets


class Patcher:
    """Writes new addresses into the blob of a capture, in place. num_allocations: length of the lists of bases."""

    def __init__(self, blob: np.ndarray, slots: Slots, num_allocations: int):
        self._words = blob.view(np.uint32)
        self._long = blob.view(np.uint64)
        self._slots = slots
        self._num_allocations = num_allocations
        self._offset = slots.offset.astype(np.uint64)
        self._whole = (slots.width == 8) & (slots.position % 2 == 0)
        self._others = np.flatnonzero(~self._whole)
        self._long_position = slots.position // 2
        self._bases: list[int] = []
        self._num_nodes = int(slots.node.max()) + 1 if len(slots) else 0
        order = np.argsort(slots.allocation, kind="stable")
        ends = np.flatnonzero(np.diff(slots.allocation[order])) + 1
        # By allocation: its slots that are whole words of the blob, with their offsets; its other slots; its nodes.
        self._own = {
            int(slots.allocation[which[0]]): (
                self._long_position[which[self._whole[which]]],
                self._offset[which[self._whole[which]]],
                which[~self._whole[which]],
                np.unique(slots.node[which]).tolist(),
            )
            for which in np.split(order, ends)
            if len(which)
        }

    def patch(self, bases: list[int]) -> list[int]:
        """Write the addresses of allocations that moved since the last call; return the changed nodes, by index."""
        if bases == self._bases:
            return []
        before: list[int] | list[None] = self._bases or [None] * len(bases)
        moved = list(itertools.compress(range(len(bases)), map(operator.ne, bases, before)))
        self._bases = list(bases)
        if len(moved) > _FEW:
            return self._write_many(moved)
        nodes: set[int] = set()
        for index in moved:
            if index in self._own:
                position, offset, others, own_nodes = self._own[index]
                self._long[position] = offset + np.uint64(bases[index])
                if len(others):
                    self._write_others(others, self._offset[others] + np.uint64(bases[index]))
                nodes.update(own_nodes)
        return sorted(nodes)

    def _write_many(self, moved):
        """All slots at once: one by one, a few hundred allocations would cost more."""
        slots, has_moved = self._slots, np.zeros(self._num_allocations, bool)
        has_moved[moved] = True
        which = has_moved[slots.allocation]
        values = np.array(self._bases, np.uint64)[slots.allocation] + self._offset
        whole = which & self._whole
        self._long[self._long_position[whole]] = values[whole]
        others = self._others[which[self._others]]
        if len(others):
            self._write_others(others, values[others])
        return np.flatnonzero(np.bincount(slots.node[which], minlength=self._num_nodes)).tolist()

    def _write_others(self, which, values):
        """Halves of addresses, and those that are no whole word of the blob."""
        position, wide = self._slots.position[which], self._slots.width[which] == 8
        self._words[position] = (values & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        self._words[position[wide] + 1] = (values[wide] >> np.uint64(32)).astype(np.uint32)

    def overwrite(self, words: list[Unexplained], values: list[int]) -> list[int]:
        """Write other values in the place of unexplained words; return the nodes that changed, by index."""
        for word, value in zip(words, values, strict=True):
            self._words[word.position] = value
        return sorted({word.node for word in words})

    def forget(self) -> None:
        """Write all addresses at the next call, after an error."""
        self._bases = []
