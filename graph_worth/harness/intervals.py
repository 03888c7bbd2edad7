"""Ratios of a run, their intervals, and the words for them.

The unit is the cycle. Each cycle gives one log ratio for each variant: mean of the logs of the cycle's base blocks less
the log of the variant's block. A run's ratio is the geometric mean over its cycles. Its 95 % interval is Student's t
with cycles - 1 degrees of freedom. The interval speaks for this host in these minutes. docs/statistics.md explains it
and says how often it holds.

A ratio above 1 means that the variant is faster than its base.
"""

import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
SAME = 0.005  # two programs whose times differ by less are the same for our purpose
SMALL_EFFECT = 0.01  # beside a smaller one stands what two equal programs differed by
NEAR = 0.05  # a graph that stays further below its ceiling missed it
LEAST_CYCLES = 8  # before `auto` ends a run
LEAST_HOSTS = 3  # the gate names rows with fewer


@dataclass(frozen=True)
class Ratio:
    """A variant's ratio to its base in one run on one host.

    Attributes:
        ratio: base_ms / variant_ms, exactly.
        low, high: ends of the 95 % interval, ratio / (1 + half_width) and ratio * (1 + half_width).
        cycles: number of cycles.
        base_ms, variant_ms: geometric means of blocks over the same cycles, each of the same weight.
    """

    ratio: float
    low: float
    high: float
    half_width: float
    cycles: int
    base_ms: float
    variant_ms: float


def ratio_of(cycles: Sequence[tuple[Sequence[float], float]]) -> Ratio:
    """Return a variant's ratio over the cycles of a run, with its interval.

    `cycles`: for each cycle the times of its base blocks and of the variant's block in ms. One cycle shows no scatter,
    so its interval goes from 0 to inf.
    """
    base_logs = [plain.fmean(map(math.log, bases)) for bases, _ in cycles]
    logs = [math.log(variant) for _, variant in cycles]
    base_ms, variant_ms = math.exp(plain.fmean(base_logs)), math.exp(plain.fmean(logs))
    ratio = base_ms / variant_ms
    half_width = math.expm1(_half_width([base - log for base, log in zip(base_logs, logs, strict=True)]))
    low, high = ratio / (1 + half_width), ratio * (1 + half_width)
    return Ratio(ratio, low, high, half_width, len(cycles), base_ms, variant_ms)


def word(ratio: Ratio) -> str:
    """Return "same" where the interval lies within 0.5 % of 1, else "faster" or "slower" where it leaves 1 out.

    Else "unclear". Exchanging base and variant exchanges "faster" and "slower" only.
    """
    if ratio.low >= 1 / (1 + SAME) and ratio.high <= 1 + SAME:
        return "same"
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "unclear"


def student_t(share: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution: `share` of it lies below."""
    # Most commands compute no interval, and scipy.stats, which calls this function too, takes a second to import.
    from scipy.special import stdtrit

    return stdtrit(freedom, share)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of two or more values."""
    import numpy

    return float(numpy.std(values, ddof=1))


def enough(ratios: Sequence[Ratio]) -> bool:
    """Return whether `auto` may end the run: every ratio has LEAST_CYCLES and a half-width of at most SAME.

    The rule looks at widths only, never at the ratios, so a run does not end because its result pleases.
    """
    return len(ratios) > 0 and all(ratio.cycles >= LEAST_CYCLES and ratio.half_width <= SAME for ratio in ratios)


def _half_width(logs):
    """Half the width of Student's t interval of the mean of `logs`."""
    count = len(logs)
    if count == 1:
        return math.inf
    return float(student_t((1 + CONFIDENCE) / 2, count - 1) * deviation(logs) / math.sqrt(count))
