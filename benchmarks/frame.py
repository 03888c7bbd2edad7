"""All runs below a folder as tables of pandas: points, rows over hosts, hosts, the archive, and files left out.

    from benchmarks import frame
    points = frame.measured(frame.read("results"))
    rows = frame.rows(points, frame.archive("results"))

A point is a variant in one build of one run, apart for each number of busy processes. A row is a variant of a workload
against one base, over its runs; it never mixes bases. Several runs of one host count as one host. Hosts of the archive
count, too, where eager makes the same kernels there.

    python -m benchmarks.frame runs --table rows --to rows.csv          points, rows, archive or faults

Exit status: 0; 1 where a run file could not be read; 2 for a mistake on the command line.
"""

import errno
import statistics as plain
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from pandas import DataFrame

from benchmarks import archive as archive_file
from benchmarks import corrections as corrections_file
from benchmarks.corrections import Corrections
from graph_worth.folders import ROOT
from graph_worth.harness import command, intervals
from graph_worth.harness.best import AS_FAST, EAGER, REDUCE_OVERHEAD, RUNS_DIFFER, Best, best_of, of_state
from graph_worth.harness.command import RUNS, Mistake, shown
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Run, Variant
from graph_worth.harness.files.workload import Workload, build_of, workload_of
from graph_worth.harness.intervals import Ratio
from graph_worth.harness.judge import ESTIMATED, PASS, Judged, Noted, judged
from graph_worth.harness.pages.cells import GIB, NO_CEILING, counted, gib, span
from graph_worth.harness.pages.roofline import Point, point_of
from graph_worth.harness.standing import (
    ASIDE,
    BESIDE,
    COUNTED,
    OUT,
    SLOWED,
    UNKNOWN,
    Standing,
    is_light,
    no_headline,
    standing_of,
)
from graph_worth.text import digits

# In the label of a user's step that a newer run measured with another file, before four digits of its digest.
EARLIER = ", earlier file"
# A row names the scatter of its base's blocks if they differ by more.
WIDE_SPREAD = 0.10
# Columns of a host of the archive.
ARCHIVED = {"archived": True, "light_cycles": 0, "is_mixed": False}
OF_ONE_RUN = ("low", "high", "control_ratio", "control_half_width", "base_fastest_ms", "base_slowest_ms")
TEXT, NUMBER, COUNT, FLAG = "string", "float64", "Int64", "boolean"
# A row shows the first of these that it has; the others stand beside it.
TIERS = {**dict.fromkeys(COUNTED, 0), BESIDE: 1, ASIDE: 2, SLOWED: 3}


@dataclass(frozen=True)
class _Point:
    """A variant in one build of a run, from which columns are made.

    `first`: the run's first build; `process`: the name of this one in the file, which differs from the workload's where
    variants stand apart.
    """

    path: Path
    run: Run
    first: Judged
    judged: Judged
    standing: Standing
    workload: Workload
    process: str
    name: str
    best: Best | None

    @property
    def variant(self) -> Variant:
        return self.judged.build.variants[self.name]

    @property
    def blocks(self) -> tuple[str, bool]:
        return self.name, self.workload.busy > 0

    @property
    def base_blocks(self) -> tuple[str, bool]:
        return self.judged.base, self.workload.busy > 0

    @property
    def base(self) -> str | None:
        base = self.judged.build.anchor if self.name == self.run.control else self.judged.base
        return base if self.judged.passed(self.name) else None

    @cached_property
    def ratio(self) -> Ratio | None:
        return self.judged.ratio_of(*self.blocks)

    @cached_property
    def control(self) -> Ratio | None:
        # A run has it in one of the processes of a state.
        judged = self.judged if self.run.control in self.judged.build.variants else self.first
        return judged.ratio_of(self.run.control, self.workload.busy > 0) if self.run.control else None

    @property
    def uncaptured_ms(self) -> float | None:
        return self.judged.working(self.judged.uncaptured(self.name)).value

    @cached_property
    def roofline(self) -> Point | None:
        return point_of(self.judged, *self.blocks)

    @property
    def is_mixed(self) -> bool:
        return REDUCE_OVERHEAD in self.judged.build.variants and self.name not in (REDUCE_OVERHEAD, self.judged.base)

    @cached_property
    def ceiling(self) -> Noted:
        return self.judged.ceiling_of(*self.blocks)

    @property
    def fastest(self) -> str:
        """The best thing to do, at the variant that does it, or that came nearest where that is eager."""
        if self.best is None or self.best.judged is not self.judged or self.best.name != self.name:
            return ""
        return "; ".join(filter(None, [self.best.words, self.best.difference]))

    @property
    def base_times(self) -> list[float]:
        return [block.mean_ms for block in self.judged.blocks(self.base or "", self.workload.busy > 0)]

    @property
    def is_committed(self) -> bool:
        # `make publish` has looked at the source of runs in results/.
        return self.run.source.get("clean") is not False or self.path.resolve().is_relative_to(ROOT / "results")


