"""Tests of graph_worth/machine/host_pace.py: host microseconds an operator and a launch; on the CPU no launch."""

import pytest
import torch

from graph_worth.machine import host_pace as probe


def test_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = probe.pace_of_host()
    assert found["operator_us"] > 0 and found["launch_us"] is None
    assert found["calls"].keys() == {"operator", "linear"}


def test_calls_draw_no_random_numbers_and_leave_torch_as_it_was():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    probe.calls_us(0.0)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_percentiles_are_those_of_single_calls_without_the_first_burst_and_without_draining(monkeypatch):
    clock = Clock([900, *range(1, 101)])
    monkeypatch.setattr(probe, "BURST", probe.CALLS_BURST)
    monkeypatch.setattr(probe, "time", clock)
    # A second passes in each drain.
    assert probe.percentiles_us(clock.issue, clock.drain, 100.5) == {"p50_us": 50.5, "p99_us": 99.01}
    assert clock.num_drained == 101


class Clock:
    """Time in nanoseconds that passes only where a call is issued or the GPU is drained."""

    def __init__(self, us_of_bursts):
        self.now, self.us_of_bursts, self.num_calls, self.num_drained = 0, us_of_bursts, 0, 0

    def issue(self):
        self.now += int(1e3 * self.us_of_bursts[self.num_calls // probe.BURST])
        self.num_calls += 1

    def drain(self):
        self.now += 10**9
        self.num_drained += 1

    def perf_counter_ns(self):
        return self.now

    def perf_counter(self):
        return self.now / 1e9


@pytest.mark.parametrize(
    "seconds, us_of_bursts, told",
    [
        # The first burst does not count, a burst in which the host was taken away hardly.
        (0.0, [500, 20, 30, 900], 30),
        (0.0, [500, 20, 30, 10], 20),
        # Draining takes a second of the time, and is in no burst.
        (5.5, [500, 20, 900, 21, 22, 23], 22),
    ],
)
def test_it_is_the_median_of_bursts_without_the_first_and_without_draining(monkeypatch, seconds, us_of_bursts, told):
    clock = Clock(us_of_bursts)
    monkeypatch.setattr(probe, "time", clock)
    assert probe.measure_us(clock.issue, clock.drain, seconds) == told
    assert clock.num_calls == probe.BURST * len(us_of_bursts) and clock.num_drained == len(us_of_bursts)


@pytest.mark.gpu
def test_on_a_gpu():
    found = probe.pace_of_host()
    assert 0.3 < found["launch_us"] < found["operator_us"] < 100 and probe.BURST < 1024
    times = {name: each["p50_us"] for name, each in found["calls"].items()}
    assert 0.3 < times["operator"] < times["linear"] and 0.3 < times["graph"] < times["linear"]
