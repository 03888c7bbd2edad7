"""What a graph gains follows from two numbers: the host's time to issue an eager step over the GPU's busy time.

    python -m benchmarks.law results                   every session and graphed variant, and how often the law holds

x = the base's issue time / busy time of the variant's kernels. First approximation of the gain: max(1, x), a GPU that
waits for the host as long as the host is the slower one. Beside it the queue model (common/queue_model.py): predicted
step of the base over that of the variant, from the passes alone; only records that were written with it have one.
Measured is the ratio of median steps, because issue time is a median, too: 10th percentiles, which the tables rank by,
leave out the slow steps of a noisy host that issue time counts.

Exit status: 0, 1 where a record was refused or no graph stands beside its base, 2 for a mistake on the command line.
"""

import math
import statistics
import sys
from dataclasses import dataclass

from benchmarks import frame, rows, tables
from benchmarks.command import parser_of

CLOSE, NEAR = 0.05, 0.10
# The variants that stand for a model, the first that there is: whole steps before parts, never chosen by a result.
HEADLINE = ("full", "graph")


@dataclass(frozen=True)
class Point:
    """One graphed variant of one session against its base.

    x: see above. quiet, median: measured ratios by 10th percentile (None where steps exceed 0.4 s) and by median step.
    queue: the queue model's ratio, None where a record lacks it. base_step, variant_step: the model's step over the
    measured median, less 1. issue_ms, busy_ms: what x is made of. is_main: one variant of each session is,
    unless all of its graphs are of compiled kernels.
    """

    group: str
    session: str
    begin: str
    model: str
    preset: str
    gpu: str
    num_gpus: int
    boot: str
    host_load: int
    variant: str
    base: str
    num_pairs: int
    issue_ms: float
    busy_ms: float
    quiet: float | None
    median: float
    queue: float | None
    base_step: float | None
    variant_step: float | None
    is_main: bool

    @property
    def x(self) -> float:
        return self.issue_ms / self.busy_ms

    @property
    def first(self) -> float:
        """The first approximation, max(1, x)."""
        return max(1.0, self.x)

    @property
    def off(self) -> float:
        """Measured by medians over max(1, x), less 1."""
        return self.median / self.first - 1

    @property
    def queue_off(self) -> float | None:
        return None if self.queue is None else self.median / self.queue - 1

    @property
    def is_explained(self) -> bool:
        """By either of the two, within NEAR."""
        return abs(self.off) <= NEAR or (self.queue_off is not None and abs(self.queue_off) <= NEAR)


def points(found) -> list[Point]:
    """All points of a frame, or of sound records as of one folder, by group, session and variant."""
    runs = frame.of(found)
    result = []
    for _, part in runs[runs["device"] == "cuda"].groupby("group", sort=True):
        group = rows.group_of(part)
        for session in group.order:
            result += _of_session(group, session)
    return result


def _of_session(group, session):
    replaying = {}
    for name, variant in sorted(group.runs):
        timed = group.timed(session, variant) if name == session else []
        base = group.base(session, variant) if timed else None
        if base in (None, variant) or not any(row["record"]["capture"]["num_replays"] for row in timed):
            continue
        pairs = [
            pair for pair in rows.pairs(group, session, variant, base) if pair[0]["issue_ms"] and pair[1]["busy_ms"]
        ]
        if pairs:
            replaying[variant] = base, pairs, timed[0]
    # Compiled kernels are not the base's: what they gain follows from fusion as well.
    own = [name for name, (_, _, row) in replaying.items() if row["record"]["extra"].get("kind") != "compile"]
    main = next((name for name in (*HEADLINE, *own) if name in own), None)
    return [_point(*of_variant, is_main=variant == main) for variant, of_variant in replaying.items()]


def _point(base, pairs, row, is_main):
    return Point(
        **{key: row[key] for key in ("group", "session", "begin", "model", "preset", "variant", "host_load")},
        gpu=row["gpu_name"] or "",
        num_gpus=row["world_size"],
        boot=(row["boots"] or ("",))[0][:6],
        base=base,
        num_pairs=len(pairs),
        issue_ms=statistics.median(own["issue_ms"] for own, _ in pairs),
        busy_ms=statistics.median(own["busy_ms"] for _, own in pairs),
        quiet=_ratio(pairs, frame.quiet_ms),
        median=_ratio(pairs, lambda record: record["statistic_ms"]),
        queue=_ratio(pairs, rows.predicted_ms),
        base_step=_step_error(own for own, _ in pairs),
        variant_step=_step_error(own for _, own in pairs),
        is_main=is_main,
    )