def _kernels(build: Judged) -> float | None:
    """The kernels in a step of a build's base."""
    return build.build.variants[build.base].profile.kernels if build.base else None


class Column(NamedTuple):
    """A column of `read`: its type in pandas, its meaning, and the function that makes it from a point."""

    type: str
    meaning: str
    value: Callable[[_Point], object]


# fmt: off
COLUMNS = {
    "run": Column(TEXT, "id of the run", lambda at: at.run.id),
    "path": Column(TEXT, "its file", lambda at: str(at.path)),
    "begin_utc": Column(TEXT, "its begin", lambda at: at.run.begin_utc),
    "host": Column(TEXT, "boot of the host", lambda at: str(at.run.host.boot)),
    "machine": Column(TEXT, "as NVIDIA H200, 2 GPUs", lambda at: at.workload.machine),
    "workload": Column(TEXT, "as gpt3/bench, with label, build and busy processes", lambda at: at.workload.name),
    "gpu": Column(TEXT, "as NVIDIA H200, or CPU", lambda at: at.workload.gpu),
    "ranks": Column(COUNT, "number of GPUs, or of ranks on the CPU", lambda at: at.workload.ranks),
    "model": Column(TEXT, "folder of the model", lambda at: at.workload.model),
    "preset": Column(TEXT, "preset; bench-l6 where the GPU held 6 layers of more", lambda at: at.workload.preset),
    "label": Column(TEXT, "flags behind the preset", lambda at: at.workload.label),
    "over": Column(TEXT, 'quantity of a sweep of which it is a point, as sequence; ""', lambda at: at.run.over),
    "swept_label": Column(TEXT, "the run's label without it", lambda at: at.run.swept_label),
    "value": Column(COUNT, "its value", lambda at: at.run.value or None),
    "build": Column(TEXT, 'build of the run; "" for the preset itself', lambda at: at.workload.build),
    "process": Column(TEXT, "build in the file, as +compiled", lambda at: at.process),
    "busy_processes": Column(COUNT, "number beside the steps; 0 in quiet cycles", lambda at: at.workload.busy),
    "digest": Column(TEXT, "of the file of a user's own step", lambda at: at.workload.digest),
    "variant": Column(TEXT, "as graph_step", lambda at: at.name),
    "base": Column(TEXT, "variant that the ratio compares with; NA if this one failed", lambda at: at.base),
    "kind": Column(TEXT, "eager, graph or compile", lambda at: at.variant.kind),
    "captured": Column(TEXT, "part in the graphs, if not all", lambda at: at.variant.traits.get("part")),
    "headline": Column(FLAG, "`make bench` measures it by default", lambda at: at.variant.headline),
    "control": Column(FLAG, "the base measured once more", lambda at: at.name == at.run.control),
    "apart": Column(FLAG, "each block has a process of its own", lambda at: at.variant.apart),
    "status": Column(TEXT, "pass, failed, oom, unsupported, ...", lambda at: at.judged.verdicts[at.name].status),
    "reason": Column(TEXT, "why it did not pass", lambda at: at.judged.verdicts[at.name].reason),
    "parity": Column(TEXT, "agreement with the reference", lambda at: at.judged.verdicts[at.name].parity),
    "ms": Column(NUMBER, "mean step over all blocks", lambda at: at.judged.ms(*at.blocks)),
    "variant_ms": Column(NUMBER, "its step in the base's cycles", lambda at: at.ratio and at.ratio.variant_ms),
    "base_ms": Column(NUMBER, "the base's step in them", lambda at: at.ratio and at.ratio.base_ms),
    "ratio": Column(NUMBER, "base_ms / variant_ms", lambda at: at.ratio and at.ratio.ratio),
    "low": Column(NUMBER, "lower end of the ratio's 95 % interval", lambda at: at.ratio and at.ratio.low),
    "high": Column(NUMBER, "upper end of it", lambda at: at.ratio and at.ratio.high),
    "half_width": Column(NUMBER, "half its width, relative", lambda at: at.ratio and at.ratio.half_width),
    "cycles": Column(COUNT, "cycles of the ratio", lambda at: at.ratio and at.ratio.cycles),
    "typical_ms": Column(NUMBER, "mean of the blocks' medians", lambda at: at.judged.typical_ms(*at.blocks)),
    "issue_ms": Column(NUMBER, "the host's time to issue a step", lambda at: at.judged.issue_ms(*at.blocks)),
    "base_issue_ms": Column(NUMBER, "of the base", lambda at: at.judged.issue_ms(*at.base_blocks)),
    "busy_ms": Column(NUMBER, "the GPU's busy time in a step, of rank 0", lambda at: at.judged.busy_ms(at.name)),
    "working_ms": Column(NUMBER, "that without waiting for ranks", lambda at: at.judged.working(at.name).value),
    "waiting_ms": Column(NUMBER, "longest wait of a rank", lambda at: at.judged.waiting_ms(at.name)),
    "skew_ms": Column(NUMBER, "slowest less fastest rank's step", lambda at: at.judged.skew_ms(*at.blocks)),
    "uncaptured_busy_ms": Column(NUMBER, "working_ms, uncaptured", lambda at: at.uncaptured_ms),
    "ceiling": Column(NUMBER, "most of it: base_ms / uncaptured_busy_ms", lambda at: at.ceiling.value),
    "ceiling_note": Column(TEXT, "estimated, or why there is none", lambda at: at.ceiling.note),
    "reached": Column(NUMBER, "ratio / ceiling", lambda at: at.judged.reached(*at.blocks)),
    "kernels": Column(NUMBER, "kernels in a step", lambda at: at.variant.profile.kernels),
    "base_kernels": Column(NUMBER, "of the base", lambda at: _kernels(at.judged)),
    "program": Column(TEXT, "variant of its kernels, uncaptured", lambda at: at.roofline and at.roofline.program),
    "kernel_us": Column(NUMBER, "its mean kernel", lambda at: at.roofline and at.roofline.kernel_us),
    "host_us": Column(NUMBER, "the host's time to issue one of it", lambda at: at.roofline and at.roofline.host_us),
    "program_ratio": Column(NUMBER, "the program's ms / ms", lambda at: at.roofline and at.roofline.gain),
    "predicted": Column(NUMBER, "that by the launch roofline", lambda at: at.roofline and at.roofline.expected),
    "graph_share": Column(NUMBER, "share of kernels in graphs", lambda at: at.variant.profile.graph_share),
    "tflops": Column(NUMBER, "useful TFLOP/s of a rank", lambda at: at.judged.tflops(*at.blocks)),
    "joules": Column(NUMBER, "energy of a step", lambda at: at.judged.joules(*at.blocks)),
    "sm_mhz": Column(NUMBER, "median clock", lambda at: at.judged.sm_mhz(*at.blocks)),
    "base_mhz": Column(NUMBER, "of the base", lambda at: at.judged.sm_mhz(*at.base_blocks)),
    "made_s": Column(NUMBER, "seconds of warm-up, compiler and capture", lambda at: at.judged.made_s(at.name)),
    "fastest": Column(TEXT, "best thing to do by its run, and its losses", lambda at: at.fastest),
    "alone_bytes": Column(COUNT, "memory alone in a process", lambda at: at.judged.alone_bytes(at.name)),
    "added_bytes": Column(COUNT, "that less the base's", lambda at: at.judged.added_bytes(at.name)),
    "steps_bytes": Column(COUNT, "without captures", lambda at: at.judged.added_bytes_in_steps(at.name)),
    "standing": Column(TEXT, "quiet, unknown, beside (other work), aside or slowed", lambda at: at.standing.kind),
    "host_slowed": Column(FLAG, "a known fault slowed the host's launches", lambda at: at.standing.is_host_slowed),
    "standing_reason": Column(TEXT, "why it is not quiet", lambda at: at.standing.text),
    "mixed": Column(FLAG, "reduce_overhead ran in its process, which slows other graphs", lambda at: at.is_mixed),
    "light": Column(FLAG, "few cycles, or a census", lambda at: at.ratio and is_light(at.judged, at.ratio.cycles)),
    "alone_ratio": Column(NUMBER, "base's step / its step alone in a process", lambda at: at.judged.alone_ratio),
    "unchecked": Column(TEXT, "what no check looked at, as no audits", lambda at: at.judged.unchecked(at.name)),
    "control_ratio": Column(NUMBER, "ratio of the run's control", lambda at: at.control and at.control.ratio),
    "control_half_width": Column(NUMBER, "half its interval", lambda at: at.control and at.control.half_width),
    "base_fastest_ms": Column(NUMBER, "of the base's fastest block", lambda at: min(at.base_times, default=None)),
    "base_slowest_ms": Column(NUMBER, "of its slowest block", lambda at: max(at.base_times, default=None)),
    "first_base": Column(TEXT, "base of the run's first build", lambda at: at.first.base),
    "first_ms": Column(NUMBER, "its mean step", lambda at: at.first.ms(at.first.base)),
    "flops_notes": Column(TEXT, "beside its rate", lambda at: "; ".join(at.judged.build.flops_notes)),
    "committed": Column(FLAG, "source was committed, or run is published", lambda at: at.is_committed),
}
# fmt: on
WORKLOAD = [{"busy": "busy_processes"}.get(field.name, field.name) for field in fields(Workload)]


