"""The size at which a graph stops gaining: one rule for the screen, the pages and the figures."""

import statistics as plain
from collections.abc import Iterable
from typing import NamedTuple

# A gain below it would not be noticed.
LEAST_GAIN = 1.05
UNITS = {"sequence": "{:,} tokens"}


class Point(NamedTuple):
    """A point of a sweep on one host that passed.

    Attributes:
        low: lower end of the gain's 95 % interval.
        kernel_us: the mean kernel of eager.
        host_us: the host's time to issue one.
    """

    value: int
    low: float
    kernel_us: float | None
    host_us: float | None


def crossing(points: Iterable[Point]) -> Point | None:
    """Return the smallest value whose interval contains 1.05 or lies below it; None where all lie above."""
    return next((point for point in sorted(points) if point.low <= LEAST_GAIN), None)


def sentence(over: str, points: Iterable[Point]) -> str:
    """Return where the gain ends on a host, in a sentence; "" without points."""
    ordered = sorted(points)
    if not ordered:
        return ""
    hosts_us = [point.host_us for point in ordered if point.host_us]
    host = f" on a host of {plain.median(hosts_us):.0f} us a kernel" if hosts_us else ""
    end = crossing(ordered)
    at = end or ordered[-1]
    size = amount(over, at.value) + (f" ({at.kernel_us:.0f} us a kernel)" if at.kernel_us else "")
    if end is None:
        return f"A graph still gains at {size}, the largest size that passed,{host}.".replace(",.", ".")
    more = [point.value for point in ordered if point.value > end.value and point.low > LEAST_GAIN]
    again = f" It gains again at {' and '.join(amount(over, value) for value in more)}." if more else ""
    if end == ordered[0]:
        return f"Even at {size}, the smallest size that passed, a gain of 5 % is not certain{host}.{again}"
    return f"At {size} and above, a gain of 5 % is not certain{host}.{again}"


def amount(over: str, value: int) -> str:
    """Return 1,024 tokens, or batch 4."""
    return UNITS.get(over, f"{over} {{:,}}").format(value)
