"""Tests of common/machine/host_pace.py: host microseconds an operator and a launch; on the CPU no launch."""

import pytest
import torch

from common.machine import host_pace as probe


def test_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = probe.pace_of_host()
    assert 0.05 < found["operator_us"] < 200 and found["launch_us"] is None


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