class Row(NamedTuple):
    """A row of `rows`: a variant of a workload against one base, over its runs. None stands for NaN.

    Of the newest run, timed ones first: run, path, kind, headline, status, reason, parity, typical_ms,
    kernels, graph_share, tflops, joules, sm_mhz, made_s. Of the newest run that measured memory: alone_bytes,
    added_bytes. Medians over passing runs: ceiling, reached, issue_ms, base_issue_ms, busy_ms.
    ceiling_note is ESTIMATED where a ceiling of these is.
    """

    row: int  # number of the row, as in `measured` and `hosts`
    machine: str
    gpu: str
    ranks: int
    model: str
    preset: str
    label: str
    over: str  # quantity, where the newest run is a point of a sweep
    build: str
    busy_processes: int
    digest: str
    workload: str
    variant: str
    kind: str
    base: str  # "" where no eager passed
    control: bool
    headline: bool  # `make bench` measures it by default, a full run opened the row, and its runs count
    status: str
    reason: str
    parity: str
    base_ms: float | None  # median over hosts
    base_ms_low: float | None  # fastest host
    base_ms_high: float | None  # slowest host
    ms: float | None  # median over hosts; of the base, of its newest run
    ms_low: float | None
    ms_high: float | None
    gain: float | None  # base ms / ms of one host, of several the geometric mean
    gain_low: float | None
    gain_high: float | None
    standing: str  # of the runs in the numbers: quiet or unknown where there are any, else beside, else aside
    beside_low: float | None  # gains beside other work, where the numbers are of quiet hosts
    beside_high: float | None
    beside_hosts: int
    interval_low: float | None  # 95 % interval of a row with one run on one host
    interval_high: float | None
    ceiling: float | None
    ceiling_low: float | None
    ceiling_high: float | None
    ceiling_note: str
    reached: float | None
    cycles: int  # of all runs
    hosts: int  # with those of the archive
    archived_hosts: int
    unknown_hosts: int  # their files do not tell of other work
    runs: int  # runs with a ratio that counts
    issue_ms: float | None
    base_issue_ms: float | None
    busy_ms: float | None
    typical_ms: float | None
    kernels: float | None
    graph_share: float | None
    tflops: float | None
    joules: float | None
    sm_mhz: float | None
    made_s: float | None
    fastest: str  # what is best by the run of the workload that measured most variants, at the row that does it
    alone_bytes: int | None
    added_bytes: int | None
    run: str
    path: str
    memory_run: str  # run of the columns of memory
    memory_path: str  # its file
    note: str  # all that a reader has to know beside the numbers


