"""A region on a made-up GPU from its capture to its launches: warm-up, two captures, comparison, proof."""

import ctypes
import struct

import pytest
import torch

from common.capture import memory
from common.capture.checks import RegionRefused
from common.capture.parameterized import analysis, random_state, region
from tests.common.capture.parameterized.test_launch import Draws
from tests.helpers import fake_driver
from tests.helpers.fake_driver import FakeCaptures, words_at
from tests.helpers.fake_regions import CPU, added, address, floats


class Generator(Draws):
    def get_state(self):
        return list(self.state)

    def set_state(self, state):
        self.state[:] = state


@pytest.fixture
def draws(monkeypatch):
    made = Generator()
    monkeypatch.setattr(random_state, "generator", lambda device: made)
    return made


@pytest.fixture
def fake(monkeypatch):
    return fake_driver.install(monkeypatch)


@pytest.fixture
def gpu(fake, draws, monkeypatch):
    return FakeCaptures(fake, monkeypatch, analysis, memory)


def capture(fn, inputs):
    with random_state.aside(CPU):
        return region._capture(fn, inputs, CPU)


def test_a_function_is_captured_proved_and_launched_on_other_memory(gpu):
    def run(x, w):
        between, out = gpu.new(8), gpu.new(8)
        gpu.node(*added(between.data_ptr(), x.data_ptr(), w.data_ptr(), 1.0))
        gpu.node(*added(out.data_ptr(), between.data_ptr(), x.data_ptr(), 2.0))
        between.copy_(x + w)
        out.copy_(between + 2 * x)
        return [out, x, 7]

    made = capture(run, [floats(0), floats(1)])
    for n in range(3):
        x, w = floats(10 + n), floats(20 + n)
        (out, same, number), _ = made.launch([x, w])
        assert torch.equal(out, (x + w) + 2 * x) and same.data_ptr() == x.data_ptr() and number == 7
    assert made.report["nodes"] == {"kernel": 2} and made.report["copied_results"] == 0
    assert made.report["unread"] == 0 and made.report["inexact"] == []
    # The result, and what lies between.
    assert made.report["arena_bytes"] == 32 + 512


def test_both_captures_add_gradients_up_alike(gpu):
    """Autograd adds in place where nobody looks on: one capture would allocate more tensors than the other."""
    added_in_place = []

    def run(x):
        with torch.profiler.profile() as seen:
            v = x.double().requires_grad_()
            torch.autograd.grad((v.sin() + v + 2 * v).sum(), v)
        added_in_place.append(sum(event.name == "aten::add_" for event in seen.events()))
        out = gpu.new(8)
        gpu.node(*added(out.data_ptr(), x.data_ptr(), x.data_ptr(), 1.0))
        out.copy_(x + x)
        return [out]

    capture(run, [floats(0)])
    warm_ups, captures = added_in_place[:2], added_in_place[2:4]
    assert warm_ups[0] > 0 and captures[0] == captures[1]


def draw(out, state):
    """out = offset + 1000 * seed."""
    out, seed, offset = struct.unpack("<Q", out)[0], *struct.unpack("<QQ", state)
    values = [words_at(at, 1, ctypes.c_longlong) for at in (seed, offset)]
    words_at(out, 1).copy_(values[1] + 1000 * values[0])


def test_a_region_that_draws_gets_seed_and_offset_of_each_launch_and_its_capture_draws_nothing(
    fake, draws, monkeypatch
):
    gpu = FakeCaptures(fake, monkeypatch, analysis, memory, seeds=True)

    def run(x):
        out = gpu.new(1)
        gpu.node("kernel", draw, [address(out.data_ptr()), address(*gpu.seed_addresses)])
        out.fill_(draws.get_offset() + 1000 * draws.initial_seed())
        draws.set_offset(draws.get_offset() + 8)
        return [out]

    # A node needs the addresses, which an eager run has none of.
    gpu.seed_addresses = [0, 0]
    made = capture(run, [floats(0)])
    assert draws.get_offset() == 100
    assert [made.launch([floats(0)])[0][0].tolist() for _ in range(2)] == [[7100.0], [7108.0]]
    assert made.report["random_increment"] == 8


def test_a_region_that_draws_without_seed_and_offset_of_torchs_generator_is_refused(gpu, draws):
    def run(x):
        draws.set_offset(draws.get_offset() + 8)
        return [gpu.new(8)]

    with pytest.raises(RegionRefused, match="another state of a generator"):
        capture(run, [floats(0)])
    assert draws.get_offset() == 100


def test_a_number_that_changes_is_refused_with_the_node(gpu):
    count = [0]

    def run(x):
        count[0] += 1
        out = gpu.new(8)
        gpu.node(*added(out.data_ptr(), x.data_ptr(), x.data_ptr(), float(count[0])))
        out.copy_(x + count[0] * x)
        return [out]

    with pytest.raises(RegionRefused, match=r"differs from eager.*differ between two captures: node 0 \(add\)"):
        capture(run, [floats(0)])


def test_a_result_from_before_the_region_is_refused(gpu):
    weight = floats(3)
    with pytest.raises(RegionRefused, match="result 1 was made before the region"):
        capture(lambda x: [x, weight], [floats(0)])
