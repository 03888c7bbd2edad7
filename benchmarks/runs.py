"""All runs below a folder as rows: a row for each variant of a workload against one base, over its hosts.

A row never mixes bases. Several runs of one host count as one host. Hosts of the archive count, too, where eager makes
the same kernels there.
"""

import math
import statistics as plain
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from benchmarks import ROOT, statistics
from benchmarks.files import archive, run_file
from benchmarks.files.archive import ArchivedHost
from benchmarks.files.facts import OWN_STEP, Run, Variant, stem
from benchmarks.files.workload import Workload, workload_of
from benchmarks.judge import PASS, Judged, Verdict, judged
from benchmarks.statistics import Ratio

NUMBER_WORDS = {1: "one host", 2: "two hosts"}
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

    @property
    def base_busy_ms(self) -> float | None:
        """The GPU's busy time in a step of the base."""
        return self.judged.busy_ms(self.judged.base)

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


@dataclass(frozen=True, kw_only=True)
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
    def timed(self) -> list[Point]:
        """The points with a ratio."""
        return [point for point in self.points if point.ratio is not None]

    @property
    def kind(self) -> str:
        """eager, graph or compile."""
        return self.newest.variant.kind

    @property
    def headline(self) -> bool:
        """True for variants that `make bench` measures by default."""
        return self.newest.variant.headline

    @property
    def control(self) -> bool:
        """True for the base measured once more."""
        return self.variant == self.newest.run.control

    @property
    def status(self) -> str:
        """The status in the newest run; "pass" if the variant passed in any run."""
        return self.newest.verdict.status

    @property
    def reason(self) -> str:
        """The reason why nothing was timed."""
        return self.newest.verdict.reason

    @cached_property
    def own_hosts(self) -> list[HostMeans]:
        """The hosts of published runs, each once."""
        found: dict[str, list[Ratio]] = defaultdict(list)
        for point in self.timed:
            assert point.ratio is not None, "a timed point has a ratio"
            found[point.host].append(point.ratio)
        return [
            HostMeans(host, geometric([own.base_ms for own in each]), geometric([own.variant_ms for own in each]))
            for host, each in found.items()
        ]

    @cached_property
    def hosts(self) -> list[HostMeans]:
        """All hosts of the row, those of the archive last."""
        return [*self.own_hosts, *self.archived]

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.hosts)

    @property
    def hosts_text(self) -> str:
        """One host, two hosts, or 7 hosts, 3 archived."""
        text = NUMBER_WORDS.get(self.num_hosts, f"{self.num_hosts} hosts")
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
        return _range([host.ms for host in self.hosts])

    @property
    def base_ms_range(self) -> Range | None:
        """The base's range over hosts."""
        return _range([host.base_ms for host in self.hosts])

    @property
    def gain_range(self) -> Range | None:
        """The gain's range over hosts."""
        return _range([host.ratio for host in self.hosts])

    @cached_property
    def ratio(self) -> float | None:
        """The gain: of one host base ms / ms, of several the geometric mean over hosts; None without any."""
        return geometric([host.ratio for host in self.hosts]) if self.hosts else None

    @cached_property
    def interval(self) -> Range | None:
        """The 95 % interval of a row with one run on one host."""
        if len(self.timed) != 1 or self.archived or self.timed[0].ratio is None or self.timed[0].ratio.cycles < 2:
            return None
        return self.timed[0].ratio.low, self.timed[0].ratio.high

    @property
    def cycles(self) -> int:
        """Cycles of all runs."""
        return sum(point.ratio.cycles for point in self.timed if point.ratio is not None)

    def range_of(self, name: str) -> Range | None:
        """Return the range over passing runs of a number of `Point`, such as "ceiling"; None if none has it."""
        passed = [point for point in self.points if point.verdict.status == PASS]
        return _range([value for point in passed if (value := getattr(point, name)) is not None])

    def median(self, name: str) -> float | None:
        """Return the median over passing runs of a number of `Point`, such as "issue_ms"; None if none has it."""
        passed = [point for point in self.points if point.verdict.status == PASS]
        found = [value for point in passed if (value := getattr(point, name)) is not None]
        return plain.median(found) if found else None

    @property
    def alone_gib(self) -> float | None:
        """GiB that the variant needs as the only one of its process; None if unknown."""
        size = self.newest.judged.alone_bytes(self.variant)
        return None if size is None else size / 2**30

    @property
    def tflops(self) -> float | None:
        """Useful TFLOP/s of the newest run; None if unknown, or if steps differ in kind."""
        return self.newest.judged.tflops(self.variant, self.newest.is_busy)

    @property
    def word(self) -> str:
        """faster, slower, same or unclear on one host, "" without an interval."""
        return statistics.word(self.timed[0].ratio) if self.interval and self.timed[0].ratio else ""

    @property
    def is_committed(self) -> bool:
        """False if a run's source was not committed. `make publish` has looked at the source of runs in results/."""
        dirty = [point.path.resolve() for point in self.points if point.run.source.get("clean") is False]
        return all(path.is_relative_to(ROOT / "results") for path in dirty)