def where_of(line) -> Workload:
    """Return the workload of a line of any of the tables."""
    return Workload(*(getattr(line, name) for name in WORKLOAD))


@dataclass(frozen=True)
class Results:
    """The runs below a folder.

    Attributes:
        runs: a run that is there twice counts once.
        faults: a line for each file that cannot be read; such files have no rows.
        archive: the hosts that were measured with the older method.
    """

    root: Path
    runs: list[tuple[Path, Run]]
    faults: list[str]
    archive: DataFrame
    points: DataFrame

    @cached_property
    def rows(self) -> DataFrame:
        """The points over hosts and runs."""
        return rows(self.points, self.archive)

    @cached_property
    def hosts(self) -> DataFrame:
        """The hosts of each row."""
        return hosts(self.points, self.archive)

    @cached_property
    def judged(self) -> dict[tuple[str, str], Judged]:
        """(id of the run, name of the build) -> the build with its verdicts, for what no column holds."""
        return {(run.id, name): build for _, run in self.runs for name, build in judged(run).items()}

    def builds_of(self, run: str, build: str) -> list[Judged]:
        """Return a build of a run, and those of its variants that stand apart."""
        return [
            judged for (id, name), judged in self.judged.items() if id == run and build_of(judged.run, name) == build
        ]

    def records(self, is_shown=None) -> list[Row]:
        """Return the rows, or those for which a column of flags is true."""
        return records(self.rows if is_shown is None else self.rows[is_shown])


def load(root: Path) -> Results:
    """Return every run below a folder with all its tables."""
    runs, faults = _runs_of(root)
    archived, damaged = _archive_of(root)
    corrections = corrections_file.read(root)
    faults += [*damaged, *corrections.faults([run for _, run in runs])]
    return Results(root, runs, faults, archived, measured(points_of(runs, corrections)))


def _runs_of(root: Path) -> tuple[list[tuple[Path, Run]], list[str]]:
    """The runs below a folder and a line for each fault. If two files of one id differ, both are left out."""
    runs, faults = run_file.find(root)
    by_id: dict[str, list[tuple[Path, Run]]] = {}
    for path, run in runs:
        by_id.setdefault(run.id, []).append((path, run))
    kept = []
    for same in by_id.values():
        if all(run == same[0][1] for _, run in same):
            kept.append(same[0])
        else:
            paths = ", ".join(str(path) for path, _ in same)
            faults.append(f"{paths}: have one id and differ: none of them counts")
    return kept, faults


