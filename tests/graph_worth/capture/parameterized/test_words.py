"""graph_worth/capture/parameterized/words: addresses found in made-up parameters, and the words that are none."""

import struct

import numpy as np
import pytest

from graph_worth.capture.parameterized import words

# (base in the first capture, base in the second, bytes): two inputs, and two segments that touch in the first.
X = (0x7F00_0000_0000, 0x7F10_0000_0200, 4096)
Y = (0x7F00_0000_2000, 0x7F10_0000_4000, 512)
SEGMENT = (0x7F20_0000_0000, 0x7F30_0020_0000, 1 << 21)
NEXT = (0x7F20_0020_0000, 0x7F30_0080_0000, 1 << 21)
ALLOCATIONS = [X, Y, SEGMENT, NEXT]
# Memory that belongs to others.
outside = range(0x7D00_0000_0000, 0x7D00_0001_0000)


def find(*nodes):
    """nodes: lists of (bytes in the first capture, bytes in the second), each a parameter."""
    sides = [[[(0x10 * i, pair[side]) for i, pair in enumerate(node)] for node in nodes] for side in (0, 1)]
    chunks, first = words.layout(sides[0])
    _, second = words.layout(sides[1])
    slots, unexplained = words.explain(chunks, (first, second), ALLOCATIONS, outside.__contains__)
    return first, slots, unexplained


def moved(form, allocation, offset, *rest):
    return tuple(struct.pack(form, allocation[side] + offset, *rest) for side in (0, 1))


def test_addresses_are_found_in_inputs_segments_and_structures():
    same = struct.pack("<QI", 0x7E00_0000_0000, 7)
    inner = tuple(struct.pack("<IIQQI", 1, 2, X[s] + 16, SEGMENT[s] + 4096, 3) for s in (0, 1))
    _, slots, unexplained = find([moved("<Q", Y, 0), (same, same)], [inner])
    assert not unexplained
    assert slots.allocation.tolist() == [1, 0, 2]
    assert slots.offset.tolist() == [0, 16, 4096]


def test_half_an_address_and_one_at_no_multiple_of_8_are_unexplained():
    packed = tuple(struct.pack("<I", 5) + data + struct.pack("<I", 6) for data in moved("<Q", SEGMENT, 64))
    half = tuple(struct.pack("<II", 9, (X[side] + 40) & 0xFFFFFFFF) for side in (0, 1))
    _, slots, unexplained = find([packed], [half])
    assert not slots.position.tolist()
    assert [(word.node, word.offset) for word in unexplained] == [(0, 0), (0, 8), (1, 0)]
    assert unexplained[-1].first == ((X[0] + 40) & 0xFFFFFFFF) << 32 | 9


def test_the_end_of_an_allocation_is_its_own_unless_the_next_one_begins_there():
    end = moved("<Q", X, X[2])
    between = tuple(struct.pack("<Q", value) for value in (NEXT[0], NEXT[1]))
    _, slots, unexplained = find([end, between])
    assert not unexplained
    assert list(zip(slots.allocation.tolist(), slots.offset.tolist(), strict=True)) == [(0, 4096), (3, 0)]


@pytest.mark.parametrize(
    "pair",
    [
        (struct.pack("<Q", X[0] + 8), struct.pack("<Q", X[1] + 16)),  # another offset
        (struct.pack("<Q", X[0]), struct.pack("<Q", Y[1])),  # another allocation
        (struct.pack("<f", 1.5), struct.pack("<f", 2.5)),  # a number that changes
        (struct.pack("<Q", X[0] - 64), struct.pack("<Q", X[1] - 64)),  # before the allocation
        (b"\x01\xaa\xbb", b"\x01\xaa\xcc"),  # bytes without a whole word
    ],
)
def test_a_word_that_differs_otherwise_is_unexplained_and_named(pair):
    same = struct.pack("<Q", 1)
    _, slots, unexplained = find([(same, same)], [(same, same), pair])
    assert len(slots.position) == 0
    assert {(word.node, word.offset) for word in unexplained} == {(1, 0x10)}
    assert unexplained[0].first != unexplained[0].second


