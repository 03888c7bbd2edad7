"""Decides how a run counts: quiet and unknown runs make the headline, and runs beside other work stand next to it.

Pure functions over facts, as in `judge`. docs/method.md has the rule in words.
"""

import statistics as plain
from dataclasses import dataclass, replace
from typing import NamedTuple

from graph_worth.harness.intervals import LEAST_CYCLES
from graph_worth.harness.judge import AGREES, Judged

QUIET, UNKNOWN, BESIDE, ASIDE, SLOWED = "quiet", "unknown", "beside", "aside", "slowed"
COUNTED, OUT = (QUIET, UNKNOWN), (ASIDE, SLOWED)
DISTURBED, NOTE = "disturbed", "note"
# Reasons for which a correction takes a run out of the headline; a note only says something of it.
REASONS = (DISTURBED, "unclean", "superseded")
# The base's mean steps in the first and in the last half of the cycles may differ by so much.
PACE = 0.10


class Correction(NamedTuple):
    """The reason, of REASONS, for which a run is no headline, with a few words on the cause."""

    kind: str
    why: str


@dataclass(frozen=True)
class Standing:
    """The standing of a build of a run.

    Attributes:
        kind: QUIET; UNKNOWN, which counts and is marked; BESIDE other work; ASIDE, in no range, for `reasons`;
            SLOWED, of a base that waits for a host that a known fault slowed.
        is_host_slowed: the fault slowed the host, whether or not the base waits for it.
        reasons: why it is not quiet, each in a few words.
    """

    kind: str
    reasons: tuple[str, ...] = ()
    is_host_slowed: bool = False

    @property
    def is_counted(self) -> bool:
        """Return whether the build belongs to the headline."""
        return self.kind in COUNTED

    @property
    def text(self) -> str:
        """The reasons in a line; "" of a quiet build."""
        return "; ".join(self.reasons)


def standing_of(judged: Judged, correction: Correction | None = None, slowed: str = "") -> Standing:
    """Return how a build counts.

    correction, slowed: what results/corrections.toml says of its run, and why the host took longer in it; "" of others.
    """
    base_ms, working_ms = judged.ms(judged.base), judged.working(judged.base).value
    if slowed and base_ms and (not working_ms or base_ms > (1 + AGREES) * working_ms):
        return Standing(SLOWED, (slowed,), True)
    return replace(_by_work_and_pace(judged, correction), is_host_slowed=bool(slowed))


def _by_work_and_pace(judged: Judged, correction: Correction | None) -> Standing:
    others = [cycle.others for cycle in judged.build.cycles]
    most = max((number or 0 for number in others), default=0)
    is_disturbed = correction is not None and correction.kind == DISTURBED
    beside = [f"beside {most} benchmark{'s' * (most > 1)} on other GPUs"] if most else []
    beside += [f"beside other work: {correction.why}"] if correction and is_disturbed else []
    if beside:
        return Standing(BESIDE, tuple(beside))
    aside = [f"{correction.kind}: {correction.why}"] if correction else []
    aside += [judged.disagrees_with_alone] if judged.disagrees_with_alone else []
    is_known, pace = bool(others) and None not in others, pace_of(judged)
    if is_known and pace is not None and not 1 / (1 + PACE) <= pace <= 1 + PACE:
        aside.append(f"{judged.base} takes {pace:.2f} times as long at the end as at the beginning")
    if aside:
        return Standing(ASIDE, tuple(aside))
    unknown = [] if is_known else ["the file does not tell of other work on the host"]
    if is_known and judged.alone_ratio is None:
        unknown.append(f"{judged.base} alone in a process has too few steps" if judged.base else "no eager passed")
    if is_known and pace is None and judged.base:
        unknown.append("too few cycles to see the host's pace")
    return Standing(UNKNOWN, tuple(unknown)) if unknown else Standing(QUIET)


def pace_of(judged: Judged) -> float | None:
    """Return the base's mean step in the last half of the cycles / in the first half; None with a single cycle."""
    blocks = judged.blocks(judged.base)
    cycles = sorted({block.cycle for block in blocks})
    half = len(cycles) // 2
    if not half:
        return None
    first, last = (
        plain.geometric_mean([block.mean_ms for block in blocks if block.cycle in part])
        for part in (cycles[:half], cycles[-half:])
    )
    return last / first


def no_headline(reasons: str, cycles: int | None = None) -> str:
    """The words beside a row, or a run, that is no headline; `cycles`: of a light run, which opens no row."""
    texts = [reasons] * bool(reasons) + ([f"{cycles} cycles, no full run"] if cycles else [])
    return f"no headline{'' if reasons else ' by itself'}: {'; '.join(texts)}" if texts else ""


def is_light(judged: Judged, cycles: int) -> bool:
    """Return whether a ratio over so many cycles adds to a row that a full run opened, and opens none itself."""
    return judged.run.parity == "blocks" or bool(judged.run.stopped) or cycles < LEAST_CYCLES
