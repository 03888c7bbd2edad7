"""Rates of false verdicts and of effects found, over rows that are simulated from the run upwards.

benchmarks.simulate prints them. Runs are arrays [2, variants, rows, sessions, rounds] of log times of standard
deviation 1, as `scatter.draw` makes them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from benchmarks import intervals
from benchmarks.intervals import LOOKS, MIN_PAIRS_ON_HOST, VERDICT_LEVEL, student_t
from benchmarks.scatter import CORRELATED, INDEPENDENT, RESAMPLED, draw

BOUND, BOUND_UPPER = 0.05, 0.06  # of ever a false verdict, and of the upper end of its own 95 % interval

NUM_ROUNDS = 5  # of a simulated session, as `make bench` measures unless told
SCATTERS = (0.003, 0.01, 0.05)  # standard deviation of a run's log time
EFFECTS = (0.02, 0.05, 0.20)  # true speed-ups less 1
PAIRS_ON_HOST = (MIN_PAIRS_ON_HOST, intervals.AUTO_MIN_ROUNDS)

# Shape of the host effect, and its standard deviation in the log ratio. The skewness of a lognormal of 0.5 is 1.75,
# that of 1 is 6.2.
SHAPES = ("normal", "lognormal 0.5", "lognormal 1")
HOSTS = (("normal", 0.0), *((shape, size) for shape in SHAPES for size in (0.05, 0.20)))

# The choice of the base, and what could replace it: see `chosen`.
RULES = {
    "row": "once for the row, over the rounds of all its sessions (the rule)",
    "unequal": "the same, on hosts that differ in speed far more than runs do",
    "mean": "once for the row, by the mean of its sessions' medians",
    "session": "in each session, over its own rounds",
    "others": "for each pair, by the other rounds of its session",
    "clear": "in each session, another eager only where it is faster than `eager` on this host, 99 %",
}
NUM_UNITS = 24  # to which rows grow where the verdict is asked for between looks too
UNEQUAL = 30.0  # standard deviation of the speed of hosts under "unequal", in units of a run's scatter
_CHUNK = 120_000  # simulated sessions at a time, for memory


# ------------------------------------------------------------------------------------------------
# The base


def chosen(times, rule="row", gap=0.0, speed=0.0):
    """Log ratios base / variant of runs as `scatter.draw` makes them, [..., rounds]; the last variant is the graph.

    rule: a key of RULES. Under "row", "unequal" and "mean" the runs are [variants, rows, sessions of a row, rounds],
    else [variants, ..., rounds]. gap: log time of the second eager less that of the first. speed: what a host adds to
    the log time of all its runs; it broadcasts to runs of one variant.
    """
    compared, quiet = times
    if len(compared) == 2:
        return compared[0] - compared[1]
    eagers, quiet = (numpy.stack([of[0], of[1] + gap]) for of in (compared, quiet))
    return numpy.where(_is_second(quiet + speed, rule), eagers[1], eagers[0]) - compared[-1]


def _is_second(quiet, rule="row"):
    """Whether the second of two eagers is the base; broadcasts to the runs of one."""
    if rule in ("row", "unequal"):
        return _is_smaller(_median(quiet.reshape(*quiet.shape[:-2], -1)))[..., None, None]
    if rule == "mean":
        return _is_smaller(_median(quiet).mean(axis=-1))[..., None, None]
    if rule == "session":
        return _is_smaller(_median(quiet))[..., None]
    if rule == "others":
        without = [numpy.delete(quiet, index, axis=-1) for index in range(quiet.shape[-1])]
        return numpy.stack([_is_smaller(_median(rounds)) for rounds in without], axis=-1)
    assert rule == "clear", rule
    return (words_of(interval_of(quiet[0] - quiet[1])) > 0)[..., None]


def _is_smaller(of_both):
    return of_both[1] < of_both[0]


def _median(values):
    """Over the last axis; sorting so few numbers is faster than what numpy.median does."""
    num, ordered = values.shape[-1], numpy.sort(values, axis=-1)
    return (ordered[..., (num - 1) // 2] + ordered[..., num // 2]) / 2


# ------------------------------------------------------------------------------------------------
# Verdicts


def interval_of(log_values, level=VERDICT_LEVEL):
    """Mean and half of the interval over the last axis, [2, ...]; benchmarks.intervals does the same to one row."""
    num = log_values.shape[-1]
    half_width = student_t(num - 1, level) / math.sqrt(num) * log_values.std(axis=-1, ddof=1)
    return numpy.stack([log_values.mean(axis=-1), half_width])


def words_of(interval, effect=0.0):
    """1 faster, -1 slower, 0 neither. effect: a true speed-up less 1."""
    mean, half_width = interval[0] + math.log1p(effect), interval[1]
    return (mean > half_width).astype(int) - (mean < -half_width)


@dataclass(frozen=True)
class Rates:
    """Shares of simulated rows, 0 to 1.

    false: without an effect the verdict was ever faster or slower. faster: it was ever faster. power: faster, under
    each effect, [effects, looks].
    """

    num: int
    false: float
    faster: float
    power: numpy.ndarray

    @property
    def upper(self) -> float:
        """Upper end of the 95 % interval of `false` (Wilson)."""
        z, n = 1.959963985, self.num
        half = z * math.sqrt(self.false * (1 - self.false) / n + z**2 / (4 * n**2))
        return (self.false + z**2 / (2 * n) + half) / (1 + z**2 / n)

    @property
    def holds(self) -> bool:
        """Whether false verdicts stay within the bound."""
        return self.false <= BOUND and self.upper <= BOUND_UPPER


def rates_of_words(words, power=()) -> Rates:
    """words: what was said of each row, [times asked, rows]."""
    words = numpy.asarray(words)
    false, faster = (float(numpy.any(each, axis=0).mean()) for each in (words != 0, words > 0))
    return Rates(words.shape[1], false, faster, numpy.array(power))


def rates_of(looks) -> Rates:
    """looks: mean and half-width of each row at each look, [looks, 2, rows]."""
    power = [[numpy.mean(words_of(look, effect) > 0) for look in looks] for effect in EFFECTS]
    return rates_of_words([words_of(look) for look in looks], power)


def looks_of_rows(times, host=0.0):
    """Plain intervals of rows at each look, [looks, 2, rows], with the base chosen anew at each.

    times: runs, [2, variants, rows, sessions, rounds]. host: what each host adds to its eager runs and so to the log
    ratio, [rows, sessions].
    """
    compared, quiet = times
    values = compared.mean(axis=-1)
    host = numpy.broadcast_to(host, values.shape[1:])
    looks = []
    for look in LOOKS:
        base = values[0, :, :look]
        if len(values) == 3:
            is_second = _is_second(quiet[:2, :, :look] + host[:, :look, None])[..., 0]
            base = numpy.where(is_second, values[1, :, :look], base)
        looks.append(interval_of(base - values[-1, :, :look] + host[:, :look]))
    return numpy.stack(looks)


@dataclass(frozen=True)
class Cell:
    """One simulated case. scatter: of a run's log time, None where it is resampled."""

    shape: str
    host: float
    kind: str
    scatter: float | None
    num_eagers: int
    rates: Rates

    @property
    def is_bound(self) -> bool:
        """Whether the bound must hold: normal and resampled, by the requirement."""
        return self.shape == "normal"