def read(root: Path | str) -> DataFrame:
    """Return a row for each run, build, number of busy processes and variant below a folder, with `COLUMNS`.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not Path(root).is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(root))
    return points_of(_runs_of(Path(root))[0], corrections_file.read(Path(root)))


def faults(root: Path | str) -> DataFrame:
    """Return the files below a folder that are left out, and the reason: another schema, no JSON, ..."""
    lines = [line.partition(": ") for line in load(Path(root)).faults]
    return DataFrame([(path, reason) for path, _, reason in lines], columns=["path", "reason"], dtype=TEXT)


def archive(root: Path | str) -> DataFrame:
    """Return a row for each workload, host and variant that was measured with the older method.

    ms, kernels and reserved_bytes are the variant's mean step, its kernels in a step, and the most memory that it
    reserved; folder has the sessions.
    """
    return _archive_of(Path(root))[0]


def _archive_of(root: Path) -> tuple[DataFrame, list[str]]:
    archived, damaged = archive_file.read(root / "archive")
    types = {"host": TEXT, "variant": TEXT, "ms": NUMBER, "kernels": NUMBER, "reserved_bytes": COUNT, "folder": TEXT}
    lines = [
        (*astuple(where), host.boot, name, ms, host.kernels.get(name), host.reserved_bytes.get(name), str(host.folder))
        for where, hosts in archived.items()
        for host in hosts
        for name, ms in host.ms.items()
    ]
    table = DataFrame(lines, columns=[*WORKLOAD, *types])
    return table.astype({name: COLUMNS[name].type for name in WORKLOAD} | types), damaged


def points_of(runs: Iterable[tuple[Path, Run]], corrections: Corrections = corrections_file.NONE) -> DataFrame:
    """Return a row for each build, number of busy processes and variant of runs, with `COLUMNS`."""
    points: list[_Point] = []
    for path, run in runs:
        builds = judged(run)
        bests = {name: best_of(of_state(builds, build)) for name, build in builds.items()}
        first = next(iter(builds.values()), None)
        seen: set[tuple[Workload, str]] = set()
        for name, build in builds.items():
            standing = standing_of(build, corrections.of(run), corrections.slows(run))
            numbers = {block.busy_processes for facts in build.build.variants.values() for block in facts.blocks}
            for busy in sorted({0, *numbers}):
                where = workload_of(run, name, busy)
                # Variants that stand apart have an eager of their own, which is a row where no other one is.
                new = [
                    _Point(path, run, first or build, build, standing, where, name, variant, bests[name])
                    for variant, facts in build.build.variants.items()
                    if not (variant == run.control and not facts.blocks) and (not busy or build.blocks(variant, True))
                    if (where, variant) not in seen
                ]
                seen |= {(where, point.name) for point in new}
                points += new
    points = _with_earlier_files(points)
    series = {name: pd.Series([*map(column.value, points)], dtype=column.type) for name, column in COLUMNS.items()}
    return DataFrame(series)


def _earlier(where: Workload) -> str:
    return f"{where.label}{EARLIER} {where.digest[:4]}".rstrip()


def _with_earlier_files(points: list[_Point]) -> list[_Point]:
    """Give a step of a user another name where a newer run measured another file of the same name."""
    newest: dict[Workload, tuple[str, str]] = {}
    for point in points:
        where = replace(point.workload, digest="")
        newest[where] = max(newest.get(where, ("", "")), (point.run.begin_utc, point.workload.digest))
    return [
        point
        if point.workload.digest == newest[replace(point.workload, digest="")][1]
        else replace(point, workload=replace(point.workload, label=_earlier(point.workload)))
        for point in points
    ]


def measured(points: DataFrame) -> DataFrame:
    """Return the points of `read` in the order of rows: machine, workload, variant; the base with most runs first.

    `row` numbers the rows. A run without a time of the variant says nothing against a base: it stands in the row with
    most runs, and `base` is "" where the variant passed in none.
    """
    variant = [*WORKLOAD, "variant"]
    order = points.assign(place=range(len(points)))
    order["first"] = order.groupby(variant)["place"].transform("min")
    by_base = order.groupby([*variant, "base"])["place"]
    order["runs"], order["first_of_base"] = by_base.transform("size"), by_base.transform("min")
    keys = {name: True for name in [*WORKLOAD, "first"]} | {"runs": False, "first_of_base": True, "place": True}
    order = order.sort_values(list(keys), ascending=list(keys.values()), kind="stable")
    # `first` leaves NA out: the base with most runs.
    order["base"] = order["base"].fillna(order.groupby(variant)["base"].transform("first")).fillna("")
    order["row"] = order.groupby([*variant, "base"], sort=False).ngroup()
    return order.sort_values("row", kind="stable").drop(columns=["place", "first", "runs", "first_of_base"])


def _tier(points: DataFrame) -> pd.Series:
    return points["standing"].map(TIERS).astype("int64")


def newest(points: DataFrame) -> DataFrame:
    """Return the point of the latest run of each row, timed ones and those that count first, by number of the row."""
    order = points.assign(passed=points["status"] == PASS, tier=_tier(points))
    order = order.sort_values(["passed", "tier", "begin_utc"], ascending=[False, True, False], kind="stable")
    return order.drop_duplicates("row").drop(columns=["passed", "tier"]).set_index("row").sort_index()


def timed(points: DataFrame) -> DataFrame:
    """Return the points with a ratio."""
    return points[points["ratio"].notna()]


def in_numbers(points: DataFrame) -> DataFrame:
    """Return the points in a row's numbers: those that count; where none does, those beside other work, then all."""
    tier = _tier(points)
    return points[tier == tier.groupby(points["row"]).transform("min")]


