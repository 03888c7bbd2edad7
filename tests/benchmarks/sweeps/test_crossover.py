"""Tests of the crossover search: it finds the crossovers of known laws, and the sentence follows the numbers."""

import math
import random
import re

import pytest

from benchmarks import statistics
from benchmarks.sweeps import crossover


def hard(cross, extra=0.005):
    """value -> (eager, graph), ms: the host issues an eager step as fast as the GPU runs a graphed one at `cross`."""
    issue = cross * (1 + extra)
    return lambda value: (max(issue, value), value * (1 + extra))


def soft(cross, extra=0.01):
    """As hard, with a rounded knee: (issue^8 + busy^8)^(1/8) = busy x (1 + extra) at `cross`."""
    issue = cross * ((1 + extra) ** 8 - 1) ** (1 / 8)
    return lambda value: ((issue**8 + value**8) ** (1 / 8), value * (1 + extra))


def numbers(ratio):
    return {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high, "word": statistics.word(ratio)}


def law_points(law, noise, seed, cycles=8, oom_from=math.inf):
    """measure(value) for `search`: cycles of blocks whose times scatter by `noise`."""
    source = random.Random(seed)

    def scattered(ms):
        return ms * math.exp(noise * source.gauss(0, 1))

    def measure(value):
        point = dict.fromkeys(("ratio", "low", "high", "word")) | {"value": value, "status": "oom"}
        if value >= oom_from:
            return point
        eager, graph = law(value)
        rows = [((scattered(eager), scattered(eager)), scattered(graph)) for _ in range(cycles)]
        return point | numbers(statistics.ratio_of(rows)) | {"status": "pass"}

    return measure


def searched(measure, first=1):
    points = []

    def keep(value):
        points.append(measure(value))
        return points[-1]

    crossover.search(keep, first)
    return points


def said(points, over="batch", who="graphs"):
    return crossover.conclusion(points, over, "NVIDIA H200", who)["finding"]


@pytest.mark.parametrize(
    ("make", "cross", "noise"), [(hard, 3.0, 0.003), (soft, 8.0, 0.01), (hard, 21.0, 0.01), (soft, 1.5, 0.003)]
)
def test_a_known_crossover_is_found_within_one_point_and_narrowed(make, cross, noise):
    misses = 0
    for seed in range(200):
        points = searched(law_points(make(cross), noise, seed))
        found = crossover.bracket(points)
        misses += found is None or not found["low"] / 2 <= cross <= 2 * found["high"]
        doubled = 2 ** len([point for point in points if point["value"].bit_count() == 1]) // 2
        misses += found is not None and cross > 3 and found["high"] - found["low"] >= doubled / 2
    assert misses <= 10


@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_graphs_that_never_pay_and_that_always_pay(noise):
    never = [searched(law_points(hard(0.5), noise, seed)) for seed in range(200)]
    assert sum(crossover.bracket(points) is not None or len(points) > 1 for points in never) <= 10
    assert all(re.match("graphs never paid at batch 1|unclear whether", said(points)) for points in never[:5])
    ends = ((math.inf, "64 on NVIDIA H200, the largest measured"), (32, "16 on NVIDIA H200, the largest that fits"))
    for oom_from, end in ends:
        points = searched(law_points(hard(1000), noise, 0, oom_from=oom_from))
        assert crossover.bracket(points) is None
        assert said(points) == f"graphs still pay at batch {end}"


def test_where_graphs_do_not_pay_at_the_start_smaller_values_are_measured():
    points = searched(law_points(hard(300), 0.003, 1), first=2048)
    assert [point["value"] for point in points] == [2048, 1024, 512, 256, 352]
    assert crossover.bracket(points)["low"] == 256
    points = searched(law_points(hard(1), 0.003, 2), first=2048)
    assert [point["value"] for point in points][-1] == 2048 // crossover.REACH
    points = searched(law_points(hard(1000), 0.003, 1, oom_from=4), first=16)
    assert [point["value"] for point in points] == [16, 8, 4, 2]
    assert said(points).endswith("2 on NVIDIA H200, the largest that fits")