def plain_cells(num_runs, seed, measured=()) -> list[Cell]:
    """Every host effect with every scatter, with one eager and with the choice among two.

    measured: log(eager / control) of measured sessions, each [rounds, 2].
    """
    random = numpy.random.default_rng(seed)
    hosts = {shape: host_effect(random, shape, (num_runs, LOOKS[-1])) for shape in SHAPES}
    cells = []
    for kind, scatters in kinds_of(measured):
        for num_eagers in (1, 2):
            parts: dict = {(*host, size): [] for host in HOSTS for size in scatters}
            for rows_of, times in _rows_of_runs(random, kind, num_runs, num_eagers + 1, measured):
                for (shape, host, size), looks in parts.items():
                    looks.append(looks_of_rows(times, host / (size or 1.0) * hosts[shape][rows_of]))
            for (shape, host, size), looks in parts.items():
                rates = rates_of((size or 1.0) * numpy.concatenate(looks, axis=-1))
                cells.append(Cell(shape, host, kind, size, num_eagers, rates))
    return cells


def _rows_of_runs(random, kind, num_runs, num_variants, measured=(), num_sessions=LOOKS[-1]):
    """(slice of rows, their runs, [2, variants, rows, sessions, rounds]), a part of the rows at a time, for memory."""
    chunk = _CHUNK // num_sessions
    for start in range(0, num_runs, chunk):
        num = min(chunk, num_runs - start)
        times = draw(random, kind, num * num_sessions, num_variants, NUM_ROUNDS, measured)
        yield slice(start, start + num), times.reshape(2, num_variants, num, num_sessions, NUM_ROUNDS)


def kinds_of(measured):
    return [(INDEPENDENT, SCATTERS), (CORRELATED, SCATTERS), *([(RESAMPLED, (None,))] if measured else [])]


def host_effect(random, shape, size):
    """Of mean 0 and standard deviation 1."""
    normal = random.standard_normal(size)
    if shape == "normal":
        return normal
    sigma = float(shape.removeprefix("lognormal "))
    variance = math.expm1(sigma**2) * math.exp(sigma**2)
    return (numpy.exp(sigma * normal) - math.exp(sigma**2 / 2)) / math.sqrt(variance)


# ------------------------------------------------------------------------------------------------
# On this host


def auto_schedule() -> list[int]:
    """Numbers of rounds at which ROUNDS=auto may stop."""
    schedule = [intervals.AUTO_MIN_ROUNDS]
    while (wanted := intervals.next_num_rounds([intervals.Interval(0.0, None, 1)], schedule[-1])) != schedule[-1]:
        schedule.append(wanted)
    return schedule


