"""common/probe: host microseconds an operator; on the CPU no launch; mistakes in one line without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.machine import host_pace as probe

ROOT = Path(__file__).resolve().parents[3]


def run(*argv, **variables):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "common.machine.host_pace", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_one_line_of_json_on_the_cpu():
    answer = run("--seconds", "0.2")
    assert answer.returncode == 0 and answer.stderr == ""
    assert answer.stdout.count("\n") == 1
    found = json.loads(answer.stdout)
    assert list(found) == ["us_per_operator", "us_per_launch", "device"]
    assert found["device"] == "cpu" and found["us_per_launch"] is None
    assert 0.05 < found["us_per_operator"] < 200


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


def test_bursts_fit_the_launch_queue():
    assert probe.BURST < 1024


def test_on_a_gpu_half_the_time_is_for_launches(monkeypatch):
    torch = pytest.importorskip("torch")
    issued, spans = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: issued.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: issued.append(cycles))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))

    def measure(issue, drain, seconds):
        issue()
        drain()
        spans.append(seconds)
        return float(len(spans))

    monkeypatch.setattr(probe, "measure_us", measure)
    assert probe.probe(3.0) == {"us_per_operator": 1.0, "us_per_launch": 2.0, "device": "cuda"}
    assert issued == ["synchronize", 0, "synchronize"] and spans == [1.5, 1.5]


@pytest.mark.gpu
def test_on_a_gpu():
    found = json.loads(run("--seconds", "0.5", CUDA_VISIBLE_DEVICES="0").stdout)
    assert found["device"] == "cuda" and 0.3 < found["us_per_launch"] < found["us_per_operator"] < 100


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "two"])
def test_a_mistake_is_one_line_without_torch(tmp_path, text):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    answer = run("--seconds", text, PYTHONPATH=str(tmp_path))
    assert answer.returncode == 2 and answer.stdout == "" and answer.stderr.count("\n") == 1
    assert f"'{text}' is not a number of seconds above 0, at most 60" in answer.stderr
