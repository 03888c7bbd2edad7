"""graph_worth/capture/parameterized/arenas: where each tensor of a pool goes in a launch."""

import math
import random

from graph_worth.capture.parameterized.arenas import Block, plan, read

A, B = 0x7F00_0000_0000, 0x7F80_0000_0000
KEPT = math.inf


def made(results, *tensors):
    """The plan for tensors (offset in the first pool, in the second, bytes, made, freed) and perhaps another stream."""
    blocks = [Block(A + first, size, *life, *([7] if len(life) == 2 else [])) for first, _, size, *life in tensors]
    return plan(blocks, [B + second for _, second, *_ in tensors], results)


def event(action, address, size=512, stream=7):
    return {"action": action, "addr": address, "size": size, "stream": stream}


def test_a_trace_tells_when_each_tensor_was_made_and_freed():
    events = [
        event("segment_alloc", A, 1 << 21),
        {"action": "oom", "size": 1 << 40, "device_free": 0, "stream": 7},
        event("alloc", A, 100),
        event("free_requested", A, 100),
        event("free_completed", A, 100),
        event("alloc", A, 30, stream=9),
        event("free_completed", B),
        event("alloc", A + 512),
    ]
    assert read(events) == [Block(A, 100, 2, 4, 7), Block(A, 30, 5, KEPT, 9), Block(A + 512, 512, 7, KEPT, 7)]


def test_a_result_gets_an_arena_of_its_own_and_the_rest_shares_one():
    plan = made({1}, (0, 0, 1024, 0, 9), (1024, 2048, 500, 1, KEPT), (1536, 4096, 512, 2, 9), (4096, 8192, 512, 3, 9))
    assert plan.sizes == [500, 2048]
    assert plan.places == [(1, 0), (0, 0), (1, 1024), (1, 1536)]
    assert (plan.results, plan.copies) == ({1: 0}, [])


def test_tensors_share_bytes_where_one_was_freed_before_the_other_was_made_on_its_stream():
    far = 1 << 30
    in_turn = (0, 0, 1000, 0, 1), (far, far + 512, 600, 1, 2)
    assert made(set(), *in_turn).places == [(0, 0), (0, 0)] and made(set(), *in_turn).sizes == [1024]
    together = (0, 0, 1000, 0, 2), (far, far + 512, 600, 1, 2)
    assert made(set(), *together).places == [(0, 0), (0, 1024)] and made(set(), *together).sizes == [2048]
    on_two_streams = (0, 0, 1000, 0, 1, 7), (far, far + 512, 600, 1, 2, 9)
    assert made(set(), *on_two_streams).places == [(0, 0), (0, 1024)]


def test_a_hole_is_filled_by_what_fits():
    # A large one for all the time, two in turn beside it, a small one beside the second.
    tensors = [(0, 0, 4096, 0, 9), (1 << 20, 1 << 21, 2048, 1, 2), (1 << 22, 1 << 23, 512, 3, 9), (8, 9, 1024, 3, 4)]
    assert made(set(), *tensors).places == [(0, 0), (0, 4096), (0, 4096 + 1024), (0, 4096)]
    assert made(set(), *tensors).sizes == [4096 + 2048]


def test_a_result_in_bytes_of_an_earlier_tensor_leaves_those_where_the_second_capture_had_it_elsewhere():
    plan = made({1}, (0, 0, 4096, 0, 1), (512, 8192, 512, 2, KEPT))
    assert (plan.sizes, plan.places) == ([512, 4096], [(1, 0), (0, 0)])


def test_a_result_that_cannot_be_told_from_an_earlier_tensor_is_copied_out_of_its_bytes():
    plan = made({2}, (0, 0, 4096, 0, 1), (512, 512, 500, 2, 3), (512, 512, 500, 4, KEPT))
    assert plan.sizes == [4096, 500]
    assert plan.places == [(0, 0), (0, 512), (0, 512)]
    assert (plan.results, plan.copies) == ({2: 1}, [(1, 0, 512)])


def test_a_chain_of_tensors_that_cannot_be_told_apart_keeps_its_distances():
    """The first and the last have no byte in common, each has some of the one between."""
    plan = made(set(), (0, 0, 1024, 0, 1), (512, 512, 1024, 2, 3), (1024, 1024, 1024, 4, 5), (9999, 0, 512, 6, 7))
    assert plan.places == [(0, 0), (0, 512), (0, 1024), (0, 0)] and plan.sizes == [2048]


def test_others_have_the_bytes_of_tensors_that_cannot_be_told_apart_while_none_of_them_is_alive():
    plan = made(set(), (0, 0, 1024, 0, 1), (0, 0, 1024, 4, 5), (1 << 20, 0, 512, 2, 3), (1 << 21, 0, 512, 2, 5))
    assert plan.places == [(0, 0), (0, 0), (0, 0), (0, 1024)] and plan.sizes == [1536]


def allocated(draw):
    """Blocks as an allocator makes them, their addresses in a second capture, and the results among them.

    Many have the same distance in both captures, so that some cannot be told from those whose bytes they have.
    """
    blocks, others, alive = [], [], []
    for index in range(draw.randrange(1, 25)):
        if alive and draw.random() < 0.5:
            gone = alive.pop(draw.randrange(len(alive)))
            blocks[gone] = blocks[gone]._replace(freed=2 * index)
        size, stream, address = draw.randrange(1, 4000), draw.choice([7, 7, 9]), A
        wanted = Block(0, size, 2 * index + 1, KEPT, stream)
        while any(
            wanted.is_beside(block) and address < block.address + block.size and block.address < address + size
            for block in blocks
        ):
            address += 512
        blocks.append(wanted._replace(address=address))
        others.append(address + B - A if draw.random() < 0.7 else (1 << 50) + (index << 20))
        alive.append(index)
    return blocks, others, {index for index in alive if draw.random() < 0.4}


def overlap(one, first, other, second):
    return first < second + other.size and second < first + one.size


def test_no_two_tensors_that_are_alive_together_ever_share_a_byte():
    draw, num_alike = random.Random(1), 0
    for _ in range(300):
        blocks, others, results = allocated(draw)
        made = plan(blocks, others, results)
        assert made.results.keys() == results
        for one, block in enumerate(blocks):
            arena, start = made.places[one]
            assert start % 512 == 0 and start + block.size <= made.sizes[arena]
            for other, (where, begin) in enumerate(made.places[:one]):
                before = blocks[other]
                if arena == where and block.is_beside(before):
                    assert not overlap(block, start, before, begin)
                alike = block.address - others[one] == before.address - others[other]
                if alike and overlap(block, block.address, before, before.address):
                    num_alike += 1
                    assert (arena, start - begin) == (where, block.address - before.address)
    assert num_alike > 100