def _ratio(pairs, value):
    """Geometric mean over the pairs that have both; None where none has."""
    logs = rows.log_ratios(pairs, value)
    return math.exp(statistics.mean(logs)) if logs else None


def _step_error(records):
    errors = [rows.predicted_ms(record) / record["statistic_ms"] - 1 for record in records if rows.predicted_ms(record)]
    return statistics.median(errors) if errors else None


# ------------------------------------------------------------------------------------------------
# Words


def counts(found: list[Point]) -> list[str]:
    """How often the law holds, over all points and over one variant a session."""
    lines = []
    for what, some in (("points", found), ("sessions, one variant each", [point for point in found if point.is_main])):
        if not some:
            continue
        of = f"of {len(some)} {what}"
        by_p10 = sum(abs((point.quiet or point.median) / point.first - 1) <= NEAR for point in some)
        lines.append(
            f"max(1, x): {_share(point.off for point in some)} {of} (by 10th percentiles {by_p10} within 10 %)"
        )
        known = [point for point in some if point.queue is not None]
        if known:
            explained = sum(point.is_explained for point in known)
            lines.append(
                f"queue model: {_share(point.queue_off for point in known)} of the {len(known)} that have one; "
                f"{explained} within 10 % of it or of max(1, x)"
            )
    bases = {(point.group, point.session, point.base): point.base_step for point in found}
    known = [error for error in bases.values() if error is not None]
    if known:
        lines.append(f"the base's own step by the queue model: {_share(known)} of {len(known)} bases of sessions")
    return lines


def _share(offs):
    offs = [abs(off) for off in offs]
    return f"{sum(off <= CLOSE for off in offs)} within 5 %, {sum(off <= NEAR for off in offs)} within 10 %,"


def table(found: list[Point]) -> str:
    """A line for each point, by model and x."""
    ordered = sorted(found, key=lambda point: (point.model, point.preset, point.x))
    return tables.aligned(tables.cells(ordered, _COLUMNS), 5)


def _cell(name, form="{}"):
    """A property of a point, or nothing where it is not known."""
    return lambda point: None if getattr(point, name) is None else form.format(getattr(point, name)).replace("%", " %")


_COLUMNS = (
    *((name, _cell(name)) for name in ("group", "session")),
    ("GPU", lambda point: f"{point.gpu} x{point.num_gpus}"),
    *((name, _cell(name)) for name in ("variant", "base")),
    *(("load", _cell("host_load")), ("pairs", _cell("num_pairs"))),
    *(("x", _cell("x", "{:.2f}")), ("max(1,x)", _cell("first", "{:.2f}"))),
    *(("queue", _cell("queue", "{:.3f}")), ("p10", _cell("quiet", "{:.3f}")), ("median", _cell("median", "{:.3f}"))),
    *(("off", _cell("off", "{:+.1%}")), ("queue off", _cell("queue_off", "{:+.1%}"))),
)


def closing(found) -> list[str]:
    """What `make bench` ends with, a line for each graphed variant: both predictions beside what was measured.

    found: frame or sound records of the session. No line where nothing can be predicted, as on a CPU.
    """
    return [
        f"{point.variant} over {point.base}: predicted max(1, x) = {point.first:.2f}x "
        f"({point.base} takes the host {point.issue_ms:.1f} ms to issue, {point.variant}'s kernels take "
        f"{point.busy_ms:.1f} ms: x = {point.x:.2f}), "
        + ("queue model -" if point.queue is None else f"queue model {point.queue:.2f}x")
        + f", measured {point.median:.2f}x by medians"
        + ("" if point.quiet is None else f" ({point.quiet:.2f}x by 10th percentiles)")
        for point in points(found)
    ]


def main(argv=None) -> int:
    parser = parser_of("law", "Gain against issue over busy time.")
    parser.add_argument("root", metavar="ROOT", nargs="?", default="results", help="results, or a folder of sessions")
    args = parser.parse_args(argv)
    try:
        runs = frame.read(args.root)
    except FileNotFoundError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    found = points(runs.frame)
    for line in (table(found), "", *counts(found)) if found else ():
        print(line)
    for fault in runs.faults:
        print(f"{parser.prog}: refused: {fault}", file=sys.stderr)
    if not found:
        print(f"{parser.prog}: no graph beside its base in {args.root}", file=sys.stderr)
    return 1 if runs.faults or not found else 0


if __name__ == "__main__":
    sys.exit(main())
