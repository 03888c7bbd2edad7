"""benchmarks/measuring/build_measurement.py: when a run has enough cycles."""

from types import SimpleNamespace

import pytest

from benchmarks import measure, run
from benchmarks.measuring import block_plan, build_measurement
from benchmarks.measuring.build_measurement import BuildMeasurement
from benchmarks.measuring.request import FEWEST_CYCLES, Settings

# Seconds on an H100 of the parts of a run of nanoGPT before its first cycle, and after its last one; of its two
# compilations of 40 s the second is not made any more.
BEFORE_S, AFTER_S = 18 + 20 + 40, 10
# Of a block, beside its steps.
BESIDE_S = 0.4


def cycles_made(monkeypatch, cycle_s, **settings):
    """(cycles, seconds of the clock) until the rule says that it is enough."""
    clock, cycles = [float(BEFORE_S)], []
    monkeypatch.setattr(build_measurement.time, "monotonic", lambda: clock[0])
    facts = SimpleNamespace(of=lambda fact, build: cycles)
    request = SimpleNamespace(name="", variants={})
    own = BuildMeasurement(request, Settings(**settings), facts, None, print)
    while not own._is_enough():
        cycles.append({"seconds": cycle_s})
        clock[0] += cycle_s
    return len(cycles), clock[0]


@pytest.mark.parametrize("eager_ms", [8.0, 12.0, 25.0])
def test_a_step_of_ones_own_is_planned_to_have_its_verdict_in_two_minutes(monkeypatch, eager_ms):
    paces = {"eager": {"ms": eager_ms, "reset_s": 0.01}} | {
        name: {"ms": eager_ms / 2, "reset_s": 0.01} for name in ("graph_step", "reduce_overhead")
    }
    own = SimpleNamespace(model=run.run_file.OWN_STEP, cycles=None, no_control=False, end_s=measure.CYCLES_END_S)
    own.is_census = False
    own.minutes, own.host_load, own.limit_s, own.share_memory = None, 0, 600.0, False
    settings = run.settings_of(own, "bench")
    steps = block_plan.steps_of_block(paces, {"period": 8, "least_steps": 10, "gpus": [1]}, settings)
    blocks = ["eager", "graph_step", "reduce_overhead", "eager", "eager"]
    number = sum(steps[each] for each in ("untimed", "timed", "drained"))
    cycle_s = sum(number * paces[name]["ms"] / 1e3 + BESIDE_S for name in blocks)
    cycles, end_s = cycles_made(monkeypatch, cycle_s, cycles=settings.cycles, end_s=settings.end_s)
    assert settings.compiles_once and not settings.is_short
    assert FEWEST_CYCLES <= cycles <= 8 and end_s + AFTER_S <= 120


@pytest.mark.parametrize(
    ("cycle_s", "end_s", "cycles"),
    [(1.0, 200.0, 8), (5.0, BEFORE_S + 31.0, 6), (60.0, BEFORE_S, FEWEST_CYCLES), (60.0, None, 8)],
)
def test_the_clock_ends_a_run_after_its_fewest_cycles(monkeypatch, cycle_s, end_s, cycles):
    assert cycles_made(monkeypatch, cycle_s, end_s=end_s)[0] == cycles
