"""graph_worth/measuring/course: what must change a hash, what must not, and the steps that a course looks at."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from graph_worth.measuring import course as courses
from graph_worth.measuring import tensor_hash as tensor_hashes
from graph_worth.measuring.course import Course
from graph_worth.measuring.tensor_hash import tensor_hash

DTYPES = [
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
]
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make(dtype, count=37):
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    values = torch.randn(count, generator=generator) * 20
    return values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)


def value(tensor):
    return int(tensor_hash(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype):
    tensor = make(dtype)
    result = tensor_hash(tensor)
    assert result.shape == () and result.dtype == torch.int64
    bits = tensor.view(UNSIGNED[tensor.element_size()])
    seen = {value(tensor.clone())}
    width = 1 if dtype is torch.bool else 8 * tensor.element_size()
    for place in (0, 1, 17, 36):
        for bit in range(width):
            changed = bits.clone()
            mask = 1 << bit
            changed[place] ^= mask - (1 << width) if bit == width - 1 and dtype.itemsize > 1 else mask
            seen.add(value(changed.view(dtype)))
    assert len(seen) == 1 + 4 * width, "two different states have the same hash"


def test_signs_of_zero_lengths_and_high_bits_count():
    """The bits of x and -x differ by a large power of two, which a sum that wraps can lose."""
    assert value(torch.zeros(3)) != value(-torch.zeros(3))
    assert len({value(torch.zeros(count)) for count in range(1, 20)}) == 19
    ones = torch.ones(8193)
    for place in (1, 2, 64, 4096, 8192):
        first, second = ones.clone(), ones.clone()
        first[0], second[place] = -1.0, -1.0
        assert value(first) != value(second)


def test_equal_nans_are_equal_and_payloads_are_not():
    nan = torch.tensor([float("nan"), 1.0])
    other = nan.view(torch.int32).clone()
    other[0] += 1
    assert value(nan) == value(nan.clone())
    assert value(nan) != value(other.view(torch.float32))


@pytest.mark.parametrize("chunk", [1, 7, 36, 37])
def test_chunks_do_not_show(monkeypatch, chunk):
    tensor = make(torch.float32)
    whole = value(tensor.clone())
    monkeypatch.setattr(tensor_hashes, "CHUNK", chunk)
    assert value(tensor.clone()) == whole
    # Nor does it show which weights were kept.
    monkeypatch.setattr(tensor_hashes, "NUM_KEPT_WEIGHTS", 18)
    assert value(tensor.clone()) == whole


def test_the_shape_and_the_strides_do_not_count_but_the_order_does():
    tensor = make(torch.float32, 24).view(4, 6)
    assert value(tensor) == value(tensor.flatten()) == value(tensor.t().contiguous().t())
    assert value(tensor.t()) == value(tensor.t().contiguous()) != value(tensor)
    assert value(tensor[:, ::2]) == value(tensor[:, ::2].clone())
    assert value(tensor[1:3]) == value(tensor[1:3].clone()), "a storage offset must not count"
    assert value(tensor[0, 0]) == value(tensor[0, :1])
    assert value(torch.empty(0)) == 0


def test_a_hash_is_computed_without_a_host_read():
    from graph_worth.capture.host_graph import HostPool

    tensor = torch.ones(5)
    graph, result = HostPool().capture(lambda: tensor_hash(tensor))
    tensor.mul_(2)
    graph.replay()
    assert int(result) == value(torch.full((5,), 2.0))


def course_of(*named, **looks):
    """The course of a training with these (name, tensor)."""
    return Course(SimpleNamespace(named_state=lambda: named), **looks)


def trajectory(order=range(5), nudge=None):
    """The course after the steps of `order`; `nudge` changes one bit of a step."""
    weight, moment = torch.ones(4, 3, dtype=torch.bfloat16), torch.zeros(300)
    course = course_of(("weight", weight), ("moment", moment), hashed=order)
    for step in order:
        weight.view(torch.int16).add_(step + 1)
        moment.add_(step + 1)
        if step == nudge:
            moment.view(torch.int32)[299] ^= 1 << 10
        course.look(step)
    return course


def test_hashes_of_each_step_and_tensor():
    course = trajectory()
    hashes = course.hashes()
    assert hashes.shape == (5, 2) and hashes.dtype == torch.int64
    assert len(set(hashes.flatten().tolist())) == 10
    assert torch.equal(hashes, trajectory().hashes())
    assert int(hashes[-1, 1]) == value(torch.full((300,), 15.0))


def test_digests_are_of_each_step():
    digests = trajectory().digests()
    assert len(digests) == len(set(digests)) == 5 and all(len(each) == 16 and int(each, 16) >= 0 for each in digests)
    assert digests == trajectory().digests() and digests[:4] == trajectory(range(4)).digests()
    nudged = trajectory(nudge=2).digests()
    assert [ours != theirs for ours, theirs in zip(digests, nudged, strict=True)] == [False, False, True, True, True]


def test_a_digest_is_of_all_ranks(monkeypatch):
    course, other = trajectory(), trajectory(nudge=3)
    rows = [numpy.array(row, "int64").tobytes() for row in other.hashes().tolist()]
    monkeypatch.setattr(courses, "of_all_ranks", lambda own: [own, rows])
    mixed = course.digests()
    monkeypatch.setattr(courses, "of_all_ranks", lambda own: [own, own])
    alike = course.digests()
    assert [a != b for a, b in zip(mixed, alike, strict=True)] == [False, False, False, True, True]


def test_tensors_that_never_move_are_named():
    weight, frozen, back = torch.ones(3), torch.ones(3), torch.zeros(3)
    course = course_of(("weight", weight), ("frozen", frozen), ("back", back), hashed=range(3))
    for step in range(3):
        weight.add_(1)
        back.fill_(step % 2)
        course.look(step)
    assert course.unmoved() == ["frozen"]


class Counting:
    """A training whose weight counts the steps since the reset."""

    def __init__(self):
        self.weight = torch.zeros(2)

    def reset(self):
        self.weight.zero_()

    def named_state(self):
        return [("weight", self.weight)]

    def results(self, count):
        return [float(index) for index in range(count)]


def test_a_course_begins_at_the_start_and_looks_after_the_steps_that_are_named():
    training = Counting()
    training.weight.fill_(7)
    made = courses.course(training, lambda index: training.weight.add_(1), 5, hashed=(1, 4), copied=(0, 3))
    assert (made.count, made.losses, made.names) == (5, [0.0, 1.0, 2.0, 3.0, 4.0], ["weight"])
    assert made.hashes().tolist() == [[value(torch.full((2,), count))] for count in (2.0, 5.0)]
    assert {step: copies[0].tolist() for step, copies in made.copies.items()} == {0: [1.0, 1.0], 3: [4.0, 4.0]}


def test_a_course_that_is_over_has_the_losses_of_the_steps_that_were_made():
    training = Counting()
    made = Course(training, hashed=range(9))
    assert list(made.steps(9, lambda index: index == 2)) == [0, 1, 2]
    assert made.count == len(made.losses) == len(made.digests()) == 3