def point(value, ratio=None, half_width=0.01, status="pass"):
    """half_width: None of one cycle."""
    blank = {"value": value, "status": status} | dict.fromkeys(("ratio", "low", "high", "word"))
    if ratio is None:
        return blank
    if half_width is None:
        return blank | {"ratio": ratio, "word": "unclear"}
    factor = 1 + half_width
    own = statistics.Ratio(ratio, ratio / factor, ratio * factor, half_width, 8, 1.0, 1.0)
    return blank | numbers(own)


def scripted(points):
    by_value = {one["value"]: one for one in points}
    return [one["value"] for one in searched(by_value.__getitem__)]


def test_what_is_too_wide_to_say_settles_nothing():
    wide = [point(1, 1.5), point(2, 1.1, 0.3), point(4, 1.2), point(8, 1.0, 0.002), point(6, 1.1)]
    assert scripted(wide) == [1, 2, 4, 8, 6]
    assert crossover.bracket(wide) == {"low": 6, "high": 8, "unclear": False}
    two = [point(1, 1.5), point(2, 1.1, 0.3), point(4, 0.9, 0.3)]
    assert scripted(two) == [1, 2, 4]
    assert crossover.bracket(two) is None
    assert "batch 2 is too noisy to say" in said(two)
    # However wide, an interval below 1 is a loss.
    assert crossover.kind(point(2, 0.7, 0.2)) == "touches"
    assert crossover.kind(point(1, 1.5, None)) == "wide"


@pytest.mark.parametrize(
    ("points", "bracket", "words"),
    [
        ([point(4, 1.2), point(8, 1.0, 0.004)], (4, 8, False), "graphs stop paying between batch 4 and 8"),
        ([point(4, 1.2), point(8, 0.9)], (4, 8, False), "graphs stop paying between batch 4 and 8"),
        ([point(4, 1.2), point(8, 1.0, 0.02)], (4, 8, True), "8 on NVIDIA H200 (8 is unclear)"),
        ([point(1, 1.0, 0.004)], None, "graphs never paid at batch 1 on NVIDIA H200"),
        ([point(2, 0.9), point(1, 0.8)], None, "graphs never paid at batch 1 to 2"),
        ([point(1, 1.0, 0.02)], None, "unclear whether graphs pay at batch 1 on NVIDIA H200: every interval holds 1"),
        ([point(1, 1.2), point(2, 0.9), point(4, 1.1)], None, "not monotone: graphs pay at batch 1, 4, not at 2"),
        ([point(1, 0.9), point(2, 1.2), point(4, 0.9)], None, "not monotone: graphs pay at batch 2, not at 1"),
        ([point(1, 0.9), point(2, 1.2)], None, "not monotone: graphs pay at batch 2, not at 1"),
        (
            [point(1, 1.2), point(2, status="failed")],
            None,
            "graphs still pay at batch 1 on NVIDIA H200, and batch 2 is",
        ),
        ([point(1, status="oom")], None, "no point has a ratio: batch 1 oom"),
    ],
)
def test_the_finding_follows_the_numbers(points, bracket, words):
    found = crossover.bracket(points)
    assert (found and (found["low"], found["high"], found["unclear"])) == bracket
    assert words in said(points)


def test_another_variant_is_named_and_of_a_cpu_nothing_is_claimed():
    assert said([point(1, 1.2)], "width", "compile").startswith("compile still pays at width 1")
    assert crossover.conclusion([point(1, 1.2), point(2, 0.9)], "batch", None) == {
        "crossover": None,
        "finding": "CPU: no speed-up is measured here",
    }


def test_points_between_are_round_numbers():
    assert [crossover.between(*pair) for pair in ((1, 2), (2, 4), (4, 8), (8, 16), (12, 24))] == [None, 3, 6, 11, 17]
    middle = crossover.between(1024, 2048)
    assert middle % 128 == 0 and crossover.between(middle, 2048) % 128 == 0
