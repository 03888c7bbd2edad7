"""All runs below a folder as rows: a row for each variant of a workload against one base, over its hosts.

A row never mixes bases. Several runs of one host count as one host. Hosts of the archive count, too, where eager makes
the same kernels there.
"""

import statistics as plain
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from benchmarks import archive
from benchmarks.archive import ArchivedHost
from graph_worth.folders import ROOT
from graph_worth.harness import intervals
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Run, Variant
from graph_worth.harness.files.workload import Workload, workload_of
from graph_worth.harness.intervals import Ratio
from graph_worth.harness.judge import PASS, Judged, Verdict, judged

NUMBER_WORDS = {1: "one host", 2: "two hosts"}
# Ends the label of a user's step that a newer run measured with another file.
EARLIER = ", earlier file"
Range = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """A variant in one run. `is_busy`: in the cycles beside busy processes, not in the quiet ones."""

    path: Path
    run: Run
    judged: Judged
    name: str
    is_busy: bool

    @property
    def variant(self) -> Variant:
        """The variant's facts."""
        return self.judged.build.variants[self.name]

    @property
    def verdict(self) -> Verdict:
        """The variant's verdict."""
        return self.judged.verdicts[self.name]

    @cached_property
    def ratio(self) -> Ratio | None:
        """The ratio to the base; None for the base and for variants without a time."""
        return self.judged.ratio_of(self.name, self.is_busy)

    @property
    def host(self) -> str:
        """The boot of the host."""
        return str(self.run.host.boot)

    @property
    def others(self) -> int:
        """The most benchmarks that ran on other GPUs of the host meanwhile."""
        return max((cycle.others or 0 for cycle in self.judged.build.cycles), default=0)

    @property
    def issue_ms(self) -> float | None:
        """The host's time to issue a step of the variant."""
        return self.judged.issue_ms(self.name, self.is_busy)

    @property
    def base_issue_ms(self) -> float | None:
        """The host's time to issue a step of the base."""
        return self.judged.issue_ms(self.judged.base, self.is_busy)

    @property
    def busy_ms(self) -> float | None:
        """The GPU's busy time in a step of the variant."""
        return self.judged.busy_ms(self.name)

    @cached_property
    def ceiling(self) -> float | None:
        """The most that a graph can gain: step / busy time of the uncaptured program."""
        return self.judged.ceiling(self.name, self.is_busy)

    @property
    def reached(self) -> float | None:
        """The share of its ceiling that the variant reached."""
        return self.judged.reached(self.name, self.is_busy)


@dataclass(frozen=True)
class HostMeans:
    """A row's means on one host, over its runs there; `is_archived`: of the archive."""

    host: str
    base_ms: float
    ms: float
    is_archived: bool = False

    @property
    def ratio(self) -> float:
        """Base ms / ms."""
        return self.base_ms / self.ms


