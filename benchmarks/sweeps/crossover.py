"""The search for the crossover, where a gain ends along a growing quantity: the next value, and the finding.

A point is a dict with value, ratio, low and high (95 % interval), word (benchmarks.statistics.word) and status. Its
ratio is None where nothing was timed, low and high where one cycle was. Nothing here knows a run or a model.
"""

import math
from collections.abc import Callable

CPU_FINDING = "CPU: no speed-up is measured here"
# Furthest from the value where the search begins, as a factor.
REACH = 64
# An interval wider than this (half-width, logarithm) says nothing about where a gain ends.
TOO_WIDE = 0.05


def kind(point: dict) -> str:
    """Return what a point says: pays, touches (no gain shown), wide (too wide to say), oom, or none."""
    if point["ratio"] is None:
        return "oom" if point["status"] == "oom" else "none"
    if point["word"] == "faster":
        return "pays"
    width = half_width(point)
    is_wide = width is None or width > TOO_WIDE
    return "wide" if is_wide and point["word"] not in ("same", "slower") else "touches"


def half_width(point: dict) -> float | None:
    """Return half of the interval's width, a logarithm; None for one cycle."""
    return None if point["low"] is None else math.log(point["high"] / point["low"]) / 2


def search(measure: Callable[[int], dict], first: int) -> None:
    """Measure values until the crossover is bracketed and narrowed by one point.

    The value doubles while graphs pay. Where they do not pay at `first`, or nothing fits, it is halved instead. One
    point that is too wide to say is passed over; two in a row end the search.

    Args:
        measure: takes a value and returns its point.
        first: value where the search begins; no other is further from it than REACH times.
    """
    points = {}

    def look(value):
        points[value] = measure(value)
        return kind(points[value])

    value, seen, last = first, look(first), None
    if seen in ("touches", "oom"):
        while seen in ("touches", "oom") and value > max(1, first // REACH):
            value //= 2
            seen = look(value)
    else:
        while value < REACH * first and (seen == "pays" or (seen == "wide" and last != "wide")):
            value *= 2
            last, seen = seen, look(value)
    found = bracket(list(points.values()))
    middle = between(found["low"], found["high"]) if found else None
    if middle is not None:
        look(middle)


def between(low: int, high: int) -> int | None:
    """Return the middle of two values on a log axis, a round number (kernels want multiples); None without one."""
    step = 1 << max(0, (low // 8).bit_length() - 1)
    middle = step * round(math.sqrt(low * high) / step)
    return middle if low < middle < high else None


def bracket(points: list[dict]) -> dict | None:
    """Return the largest value that pays and the smallest above it without a gain.

    Returns:
        "low", "high" and "unclear": whether the interval at `high` holds both a gain and a loss. None where there are
        no two such values, or where a settled point without a gain lies below one that pays.
    """
    points = sorted(points, key=lambda point: point["value"])
    low = max((point["value"] for point in points if kind(point) == "pays"), default=None)
    above = [point for point in points if low is not None and point["value"] > low and kind(point) == "touches"]
    if not above or _contradictions(points):
        return None
    return {"low": low, "high": above[0]["value"], "unclear": above[0]["word"] == "unclear"}


def _contradictions(points):
    """Values without a gain, settled so, below one that pays."""
    low = max((point["value"] for point in points if kind(point) == "pays"), default=0)
    return [point["value"] for point in points if point["word"] in ("same", "slower") and point["value"] < low]


def conclusion(points: list[dict], over: str, where: str | None, who: str = "graphs") -> dict:
    """Return what the points say.

    Args:
        points: in any order.
        over: the quantity.
        where: the GPU's name; None for a CPU, of which nothing is claimed.
        who: "graphs", or the name of a variant that is none.

    Returns:
        "crossover" of `bracket`, and "finding", one sentence.
    """
    if where is None:
        return {"crossover": None, "finding": CPU_FINDING}
    points = sorted(points, key=lambda point: point["value"])
    return {"crossover": bracket(points), "finding": _finding(points, over, where, who)}


def _finding(points, over, where, who):
    pays = [point["value"] for point in points if kind(point) == "pays"]
    found, odd, s = bracket(points), _contradictions(points), "" if who == "graphs" else "s"
    measured = [point["value"] for point in points if point["ratio"] is not None]
    if found:
        text = f"{who} stop{s} paying between {over} {found['low']} and {found['high']} on {where}"
        return f"{text} ({found['high']} is unclear)" if found["unclear"] else text
    if odd:
        paying, others = (", ".join(map(str, values)) for values in (pays, odd))
        return f"not monotone: {who} pay{s} at {over} {paying}, not at {others}, on {where}"
    if pays:
        return f"{who} still pay{s} at {over} {pays[-1]} on {where}, {_what_ends(points, pays[-1], over)}"
    if not measured:
        return "no point has a ratio: " + ", ".join(f"{over} {point['value']} {point['status']}" for point in points)
    low, high = measured[0], measured[-1]
    values = f"{over} {low}" if low == high else f"{over} {low} to {high}"
    if any(point["word"] in ("same", "slower") for point in points):
        return f"{who} never paid at {values} on {where}"
    return f"unclear whether {who} pay{s} at {values} on {where}: every interval holds 1"


def _what_ends(points, last, over):
    above = [point for point in points if point["value"] > last]
    if not above:
        return "the largest measured"
    if kind(above[0]) == "oom":
        return "the largest that fits"
    what = "too noisy to say" if kind(above[0]) == "wide" else above[0]["status"]
    return f"and {over} {above[0]['value']} is {what}"
