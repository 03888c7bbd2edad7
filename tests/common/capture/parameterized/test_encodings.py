"""common/capture/parameterized/encodings: addresses in made-up parameters, shifted, split or off their tensor."""

import struct

import pytest

from common.capture.parameterized import encodings, words

# Two tensors of a segment that moved as one, and an input that moved otherwise, into other 4 GiB.
A = (0x7F01_FFFF_0000, 0x7F13_0001_2000, 0x4000)
B = (0x7F01_FFFF_4000, 0x7F13_0001_6000, 0x4000)
FAR = (0x7F20_8000_0000, 0x7F35_4000_0200, 1 << 20)
ALLOCATIONS = [A, B, FAR]


def find(parameter, nodes=1):
    """parameter(bases) -> bytes of a node; slots and unexplained words of two captures, and the first one's blob."""
    chunks, first = words.layout([[(0, parameter([base[0] for base in ALLOCATIONS]))]] * nodes)
    _, second = words.layout([[(0, parameter([base[1] for base in ALLOCATIONS]))]] * nodes)
    blobs = (first, second)
    return *encodings.explain(chunks, blobs, ALLOCATIONS, *words.explain(chunks, blobs, ALLOCATIONS)), first


FORMS = {
    "shifted right by four": lambda a, b, far: struct.pack("<Q", far + 0x120 >> 4),
    "in units of floats": lambda a, b, far: struct.pack("<IIQ", 1, 2, a + 8 >> 2),
    "flags above": lambda a, b, far: struct.pack("<Q", far + 16 | 0xB4 << 56),
    "between flags": lambda a, b, far: struct.pack("<Q", 0x5 << 60 | (b + 32) << 12 | 0x7FF),
    "44 bits in a descriptor": lambda a, b, far: struct.pack("<IQI", 9, (far >> 4) << 20 | 0xABCDE, 8),
    "at a byte between words": lambda a, b, far: b"\x07\x01" + struct.pack("<Q", a + 24) + b"\x03" * 6,
    "upper half first": lambda a, b, far: struct.pack("<III", a + 64 >> 32, a + 64 & 0xFFFFFFFF, 5),
    "halves apart": lambda a, b, far: struct.pack("<IIII", b & 0xFFFFFFFF, 7, 7, b >> 32),
    "before its tensor": lambda a, b, far: struct.pack("<QQ", far, far - 0x1480),
    "behind its tensor": lambda a, b, far: struct.pack("<QQ", far + 8, far + (1 << 20) + 0x800),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_address_in_a_code_is_found_and_patched_as_a_capture_there_would_hold_it(form):
    slots, unexplained, blob = find(lambda bases: form(*bases), nodes=3)
    assert not unexplained and set(slots.node.tolist()) == {0, 1, 2}
    covered = [p + i for p, width in zip(slots.position, slots.width, strict=True) for i in range(width // 4)]
    assert len(covered) == len(set(covered))
    patcher = words.Patcher(blob, slots, len(ALLOCATIONS))
    for bases in (
        [0x7A00_1234_0000, 0x7B01_0000_8000, 0x7C55_FFFF_F000],
        [0x7A02_0000_0200, 0x10_0000_0000, 0x7C55_0000_0010],
    ):
        assert patcher.patch(bases) == [0, 1, 2]
        assert blob.tobytes() == words.layout([[(0, form(*bases))]] * 3)[1].tobytes()


UNKNOWN = {
    "other flags": lambda a, b, far: struct.pack("<Q", far | (1 if far == FAR[0] else 2) << 56),
    "another offset": lambda a, b, far: struct.pack("<Q", far + 16 * (far == FAR[0]) >> 4),
    "more bits shifted out than inputs are aligned to": lambda a, b, far: struct.pack("<Q", far >> 8),
    "off a tensor that the node does not address": lambda a, b, far: struct.pack("<QQ", a, far - 64),
    "off one of two tensors that moved as one": lambda a, b, far: struct.pack("<QQQ", a, b, a - 64),
    "too far away": lambda a, b, far: struct.pack("<QQ", far, far - (1 << 21)),
    "an upper half without a lower one": lambda a, b, far: struct.pack("<II", 3, far >> 32),
    "an upper half of one of two": lambda a, b, far: struct.pack(
        "<IIIIII", a & 2**32 - 1, 0, b & 2**32 - 1, 0, 0, a >> 32
    ),
    "a number": lambda a, b, far: struct.pack("<Q", far * 0x9E3779B97F4A7C15 & 2**64 - 1),
}


@pytest.mark.parametrize("form", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_no_address_for_sure_stays_unexplained(form):
    _, unexplained, _ = find(lambda bases: form(*bases))
    assert unexplained


def test_addresses_that_were_known_stay_as_they_are():
    both = find(lambda bases: struct.pack("<QQQ", bases[0] + 16, bases[2] >> 4, bases[1]))
    slots, unexplained, _ = both
    assert not unexplained
    assert slots.position.tolist() == [0, 2, 4]
    assert slots.right.tolist() == [0, 4, 0]
    assert slots.allocation.tolist() == [0, 2, 1]
    assert slots.offset.tolist() == [16, 0, 0]