@dataclass
class Found:
    """The runs below a folder. `faults`: a line for each file that cannot be read; such files have no rows."""

    root: Path
    runs: list[tuple[Path, Run]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def read(root: Path) -> Found:
    """Return every run below a folder, and its rows in the order of machines, workloads and the models' variants.

    A run that is there twice counts once. If two files of one id differ, both are left out.
    """
    found, faults = run_file.find(root)
    by_id: dict[str, list] = defaultdict(list)
    for path, run in found:
        by_id[run.id].append((path, run))
    kept = []
    for same in by_id.values():
        if all(run == same[0][1] for _, run in same):
            kept.append(same[0])
        else:
            paths = ", ".join(str(path) for path, _ in same)
            faults.append(f"{paths}: have one id and differ: none of them counts")
    archived, damaged = archive.read(root / "archive")
    return Found(root, kept, [*faults, *damaged], rows_of(kept, archived))


def rows_of(found: list[tuple[Path, Run]], archived: dict[Workload, list[ArchivedHost]] | None = None) -> list[Row]:
    """Return a row for each variant and base of each workload; of several bases the one with most runs first."""
    grouped: dict[tuple[Workload, str], list[Point]] = defaultdict(list)
    for path, run in found:
        for name, own in judged(run).items():
            numbers = {block.busy_processes for each in own.build.variants.values() for block in each.blocks}
            for busy in sorted({0, *numbers}):
                where = workload_of(run, name, busy)
                for variant, facts in own.build.variants.items():
                    if variant == run.control and not facts.blocks:
                        continue
                    if not busy or own.blocks(variant, True):
                        grouped[where, variant].append(Point(path, run, own, variant, bool(busy)))
    _name_earlier_files(grouped)
    rows = []
    for where, variant in sorted(grouped, key=lambda key: key[0]):
        by_base: dict[str, list[Point]] = defaultdict(list)
        points = grouped[where, variant]
        for point in points:
            by_base[_base_of(point)].append(point)
        # A run without a time of the variant says nothing against a base: it stands with the others' row.
        untimed = [point for point in points if point.verdict.status != PASS]
        timed = {base: [each for each in points if each not in untimed] for base, points in by_base.items()}
        kept = {base: each for base, each in timed.items() if each} or {"": []}
        for index, (base, each) in enumerate(sorted(kept.items(), key=lambda item: -len(item[1]))):
            row_points = (*each, *(untimed if index == 0 else ()))
            rows.append(_with_archive(where, variant, base, row_points, archived or {}))
    return rows


def _name_earlier_files(grouped) -> None:
    """Give a step of a user another name where a newer run measured another file of the same name."""
    newest: dict[Workload, tuple[str, str]] = {}
    for (where, _), points in grouped.items():
        latest = max(point.run.begin_utc for point in points), where.digest
        plain_where = replace(where, digest="")
        newest[plain_where] = max(newest.get(plain_where, latest), latest)
    for where, variant in list(grouped):
        if where.digest != newest[replace(where, digest="")][1]:
            points = grouped.pop((where, variant))
            grouped[replace(where, label=f"{where.label}, earlier file"), variant] = points


def _base_of(point: Point) -> str:
    return point.judged.build.anchor if point.name == point.run.control else point.judged.base


def _with_archive(where, variant, base, points, archived) -> Row:
    row = Row(workload=where, variant=variant, base=base, points=points)
    kernels = row.newest.judged.build.variants[base].profile.kernels if base in row.newest.judged.verdicts else None
    if not row.timed or not kernels or row.control:
        return row
    known = {host.host for host in row.own_hosts}
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
    return Row(workload=where, variant=variant, base=base, points=points, archived=hosts)


def of_machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return machine -> its rows, first the machine with most rows, last CPUs."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.workload.machine].append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("CPU"), -len(item[1]), item[0])))


def best_measured(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each model: the fastest graph of its preset `bench` without flags, in its first build.

    For a model without such a row: the fastest graph of the workload with most hosts and cycles. Steps of users are no
    model.
    """
    timed = [row for row in rows if row.kind == "graph" and row.ratio is not None and not row.workload.busy]
    graphs = [row for row in timed if row.workload.model != OWN_STEP]
    hosts: Counter = Counter()
    for row in graphs:
        hosts[row.workload] = max(hosts[row.workload], row.num_hosts)

    def rank(row):
        where = row.workload
        is_other = stem(where.preset) != "bench", where.label != "", where.ranks > 1, where.preset != stem(where.preset)
        return *is_other, -hosts[where], where.build, not row.headline, -row.num_hosts, row.ms

    best = {row.workload.model: row for row in sorted(graphs, key=rank, reverse=True)}
    return [best[model] for model in sorted(best)]


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def counted(number: int, word: str) -> str:
    """Return 1 host, or 2 hosts."""
    return f"{number} {word}{'s' if number != 1 else ''}"


def _range(values) -> Range | None:
    return (min(values), max(values)) if values else None