def test_words_that_may_be_addresses_of_other_memory_are_suspects():
    lower = tuple(struct.pack("<Q", outside[16 * side]) for side in (0, 1))
    first_alone = (struct.pack("<Q", outside[8]), struct.pack("<Q", 3))
    number = tuple(struct.pack("<IQ", 7, side) for side in (0, 1))
    _, _, unexplained = find([lower, number], [first_alone, moved("<Q", X, 8)])
    assert [(word.node, word.offset, word.is_suspect) for word in unexplained] == [
        (0, 0, True), (0, 0x10, False), (1, 0, True),
    ]  # fmt: skip
    assert [word.second for word in unexplained] == [outside[16], 7 | 1 << 32, 3]


def test_the_bytes_that_agree_are_kept():
    assert words.Unexplained(0, 0, 0x00BBAA01_00000002, 0x00BBCC01_00000003, 0).agreed == 0x00BB0001_00000000


def test_tensors_of_a_pool_that_lay_elsewhere_and_overlap_are_told_apart_by_both_addresses():
    # The second allocator put two tensors the other way round, and a third one over the first.
    tensors = [(0x7F20_0000_0000, 0x7F30_0000_0200, 512), (0x7F20_0000_0200, 0x7F30_0000_0000, 512)]
    tensors.append((0x7F20_0000_0000, 0x7F30_0000_0400, 512))
    pairs = [tuple(struct.pack("<Q", tensor[side] + 8) for side in (0, 1)) for tensor in tensors]
    sides = [[[(0, pair[side])] for pair in pairs] for side in (0, 1)]
    chunks, first = words.layout(sides[0])
    _, second = words.layout(sides[1])
    slots, unexplained = words.explain(chunks, (first, second), tensors, outside.__contains__)
    assert not unexplained
    assert slots.allocation.tolist() == [0, 1, 2]
    assert slots.offset.tolist() == [8, 8, 8]


def test_a_launch_writes_what_a_capture_at_those_addresses_would_hold():
    def node(bases):
        return [
            struct.pack("<QQ", bases[0] + 16, bases[2] + 4096),
            struct.pack("<IIQI", 5, 7, bases[2] + 8, 6),
            struct.pack("<Q", bases[1] + 40),
        ]

    captured = [[allocation[side] for allocation in ALLOCATIONS] for side in (0, 1)]
    other = struct.pack("<Q", 11)
    nodes = [list(zip(*map(node, captured), strict=True)), [(other, other)], [moved("<Q", Y, 8)]]
    blob, slots, unexplained = find(*nodes)
    assert not unexplained
    bases = [0x7A00_1234_0000, 0x7B00_FFFF_F000, 0x7C00_0000_0000, 0]
    for moving in (None, 1, 0, 3):
        if moving is not None:
            bases[moving] += 512
        words.place(blob, slots, np.array(bases))
        _, expected = words.layout(
            [[(0, data) for data in node(bases)], [(0, other)], [(0, struct.pack("<Q", bases[1] + 8))]]
        )
        assert blob.tobytes() == expected.tobytes()


def test_all_that_moved_and_nothing_else_is_written():
    count = 30
    allocations = [(0x7F00_0000_0000 + i * 4096, 0x7F10_0100_0000 + i * 8192, 4096) for i in range(count)]

    def blob_at(bases):
        def parameter(node):
            address = bases[node % count] + 16 * node
            return struct.pack("<Q", address) if node % 3 else struct.pack("<IIQI", 7, 8, address, 9)

        return words.layout([[(0, parameter(node)), (32, parameter(node + 7))] for node in range(80)])

    chunks, blob = blob_at([first for first, _, _ in allocations])
    slots, unexplained = words.explain(
        chunks, (blob, blob_at([b for _, b, _ in allocations])[1]), allocations, outside.__contains__
    )
    assert not unexplained
    bases = [0x7A00_0000_0000 + i * 512 for i in range(count)]
    for moved in ([], [3], [0, 4, 9], range(20), [29]):
        bases = [base + 4096 * (index in moved) for index, base in enumerate(bases)]
        words.place(blob, slots, np.array(bases))
        assert blob.tobytes() == blob_at(bases)[1].tobytes()
