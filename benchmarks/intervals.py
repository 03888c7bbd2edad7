"""The statistic of a run, intervals over pairs of runs, units of sessions, and verdicts: the rules of docs/method.md.

Plain data in, plain data out: lists of step times, log ratios of pairs, sessions with the boot and the GPUs they ran
on. The log ratio of a pair is log(base ms / variant ms), of two runs of one round that stood next to each other in
time; rounds in ABBA order turn drift into scatter, which widens an interval instead of moving it. benchmarks.simulate
says how often these rules give a false verdict, and how often they find an effect.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy

SAME = math.log(1.005)  # an interval inside +-0.5 % says that two variants are the same for practical purposes

TABLE_LEVEL = 0.95  # of the intervals that tables print
VERDICT_LEVEL = 0.99  # of the intervals that verdicts rest on

MIN_PAIRS = 3  # with fewer a session has no value and enters no unit
MIN_PAIRS_ON_HOST = 5  # with fewer a session gives no verdict of its own
LOOKS = (3, 6, 12)  # numbers of units at which the plain verdict is judged

LONG_STEP_MS = 400.0  # beyond it a window has too few steps for a 10th percentile

_MAX_KIND = 2**16 - 1  # kinds of batch are indexed in 16 bits, which sort in one tenth of the time

AUTO_HALF_WIDTH = 0.01
AUTO_MAX_ROUNDS = 15
# A rule that stops once the interval is narrow prefers sessions whose scatter looks small by chance, and
# more so the fewer rounds it may stop at: see the simulation in tests/test_intervals.py.
AUTO_MIN_ROUNDS = 8

# Two-sided quantiles of Student's t for 1 to 12 degrees of freedom, and the normal one (any table of the distribution).
_T = {
    0.95: (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099, 2.17881),
    0.99: (63.65674, 9.92484, 5.84091, 4.60409, 4.03214, 3.70743, 3.49948, 3.35539, 3.24984, 3.16927, 3.10581, 3.05454),
}
_NORMAL = {0.95: 1.959963985, 0.99: 2.575829304}


# ------------------------------------------------------------------------------------------------
# One run


def statistic(step_ms: Sequence[float], batch: Sequence, quantile: float = 0.5) -> float:
    """Mean over the kinds of batch of each kind's quantile of step time, ms; the median unless told.

    step_ms, batch: time of each step and its kind of batch, [steps]. Raises ValueError where their lengths differ
    or there is no step.
    """
    return float(_of_each_kind(*_arrays(step_ms, batch), quantile).mean())


def by_batch(step_ms: Sequence[float], batch: Sequence) -> dict:
    """{kind of batch: its step times, ms}, both in order of first appearance."""
    groups: dict = {}
    for ms, kind in zip(step_ms, batch, strict=True):
        groups.setdefault(kind, []).append(ms)
    return groups


def percentile(values: Sequence[float], quantile: float) -> float:
    """Linear between the two nearest order statistics; quantile in 0 to 1. Raises ValueError for no value."""
    ordered = numpy.sort(numpy.asarray(values, dtype=float))
    if ordered.size == 0:
        raise ValueError("no value to take a percentile of")
    position = quantile * (ordered.size - 1)
    low = int(position)
    high = min(low + 1, ordered.size - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (position - low))


def tail(step_ms: Sequence[float], batch: Sequence) -> float:
    """p95 of step time over the median of its kind of batch, dimensionless. Raises as `statistic` does."""
    times, kinds = _arrays(step_ms, batch)
    return percentile(times / _of_each_kind(times, kinds, 0.5)[kinds], 0.95)


def _arrays(step_ms, batch):
    """Step times, and for each the index of its kind of batch, from 0 without a gap."""
    times, kinds = numpy.asarray(step_ms, dtype=float), numpy.asarray(batch)
    if len(times) != len(kinds):
        raise ValueError(f"{len(times)} step times, but {len(kinds)} kinds of batch")
    if not len(times):
        raise ValueError("no step to take a statistic of")
    if kinds.dtype.kind in "iu" and kinds.min() >= 0 and kinds.max() <= _MAX_KIND:
        used = numpy.bincount(kinds) > 0
        kinds = kinds if used.all() else (numpy.cumsum(used) - 1)[kinds]
    else:
        kinds = numpy.unique(kinds, return_inverse=True)[1]
    return times, kinds.astype(numpy.uint16)


def _of_each_kind(times, kinds, quantile):
    """The quantile of each kind's times, ms, [kinds]."""
    counts = numpy.bincount(kinds)
    if len(counts) == 1:
        return numpy.array([percentile(times, quantile)])
    ascending = numpy.argsort(times)
    ordered = times[ascending[numpy.argsort(kinds[ascending], kind="stable")]]
    first = numpy.cumsum(counts) - counts
    position = quantile * (counts - 1)
    below = position.astype(int)
    low = ordered[first + below]
    high = ordered[first + numpy.minimum(below + 1, counts - 1)]
    return low + (high - low) * (position - below)