def host_means(points: DataFrame) -> DataFrame:
    """Return the means of each row on each host, over its runs there."""
    by_host = timed(points).groupby(["row", "host"], sort=False)
    means = by_host.agg(
        base_ms=("base_ms", geometric_mean),
        ms=("variant_ms", geometric_mean),
        standing=("standing", "min"),
        light_cycles=("cycles", "max"),
        is_light=("light", "all"),
        is_mixed=("mixed", "any"),
    ).reset_index()
    means["light_cycles"] = means["light_cycles"].where(means.pop("is_light").astype(bool), 0).astype(int)
    return means.assign(archived=False, gain=means["base_ms"] / means["ms"])


def beside(points: DataFrame) -> DataFrame:
    """Return the means of each row on hosts beside other work."""
    return host_means(points[points["standing"] == BESIDE])


def hosts(points: DataFrame, archived: DataFrame) -> DataFrame:
    """Return all hosts of each row with base_ms, ms and gain, those of the archive last.

    Hosts of the archive count where the base makes the same kernels as in the row's newest run.
    """
    means, latest = host_means(in_numbers(timed(points))), newest(points).reset_index()
    # The archive's builds are of one preset.
    same = ["gpu", "ranks", "model", "preset", "label", "busy_processes"]
    old = archived[(archived["build"] == "") & (archived["digest"] == "")]
    latest = latest[latest["row"].isin(means["row"]) & ~latest["control"] & (latest["base_kernels"] > 0)]
    pairs = latest[["row", *same, "variant", "base", "base_kernels"]].merge(
        old[[*same, "variant", "host", "ms"]], on=[*same, "variant"]
    )
    bases = old[[*same, "host", "variant", "ms", "kernels"]].rename(columns={"variant": "base", "ms": "old_base_ms"})
    pairs = pairs.merge(bases, on=[*same, "host", "base"])
    pairs = pairs[(pairs["kernels"] / pairs["base_kernels"] - 1).abs() <= archive_file.SAME_KERNELS]
    pairs = pairs[["row", "host", "old_base_ms", "ms"]].rename(columns={"old_base_ms": "base_ms"})
    pairs = pairs.assign(gain=pairs["base_ms"] / pairs["ms"], standing=UNKNOWN, **ARCHIVED)
    # An archived host counts, so nothing that does not count stands beside it in the numbers.
    means = means[means["standing"].isin(COUNTED) | ~means["row"].isin(pairs["row"])]
    every = pd.concat([means, pairs]) if len(pairs) else means
    return every.drop_duplicates(["row", "host"]).sort_values("row", kind="stable").reset_index(drop=True)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean to the last digit of the statistics module; NaN of nothing."""
    numbers = list(values)
    return plain.geometric_mean(numbers) if numbers else float("nan")


def _over(hosts: DataFrame) -> DataFrame:
    """The columns of `Row` that are over hosts."""
    ends = {"_low": "min", "_high": "max"}
    parts = {f"{name}{end}": (name, how) for name in ("base_ms", "ms", "gain") for end, how in ends.items()}
    return hosts.groupby("row").agg(
        base_ms=("base_ms", "median"),
        ms_over_hosts=("ms", "median"),
        gain=("gain", geometric_mean),
        hosts=("host", "size"),
        archived_hosts=("archived", "sum"),
        unknown_hosts=("unknown", "sum"),
        standing=("standing", "min"),
        **parts,
    )


def _worst_note(notes: pd.Series) -> str:
    """The note of a row's ceilings: ESTIMATED, else the reason why one is missing."""
    texts = set(notes.dropna())
    return ESTIMATED if ESTIMATED in texts else max(texts, default="")


