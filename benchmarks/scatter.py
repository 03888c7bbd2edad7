"""Scatter of equally fast runs: simulated, or resampled from packed sessions that timed `eager` and `control`."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks import frame, intervals, rows, sessions

INDEPENDENT, CORRELATED, RESAMPLED = "independent", "AR(1) 0.3", "resampled"
CORRELATION = 0.3
FOLLOWS = 2 / 3  # chance that a resampled round is the one after its predecessor: stretches of 3 on average


def draw(random, kind, num_sessions, num_variants, num_rounds, measured=()):
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
        few = f"{len(pairs)} pairs of eager and control, {intervals.MIN_PAIRS} are needed"
        raise ValueError(f"--resample {path}: {few}{why}")

    def log_of(run):
        steps = run["steps"]["gpu_ms"], run["steps"]["batch"]
        return [math.log(intervals.statistic(*steps, quantile)) for quantile in (0.5, 0.1)]

    log_ms = numpy.array([[log_of(run) for run in pair] for pair in pairs])
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