@dataclass(frozen=True)
class Row:
    """A variant of a workload against one base, over all its runs.

    Attributes:
        base: the variant that ratios compare with; the row's own name where the row is the base.
        points: the variant in each run with this base.
        archived: hosts of the archive that count.
    """

    workload: Workload
    variant: str
    base: str
    points: tuple[Point, ...]
    archived: tuple[HostMeans, ...] = ()

    @cached_property
    def newest(self) -> Point:
        """The point of the latest run, timed ones first."""
        return max(self.points, key=lambda point: (point.verdict.status == PASS, point.run.begin_utc))

    @cached_property
    def newest_with_memory(self) -> Point:
        """The newest point whose run measured memory alone, which a census does not; else the newest."""
        measured = [point for point in self.points if point.judged.alone_bytes(self.variant) is not None]
        return replace(self, points=tuple(measured)).newest if measured else self.newest

    @cached_property
    def timed(self) -> list[Point]:
        """The points with a ratio."""
        return [point for point in self.points if point.ratio is not None]

    @property
    def undisturbed(self) -> "Row":
        """The row without runs beside other benchmarks, and without those whose base was slower than alone."""
        return replace(self, points=tuple(point for point in self.points if not (point.others or point.judged.slowed)))

    @property
    def ratios(self) -> list[Ratio]:
        """The ratio of each timed point."""
        return [point.ratio for point in self.points if point.ratio is not None]

    @property
    def kind(self) -> str:
        """eager, graph or compile."""
        return self.newest.variant.kind

    @property
    def headline(self) -> bool:
        """True for variants that `make bench` measures by default, against a base that they did not slow."""
        return self.newest.variant.headline and not self.newest.judged.slowed

    @property
    def control(self) -> bool:
        """True for the base measured once more."""
        return self.variant == self.newest.run.control

    @property
    def status(self) -> str:
        """The status in the newest run; "pass" if the variant passed in any run."""
        return self.newest.verdict.status

    @cached_property
    def hosts(self) -> list[HostMeans]:
        """All hosts of the row, each once, those of the archive last."""
        ratios_by_host: dict[str, list[Ratio]] = defaultdict(list)
        for point, ratio in zip(self.timed, self.ratios, strict=True):
            ratios_by_host[point.host].append(ratio)
        mean = plain.geometric_mean
        measured = [
            HostMeans(host, mean([ratio.base_ms for ratio in ratios]), mean([ratio.variant_ms for ratio in ratios]))
            for host, ratios in ratios_by_host.items()
        ]
        return [*measured, *self.archived]

    @property
    def hosts_text(self) -> str:
        """One host, two hosts, or 7 hosts, 3 archived."""
        text = NUMBER_WORDS.get(len(self.hosts), f"{len(self.hosts)} hosts")
        return f"{text}, {len(self.archived)} archived" if self.archived else text

    @property
    def ms(self) -> float | None:
        """The step: the median over hosts; of the base, or of a row without a ratio, of its newest run."""
        if self.hosts:
            return plain.median(host.ms for host in self.hosts)
        return self.newest.judged.ms(self.variant, self.newest.is_busy) if self.status == PASS else None

    @property
    def base_ms(self) -> float | None:
        """The base's step: the median over hosts."""
        return plain.median(host.base_ms for host in self.hosts) if self.hosts else None

    @property
    def ms_range(self) -> Range | None:
        """The step's range over hosts."""
        return range_of([host.ms for host in self.hosts])

    @property
    def base_ms_range(self) -> Range | None:
        """The base's range over hosts."""
        return range_of([host.base_ms for host in self.hosts])

    @property
    def gain_range(self) -> Range | None:
        """The gain's range over hosts."""
        return range_of([host.ratio for host in self.hosts])

    @cached_property
    def ratio(self) -> float | None:
        """The gain: of one host base ms / ms, of several the geometric mean over hosts; None without any."""
        return plain.geometric_mean([host.ratio for host in self.hosts]) if self.hosts else None

    @cached_property
    def interval(self) -> Range | None:
        """The 95 % interval of a row with one run on one host."""
        if len(self.ratios) != 1 or self.archived or self.cycles < 2:
            return None
        return self.ratios[0].low, self.ratios[0].high

    @property
    def cycles(self) -> int:
        """Cycles of all runs."""
        return sum(ratio.cycles for ratio in self.ratios)

    def over_runs(self, name: str) -> list[float]:
        """Return a number of `Point`, such as "ceiling", of each passing run that has it."""
        passed = [point for point in self.points if point.verdict.status == PASS]
        return [value for point in passed if (value := getattr(point, name)) is not None]

    def median(self, name: str) -> float | None:
        """Return the median over passing runs of a number of `Point`; None if none has it."""
        values = self.over_runs(name)
        return plain.median(values) if values else None

    @property
    def word(self) -> str:
        """faster, slower, same or unclear on one host, "" without an interval."""
        return intervals.word(self.ratios[0]) if self.interval else ""

    @property
    def is_committed(self) -> bool:
        """False if a run's source was not committed. `make publish` has looked at the source of runs in results/."""
        dirty = [point.path.resolve() for point in self.points if point.run.source.get("clean") is False]
        return all(path.is_relative_to(ROOT / "results") for path in dirty)


@dataclass(frozen=True)
class Found:
    """The runs below a folder.

    Attributes:
        faults: a line for each file that cannot be read; such files have no rows.
        archived: the archive's hosts of each workload, measured before blocks.
    """

    root: Path
    runs: list[tuple[Path, Run]]
    faults: list[str]
    rows: list[Row]
    archived: dict[Workload, list[ArchivedHost]] = field(default_factory=dict)


def read(root: Path) -> Found:
    """Return every run below a folder, and its rows in the order of machines, workloads and the models' variants.

    A run that is there twice counts once. If two files of one id differ, both are left out.
    """
    runs, faults = run_file.find(root)
    by_id: dict[str, list] = defaultdict(list)
    for path, run in runs:
        by_id[run.id].append((path, run))
    kept = []
    for same in by_id.values():
        if all(run == same[0][1] for _, run in same):
            kept.append(same[0])
        else:
            paths = ", ".join(str(path) for path, _ in same)
            faults.append(f"{paths}: have one id and differ: none of them counts")
    archived, damaged = archive.read(root / "archive")
    return Found(root, kept, [*faults, *damaged], rows_of(kept, archived), archived)


