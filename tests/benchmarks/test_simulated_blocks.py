"""The simulation follows harness/intervals.py, the rates are reached, and results/simulation.md has its tables."""

import math
import re
from pathlib import Path

import numpy
import pytest

from graph_worth.harness import intervals
from graph_worth.harness.builds.request import FEWEST_CYCLES
from tests.helpers import simulated_blocks

PAGE = Path(__file__).resolve().parents[2] / "results" / "simulation.md"
NUMBER = re.compile(r"\d+\.\d")
# `auto` stops where the scatter happens to look small; results/simulation.md says so.
AUTO_MISSES = {"noise 1 %, 0.3 s"}


def test_the_simulation_computes_what_statistics_does():
    host = simulated_blocks.Scenario("", 0.3, noise=0.01)
    logs, _ = simulated_blocks.measure(host, 200, numpy.random.default_rng(3), cycles=12)
    logs[..., 100:] /= 4  # so that intervals which leave 1 out lie within 0.5 %, too
    mean, half = simulated_blocks.intervals(logs)
    is_verdict = simulated_blocks.is_verdict(mean, half)
    words = set()
    for cycles in (1, 8, 12):
        for run in range(200):
            one = intervals.ratio_of([((math.exp(log),), 1.0) for log in logs[:cycles, -1, run]])
            assert math.log(one.ratio) == pytest.approx(mean[cycles - 1, -1, run], abs=1e-9)
            assert one.half_width == pytest.approx(math.expm1(half[cycles - 1, -1, run]), rel=1e-6)
            word = intervals.word(one)
            words.add(word)
            assert is_verdict[cycles - 1, -1, run] == (word in ("faster", "slower"))
    assert words == {"same", "faster", "slower", "unclear"}


def test_a_steady_host_gives_the_ratio_that_it_was_given():
    host = simulated_blocks.Scenario("", 1, noise=0.0, drift=0.002)
    for order in ("drawn", "reversed"):
        logs, pace = simulated_blocks.measure(host, 50, numpy.random.default_rng(3), order, cycles=8)
        # Graphs: eager's mean step in the cycle, but for step noise.
        assert abs((logs - numpy.log(pace)[:, None])[:, :-1]).max() < 0.03
        assert abs(logs.mean(axis=(0, 2))[-1]) < 0.002  # control: the drift cancels over cycles
    fixed, _ = simulated_blocks.measure(host, 50, numpy.random.default_rng(3), "fixed", cycles=8)
    assert fixed.mean(axis=(0, 2))[-1] == pytest.approx(-0.002 * 1.5, abs=0.0015)  # one place after the middle


def test_blocks_count_by_their_mean_and_the_order_is_drawn():
    """A burst in three of ten steps adds its part to a block, where a median would not see it."""
    host = simulated_blocks.Scenario("", 1, noise=0.0, burst=1.0, burst_s=0.3, between_s=0.7)
    logs, pace = simulated_blocks.measure(host, 400, numpy.random.default_rng(3), cycles=8)
    assert math.exp(numpy.median(logs[:, 0])) == pytest.approx(pace.mean(), rel=0.03) and pace.mean() > 1.2
    steady = simulated_blocks.Scenario("", 1, noise=0.0, drift=0.04)
    logs, _ = simulated_blocks.measure(steady, 50, numpy.random.default_rng(3), cycles=8)
    places = numpy.round(-logs[:, -1] / 0.06)  # of control, before or after the middle
    assert set(places.flatten()) == {-1, 0, 1} and len(set(map(tuple, places.T))) > 40


def _rows_of(page):
    """The rows of a page's tables, without the lines under the heads."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if row[0] != "---"]


def _numbers_and_words(row):
    text = " | ".join(row[1:])
    return [float(number) for number in NUMBER.findall(text)], NUMBER.sub("", text)


@pytest.mark.slow
@pytest.mark.parametrize("host", simulated_blocks.HOSTS, ids=lambda host: host.name)
def test_rates_are_reached(host):
    eight, auto, more = simulated_blocks.rates(host, 10_000, seed=2)  # not the page's seed
    assert min(eight.coverage, auto.coverage, more.coverage) >= 0.92
    assert max(eight.nulls, more.nulls) <= 0.065
    assert auto.nulls <= (0.075 if host.name in AUTO_MISSES else 0.065)


@pytest.mark.slow
def test_the_page_has_the_tables():
    expected = [row for rows in simulated_blocks.tables() for row in rows]
    found = _rows_of(PAGE.read_text())
    assert [row[0] for row in found] == [row[0] for row in expected]
    for one, other in zip(found, expected, strict=True):
        (numbers, words), (fresh, fresh_words) = _numbers_and_words(one), _numbers_and_words(other)
        assert words == fresh_words, one[0]
        assert numbers == pytest.approx(fresh, abs=0.2), one[0]  # another numpy may round otherwise


@pytest.mark.slow
@pytest.mark.parametrize("host", simulated_blocks.HOSTS, ids=lambda host: host.name)
def test_rates_of_short_blocks_and_few_cycles_are_reached(monkeypatch, host):
    """A step of somebody's own may have five cycles. Here blocks last 0.4 s, with 0.4 s between them."""
    monkeypatch.setattr(simulated_blocks, "DEAD_TICKS", 4)
    monkeypatch.setattr(simulated_blocks, "TIMED_TICKS", 4)
    rng = numpy.random.default_rng(2)
    logs, pace = simulated_blocks.measure(host, 4_000, rng, "drawn", cycles=FEWEST_CYCLES)
    mean, half = (each[-1] for each in simulated_blocks.intervals(logs))
    assert (abs(mean - numpy.log(pace.mean(axis=0)))[:-1] <= half[:-1]).mean() >= 0.92
    assert simulated_blocks.is_verdict(mean, half)[-1].mean() <= 0.065
