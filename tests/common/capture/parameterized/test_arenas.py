"""common/capture/parameterized/arenas: the parts of a pool's segments, and where each goes in a launch."""

from common.capture.parameterized.arenas import merge, plan

A = 0x7F00_0000_0000


def test_ranges_that_overlap_are_one_part_and_those_that_touch_are_two():
    assert merge([(1024, 512), (0, 1024), (512, 100)]) == [(0, 1024), (1024, 1536)]
    assert merge([(0, 513), (1024, 1), (1536, 0)]) == [(0, 1024), (1024, 1536), (1536, 2048)]


def test_a_result_gets_an_arena_of_its_own_and_the_rest_of_a_segment_shares_one():
    blocks = [(A, 1024), (A + 1024, 512), (A + 1536, 512), (A + 4096, 512)]
    made = plan([(A, 1 << 21)], blocks, [A + 1024 + 16])
    assert made.parts == [(A, A + 1024), (A + 1024, A + 1536), (A + 1536, A + 2048), (A + 4096, A + 4608)]
    assert made.sizes == [512, 2048]
    assert made.arena == [1, 0, 1, 1]
    assert made.offset == [0, 0, 1024, 1536]
    assert [made.place(A + address) for address in (8, 1032, 2047, 4096)] == [(1, 8), (0, 8), (1, 1535), (1, 1536)]


def test_a_result_in_bytes_that_an_earlier_tensor_spanned_takes_those_along():
    made = plan([(A, 1 << 21)], [(A, 4096), (A + 512, 512)], [A + 512])
    assert made.parts == [(A, A + 4096)]
    assert (made.arena, made.offset, made.sizes) == ([0], [0], [4096])


def test_segments_have_arenas_of_their_own_and_blocks_elsewhere_are_left_out():
    segments = [(A + (1 << 30), 1 << 21), (A, 1 << 21)]
    blocks = [(A + 512, 512), (A + (1 << 30), 512), (0x1000, 512)]
    made = plan(segments, blocks, [])
    assert made.parts == [(A + 512, A + 1024), (A + (1 << 30), A + (1 << 30) + 512)]
    assert (made.arena, made.offset, made.sizes) == ([0, 1], [0, 0], [512, 512])
