"""Simulate runs: how often their intervals hold, and how often two equal programs are called faster or slower.

    python -m tests.helpers.simulated_blocks [--markdown] [--runs N] [--seed S]

In a cycle of a simulated run, two graphs and the control stand in a drawn order between two blocks of the base. The
host sets the pace of eager, which is base and control; graphs are steady. The log of the host's pace is AR(1) noise,
with bursts and drift in some scenarios. A block is 0.5 s untimed and ten timed steps of 0.1 s, and its number is their
mean. results/simulation.md explains the tables.
"""

import argparse
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from graph_worth.harness.intervals import CONFIDENCE, LEAST_CYCLES, SAME, student_t

RUNS, SEED, MOST_CYCLES, MORE_CYCLES = 10_000, 1, 24, 4
TICK_S, DEAD_TICKS, TIMED_TICKS = 0.1, 5, 10
STEP_NOISE, GRAPH_NOISE = 0.02, 0.001  # of one eager step; of one graph's block
DRIFT = 0.10 / 60  # for each second; eight cycles with two graphs take 60 s
MOST_NULLS, LEAST_COVERAGE = 0.065, 0.92


@dataclass(frozen=True)
class Scenario:
    """A host.

    Attributes:
        name: the scenario in words.
        correlation_s, noise: correlation time in seconds and standard deviation of the AR(1) noise in the log pace.
        burst, burst_s, between_s: how much slower the host is in a burst (0.3 is 30 %), mean length, mean time between.
        drift, first: change of the log of the pace for each second; how much slower the first cycle is.
        graphs: number of graphs in the build.
    """

    name: str
    correlation_s: float
    noise: float = 0.08
    burst: float = 0.0
    burst_s: float = 2.0
    between_s: float = 20.0
    drift: float = 0.0
    first: float = 0.0
    graphs: int = 2


HOSTS = (
    *(Scenario(f"noise 8 %, {seconds:g} s", seconds) for seconds in (0.3, 1, 3, 10, 30, 60)),
    Scenario("3 s, bursts of 2 s", 3, burst=0.3),
    Scenario("3 s, bursts of 0.3 s", 3, burst=0.3, burst_s=0.3, between_s=5),
    Scenario("3 s, drift", 3, drift=DRIFT),
    Scenario("3 s, first cycle slow", 3, first=0.1),
    Scenario("60 s, all three", 60, burst=0.3, drift=DRIFT, first=0.1),
    Scenario("noise 1 %, 0.3 s", 0.3, noise=0.01),
    Scenario("noise 0.5 %, 3 s, drift", 3, noise=0.005, drift=DRIFT),
)


class Rates(NamedTuple):
    """Rates over the runs of one scenario.

    Attributes:
        coverage: share of graphs whose interval covers the ratio of the mean steps in the run's own minutes.
        later: the same with eager's mean step over all time; nan with drift.
        nulls: share of runs that call control faster or slower than eager.
        graph, control, cycles: median half-widths, and mean number of cycles.
    """

    coverage: float
    later: float
    nulls: float
    graph: float
    control: float
    cycles: float


def host_pace(scenario, runs, ticks, ticks_a_cycle, rng):
    """Return the log of the host's pace, shape (ticks, runs); 0 is the pace of a host without noise."""
    keep = math.exp(-TICK_S / scenario.correlation_s)
    fresh = numpy.float32(scenario.noise * math.sqrt(1 - keep**2))
    state = numpy.float32(scenario.noise) * rng.standard_normal(runs, dtype=numpy.float32)
    in_burst = rng.random(runs) < scenario.burst_s / (scenario.burst_s + scenario.between_s)
    pace = numpy.empty((ticks, runs), numpy.float32)
    for tick in range(ticks):
        state = numpy.float32(keep) * state + fresh * rng.standard_normal(runs, dtype=numpy.float32)
        pace[tick] = state + numpy.float32(scenario.drift * TICK_S * tick)
        if scenario.burst:
            draw = rng.random(runs, dtype=numpy.float32)
            in_burst = numpy.where(in_burst, draw > TICK_S / scenario.burst_s, draw < TICK_S / scenario.between_s)
            pace[tick] += numpy.float32(math.log1p(scenario.burst)) * in_burst
    pace[:ticks_a_cycle] += numpy.float32(math.log1p(scenario.first))
    return pace


