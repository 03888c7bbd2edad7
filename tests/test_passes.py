"""common/passes and phases: how long windows are, clocks that must agree, and what a run says of its own course."""

import errno
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from common import measure, passes, phases
from common import record as records
from tests.measured import Clock, Config, Graphed, Measured, State, Variant, expected_losses, measuring, sleeping


@pytest.fixture
def run(tmp_path, capsys):
    return measuring(tmp_path, capsys)


GMT = {"strftime": time.strftime, "gmtime": time.gmtime, "clock_gettime": time.clock_gettime}
GMT |= {"CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


FULL = {"min_window_s": 5.0, "warmup_min_s": 0.0, "warmup_max_s": 0.0}


def num_steps(record):
    return len(record["steps"]["gpu_ms"])


# --- how long a window is


def test_a_window_has_its_seconds_also_where_steps_are_faster_in_it(run, clock):
    """Settled steps are slower than those of the window: a window of their pace would end short."""
    record = run(clock.steps_of(lambda index: 0.1 if index is None else 0.07), config=Config(**FULL)).record
    assert sum(record["steps"]["gpu_ms"]) >= 5000 and num_steps(record) == 79
    assert record["conditions"]["window_s"] == pytest.approx(79 * 0.07)
    assert record["status"] == "pass" and record["numerics"]["loss"][:2] == pytest.approx(expected_losses(2), rel=1e-5)


def test_a_window_of_the_settled_pace_is_made_once(run, clock):
    made = run(clock.steps_of(lambda index: 0.1), config=Config(**FULL))
    assert num_steps(made.record) == 56
    # Behind it come the steps of the section pass.
    assert made.variant.indices[-59:] == [*range(56), 0, 1, 2] and made.variant.indices.count(55) == 1


def test_a_window_is_made_three_times_at_most_and_grows_fourfold_at_most(run, clock):
    made = run(clock.steps_of(lambda index: 0.1 if index is None else 1e-5), config=Config(**FULL))
    assert num_steps(made.record) == 56 * 16
    assert [made.variant.indices.count(step) for step in (55, 56, 224, 895)] == [3, 2, 1, 1]
    assert made.record["capture"]["num_replays"] == 0


def test_replays_are_those_of_the_window_that_counts(run, clock):
    make = clock.steps_of(lambda index: 0.1 if index is None else 0.07, Graphed)
    record = run(make, config=Config(**FULL), promise=("graph", 1, 1)).record
    assert record["capture"]["num_replays"] == record["capture"]["expected_replays"] == num_steps(record) == 79
    assert record["status"] == "pass" and record["proof"]["steps"][-1] == 78


@pytest.mark.parametrize(
    ("seconds", "config", "steps", "expected"),
    [
        # Beyond 0.4 s: 20 s and 8 steps.
        (0.41, {}, 0, 54),
        (5.0, {}, 0, 8),
        (5.0, {}, 10, 10),
        (0.39, {"min_steps": 50}, 0, 50),
        # What asks for a shorter window is asked for no more.
        (0.5, {"min_window_s": 1.5}, 0, 12),
    ],
)
def test_long_steps_have_windows_of_their_own(run, clock, seconds, config, steps, expected):
    record = run(clock.steps_of(lambda index: seconds), config=Config(**FULL | config), steps=steps).record
    assert num_steps(record) == expected
    assert len(record["numerics"]["loss"]) == min(expected, record["config"]["min_steps"])


@pytest.mark.parametrize(
    ("seconds", "window_s", "flags", "expected"),
    [
        (0.5, 5.0, {}, 3),
        (0.3, 5.0, {}, 20),
        (0.3, 5.0, {"steps": 27}, 27),
        (0.5, 5.0, {"steps": 27}, 3),
        (0.5, 5.0, {"parity_steps": 6}, 6),
        (0.3, 5.0, {"parity_steps": 6}, 6),
        (0.5, 1.5, {}, 20),
    ],
)
def test_parity_has_three_steps_where_they_are_long(run, monkeypatch, seconds, window_s, flags, expected):
    """The second step counts: the first compiles, allocates and chooses kernels."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def take(index):
        now[0] += seconds if index else 9.0

    record = run(
        lambda state: Variant(state, before=take), parity=True, config=Config(min_window_s=window_s), **flags
    ).record
    assert len(record["numerics"]["loss"]) == expected and record["status"] == "pass"


# --- clocks


@pytest.mark.parametrize(("wall_ms", "fault"), [(1004.0, None), (1006.0, "sum to 1000.0 ms")])
def test_events_of_a_gpu_agree_with_the_wall_clock(wall_ms, fault):
    record = records.blank(device="cuda")
    record["steps"].update(gpu_ms=[10.0] * 100, wall_ms=wall_ms)
    said = passes.wrong_wall(record)
    assert (fault in said) if fault else said is None
    record["device"] = "cpu"
    assert passes.wrong_wall(record) is None


def test_a_clock_that_does_not_agree_fails_the_run(run, monkeypatch):
    monkeypatch.setattr(passes, "wrong_wall", lambda record: "the clocks part")
    record = run(Graphed).record
    assert (record["status"], record["message"]) == ("failed", "the clocks part")
    assert record["statistic_ms"] > 0


@pytest.mark.gpu
def test_events_on_a_gpu_fill_the_wall_clock():
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    boundaries = passes.Boundaries(device, 200)
    passes.synchronize()
    start = time.perf_counter()
    boundaries.note()
    for _ in range(200):
        x @ x
        boundaries.note()
    passes.synchronize()
    wall_ms = (time.perf_counter() - start) * 1e3
    assert sum(boundaries.step_ms()) == pytest.approx(wall_ms, abs=max(1.0, 0.01 * wall_ms))


# --- what a run says of its course


def test_a_record_says_when_where_and_for_how_long_it_ran(run):
    before = time.time()
    record = run(sleeping(lambda index: 0.004), config=Config(min_steps=30)).record
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record[key]) for key in ("begin_utc", "end_utc"))
    assert phases.utc(before - 1) <= record["end_utc"] <= phases.utc(time.time())
    # This process began before any test of it.
    assert record["begin_utc"] <= phases.utc(before)
    assert record["conditions"]["cores"] == sorted(os.sched_getaffinity(0))
    assert record["conditions"]["settled"] is record["extra"]["settle"]["settled"]
    assert record["conditions"]["window_s"] * 1e3 == pytest.approx(record["steps"]["wall_ms"])
    seconds = record["seconds"]
    later = {"prepare", "canary", "reset", "proof", "sections", "close"}
    assert set(records.TEMPLATE["seconds"]) | later == set(seconds)
    assert list(seconds) == [name for name in phases.NAMES if name in seconds], "in the order of a run"
    assert seconds["window"] >= 0.12 and seconds["settle"] >= 0.008 and seconds["start"] >= 0 and seconds["import"] > 0
    assert seconds["build"] >= 0 and seconds["profile"] is None
    assert seconds["warmup"] == round(record["capture"]["warmup_s"], 3)
    assert record["proof"]["settled_ms"]["0"] >= 4


@pytest.mark.parametrize(
    ("clocks", "num_blocks", "settled"),
    [
        # One sample in two is far off, as at a power limit; the medians of blocks are not.
        ([1700, 1760, 1700, 1640] * 10, 3, True),
        ([1900] * 4 + [1800] * 4 + [1750] * 4 + [1745] * 4, 4, True),
        # 2 % a second.
        ([1700 + 9 * place for place in range(40)], 5, False),
    ],
)
def test_a_clock_settles_by_the_median_of_a_blocks_samples(clock, clocks, num_blocks, settled):
    """Samples of every 250 ms; at least 3 blocks of a second or a little more, at most 5."""

    def between(start, end):
        seen = [mhz for place, mhz in enumerate(clocks) if start < 100.0 + 0.25 * place + 0.01 <= end]
        return {"sm_mhz": statistics.median(seen)}

    def step(index):
        clock.now += 0.1

    config = Config(warmup_min_s=2.9, warmup_max_s=4.9)
    made = SimpleNamespace(step=step), config, torch.device("cpu"), SimpleNamespace(between=between)
    summary, settled_ms = passes.settle(*made)
    assert (len(summary["blocks"]), summary["settled"]) == (num_blocks, settled)
    assert summary["blocks"][-1][0] == pytest.approx(100.0) and settled_ms == {"0": pytest.approx(100.0)}


@pytest.mark.parametrize(
    ("times", "min_window_s", "num_blocks", "settled"),
    [
        # Llama 2's 8192 tokens: the first block heats the GPU, and with the second the ceiling is reached.
        ([2.48, 2.62] + [2.72] * 20, 5.0, 3, True),
        ([2.0 + 0.1 * place for place in range(20)], 5.0, 4, False),
        # A tiny preset's window is short: its steps are not long, whatever they take.
        ([2.48, 2.62] + [2.72] * 20, 1.0, 2, False),
        # Steps of half a second have blocks enough below the ceiling.
        ([0.5 + 0.02 * place for place in range(30)], 5.0, 8, False),
    ],
)
def test_long_steps_have_blocks_enough_to_settle_in(clock, times, min_window_s, num_blocks, settled):
    seconds = iter(times)

    def step(index):
        clock.now += next(seconds)

    config = Config(warmup_min_s=4.0, warmup_max_s=10.0, min_window_s=min_window_s)
    summary, _ = passes.settle(SimpleNamespace(step=step), config, torch.device("cpu"), None)
    assert (len(summary["blocks"]), summary["settled"]) == (num_blocks, settled)


def test_settled_paces_are_told_by_kind_of_batch(run, clock, monkeypatch):
    seconds = iter([0.002, 0.005] * 1000)
    made = run(clock.steps_of(lambda index: next(seconds)), state=lambda: State(classes=2), config=Config(min_steps=10))
    assert made.record["proof"]["settled_ms"] == {"0": 2.0, "1": 5.0}


def test_a_phase_that_fails_has_its_seconds():
    record = records.blank()
    clock = phases.Phases(record)
    with pytest.raises(KeyError), clock.phase("build"):
        time.sleep(0.02)
        raise KeyError
    with clock.phase("build"):
        pass
    assert record["seconds"]["build"] >= 0.02
    assert clock.end() is None and record["end_utc"]


def test_a_phase_within_another_counts_for_itself(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, **GMT))
    record = records.blank()
    clock = phases.Phases(record)
    with clock.phase("window"):
        now[0] += 1.0
        for _ in range(2):
            with clock.phase("reset"):
                now[0] += 0.25
                with clock.phase("build"):
                    now[0] += 4.0
        now[0] += 2.0
    assert [record["seconds"][name] for name in ("window", "reset", "build")] == [3.0, 0.5, 8.0]


@pytest.mark.parametrize(
    "flags",
    [
        ("--variant", "graph", "--warmup-min-s", "0.2", "--min-window-s", "0.2", "--min-steps", "5"),
        ("--variant", "eager", "--parity", "--parity-steps", "4"),
    ],
)
def test_phases_sum_to_the_time_of_the_process(tmp_path, flags):
    """Up to its last line, which is the record: what Python and torch take to end is nobody's phase."""
    command = [sys.executable, "-m", "gpt3.train", "--preset", "tiny", *flags]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    root = pathlib.Path(__file__).resolve().parent.parent
    start = time.monotonic()
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            last, wall_s = line, time.monotonic() - start
    seconds = json.loads(last)["seconds"]
    assert sum(value for value in seconds.values() if value) == pytest.approx(wall_s, rel=0.1, abs=0.5)
    assert set(seconds) <= set(phases.NAMES)


def test_a_host_without_proc_tells_no_start(monkeypatch):
    monkeypatch.setattr(phases, "_process_start_s", lambda: None)
    record = records.blank()
    phases.Phases(record)
    assert record["seconds"]["start"] is None and record["seconds"]["import"] > 0 and record["begin_utc"]


def test_a_step_ends_with_its_last_rank():
    assert passes.skew_ms([[10.0, 10.0, 10.0]]) is None
    # Ends at 10, 20, 30 and at 12, 21, 33.
    assert passes.skew_ms([[10.0, 10.0, 10.0], [12.0, 9.0, 12.0]]) == 2.0


# --- a full disk


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def said(tmp_path, capsys):
    """A run, and what it said on stderr."""

    def go(**more):
        errors = []

        def read_output():
            out, err = capsys.readouterr()
            errors.append(err)
            return out

        made = Measured(Graphed, tmp_path, read_output, **more)
        return made, errors[-1]

    return go


def test_a_record_that_does_not_fit_is_one_line(said, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    made, error = said()
    assert error == f"python -m tests.fake_model.train: --record {made.path}: No space left on device\n"
    assert made.record["status"] == "failed" and not made.path.exists()


def test_a_sidecar_that_does_not_fit_is_no_traceback(said, monkeypatch):
    monkeypatch.setattr("numpy.savez_compressed", full)
    made, error = said(parity=True)
    assert error == ""
    assert made.record["status"] == "failed" and "No space left on device" in made.record["message"]
    assert records.read(made.path)["status"] == "failed"