def choose_base(candidates: dict[str, list[tuple[Sequence[float], Sequence]]]) -> str:
    """Name of the eager variant that a row compares with: the fastest one over all rounds of its sessions.

    candidates: for each eager variant its timed runs (last attempts) of all sessions that pool in the row, each
    (step_ms, batch) as `statistic` takes them. The variant with the smallest median over rounds of the 10th percentile
    of step time wins; of the median step time where a candidate's steps exceed 0.4 s. Of equal ones the first in the
    dict. Where a candidate has the 3 runs that a session's value needs, those with fewer are left aside: one lucky run
    of a variant that then failed would leave every row without pairs. Raises ValueError where nothing was timed.

    A choice in each session would favour the eager that ran faster there by chance, and over many sessions that alone
    makes the variant "slower" (benchmarks.simulate says how often).
    """
    most = max((len(runs) for runs in candidates.values()), default=0)
    if not most:
        raise ValueError("no eager variant has a timed run to compare with")
    eligible = {name: runs for name, runs in candidates.items() if len(runs) >= min(most, MIN_PAIRS)}

    def over_rounds(name, quantile):
        return percentile([statistic(step_ms, batch, quantile) for step_ms, batch in eligible[name]], 0.5)

    medians = {name: over_rounds(name, 0.5) for name in eligible}
    if max(medians.values()) > LONG_STEP_MS:
        return min(eligible, key=medians.__getitem__)
    return min(eligible, key=lambda name: over_rounds(name, 0.1))


# ------------------------------------------------------------------------------------------------
# Student's t


@dataclass(frozen=True)
class Interval:
    """Mean of `num` log ratios and half of its interval, both logarithms; None for a single value.

    The verdict is at the level of the interval: 95 % in sweeps, the gate and ROUNDS=auto, 99 % in tables.
    """

    mean: float
    half_width: float | None
    num: int

    @property
    def ratio(self) -> float:
        """Speed-up: base time over variant time, geometric mean."""
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


def student_t(degrees: int, level: float = TABLE_LEVEL) -> float:
    """Two-sided quantile of Student's t at level 0.95 or 0.99, correct to 1e-3.

    Above the table: the expansion in 1/n of Abramowitz and Stegun, 26.7.5. Raises ValueError below 1 degree of
    freedom and for another level.
    """
    if level not in _T:
        raise ValueError(f"Student's t is tabulated at levels 0.95 and 0.99, not {level}")
    if degrees < 1:
        raise ValueError(f"Student's t needs at least 1 degree of freedom, got {degrees}")
    if degrees <= len(_T[level]):
        return _T[level][degrees - 1]
    z, n = _NORMAL[level], degrees
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    last = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return sum(term / n**power for power, term in enumerate((*terms, last)))


def interval(log_values: Iterable[float], level: float = TABLE_LEVEL) -> Interval:
    """Mean and Student's t interval of logarithms; one value has no interval. Raises ValueError for none."""
    values = numpy.asarray(tuple(log_values), dtype=float)
    if values.size == 0:
        raise ValueError("no round has a pair to compare")
    if values.size == 1:
        return Interval(float(values[0]), None, 1)
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return Interval(float(values.mean()), student_t(values.size - 1, level) * error, int(values.size))


def verdict(log_values: Iterable[float], level: float = VERDICT_LEVEL) -> str:
    """`Interval.verdict` of 2 or more logarithms. Raises ValueError for fewer."""
    result = interval(log_values, level)
    if result.half_width is None:
        raise ValueError(f"a verdict needs at least 2 values, got {result.num}")
    return result.verdict


def bears(gain: float, half_width: float | None) -> bool:
    """Whether a result carries a bound on a gain: its half-width is at most half of that gain (both logarithms)."""
    return half_width is not None and half_width <= abs(gain) / 2


def next_num_rounds(results: Iterable[Interval], num_rounds: int) -> int:
    """How many rounds ROUNDS=auto wants after num_rounds; the same number means that it stops.

    results: the 95 % interval of each comparable variant. Pairs of rounds are added until every half-width is
    at most 1 %, and never beyond 15. Only widths are looked at: stopping on a sign would manufacture one.
    """
    wide = any(result.half_width is None or result.half_width > AUTO_HALF_WIDTH for result in results)
    if num_rounds >= AUTO_MAX_ROUNDS or (num_rounds >= AUTO_MIN_ROUNDS and not wide):
        return num_rounds
    return min(num_rounds + 2, AUTO_MAX_ROUNDS)


# ------------------------------------------------------------------------------------------------
# Sessions and units


@dataclass(frozen=True, kw_only=True)
class Session:
    """The pairs of one row in one session.

    boot, gpus: boot id and GPU uuids it ran on; of several nodes rank 0's boot, and in gpus everyone's GPUs and the
    other nodes' boots. On the CPU no GPU.
    begin: UTC as text that sorts by time. log_ratios: log(base ms / variant ms) of each pair, last attempts, by
    round; first_log_ratios: the same of first attempts, equal where no run was repeated. may_be_plain: False for
    records of schema 1, which lack what a plain verdict asks for, and for sessions that did not run all eagers.
    """

    name: str
    boot: str
    gpus: tuple[str, ...]
    begin: str
    log_ratios: tuple[float, ...]
    first_log_ratios: tuple[float, ...]
    may_be_plain: bool = True

    @property
    def value(self) -> float | None:
        """Mean log ratio of its pairs; None with fewer than 3."""
        return float(numpy.mean(self.log_ratios)) if len(self.log_ratios) >= MIN_PAIRS else None