def measure(scenario, runs, rng, order="drawn", base="mean", cycles=MOST_CYCLES):
    """Simulate runs.

    Args:
        scenario: the host.
        runs: number of runs.
        rng: numpy's generator.
        order: blocks between the bases: "drawn" anew in each cycle, "reversed" in every second one, or "fixed".
        base: "mean" of the cycle's own bases, "interpolated" to the block's place, or "shared" with the next cycle.
        cycles: cycles of each run.

    Returns:
        Log ratios, shape (cycles, graphs + 1, runs), control last, and eager's mean step in each cycle, shape (cycles,
        runs). A graph's step takes 1, as an eager one at pace 0.
    """
    inner, shared = scenario.graphs + 1, base == "shared"
    places, ticks = inner + 2 - shared, DEAD_TICKS + TIMED_TICKS
    count = cycles + shared  # a shared base needs the first block after the last cycle
    pace = host_pace(scenario, runs, count * places * ticks, places * ticks, rng).reshape(count, places, ticks, runs)
    steps = pace[:, :, DEAD_TICKS:]
    steps = numpy.exp(steps + numpy.float32(STEP_NOISE) * rng.standard_normal(steps.shape, numpy.float32))
    blocks = numpy.log(steps.mean(axis=2, dtype=float))
    first, last = blocks[:cycles, 0], blocks[1:, 0] if shared else blocks[:, -1]
    place = numpy.tile(numpy.arange(1, inner + 1)[None, :, None], (cycles, 1, runs))
    if order == "reversed":
        place[1::2] = inner + 1 - place[1::2]
    elif order == "drawn":
        place = rng.permuted(place, axis=1)
    weight = place / (inner + 1) if base == "interpolated" else numpy.full_like(place, 0.5, dtype=float)
    logs = (1 - weight) * first[:, None] + weight * last[:, None]
    logs[:, :-1] -= GRAPH_NOISE * rng.standard_normal((cycles, scenario.graphs, runs))
    logs[:, -1] -= numpy.take_along_axis(blocks[:cycles], place[:, -1:], axis=1)[:, 0]
    return logs, numpy.exp(pace[:cycles]).mean(axis=(1, 2), dtype=float)


def intervals(logs):
    """Return mean and half-width of the log ratios after each cycle, each of the shape of `logs`; see statistics."""
    count = numpy.arange(1, len(logs) + 1).reshape(-1, *[1] * (logs.ndim - 1))
    mean = logs.cumsum(axis=0) / count
    variance = ((logs**2).cumsum(axis=0) - count * mean**2).clip(0) / (count - 1).clip(1)
    half = student_t((1 + CONFIDENCE) / 2, (count - 1).clip(1)) * numpy.sqrt(variance / count)
    return mean, numpy.where(count == 1, numpy.inf, half)


def is_verdict(mean, half):
    """Return where statistics.word says faster or slower."""
    return (abs(mean) > half) & (abs(mean) + half > math.log1p(SAME))


def rates(scenario, runs=RUNS, seed=SEED, order="drawn", base="mean"):
    """Return Rates of eight cycles, of `auto` with at most 24 cycles, and of `auto` and up to four cycles more."""
    logs, pace = measure(scenario, runs, numpy.random.default_rng(seed), order, base)
    mean, half = intervals(logs)
    own = numpy.log(pace.cumsum(axis=0) / numpy.arange(1, len(pace) + 1)[:, None])
    ends = (numpy.expm1(half) <= SAME).all(axis=1)
    ends[: LEAST_CYCLES - 1], ends[-1] = False, True
    auto, run = ends.argmax(axis=0), numpy.arange(runs)
    burst = math.log1p(scenario.burst * scenario.burst_s / (scenario.burst_s + scenario.between_s))
    # The mean of a pace whose logarithm is normal.
    later, result = math.nan if scenario.drift else burst + scenario.noise**2 / 2, []
    for at in (numpy.full(runs, LEAST_CYCLES - 1), auto, (auto + MORE_CYCLES).clip(max=len(pace) - 1)):
        ratio, width = mean[at, :, run], half[at, :, run]
        covers = [(abs(ratio - truth)[:, :-1] <= width[:, :-1]).mean() for truth in (own[at, run][:, None], later)]
        widths = [numpy.expm1(numpy.median(each)) for each in (width[:, :-1], width[:, -1])]
        numbers = (*covers, is_verdict(ratio, width)[:, -1].mean(), *widths, at.mean() + 1)
        result.append(Rates(*map(float, numbers)))
    return result


def _cell(share, misses=False):
    return f"{100 * share:.1f}{' (misses)' if misses else ''}"


def tables(runs=RUNS, seed=SEED):
    """Yield the table of hosts as a list of rows, the head first. Rates and widths are in %."""
    rows = [["host", "covers, 8 / auto", "covers later, 8", "half-width, 8: graph / control"]]
    rows[0] += ["nulls, 8", "nulls, auto", "cycles, auto", "nulls, auto + 4"]
    for host in HOSTS:
        eight, auto, more = rates(host, runs, seed)
        covers = " / ".join(_cell(each.coverage, each.coverage < LEAST_COVERAGE) for each in (eight, auto))
        nulls = [_cell(each.nulls, each.nulls > MOST_NULLS) for each in (eight, auto, more)]
        later, widths = "" if host.drift else _cell(eight.later), f"{_cell(eight.graph)} / {_cell(eight.control)}"
        rows.append([host.name, covers, later, widths, *nulls[:2], f"{auto.cycles:.1f}", nulls[2]])
    yield rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of tabs")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    for rows in tables(options.runs, options.seed):
        if options.markdown:
            rows = [[f"| {' | '.join(row)} |"] for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
        print(*map("\t".join, rows), "", sep="\n")