def rows(points: DataFrame, archived: DataFrame | None = None) -> DataFrame:
    """Return the points of `measured` over hosts and runs, with the columns of `Row`."""
    latest, passed, every_ratio = newest(points), in_numbers(points[points["status"] == PASS]), timed(points)
    with_ratio = in_numbers(every_ratio)
    with_memory = points[points["alone_bytes"].notna()]
    memory = newest(with_memory)[["run", "path", "alone_bytes", "added_bytes", "steps_bytes"]]
    medians = passed.groupby("row").agg(
        **{name: (name, "median") for name in ("ceiling", "reached", "issue_ms", "base_issue_ms", "busy_ms")},
        ceiling_low=("ceiling", "min"),
        ceiling_high=("ceiling", "max"),
        ceiling_note=("ceiling_note", _worst_note),
    )
    sums = with_ratio.groupby("row").agg(
        cycles=("cycles", "sum"),
        most_cycles=("cycles", "max"),
        unchecked=("unchecked", "max"),
        unchecked_runs=("unchecked", lambda texts: int((texts != "").sum())),
        runs=("run", "size"),
        is_apart=("apart", "any"),
        **{name: (name, "first") for name in OF_ONE_RUN},
    )
    host_table = host_means(with_ratio) if archived is None else hosts(points, archived)
    is_unknown = (host_table["standing"] == UNKNOWN) & ~host_table["archived"].astype(bool)
    over = _over(host_table.assign(unknown=is_unknown))
    gains = beside(points).groupby("row")["gain"]
    gains = gains.agg(beside_low="min", beside_high="max", beside_hosts="size")
    gains = gains[gains.index.isin(over.index[over["standing"].isin(COUNTED)])]
    parts = [medians, over, sums, gains, memory.rename(columns={"run": "memory_run", "path": "memory_path"})]
    table = latest.rename(columns={"base_ms": "newest_base_ms"})
    for part in parts:
        table = table.drop(columns=part.columns, errors="ignore").join(part)
    table["is_committed"] = points.groupby("row")["committed"].all()
    numbers = ("cycles", "runs", "hosts", "archived_hosts", "unknown_hosts", "beside_hosts")
    table = table.assign(**{name: table[name].fillna(0).astype(COUNT) for name in numbers})
    has_interval = (table["runs"] == 1) & (table["archived_hosts"] == 0) & (table["cycles"] > 1)
    table["interval_low"], table["interval_high"] = table["low"].where(has_interval), table["high"].where(has_interval)
    table["ms"] = table["ms_over_hosts"].fillna(table["ms"].where(table["status"] == PASS))
    is_opened = table.index.isin(opened(points)) | (table["archived_hosts"] > 0)
    table["is_opened"] = is_opened | ~table.index.isin(every_ratio["row"])
    table["headline"] &= table["is_opened"] & table["standing"].isin(COUNTED)
    table["standing"] = table["standing"].fillna("")
    table = table.join(_aside(every_ratio))
    table["fastest"] = _fastest(points, table).reindex(table.index).fillna("")
    for name in ("run", "path"):
        table[f"memory_{name}"] = table[f"memory_{name}"].fillna(table[name])
    table["note"] = pd.Series([_note(row) for row in _plain(table)], index=table.index, dtype=TEXT)
    return table.reset_index()[list(Row._fields)]


def _fastest(points: DataFrame, table: DataFrame) -> pd.Series:
    """The best thing to do with each workload, by number of the row that does it.

    Of its runs, those that count first, the newest of those that measured most variants decides, unless the numbers of
    the rows say another thing: a capture has to gain on each host of its row, and beside "leave it eager" no graph may
    gain in the mean over hosts.
    """
    order = points.assign(tier=_tier, known=points.groupby(["run", *WORKLOAD])["ratio"].transform("count"))
    order = order[(order["fastest"] != "") & (order["busy_processes"] == 0)]
    order = order.sort_values(["tier", "known", "begin_utc"], ascending=[True, False, False], kind="stable")
    chosen = order.drop_duplicates(WORKLOAD).set_index("row")["fastest"]
    tier = table["standing"].map(TIERS)
    gains = (table["kind"] != "eager") & (table["gain"] > 1 + AS_FAST) & ~(table["interval_low"] <= 1)
    by_workload = [table[name] for name in WORKLOAD]
    best_tier = tier.groupby(by_workload, dropna=False).transform("min")
    any_gains = (gains & (tier == best_tier)).groupby(by_workload, dropna=False).transform("any")
    agrees = (gains & (table["gain_low"] > 1 + AS_FAST)).where(chosen.reindex(table.index) != EAGER, ~any_gains)
    return chosen.where(agrees.reindex(chosen.index), RUNS_DIFFER)


def opened(points: DataFrame) -> pd.Series:
    """Return the rows that a full run opened; a light one adds a host to them, and is no headline by itself."""
    return points["row"][points["ratio"].notna() & ~points["light"].fillna(True).astype(bool)]


def _aside(points: DataFrame) -> DataFrame:
    """The timed runs of a row that neither count nor are beside other work: their reasons, newest first, and gains."""
    out = points[points["standing"].isin(OUT)]
    by_row = out.sort_values("begin_utc", ascending=False, kind="stable").groupby("row")
    table = by_row["ratio"].agg(aside_low="min", aside_high="max")
    texts = [first if not more else f"{first}, and more" for first, *more in by_row["standing_reason"].unique()]
    return table.assign(aside=pd.Series(texts, index=table.index, dtype=TEXT))


