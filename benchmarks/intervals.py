"""The statistic of a run, and intervals and verdicts from paired rounds.

Each round gives one log-ratio, log(base time / variant time), of two runs that stood next to each other
in time. Over rounds their mean has a Student-t interval. That is the whole statistics: rounds in ABBA
order turn drift into scatter, which widens the interval instead of moving it.
"""

import math
from dataclasses import dataclass

import numpy

SAME = math.log(1.005)  # an interval inside +-0.5 % says that two variants are the same for practical purposes
AUTO_HALF_WIDTH = 0.01
AUTO_MAX_ROUNDS = 15
# A rule that stops once the interval is narrow prefers sessions whose scatter looks small by chance, and
# more so the fewer rounds it may stop at: see the simulation in tests/test_intervals.py.
AUTO_MIN_ROUNDS = 8

# 97.5 % quantiles of Student's t for 1 to 12 degrees of freedom (any table of the distribution).
_T = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099, 2.17881)


# ------------------------------------------------------------------------------------------------
# One run


def statistic(step_ms: list, batch: list, quantile: float = 0.5) -> float:
    """Mean over the kinds of batch of each kind's quantile of step time, ms; the median unless told."""
    groups = by_batch(step_ms, batch)
    return sum(percentile(times, quantile) for times in groups.values()) / len(groups)


def by_batch(step_ms: list, batch: list) -> dict:
    groups: dict = {}
    for ms, kind in zip(step_ms, batch, strict=True):
        groups.setdefault(kind, []).append(ms)
    return groups


def percentile(values: list, quantile: float) -> float:
    """Linear between the two nearest order statistics."""
    ordered = sorted(values)
    position = quantile * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def tail(step_ms: list, batch: list) -> float:
    """p95 of step time over the median of its kind of batch, dimensionless."""
    medians = {kind: percentile(times, 0.5) for kind, times in by_batch(step_ms, batch).items()}
    return percentile([ms / medians[kind] for ms, kind in zip(step_ms, batch, strict=True)], 0.95)


# ------------------------------------------------------------------------------------------------
# Several rounds


@dataclass(frozen=True)
class Paired:
    """Mean of paired log-ratios and half of its 95 % interval, both dimensionless logarithms."""

    mean: float
    half_width: float | None
    num_rounds: int

    @property
    def ratio(self) -> float:
        """Speed-up: base time over variant time, geometric mean over rounds."""
        return math.exp(self.mean)

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else math.exp(self.mean - self.half_width)

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else math.exp(self.mean + self.half_width)

    @property
    def verdict(self) -> str:
        """faster or slower (interval excludes 1), same (interval inside +-0.5 %), unclear, or one round."""
        if self.half_width is None:
            return "one round"
        if abs(self.mean) > self.half_width:
            return "faster" if self.mean > 0 else "slower"
        return "same" if abs(self.mean) + self.half_width <= SAME else "unclear"


def student_t(num_degrees: int) -> float:
    """97.5 % quantile of Student's t (two-sided 95 %), correct to 1e-3. Raises ValueError below 1.

    Above the table: the expansion in 1/n of Abramowitz and Stegun, 26.7.5.
    """
    if num_degrees < 1:
        raise ValueError(f"Student's t needs at least 1 degree of freedom, got {num_degrees}")
    if num_degrees <= len(_T):
        return _T[num_degrees - 1]
    z, n = 1.959963985, num_degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def paired(log_ratios) -> Paired:
    """Mean and 95 % interval of log-ratios [rounds]; one round has no interval. Raises ValueError for none."""
    values = numpy.asarray(log_ratios, dtype=float)
    if values.size == 0:
        raise ValueError("no round has a pair to compare")
    if values.size == 1:
        return Paired(float(values[0]), None, 1)
    error = values.std(ddof=1) / math.sqrt(values.size)
    return Paired(float(values.mean()), float(student_t(values.size - 1) * error), int(values.size))


def bears(gain: float, half_width: float | None) -> bool:
    """Whether a result carries a bound on a gain: its half-width is at most half of that gain (both logarithms)."""
    return half_width is not None and half_width <= abs(gain) / 2


def next_num_rounds(results, num_rounds: int) -> int:
    """How many rounds ROUNDS=auto wants after num_rounds; the same number means that it stops.

    results: a `Paired` for each comparable variant. Pairs of rounds are added until every half-width is
    at most 1 %, and never beyond 15. Only widths are looked at: stopping on a sign would manufacture one.
    """
    wide = any(result.half_width is None or result.half_width > AUTO_HALF_WIDTH for result in results)
    if num_rounds >= AUTO_MAX_ROUNDS or (num_rounds >= AUTO_MIN_ROUNDS and not wide):
        return num_rounds
    return min(num_rounds + 2, AUTO_MAX_ROUNDS)
