"""How often the verdicts of benchmarks.intervals are false, and how often they find an effect, by simulation.

    python -m benchmarks.simulate [--runs N] [--seed S] [--resample SESSION ...] [--write docs/method.md]

Prints Markdown tables; --write puts them between the two markers of a file. A row of a table is simulated from
the run upwards: each run's log time has scatter, a host adds an effect of mean zero to its eager runs, the base is
chosen for the row among one or two equally fast eager variants, a session's value is the mean over its rounds of
log(base / variant), and a unit is one session. The plain verdict is then asked for at 3, 6 and 12 units, with the base
chosen anew over the sessions that there are by then. Scatter is independent, AR(1) with 0.3 from round to round of a
variant, or resampled from packed sessions that timed `eager` and `control`, which is eager again: --resample takes
their folders or their records.jsonl.xz.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks import frame, intervals, rows, sessions
from benchmarks.intervals import LOOKS, MIN_PAIRS_ON_HOST, VERDICT_LEVEL, student_t

NUM_RUNS, SEED = 50_000, 1
BOUND, BOUND_UPPER = 0.05, 0.06  # of ever a false verdict, and of the upper end of its own 95 % interval

NUM_ROUNDS = 5  # of a simulated session, as `make bench` measures unless told
SCATTERS = (0.003, 0.01, 0.05)  # standard deviation of a run's log time
EFFECTS = (0.02, 0.05, 0.20)  # true speed-ups less 1
PAIRS_ON_HOST = (MIN_PAIRS_ON_HOST, intervals.AUTO_MIN_ROUNDS)

# Shape of the host effect, and its standard deviation in the log ratio. The skewness of a lognormal of 0.5 is 1.75,
# that of 1 is 6.2.
HOSTS = (
    ("normal", 0.0),
    ("normal", 0.05),
    ("normal", 0.20),
    ("lognormal 0.5", 0.05),
    ("lognormal 0.5", 0.20),
    ("lognormal 1", 0.05),
    ("lognormal 1", 0.20),
)
INDEPENDENT, CORRELATED, RESAMPLED = "independent", "AR(1) 0.3", "resampled"
CORRELATION = 0.3
FOLLOWS = 2 / 3  # chance that a resampled round is the one after its predecessor: stretches of 3 on average

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

BEGIN, END = "<!-- simulation: written by benchmarks.simulate -->", "<!-- end of simulation -->"
_CHUNK = 10_000  # simulated rows at a time, for memory


# ------------------------------------------------------------------------------------------------
# Scatter of runs


def scatter(random, kind, num_sessions, num_variants, num_rounds, measured=()):
    """Log times of equally fast variants, [2, variants, sessions, rounds]: what is compared, and what chooses a base.

    The standard deviation is 1, resampled that of the measured sessions. Simulated runs are chosen by the very
    number that is compared, the worst case: a choice by other numbers knows less of this one's scatter.
    """
    if kind == RESAMPLED:
        return _resampled(random, num_sessions, num_variants, num_rounds, measured)
    times = random.standard_normal((num_variants, num_sessions, num_rounds))
    if kind == CORRELATED:
        for index in range(1, num_rounds):
            times[..., index] *= math.sqrt(1 - CORRELATION**2)
            times[..., index] += CORRELATION * times[..., index - 1]
    return numpy.broadcast_to(times, (2, *times.shape))


def _resampled(random, num_sessions, num_variants, num_rounds, measured):
    """Stretches of rounds that follow one another in a measured session, its last followed by its first.

    measured: log(eager / control) of each round of a session, [rounds, 2], of mean zero. Each simulated session takes
    all its rounds of one measured one. Two variants are a pair as measured, with a random sign. Of three each gets
    1 / sqrt(2) of a pair's log ratio of its own, so that any two of them differ by as much as the measured two.
    """
    result = numpy.zeros((2, num_variants, num_sessions, num_rounds))
    which = random.integers(len(measured), size=num_sessions)
    num_drawn, scale = (1, 1.0) if num_variants == 2 else (num_variants, math.sqrt(0.5))
    for index, ratios in enumerate(measured):
        members = numpy.flatnonzero(which == index)
        drawn = random.integers(len(ratios), size=(num_drawn, members.size, num_rounds))
        follows = random.random(drawn.shape) < FOLLOWS
        for number in range(1, num_rounds):
            after = (drawn[..., number - 1] + 1) % len(ratios)
            drawn[..., number] = numpy.where(follows[..., number], after, drawn[..., number])
        sign = random.choice((-scale, scale), size=(num_drawn, members.size, 1, 1))
        result[:, :num_drawn, members] = numpy.moveaxis(ratios[drawn] * sign, -1, 0)
    return result


@dataclass(frozen=True)
class Measured:
    """A session of eager against eager. path: as it was given. num_second: pairs of second attempts.

    log_ratios: log(eager / control), [rounds, 2]: of the statistic, and of what chooses a base. faults: a line for
    each record left out, since it cannot be read or contradicts itself.
    """

    path: str
    log_ratios: numpy.ndarray
    num_second: int
    faults: tuple[str, ...]


def read_measured(path) -> Measured:
    """A packed session, by its folder or its records.jsonl.xz, with pairs as rows form them (last attempts).

    The mean over rounds is taken off, since both are eager, and the scatter that this takes away is given back.
    Raises ValueError, which names the path, where it cannot be read whole or has fewer than 3 pairs.
    """
    folder = Path(path).parent if Path(path).name == sessions.RECORDS else Path(path)
    if not sessions.NAME.fullmatch(folder.resolve().name):
        raise ValueError(f"--resample {path}: no packed session, nor the {sessions.RECORDS} of one")
    fault = sessions.read_lines(folder / sessions.RECORDS)[1]
    if fault:
        raise ValueError(f"--resample {fault}")
    found = frame.read(folder)
    pairs = []
    if not found.frame.empty:
        group = rows.group_of(found.frame, base="eager")
        pairs = rows.pairs(group, group.order[0], "control", "eager")
    if len(pairs) < intervals.MIN_PAIRS:
        why = f" ({len(found.faults)} faults, the first: {found.faults[0]})" if found.faults else ""
        raise ValueError(
            f"--resample {path}: {len(pairs)} pairs of eager and control, {intervals.MIN_PAIRS} are needed{why}"
        )
    log_ms = numpy.log(
        [
            [
                [
                    intervals.statistic(run["steps"]["gpu_ms"], run["steps"]["batch"], quantile)
                    for quantile in (0.5, 0.1)
                ]
                for run in pair
            ]
            for pair in pairs
        ]
    )
    if numpy.exp(numpy.median(log_ms[..., 0], axis=0)).max() > intervals.LONG_STEP_MS:
        log_ms[..., 1] = log_ms[..., 0]
    ratios = log_ms[:, 0] - log_ms[:, 1]
    centred = (ratios - ratios.mean(axis=0)) * math.sqrt(len(ratios) / (len(ratios) - 1))
    num_second = sum(pair[0]["attempt"] > 1 for pair in pairs)
    return Measured(str(path), centred, num_second, tuple(found.faults))


def read_all_measured(paths) -> list[Measured]:
    """Each session once. Raises as `read_measured`, and for a session named twice."""
    found = [read_measured(path) for path in paths]
    for number, each in enumerate(found):
        if any((each.log_ratios.tolist() == other.log_ratios.tolist()) for other in found[:number]):
            raise ValueError(f"--resample {each.path}: the same session is named twice")
    return found


# ------------------------------------------------------------------------------------------------
# The base


def chosen(times, rule="row", gap=0.0, speed=0.0):
    """Log ratios base / variant of runs as `scatter` makes them, [..., rounds]; the last variant is the graph.

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
        return _second_is_smaller(_median(quiet.reshape(*quiet.shape[:-2], -1)))[..., None, None]
    if rule == "mean":
        return _second_is_smaller(_median(quiet).mean(axis=-1))[..., None, None]
    if rule == "session":
        return _second_is_smaller(_median(quiet))[..., None]
    if rule == "others":
        rounds = numpy.arange(quiet.shape[-1])
        medians = [_median(quiet[..., rounds != index]) for index in rounds]
        return numpy.stack([_second_is_smaller(median) for median in medians], axis=-1)
    assert rule == "clear", rule
    mean, half_width = _interval(quiet[0] - quiet[1])
    return (mean > half_width)[..., None]