@dataclass(frozen=True)
class Unit:
    """Sessions that share a boot or a GPU, directly or through one another, in order of time."""

    sessions: tuple[Session, ...]

    @property
    def value(self) -> float:
        """Mean of its sessions' values, a log ratio."""
        return float(numpy.mean([session.value for session in self.sessions]))

    @property
    def begin(self) -> str:
        return self.sessions[0].begin


def units(sessions: Iterable[Session]) -> list[Unit]:
    """Units in order of time. A session with fewer than 3 pairs enters none, and joins no others to one."""
    members: list[list[Session]] = []
    for session in _by_time(sessions):
        if session.value is None:
            continue
        joined = [group for group in members if any(_share_a_machine(session, other) for other in group)]
        members = [group for group in members if group not in joined]
        members.append(_by_time([session, *(other for group in joined for other in group)]))
    return sorted((Unit(tuple(group)) for group in members), key=lambda unit: (unit.begin, unit.sessions[0].name))


def _share_a_machine(session, other):
    return not {session.boot, *session.gpus}.isdisjoint({other.boot, *other.gpus})


def _by_time(sessions):
    return sorted(sessions, key=lambda session: (session.begin, session.name))


# ------------------------------------------------------------------------------------------------
# The verdict of a row


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a row prints of its sessions.

    ratio: speed-up, geometric mean over units; without a unit, over the pairs of the last session.
    low, high: 95 % interval of it, over 3 or more units, or over the pairs of the only session; else None.
    half_width: half of that interval, a logarithm. range_low, range_high: over units, None with fewer than 2.
    verdict: faster, slower, same or unclear, with scope "plain" or "on this host"; without a scope "one round",
    "two pairs", or "" where no rule gives a verdict.
    num_units, num_sessions, num_pairs: what the ratio rests on. num_judged_units: of these, units with a session of 5
    pairs, which a verdict on this host rests on. num_older: sessions of schema 1 that the ratio leaves aside.
    """

    ratio: float
    low: float | None
    high: float | None
    half_width: float | None
    range_low: float | None
    range_high: float | None
    verdict: str
    scope: str
    num_units: int
    num_sessions: int
    num_pairs: int
    num_judged_units: int = 0
    num_older: int = 0


def judge(sessions: Iterable[Session]) -> Judgement | None:
    """What the sessions of one row say; None where no session has a pair.

    Sessions of schema 1 count only where none of schema 2 has a pair.
    """
    with_pairs = _by_time(session for session in sessions if session.log_ratios)
    if not with_pairs:
        return None
    counted = [session for session in with_pairs if session.may_be_plain] or with_pairs
    found = units(counted)
    used = [session for unit in found for session in unit.sessions] or counted[-1:]
    values = [unit.value for unit in found]
    if len(found) >= LOOKS[0]:
        result = interval(values)
    elif len(used) == 1 and found:
        result = interval(used[0].log_ratios)
    else:
        result = Interval(float(numpy.mean(values or used[0].log_ratios)), None, len(values))
    word, scope = _verdict_and_scope(counted)
    return Judgement(
        ratio=result.ratio,
        low=result.low,
        high=result.high,
        half_width=result.half_width,
        range_low=math.exp(min(values)) if len(values) >= 2 else None,
        range_high=math.exp(max(values)) if len(values) >= 2 else None,
        verdict=word,
        scope=scope,
        num_units=len(found),
        num_sessions=len(used),
        num_pairs=sum(len(session.log_ratios) for session in used),
        num_judged_units=sum(any(_has_verdict(session) for session in unit.sessions) for unit in found),
        num_older=len(with_pairs) - len(counted),
    )


def _verdict_and_scope(sessions):
    """Of last attempts; unclear where first attempts say something else."""
    last = _of_attempts(sessions)
    first = _of_attempts([replace(session, log_ratios=session.first_log_ratios) for session in sessions])
    return ("unclear", last[1]) if last[1] and first != last else last


def _of_attempts(sessions):
    found = units(sessions)
    if not found:
        return {1: "one round", 2: "two pairs"}.get(len(sessions[-1].log_ratios), ""), ""
    look = max((look for look in LOOKS if look <= len(found)), default=None)
    if look and all(session.may_be_plain for session in sessions):
        return verdict(unit.value for unit in found[:look]), "plain"
    words = Counter(verdict(session.log_ratios) for session in sessions if _has_verdict(session))
    if not words:
        return "", ""
    return next(iter(words)) if len(words) == 1 else "unclear", "on this host"


def _has_verdict(session):
    return len(session.log_ratios) >= MIN_PAIRS_ON_HOST