def rows_of(runs: list[tuple[Path, Run]], archived: dict[Workload, list[ArchivedHost]] | None = None) -> list[Row]:
    """Return a row for each variant and base of each workload; of several bases the one with most runs first."""
    grouped: dict[tuple[Workload, str], list[Point]] = defaultdict(list)
    for path, run in runs:
        for name, judged_build in judged(run).items():
            numbers = {block.busy_processes for facts in judged_build.build.variants.values() for block in facts.blocks}
            for busy in sorted({0, *numbers}):
                where = workload_of(run, name, busy)
                for variant, facts in judged_build.build.variants.items():
                    if variant == run.control and not facts.blocks:
                        continue
                    if not busy or judged_build.blocks(variant, True):
                        grouped[where, variant].append(Point(path, run, judged_build, variant, bool(busy)))
    _name_earlier_files(grouped)
    rows = []
    for where, variant in sorted(grouped, key=lambda key: key[0]):
        by_base: dict[str, list[Point]] = defaultdict(list)
        untimed: list[Point] = []
        for point in grouped[where, variant]:
            judged_build = point.judged
            base = judged_build.build.anchor if variant == point.run.control else judged_build.base
            (by_base[base] if point.verdict.status == PASS else untimed).append(point)
        # A run without a time of the variant says nothing against a base: it stands with the others' row.
        ranked = sorted(by_base.items(), key=lambda item: -len(item[1])) or [("", [])]
        ranked[0][1].extend(untimed)
        rows += [_with_archive(Row(where, variant, base, tuple(points)), archived or {}) for base, points in ranked]
    return rows


def _name_earlier_files(grouped) -> None:
    """Give a step of a user another name where a newer run measured another file of the same name."""
    newest: dict[Workload, tuple[str, str]] = defaultdict(lambda: ("", ""))
    for (where, _), points in grouped.items():
        latest = max(point.run.begin_utc for point in points), where.digest
        newest[replace(where, digest="")] = max(newest[replace(where, digest="")], latest)
    for where, variant in list(grouped):
        if where.digest != newest[replace(where, digest="")][1]:
            points = grouped.pop((where, variant))
            grouped[replace(where, label=f"{where.label}{EARLIER}"), variant] = points


def _with_archive(row: Row, archived: dict[Workload, list[ArchivedHost]]) -> Row:
    """Add the hosts of the archive where eager makes the same kernels."""
    where, base, variant = row.workload, row.base, row.variant
    facts = row.newest.judged.build.variants.get(base)
    kernels = facts.profile.kernels if facts else None
    if not row.timed or not kernels or row.control:
        return row
    known = {host.host for host in row.hosts}
    # The archive's builds are of one preset.
    of_archive = Workload(where.gpu, where.ranks, where.model, where.preset, where.label, "", where.busy)
    hosts = tuple(
        HostMeans(host.boot, host.ms[base], host.ms[variant], True)
        for host in archived.get(of_archive, ())
        if host.boot not in known
        and {base, variant} <= host.ms.keys()
        and base in host.kernels
        and abs(host.kernels[base] / kernels - 1) <= archive.SAME_KERNELS
    )
    return replace(row, archived=hosts)


@dataclass(frozen=True)
class Reached:
    """A graph in one run beside its ceiling; `share`: gain / ceiling."""

    row: Row
    point: Point
    ceiling: float
    share: float

    @property
    def gain(self) -> float:
        """Base ms / ms."""
        return self.ceiling * self.share


def reached(rows: Sequence[Row]) -> list[Reached]:
    """Return each graph in each run on a GPU that has a gain and a ceiling, contended cycles apart."""
    return [
        Reached(row, point, ceiling, share)
        for row in rows
        for point in row.timed
        if (ceiling := point.ceiling) is not None and (share := point.reached) is not None
    ]


def on_gpus(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no CPU measured."""
    return [row for row in rows if row.workload.gpu != "CPU"]


def of_machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return machine -> its rows, first the machine with most rows, last CPUs."""
    rows_by_machine: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_machine[row.workload.machine].append(row)
    return dict(sorted(rows_by_machine.items(), key=lambda item: (item[0].startswith("CPU"), -len(item[1]), item[0])))


def counted(number: int, word: str) -> str:
    """Return 1 host, or 2 hosts."""
    return f"{number} {word}{'s' if number != 1 else ''}"


def range_of(values: Sequence[float]) -> Range | None:
    """Return the smallest and the largest number; None without any."""
    return (min(values), max(values)) if values else None