def _second_is_smaller(of_both):
    return of_both[1] < of_both[0]


def _median(values):
    """Over the last axis; sorting so few numbers is faster than what numpy.median does."""
    num, ordered = values.shape[-1], numpy.sort(values, axis=-1)
    return (ordered[..., (num - 1) // 2] + ordered[..., num // 2]) / 2


# ------------------------------------------------------------------------------------------------
# Verdicts


def _interval(log_values, level=VERDICT_LEVEL):
    """Mean and half of the interval over the last axis; benchmarks.intervals does the same to one row."""
    num = log_values.shape[-1]
    return log_values.mean(axis=-1), student_t(num - 1, level) / math.sqrt(num) * log_values.std(axis=-1, ddof=1)


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


def looks_of_rows(times, host=0.0) -> list[tuple]:
    """(mean, half-width) of the plain interval of rows at each look, [rows], with the base chosen anew at each.

    times: runs as `scatter` makes them, [2, variants, rows, sessions, rounds]. host: what each host adds to its eager
    runs and so to the log ratio, [rows, sessions].
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
        looks.append(_interval(base - values[-1, :, :look] + host[:, :look]))
    return looks


def _rates(looks, ever=False):
    """Of (mean, half_width) of each look, [rows]; `false` is of any look or of the last."""
    looks = [tuple(look) for look in looks]
    faster = numpy.stack([mean > half_width for mean, half_width in looks])
    slower = numpy.stack([mean < -half_width for mean, half_width in looks])
    faster, slower = (numpy.any(each, axis=0) if ever else each[-1] for each in (faster, slower))
    power = [[numpy.mean(mean + math.log1p(effect) > half) for mean, half in looks] for effect in EFFECTS]
    return Rates(faster.size, float(numpy.mean(faster | slower)), float(numpy.mean(faster)), numpy.array(power))


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
    hosts = {shape: _host_effect(random, shape, (num_runs, LOOKS[-1])) for shape in dict.fromkeys(h[0] for h in HOSTS)}
    cells = []
    for kind, scatters in _kinds(measured):
        for num_eagers in (1, 2):
            looks: dict = {(shape, host, size): [] for shape, host in HOSTS for size in scatters}
            for rows_of, times in _rows_of_runs(random, kind, num_runs, num_eagers + 1, measured):
                for (shape, host, size), parts in looks.items():
                    parts.append(looks_of_rows(times, host / (size or 1.0) * hosts[shape][rows_of]))
            cells += [
                Cell(shape, host, kind, size, num_eagers, _rates(_joined(parts, size or 1.0), ever=True))
                for (shape, host, size), parts in looks.items()
            ]
    return cells


def _rows_of_runs(random, kind, num_runs, num_variants, measured=()):
    """(slice of rows, their runs, [2, variants, rows, 12 sessions, rounds]), a part of the rows at a time."""
    for start in range(0, num_runs, _CHUNK):
        num = min(_CHUNK, num_runs - start)
        times = scatter(random, kind, num * LOOKS[-1], num_variants, NUM_ROUNDS, measured)
        yield slice(start, start + num), times.reshape(2, num_variants, num, LOOKS[-1], NUM_ROUNDS)


def _joined(parts, size=1.0):
    """Looks of all rows of looks of parts of them, with logarithms multiplied by `size`."""
    return [
        tuple(size * numpy.concatenate(each) for each in zip(*look, strict=True)) for look in zip(*parts, strict=True)
    ]


def _kinds(measured):
    return [(INDEPENDENT, SCATTERS), (CORRELATED, SCATTERS), *([(RESAMPLED, (None,))] if measured else [])]


def _host_effect(random, shape, size):
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

    times: runs of standard deviation 1 as `scatter` makes them, 15 rounds of them. size: that of the simulated runs.
    The base is chosen over the rounds that there are: a row of one session has only those.
    """

    def at(num_rounds, level=VERDICT_LEVEL):
        return _interval(size * chosen([of[..., :num_rounds] for of in times], "session"), level)

    rates = [_rates([at(num)]) for num in PAIRS_ON_HOST]
    schedule = auto_schedule()
    stopped = numpy.zeros(times[0].shape[1], dtype=bool)
    mean, half_width, num_rounds = (numpy.zeros(stopped.shape) for _ in range(3))
    for num in schedule:
        narrow = at(num, intervals.TABLE_LEVEL)[1] <= intervals.AUTO_HALF_WIDTH
        stops = ~stopped & (narrow | (num == schedule[-1]))
        for into, of in zip((mean, half_width), at(num), strict=True):
            into[stops] = of[stops]
        num_rounds[stops] = num
        stopped |= stops
    return [*rates, _rates([(mean, half_width)])], float(num_rounds.mean())


def host_rows(num_runs, seed, measured=()) -> Iterator[tuple]:
    """(kind, number of eagers, scatter, rates after 5 pairs, 8 and auto, mean rounds of auto) of each case."""
    random = numpy.random.default_rng(seed)
    for kind, scatters in _kinds(measured):
        for num_eagers in (1, 2):
            times = scatter(random, kind, num_runs, num_eagers + 1, intervals.AUTO_MAX_ROUNDS, measured)
            for size in scatters:
                yield kind, num_eagers, size, *on_this_host(times, size or 1.0)


def ever_rates(num_runs, seed, kind, num_eagers, measured=()) -> Rates:
    """Rates of rows whose first session is judged on this host, then two together, then 3, 6 and 12 plainly.

    Hosts have no effect, so that a verdict on this host is false too. Of two sessions both must say it.
    """
    random = numpy.random.default_rng(seed)
    false, faster = [], []
    for _, times in _rows_of_runs(random, kind, num_runs, num_eagers + 1, measured):
        one, two = (_words(*_interval(chosen(times[:, :, :, :num]))) for num in (1, 2))
        words = [one[:, 0], numpy.where(two[:, 0] == two[:, 1], two[:, 0], 0)]
        words += [_words(*look) for look in looks_of_rows(times)]
        false.append(numpy.any(numpy.stack(words) != 0, axis=0))
        faster.append(numpy.any(numpy.stack(words) > 0, axis=0))
    return Rates(
        num_runs, float(numpy.concatenate(false).mean()), float(numpy.concatenate(faster).mean()), numpy.empty(0)
    )


def between_rates(num_runs, seed, kind, speed=0.0, measured=()) -> Rates:
    """Rates of the plain verdict of rows with two eagers, asked for with each unit from 3 to NUM_UNITS.

    Between looks the units stay those of the last look, but the base is chosen over all sessions, and with another
    base the verdict may be another one. Hosts have no effect; speed: standard deviation of their speeds.
    """
    random = numpy.random.default_rng(seed)
    false, faster = [], []
    for start in range(0, num_runs, _CHUNK // 2):
        num = min(_CHUNK // 2, num_runs - start)
        compared, quiet = scatter(random, kind, num * NUM_UNITS, 3, NUM_ROUNDS, measured).reshape(
            2, 3, num, NUM_UNITS, NUM_ROUNDS
        )
        quiet = quiet[:2] + speed * random.standard_normal((num, NUM_UNITS, 1))
        values = compared[:2].mean(axis=-1) - compared[2].mean(axis=-1)
        # The words at the last look under either base, and which base it is.
        words = {look: _words(*_interval(values[:, :, :look])) for look in LOOKS}
        said = []
        for num_units in range(LOOKS[0], NUM_UNITS + 1):
            first, second = words[max(look for look in LOOKS if look <= num_units)]
            said.append(numpy.where(_is_second(quiet[:, :, :num_units])[:, 0, 0], second, first))
        false.append(numpy.any(numpy.stack(said) != 0, axis=0))
        faster.append(numpy.any(numpy.stack(said) > 0, axis=0))
    return Rates(
        num_runs, float(numpy.concatenate(false).mean()), float(numpy.concatenate(faster).mean()), numpy.empty(0)
    )


def _words(mean, half_width):
    """1 faster, -1 slower, 0 neither."""
    return (mean > half_width).astype(int) - (mean < -half_width)


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
            parts[rule].append(
                [_interval(chosen(times[:, :, :, :k], rule, 0.0, speeds[rule][:, :k]).mean(axis=-1)) for k in LOOKS]
            )
    _, times = next(_rows_of_runs(random, INDEPENDENT, min(num_runs, _CHUNK // 2), 3))
    times = times[:, :, :, : LOOKS[0]]
    speeds, gaps = _speeds(random, times), numpy.linspace(-5, 5, 41)
    result = {}
    for rule in RULES:
        excess = [float(chosen(times, rule, gap, speeds[rule]).mean()) - min(0.0, gap) for gap in gaps]
        result[rule] = _rates(_joined(parts[rule]), ever=True), excess[len(gaps) // 2], max(excess)
    return result


def _speeds(random, times):
    """{rule: speed of each host, [rows, sessions, 1]}"""
    shape = (*times.shape[2:4], 1)
    return {rule: numpy.zeros(shape) for rule in RULES} | {"unequal": UNEQUAL * random.standard_normal(shape)}


# ------------------------------------------------------------------------------------------------
# Tables


def _percent(share):
    return f"{100 * share:.1f}"


def _size(share):
    return "as measured" if share is None else f"{100 * share:g} %"


def _host(shape, host):
    return f"{shape}, {100 * host:g} %" if host else "none"


def _false(rates, is_broken=False):
    text = f"{_percent(rates.false)} ({_percent(rates.faster)})"
    return f"**{text}**" if is_broken else text


def _powers(of_looks):
    return " / ".join(f"{100 * share:.0f}" for share in of_looks)


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain_table(cells):
    """A line for each kind of runs, host effect and scatter: false verdicts and power, with one eager and with two."""
    lines: dict = {}
    for cell in cells:
        false = _false(cell.rates, cell.is_bound and not cell.rates.holds)
        lines.setdefault((cell.kind, cell.shape, cell.host, cell.scatter), []).append(
            (false, *map(_powers, cell.rates.power))
        )
    head = ["runs", "host effect", "scatter"]
    for eagers in ("1 eager", "2 eagers"):
        head += [f"{eagers}: false", *(f"{_size(effect)}" for effect in EFFECTS)]
    return _table(
        head,
        [
            [kind, _host(shape, host), _size(size), *(text for each in found for text in each)]
            for (kind, shape, host, size), found in lines.items()
        ],
    )


def _host_table(rows):
    head = ["runs", "eagers", "scatter", *(f"false, {num} pairs" for num in PAIRS_ON_HOST), "false, auto"]
    head += [f"effect {_size(effect)}" for effect in EFFECTS] + ["rounds of auto"]
    lines = []
    for kind, num_eagers, size, rates, num_rounds in rows:
        powers = [_powers([each.power[index, 0] for each in rates]) for index in range(len(EFFECTS))]
        lines.append(
            [
                kind,
                str(num_eagers),
                _size(size),
                *(_false(each, not each.holds) for each in rates),
                *powers,
                f"{num_rounds:.1f}",
            ]
        )
    return _table(head, lines)


def _rule_table(rules):
    rows = [
        [RULES[rule], _false(rates, not rates.holds), f"{shift:+.2f}", f"{max(excess, 0.0):.2f}"]
        for rule, (rates, shift, excess) in rules.items()
    ]
    return _table(["the base is chosen", "false", "shift", "excess"], rows)


def report(num_runs, seed, measured=()) -> str:
    """All tables as Markdown, with the command that writes them. measured: of `read_measured`."""
    log_ratios = [each.log_ratios for each in measured]
    cells = plain_cells(num_runs, seed, log_ratios)
    bound = [cell for cell in cells if cell.is_bound]
    num_broken = sum(not cell.rates.holds for cell in bound)
    above = max(cell.rates.upper - cell.rates.false for cell in cells)
    command = f"python -m benchmarks.simulate --runs {num_runs} --seed {seed}"
    if measured:
        command += f" --resample {shlex.join(each.path for each in measured)}"
    looks, pairs = " / ".join(map(str, LOOKS)), " / ".join(map(str, PAIRS_ON_HOST))
    return "\n\n".join(
        [
            f"`{command}`",
            "**Plain.** `false`: without an effect, % of rows whose verdict is faster or slower at any of "
            f"{looks} units (in parentheses: ever faster). {_size(EFFECTS[0])} and so on: with that effect, % of rows "
            f"found faster at {looks} units. Bold: a normal or resampled case above the bound, {num_broken} of "
            f"{len(bound)}. The 95 % interval of a rate of this simulation ends at most {100 * above:.2f} above it. "
            + _about(measured),
            _plain_table(cells),
            "**On this host.** One session, and the base chosen over its rounds. `false`: without an effect, % of "
            "sessions whose verdict is faster or slower (in parentheses: faster), bold above the bound. "
            f"{_size(EFFECTS[0])} and so on: with that effect, % found faster after {pairs} pairs / under ROUNDS=auto.",
            _host_table(host_rows(num_runs, seed, log_ratios)),
            "**Both.** Hosts have no effect, and a row is judged with each session that it gains: the first on this "
            f"host, two on this host, then {looks} plainly. % of rows where any of these verdicts is false.",
            _ever_table(num_runs, seed, log_ratios),
            "**Between looks.** Two eagers, hosts have no effect, and the plain verdict is asked for with each unit "
            f"from {LOOKS[0]} to {NUM_UNITS}. It is that of the last look, but with the base that is chosen by then. "
            "`false`: as in the first table.",
            _between_table(max(num_runs // 2, 100), seed, log_ratios),
            "**Ways to choose between two eagers**, with independent runs and no host effect. `false`: as in the "
            "first table. Shift: what the choice adds to the mean log ratio of 3 sessions where both are equally fast. "
            "Excess: the most by which it exceeds that against the faster eager, over differences of up to 5 "
            "scatters. Both in units of a run's scatter.",
            _rule_table(rule_rates(num_runs, seed)),
        ]
    )


def _ever_table(num_runs, seed, measured):
    lines = []
    for kind, _ in _kinds(measured):
        rates = [ever_rates(num_runs, seed, kind, num_eagers, measured) for num_eagers in (1, 2)]
        lines.append([kind, *(_false(each, not each.holds) for each in rates)])
    return _table(["runs", "1 eager", "2 eagers"], lines)


def _between_table(num_runs, seed, measured):
    lines = []
    for kind, _ in _kinds(measured):
        unit = float(numpy.mean([each[:, 0].std() for each in measured])) if kind == RESAMPLED else 1.0
        rates = [between_rates(num_runs, seed, kind, unit * speed, measured) for speed in (0.0, UNEQUAL)]
        lines.append([kind, *(_false(each, not each.holds) for each in rates)])
    return _table(["runs", "hosts of equal speed", "hosts that differ in speed far more than runs do"], lines)


def _about(measured):
    if not measured:
        return "No session of eager against eager was given to resample."
    parts = []
    for each in measured:
        second = f", {each.num_second} of second attempts" if each.num_second else ""
        size = 100 * each.log_ratios[:, 0].std()
        parts.append(f"`{each.path}` ({len(each.log_ratios)} pairs{second}, scatter of their log ratios {size:.2f} %)")
    return f"Resampled: {', '.join(parts)}."


def write(path, text):
    """Replace what stands between the markers of a file. Raises ValueError where it has none."""
    before, begin, rest = Path(path).read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"--write {path}: no line {BEGIN!r} with a line {END!r} after it")
    Path(path).write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# Command


def _from(least):
    def parse(text):
        if not (text.isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return parse


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="How often verdicts are false, and how often they find an effect, as Markdown tables.",
        allow_abbrev=False,
    )
    parser.add_argument("--runs", type=_from(100), default=NUM_RUNS, metavar="N", help=f"simulated rows ({NUM_RUNS})")
    parser.add_argument("--seed", type=_from(0), default=SEED, metavar="S", help=f"of the random numbers ({SEED})")
    parser.add_argument(
        "--resample", nargs="+", default=[], metavar="SESSION", help="packed sessions with runs of eager and control"
    )
    parser.add_argument("--write", metavar="FILE", help="put the tables between the markers of this file")
    args = parser.parse_args(argv)
    try:
        measured = read_all_measured(args.resample)
        for each in measured:
            for fault in each.faults:
                print(f"{parser.prog}: left out of {each.path}: {fault}", file=sys.stderr)
        text = report(args.runs, args.seed, measured)
        if args.write:
            write(args.write, text)
        else:
            print(text)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
