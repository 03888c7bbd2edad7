"""Where a gain ends along a growing quantity: which value to measure next, and what the measured ones say.

A point is a dict with value, speedup, low and high (95 % interval), verdict (as benchmarks.intervals gives it) and
status; speedup is None where nothing was timed. Nothing here knows a record or a model.
"""

import math

from benchmarks import intervals

CPU_FINDING = "CPU: no speed-up is measured here"
# Furthest from the value where the search begins, as a factor.
REACH = 64
# An interval wider than this (half-width, logarithm) says nothing about where a gain ends.
TOO_WIDE = 0.05

# ------------------------------------------------------------------------------------------------
# Where to measure next


def kind(point: dict) -> str:
    """What a point says: pays, touches (no gain shown), wide (too wide to say), oom, or none."""
    if point["speedup"] is None:
        return "oom" if point["status"] == "oom" else "none"
    if point["verdict"] == "faster":
        return "pays"
    width = half_width(point)
    is_wide = width is None or width > TOO_WIDE
    return "wide" if is_wide and point["verdict"] not in ("same", "slower") else "touches"


def half_width(point: dict) -> float | None:
    """Half of the interval's width, a logarithm; None for one round."""
    return None if point.get("low") is None else math.log(point["high"] / point["low"]) / 2


def search(measure, first: int, largest: int, num_refining: int) -> None:
    """Call measure(value), which returns a point, until the crossover is bracketed and narrowed.

    Up from `first` by doubling while graphs pay; down by halving where they do not pay, or nothing fits, at
    `first`. One point that is too wide to say is passed over, two in a row end the search.
    """
    points = {}

    def look(value):
        points[value] = measure(value)
        return kind(points[value])

    value, seen = first, look(first)
    if seen in ("touches", "oom"):
        while seen in ("touches", "oom") and value > max(1, first // REACH):
            value //= 2
            seen = look(value)
    else:
        last = None
        while value < largest and (seen == "pays" or (seen == "wide" and last != "wide")):
            value = min(2 * value, largest)
            last, seen = seen, look(value)
    for _ in range(num_refining):
        found = bracket(list(points.values()))
        value = between(found["low"], found["high"]) if found else None
        if value is None or value in points or look(value) not in ("pays", "touches"):
            break


def between(low: int, high: int) -> int | None:
    """The middle of two values on a log axis, a round number (kernels want multiples); None where there is none."""
    step = 1 << max(0, (low // 8).bit_length() - 1)
    middle = step * round(math.sqrt(low * high) / step)
    return middle if low < middle < high else None


# ------------------------------------------------------------------------------------------------
# Points that were read from a file


def checked(points) -> list[dict]:
    """Points by value, each verdict computed again from its interval. Raises ValueError that names the point."""
    if not isinstance(points, list):
        raise ValueError(f"points is {points!r}, not a list")
    result: dict = {}
    for index, point in enumerate(points):
        if not isinstance(point, dict):
            raise ValueError(f"point {index} is {point!r}, not an object")
        value = point.get("value")
        if type(value) is not int or not 1 <= value <= 2**53:
            raise ValueError(f"point {index}: value is {value!r}, not a whole number from 1 up")
        if value in result:
            raise ValueError(f"value {value} stands there twice")
        fault = _fault(point)
        if fault:
            raise ValueError(f"value {value}: {fault}")
        result[value] = point | {"verdict": _verdict(point)}
    return [result[value] for value in sorted(result)]


_RATIOS = ("speedup", "low", "high")
_MEASURED = ("ceiling", "issue_ms", "busy_ms", "eager_ms", "graph_ms")
# A ratio is the middle of its interval on a log axis; of the quotient, for digits cut off by hand.
_MIDDLE = 1e-3


def _fault(point):
    for key in (*_RATIOS, *_MEASURED):
        number = point.get(key)
        if number is not None and not (type(number) in (int, float) and 0 <= number < math.inf):
            return f"{key} is {number!r}, not a number from 0 up"
        if number == 0 and key in _RATIOS:
            return f"{key} is 0"
    if not isinstance(point.get("status"), str):
        return f"status is {point.get('status')!r}, not text"
    rounds = point.get("rounds", 0)
    if type(rounds) is not int or rounds < 0:
        return f"rounds is {rounds!r}, not a count"
    speedup, low, high = (point.get(key) for key in _RATIOS)
    if (low is None) != (high is None) or (speedup is None and low is not None):
        return f"speedup {speedup} with low {low} and high {high}"
    if low is not None and (low > high or abs(math.log(speedup) - (math.log(low) + math.log(high)) / 2) > _MIDDLE):
        return f"speedup {speedup} is not the middle of its interval [{low}, {high}]"
    return None


def _verdict(point):
    if point.get("speedup") is None:
        return None
    return intervals.Interval(math.log(point["speedup"]), half_width(point), point.get("rounds", 0)).verdict


# ------------------------------------------------------------------------------------------------
# What the points say


def bracket(points: list[dict]) -> dict | None:
    """{"low", "high", "unclear"}: the largest value that pays and the smallest above it without a gain.

    unclear: whether that interval is too wide for `same` and holds both a gain and a loss. None where there
    are no two such values, or where a settled point without a gain lies below one that pays.
    """
    points = sorted(points, key=lambda point: point["value"])
    low = max((point["value"] for point in points if kind(point) == "pays"), default=None)
    above = [point for point in points if low is not None and point["value"] > low and kind(point) == "touches"]
    if not above or contradictions(points):
        return None
    return {"low": low, "high": above[0]["value"], "unclear": above[0]["verdict"] == "unclear"}


def contradictions(points: list[dict]) -> list[int]:
    """Values without a gain, settled so, below one that pays."""
    low = max((point["value"] for point in points if kind(point) == "pays"), default=0)
    return [point["value"] for point in points if point["verdict"] in ("same", "slower") and point["value"] < low]


def conclusion(
    points: list[dict], over: str, variant: str, where: str | None, is_cpu: bool, variant_kind: str = "graph"
) -> dict:
    """{"crossover", "finding"}: bracket and sentence of points, and no claim from a CPU's. Arguments as `finding`."""
    if is_cpu:
        return {"crossover": None, "finding": CPU_FINDING}
    return {"crossover": bracket(points), "finding": finding(points, over, variant, where, variant_kind)}


def finding(points: list[dict], over: str, variant: str, where: str, variant_kind: str = "graph") -> str:
    """One sentence: where graphs stop paying. where: the GPU's name. variant_kind: what the variant is declared to be;
    one that is no graph is named."""
    points = sorted(points, key=lambda point: point["value"])
    pays = [point["value"] for point in points if kind(point) == "pays"]
    flat = [point for point in points if kind(point) == "touches"]
    who, s = ("graphs", "") if variant_kind == "graph" else (variant, "s")
    found = bracket(points)
    if found:
        text = f"{who} stop{s} paying between {over} {found['low']} and {found['high']} on {where}"
        high = next(point for point in flat if point["value"] == found["high"])
        return f"{text} ({high['value']} is unclear, {_gain(high)})" if found["unclear"] else text
    if contradictions(points):
        return f"not monotone: {who} pay{s} at {over} {_join(pays)}, not at {_join(contradictions(points))}, on {where}"
    if pays:
        return f"{who} still pay{s} at {over} {pays[-1]} on {where}, {_what_ends(points, pays[-1], over)}"
    if any(point["verdict"] in ("same", "slower") for point in flat):
        return f"{who} never paid at {_range(flat, over)} on {where}"
    measured = [point for point in points if point["speedup"] is not None]
    if measured:
        return f"unclear whether {who} pay{s} at {_range(measured, over)} on {where}: every interval holds 1"
    if not points:
        return "no point was measured"
    return "no point has a speed-up: " + ", ".join(f"{over} {point['value']} {point['status']}" for point in points)


def _what_ends(points, last, over):
    above = [point for point in points if point["value"] > last]
    if not above:
        return "the largest measured"
    if kind(above[0]) == "oom":
        return "the largest that fits"
    what = f"too noisy to say ({_gain(above[0])})" if kind(above[0]) == "wide" else above[0]["status"]
    return f"and {over} {above[0]['value']} is {what}"


def _range(points, over):
    low, high = points[0]["value"], points[-1]["value"]
    return f"{over} {low}" if low == high else f"{over} {low} to {high}"


def _gain(point):
    width = half_width(point)
    return f"{point['speedup']:.3f}x" + (" of one round" if width is None else f" +-{100 * width:.1f} %")


def _join(values):
    return ", ".join(map(str, values))