def _plain(table: DataFrame) -> list:
    """The lines of a table with Python's numbers, and None in the place of NaN and NA."""
    return list(table.astype(object).where(table.notna(), None).itertuples(index=False, name="Line"))


def records(table: DataFrame) -> list[Row]:
    """Return rows of `rows` with Python's numbers, and None in the place of NaN."""
    return [Row(*line) for line in _plain(table)]


def _note(row) -> str:
    """All that a reader has to know beside the numbers. It rests on timed, passing runs alone."""
    word = intervals.word(row) if row.interval_low is not None else ""
    texts = [word if word in ("same", "unclear") else ""]
    if row.base not in ("eager", "", row.variant) and not row.control:
        texts.append(f"against {row.base}")
    texts.append("no eager variant passed" if not row.base and row.kind != "eager" else "")
    if row.runs and not row.control:
        texts.append(f"its graphs hold {row.captured} alone" if row.captured else "")
        # A faster base of the run's first build: the ratio then overstates the gain.
        if row.first_base not in ("", row.base) and row.first_ms and row.newest_base_ms is not None:
            is_faster = row.first_ms < row.newest_base_ms / 1.01
            texts.append(f"{row.first_base} of the other build: {digits(row.first_ms)} ms" if is_faster else "")
        texts.append("a process for each block" if row.is_apart else "")
        texts.append("in a process of its own with eager" if row.process != row.build else "")
        texts.append("reduce_overhead ran in its process" if row.mixed and row.kind == "graph" else "")
        # Beside a small effect stands by how much two equal programs differed in the same run.
        if word and abs(row.gain - 1) < intervals.SMALL_EFFECT and row.control_ratio is not None:
            texts.append(f"control {row.control_ratio:.3f}x +- {100 * row.control_half_width:.1f} %")
        fastest, slowest = row.base_fastest_ms, row.base_slowest_ms
        if row.runs == 1 and fastest is not None and slowest > (1 + WIDE_SPREAD) * fastest:
            texts.append(f"{row.base} {digits(fastest)} to {digits(slowest)} ms")
        beside = row.standing_reason if row.runs == 1 else "beside other work"
        reason = {BESIDE: beside, **dict.fromkeys(OUT, row.aside)}.get(row.standing, "")
        texts.append(no_headline(reason, None if row.is_opened else row.most_cycles))
        some = f"in {row.unchecked_runs} of {row.runs} runs " if row.unchecked_runs < row.runs else ""
        texts.append(f"{some}{row.unchecked}" if row.unchecked else "")
        not_counted = f"not counted: {span(row.aside_low, row.aside_high, '.3f', 'x')} ({row.aside})"
        texts += [not_counted] if row.aside and row.standing not in OUT else []
        added, steps = row.added_bytes or 0, row.steps_bytes
        if added >= GIB / 2:
            is_brief = steps is not None and added - steps >= GIB / 2
            texts.append(f"adds {gib(added)} GiB" + (f" in its capture, {gib(steps)} in steps" if is_brief else ""))
        # Where some runs have a ceiling, the row has it.
        texts.append(f"{NO_CEILING}: {row.ceiling_note}" if row.ceiling is None and row.ceiling_note else "")
        texts.append(row.flops_notes)
    texts.append("" if row.is_committed else "uncommitted source")
    return "; ".join(filter(None, texts)) if row.status == PASS else ""


def work(args) -> int:
    """Write a table."""
    if not Path(args.root).is_dir():
        raise Mistake(f"{args.root}: no such folder")
    if args.to.suffix not in (".csv", ".parquet"):
        raise Mistake(f"--to {args.to}: ends in .csv or .parquet")
    results = load(Path(args.root))
    table = faults(args.root) if args.table == "faults" else getattr(results, args.table)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    try:
        (table.to_csv if args.to.suffix == ".csv" else table.to_parquet)(args.to, index=False)
    except ImportError:
        raise Mistake(f"--to {args.to}: parquet needs pyarrow: ./setup.sh parquet") from None
    print(f"{shown(args.to)}: {counted(len(table), 'line')}")
    for fault in results.faults:
        print(f"left out: {fault}", file=sys.stderr)
    return 1 if results.faults and args.table != "faults" else 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("frame", "A table of all runs below a folder, as csv or parquet.")
    parser.add_argument("root", metavar="DIR", nargs="?", default="results", help="a root of runs (results)")
    parser.add_argument("--to", metavar="FILE", type=Path, default=RUNS / "frame.csv", help="(runs/frame.csv)")
    parser.add_argument("--table", choices=("points", "rows", "archive", "faults"), default="points", help="(points)")
    args = parser.parse_args(argv)
    return command.exit_status("python -m benchmarks.frame", lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