def on_this_host(times, size) -> tuple[list[Rates], float]:
    """Rates after 5 pairs, after 8 and under ROUNDS=auto, and the mean number of rounds of the last.

    times: runs of standard deviation 1, 15 rounds of them. size: that of the simulated runs. The base is chosen over
    the rounds that there are: a row of one session has only those.
    """

    def at(num_rounds, level=VERDICT_LEVEL):
        return interval_of(size * chosen([of[..., :num_rounds] for of in times], "session"), level)

    schedule = auto_schedule()
    result, num_rounds = at(schedule[-1]), numpy.full(times[0].shape[1], float(schedule[-1]))
    # The first of the schedule that is narrow enough counts.
    for num in reversed(schedule[:-1]):
        stops = at(num, intervals.TABLE_LEVEL)[1] <= intervals.AUTO_HALF_WIDTH
        result = numpy.where(stops, at(num), result)
        num_rounds[stops] = num
    return [rates_of(each[None]) for each in (*map(at, PAIRS_ON_HOST), result)], float(num_rounds.mean())


def host_rows(num_runs, seed, measured=()) -> Iterator[tuple]:
    """(kind, number of eagers, scatter, rates after 5 pairs, 8 and auto, mean rounds of auto) of each case."""
    random = numpy.random.default_rng(seed)
    for kind, scatters in kinds_of(measured):
        for num_eagers in (1, 2):
            times = draw(random, kind, num_runs, num_eagers + 1, intervals.AUTO_MAX_ROUNDS, measured)
            for size in scatters:
                yield kind, num_eagers, size, *on_this_host(times, size or 1.0)


def ever_rates(num_runs, seed, kind, num_eagers, measured=()) -> Rates:
    """Rates of rows whose first session is judged on this host, then two together, then 3, 6 and 12 plainly.

    Hosts have no effect, so that a verdict on this host is false too. Of two sessions both must say it.
    """
    random, parts = numpy.random.default_rng(seed), []
    for _, times in _rows_of_runs(random, kind, num_runs, num_eagers + 1, measured):
        one, two = (words_of(interval_of(chosen(times[:, :, :, :num]))) for num in (1, 2))
        both = numpy.where(two[:, 0] == two[:, 1], two[:, 0], 0)
        parts.append([one[:, 0], both, *map(words_of, looks_of_rows(times))])
    return rates_of_words(numpy.concatenate(parts, axis=-1))


def between_rates(num_runs, seed, kind, speed=0.0, measured=()) -> Rates:
    """Rates of the plain verdict of rows with two eagers, asked for with each unit from 3 to NUM_UNITS.

    Between looks the units stay those of the last look, but the base is chosen over all sessions, and with another
    base the verdict may be another one. Hosts have no effect; speed: standard deviation of their speeds.
    """
    random, parts = numpy.random.default_rng(seed), []
    for _, (compared, quiet) in _rows_of_runs(random, kind, num_runs, 3, measured, NUM_UNITS):
        quiet = quiet[:2] + speed * random.standard_normal((*quiet.shape[1:3], 1))
        values = compared[:2].mean(axis=-1) - compared[2].mean(axis=-1)
        # The words at the last look under either base, and which base it is.
        words = {look: words_of(interval_of(values[:, :, :look])) for look in LOOKS}
        parts.append([])
        for num_units in range(LOOKS[0], NUM_UNITS + 1):
            first, second = words[max(look for look in LOOKS if look <= num_units)]
            parts[-1].append(numpy.where(_is_second(quiet[:, :, :num_units])[:, 0, 0], second, first))
    return rates_of_words(numpy.concatenate(parts, axis=-1))


# ------------------------------------------------------------------------------------------------
# Other ways to choose the base


def rule_rates(num_runs, seed) -> dict[str, tuple[Rates, float, float]]:
    """{rule: (rates, shift, excess)} with two eagers, independent runs and no host effect.

    shift: mean of the log ratio where the eagers are equally fast, in rows of 3 sessions. excess: the largest mean by
    which the log ratio exceeds that against the faster eager, over differences of up to 5 times the scatter. Both in
    units of the scatter.
    """
    random = numpy.random.default_rng(seed)
    parts: dict = {rule: [] for rule in RULES}
    for _, times in _rows_of_runs(random, INDEPENDENT, num_runs, 3):
        speeds = _speeds(random, times)
        for rule in RULES:
            ratios = [chosen(times[:, :, :, :look], rule, 0.0, speeds[rule][:, :look]) for look in LOOKS]
            parts[rule].append([interval_of(each.mean(axis=-1)) for each in ratios])
    _, times = next(_rows_of_runs(random, INDEPENDENT, min(num_runs, 5_000), 3))
    times = times[:, :, :, : LOOKS[0]]
    speeds, gaps, result = _speeds(random, times), numpy.linspace(-5, 5, 41), {}
    for rule in RULES:
        excess = [float(chosen(times, rule, gap, speeds[rule]).mean()) - min(0.0, gap) for gap in gaps]
        result[rule] = rates_of(numpy.concatenate(parts[rule], axis=-1)), excess[len(gaps) // 2], max(excess)
    return result


def _speeds(random, times):
    """{rule: speed of each host, [rows, sessions, 1]}"""
    shape = (*times.shape[2:4], 1)
    return dict.fromkeys(RULES, numpy.zeros(shape)) | {"unequal": UNEQUAL * random.standard_normal(shape)}
