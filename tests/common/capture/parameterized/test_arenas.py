"""common/capture/parameterized/arenas: where each tensor of a pool goes in a launch."""

from common.capture.parameterized.arenas import Block, merge, plan

A, B = 0x7F00_0000_0000, 0x7F80_0000_0000


def blocks(*ranges):
    """(offset in the first pool, offset in the second, bytes) of each."""
    return [Block(A + first, B + second, size) for first, second, size in ranges]


def test_ranges_that_overlap_are_one_part_and_those_that_touch_are_two():
    assert merge([(1024, 512), (0, 1024), (512, 100)]) == [(0, 1024), (1024, 1536)]
    assert merge([(0, 513), (1024, 1), (1536, 0)]) == [(0, 1024), (1024, 1536), (1536, 2048)]


def test_a_result_gets_an_arena_of_its_own_and_the_rest_of_a_segment_shares_one():
    made = plan([(A, 1 << 21)], blocks((0, 0, 1024), (1024, 1024, 500), (1536, 1536, 512), (4096, 4096, 512)), {1})
    assert made.sizes == [500, 2048]
    assert made.places == [(1, 0), (0, 0), (1, 1024), (1, 1536)]
    assert (made.results, made.copies) == ({1: 0}, [])


def test_a_result_in_bytes_of_an_earlier_tensor_leaves_those_where_the_second_capture_had_it_elsewhere():
    made = plan([(A, 1 << 21)], blocks((0, 0, 4096), (512, 8192, 512)), {1})
    assert (made.sizes, made.places) == ([512, 4096], [(1, 0), (0, 0)])


def test_a_result_that_cannot_be_told_from_an_earlier_tensor_is_copied_out_of_its_bytes():
    made = plan([(A, 1 << 21)], blocks((0, 0, 4096), (512, 512, 500), (512, 512, 500)), {2})
    assert made.sizes == [4096, 500]
    assert made.places == [(0, 0), (0, 512), (0, 512)]
    assert (made.results, made.copies) == ({2: 1}, [(1, 0, 512)])


def test_tensors_in_turn_share_bytes_and_segments_have_arenas_of_their_own():
    far = 1 << 30
    made = plan([(A + far, 1 << 21), (A, 1 << 21)], blocks((512, 512, 512), (far, far, 512), (512, 512, 100)), set())
    assert made.places == [(1, 0), (0, 0), (1, 0)]
    assert made.sizes == [512, 512]
