"""Words that hold an address otherwise than as it is: shifted, with flags, its upper half, or just outside its tensor.

Each rule asks both captures for the same allocation, the same offset and the same other bits. What it finds is patched
like any address, so the launches that are compared with eager at other addresses prove it.
"""

from collections import defaultdict

import numpy as np

from common.capture.parameterized import words
from common.capture.parameterized.words import Chunk, Slots, Unexplained

_ADDRESS_BITS = 48
# Inputs are aligned to 16 bytes, so the GPU can shift out no more than 4 bits of any address.
_FIELDS = [(right, left) for right in range(5) for left in range(64 - _ADDRESS_BITS + right + 1)]
# Bytes before and behind a tensor where a kernel may begin to count, such as the padding of a convolution.
_MARGIN = 1 << 20


def explain(
    chunks: list[Chunk],
    blobs: tuple[np.ndarray, np.ndarray],
    allocations: list[tuple[int, int, int]],
    slots: Slots,
    unexplained: list[Unexplained],
) -> tuple[Slots, list[Unexplained]]:
    """Find addresses among the words that `words.explain` left.

    Args:
        chunks: layout of both blobs.
        blobs: parameters of the first and the second capture.
        allocations: (base in the first, base in the second, bytes).
        slots: addresses that are known.
        unexplained: words that differ and are none.

    Returns:
        all slots, and the words that nothing explains.
    """
    found = _Found(chunks, blobs, slots, unexplained)
    if unexplained and allocations:
        for right, left in _FIELDS:
            _shifted(found, blobs, allocations, right, left)
        _outside(found, blobs, allocations, slots)
        _upper_halves(found, allocations, slots)
    return found.slots(slots), [word for word in unexplained if word.position in found.left]


class _Found:
    """The codes that were found, and the words that are left: 8-byte candidates by position, and single words."""

    def __init__(self, chunks, blobs, slots, unexplained):
        self.left = {word.position: word for word in unexplained}
        wide = slots.position[slots.width == 8]
        # A lower half that was found by itself gives way to a whole word that holds it.
        self._taken = {*wide.tolist(), *(wide + 1).tolist()}
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        self._candidates = set()
        for word in unexplained:
            for position in (word.position - 1, word.position):
                index = int(np.searchsorted(starts, position * 4, side="right")) - 1
                if index >= 0 and position * 4 + 8 <= chunks[index].start + chunks[index].size:
                    self._candidates.add(position)
        self._rows: list[tuple[int, ...]] = []

    def candidates(self) -> np.ndarray:
        """Positions of 8-byte words that nothing explains, first those that are aligned."""
        own = {position for position in self._candidates if not {position, position + 1} & self._taken}
        return np.array(sorted(own, key=lambda position: (position % 2, position)), np.int64)

    def add(self, position, width, place, code=(0, 0, 0)):
        """Note a slot, unless a word of it was explained meanwhile. place: (allocation, offset)."""
        covered = range(position, position + width // 4)
        if self._taken.intersection(covered):
            return
        node = next(self.left[p].node for p in covered if p in self.left)
        self._rows.append((position, width, *place, node, *code))
        self._taken.update(covered)
        for one in covered:
            self.left.pop(one, None)

    def slots(self, before) -> Slots:
        """The slots before and those that were found."""
        if not self._rows:
            return before
        columns = zip(*self._rows, strict=True)
        names = list(Slots.__dataclass_fields__)
        kept = (before.width == 8) | ~np.isin(before.position, list(self._taken))
        merged = {
            name: np.concatenate([getattr(before, name)[kept], np.array(column, getattr(before, name).dtype)])
            for name, column in zip(names, columns, strict=True)
        }
        order = np.argsort(merged["position"], kind="stable")
        return Slots(**{name: merged[name][order] for name in names})


def _wide(blob, position):
    halves = blob.view(np.uint32).astype(np.uint64)
    return halves[position] | halves[position + 1] << np.uint64(32)


def _shifted(found, blobs, allocations, right, left):
    """Fields of (address >> right) << left among other bits that are the same in both captures."""
    position = found.candidates()
    mask = np.uint64((1 << _ADDRESS_BITS - right) - 1 << left)
    values = [_wide(blob, position) for blob in blobs]
    same = values[0] & ~mask == values[1] & ~mask
    fields = tuple((value & mask) >> np.uint64(left) << np.uint64(right) for value in values)
    low, high = min(base for base, _, _ in allocations), max(base + size for base, _, size in allocations)
    same &= (fields[0] >= np.uint64(low)) & (fields[0] <= np.uint64(high))
    if not same.any():
        return
    allocation, offset = words.match((fields[0][same], fields[1][same]), allocations, bits=64)
    for at, value, index, bytes_ in zip(position[same], values[0][same], allocation, offset, strict=True):
        if index >= 0:
            found.add(int(at), 8, (int(index), int(bytes_)), (right, left, int(value & ~mask)))


def _outside(found, blobs, allocations, slots):
    """Addresses just outside the one tensor of the node that they can belong to."""
    own = defaultdict(set)
    for node, allocation in zip(slots.node.tolist(), slots.allocation.tolist(), strict=True):
        own[node].add(allocation)
    for position in found.candidates().tolist():
        word = found.left.get(position) or found.left[position + 1]
        first, second = (int(_wide(blob, np.array([position]))[0]) for blob in blobs)
        near = {
            allocations[index][:2]: index
            for index in own[word.node]
            for base, other, size in (allocations[index],)
            if first - base == second - other and -_MARGIN <= first - base <= size + _MARGIN
        }
        if len(near) == 1:
            ((bases, index),) = near.items()
            found.add(position, 8, (index, first - bases[0]))


def _upper_halves(found, allocations, slots):
    """Upper halves of addresses whose lower half stands elsewhere in the node, next to it or alone of its tensor."""
    lower = defaultdict(list)
    for index in np.flatnonzero(slots.width == 4).tolist():
        place = int(slots.allocation[index]), int(slots.offset[index])
        lower[int(slots.node[index])].append((int(slots.position[index]), *place))
    for position, word in list(found.left.items()):
        fitting = [
            (at, allocation, offset)
            for at, allocation, offset in lower[word.node]
            for base, other, _ in (allocations[allocation],)
            if (base + offset >> 32, other + offset >> 32) == (word.first, word.second)
        ]
        beside = [one for one in fitting if abs(one[0] - position) == 1]
        places = {one[1:] for one in beside or fitting}
        if len({allocation for allocation, _ in places}) == 1:
            found.add(position, 4, min(places), (32, 0, 0))
