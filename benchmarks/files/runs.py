"""All runs below a folder as rows: one row for each variant of a workload, over its runs and hosts.

A row has base ms, variant ms and their ratio, which is their quotient. Several runs of one host count as one host.
"""

import math
import statistics as plain
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks import ROOT, statistics
from benchmarks.files import run_file
from benchmarks.files.run_file import Block, Build, Run, Variant
from benchmarks.files.workload import Workload, workload_of
from benchmarks.pages.published import stem
from benchmarks.pages.run_table import milliseconds
from benchmarks.statistics import Ratio

# A row names its base's fastest and slowest block if they differ by more, and an eager variant that is faster by more.
WIDE_SPREAD, FASTER_EAGER = 0.10, 1.01


@dataclass(frozen=True)
class Point:
    """A variant in one run. `is_busy`: in the cycles beside busy processes, not in the quiet ones."""

    path: Path
    run: Run
    build: Build
    name: str
    is_busy: bool

    @property
    def variant(self) -> Variant:
        """The variant's facts."""
        return self.build.variants[self.name]

    @property
    def base(self) -> Variant | None:
        """The base's facts."""
        return self.build.variants.get(self.build.base)

    @cached_property
    def blocks(self) -> list[Block]:
        """The variant's blocks."""
        return _blocks(self.variant, self.is_busy)

    @cached_property
    def ratio(self) -> Ratio | None:
        """The ratio to the base; None for the base and for variants without a time."""
        return self.build.ratio_of(self.name, self.is_busy) if self.variant.status == "pass" else None

    @property
    def host(self) -> str:
        """The boot of the host."""
        return str(self.run.host.get("boot"))

    @property
    def issue_ms(self) -> float | None:
        """The host's time to issue a step of the variant."""
        return self.variant.issue_ms(self.is_busy)

    @property
    def base_issue_ms(self) -> float | None:
        """The host's time to issue a step of the base."""
        return self.base.issue_ms(self.is_busy) if self.base else None

    @property
    def busy_ms(self) -> float | None:
        """The GPU's busy time in a step of the variant."""
        return self.variant.profile.get("busy_ms")

    @property
    def base_busy_ms(self) -> float | None:
        """The GPU's busy time in a step of the base."""
        return self.base.profile.get("busy_ms") if self.base else None

    @property
    def predicted_gain(self) -> float | None:
        """max(1, issue of the base / busy of the variant); None for eager variants."""
        return None if self.variant.kind == "eager" else self.build.predicted_gain(self.name, self.is_busy)

    @property
    def early_prediction(self) -> float | None:
        """max(1, issue / busy) of the base, which needs no capture; None for eager variants."""
        if self.variant.kind == "eager" or self.base is None:
            return None
        return self.build.predicted_gain(self.build.base, self.is_busy)

    @property
    def why_missed(self) -> str:
        """The ms that the predicted gain leaves out, as a sentence; "" without a prediction."""
        if self.ratio is None or self.predicted_gain is None:
            return ""
        pace_ms = max(self.base_issue_ms or 0.0, self.base_busy_ms or 0.0)
        base = f"{self.build.base} takes {self.ratio.base_ms:,.2f} ms, the slower of its issue and busy {pace_ms:,.2f}"
        return f"{base}; the graph's step is {self.ratio.variant_ms - (self.busy_ms or 0.0):+.2f} ms off its busy"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant of a workload over all its runs. Numbers are None, or 0, if nothing was timed.

    Attributes:
        ratio: base ms / variant ms: of one host, or the geometric mean over hosts, each counted once.
        low, high: ends of the 95 % interval: of one run, or over at least three hosts; None between.
        lowest, highest: range of the runs' ratios.
        base_ms, variant_ms: geometric means over the same runs; their quotient is `ratio`.
    """

    workload: Workload
    variant: str
    points: tuple[Point, ...]
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    lowest: float | None = None
    highest: float | None = None
    base_ms: float | None = None
    variant_ms: float | None = None
    cycles: int = 0
    hosts: int = 0

    @cached_property
    def newest(self) -> Point:
        """The point of the latest run."""
        return max(self.points, key=lambda point: point.run.begin_utc)

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
        """The status in the newest run; "pass" if anything was timed in any run."""
        return self.newest.variant.status if self.ratio is None else "pass"

    @property
    def reason(self) -> str:
        """The reason why nothing was timed."""
        return self.newest.variant.reason if self.ratio is None else ""

    @cached_property
    def base(self) -> str:
        """The base's name; "" if runs have different bases."""
        timed = [point for point in self.points if point.ratio is not None]
        bases = {point.build.base for point in timed or [self.newest]}
        return bases.pop() if len(bases) == 1 else ""

    @property
    def ms(self) -> float | None:
        """Time of a step: `variant_ms`, or without a ratio the geometric mean over the newest run's blocks."""
        blocks = [block.step_ms for block in self.newest.blocks]
        return self.variant_ms or (geometric(blocks) if blocks else None)

    @property
    def reserved_gib(self) -> float | None:
        """Median over the newest run's blocks of the GiB that torch holds; None if unknown."""
        found = [block.reserved_bytes for block in self.newest.variant.blocks if block.reserved_bytes]
        return plain.median(found) / 2**30 if found else None

    @property
    def tflops(self) -> float | None:
        """Useful TFLOP/s; None if unknown, or if steps differ in kind, as FLOP are not counted for each kind."""
        flops, ms = self.newest.build.flops_per_step, self.ms
        is_alike = all(len(block.classes) < 2 for block in self.newest.variant.blocks)
        return flops / ms / 1e9 if flops and ms and is_alike else None

    def median(self, name: str) -> float | None:
        """Return the median over runs of a number of `Point`, such as "issue_ms"; None if no run has it."""
        found = [value for point in self.points if (value := getattr(point, name)) is not None]
        return plain.median(found) if found else None

    @property
    def word(self) -> str:
        """faster, slower, same or unclear; "" without an interval."""
        if self.ratio is None or self.low is None or self.high is None:
            return ""
        times = (self.base_ms or 0.0, self.variant_ms or 0.0)
        return statistics.word(Ratio(self.ratio, self.low, self.high, self.high / self.ratio - 1, self.cycles, *times))

    @property
    def note(self) -> str:
        """All that a reader has to know beside the ratio."""
        is_graph = self.ratio is not None and not self.control
        texts = [self.word if self.word in ("same", "unclear") else ""]
        texts.append("" if self.base in ("eager", "", self.variant) else f"against {self.base}")
        texts.append("" if self.base else "against the base of each run")
        texts.append(_first_build(self.newest) if is_graph else "")
        texts.append("a process for each block" if any(point.variant.apart for point in self.points) else "")
        if is_graph:
            texts += [_faster_eager(self.points), _spread(self.points, self.base), _added(self.points)]
        texts.append("" if self.is_committed else "uncommitted source")
        return "; ".join(filter(None, texts))

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
    return Found(root, kept, faults, rows_of(kept))


def rows_of(found: list[tuple[Path, Run]]) -> list[Row]:
    """Return a row for each variant of each workload."""
    points: dict[tuple[Workload, str], list[Point]] = defaultdict(list)
    for path, run in found:
        for name, build in run.builds.items():
            numbers = {block.busy_processes for own in build.variants.values() for block in own.blocks}
            for busy in sorted({0, *numbers}):
                where = workload_of(run, name, busy)
                for variant, own in build.variants.items():
                    if not busy or _blocks(own, True):
                        points[where, variant].append(Point(path, run, build, variant, bool(busy)))
    keys = sorted(points, key=lambda key: key[0])
    return [_row(where, variant, points[where, variant]) for where, variant in keys]


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
    graphs = [row for row in timed if row.workload.model != run_file.OWN_STEP]

    def rank(row):
        where = row.workload
        is_other = stem(where.preset) != "bench", where.label != "", where.preset != stem(where.preset)
        return *is_other, -row.hosts, where.build, not row.headline, -row.cycles, row.variant_ms

    best = {row.workload.model: row for row in sorted(graphs, key=rank, reverse=True)}
    return [best[model] for model in sorted(best)]


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def counted(number: int, word: str) -> str:
    """Return 1 host, or 2 hosts."""
    return f"{number} {word}{'s' if number != 1 else ''}"


def _blocks(variant, is_busy):
    return [block for block in variant.blocks if bool(block.busy_processes) == is_busy]


def _row(where, name, points):
    by_host = defaultdict(list)
    for point in points:
        if point.ratio is not None:
            by_host[point.host].append(point.ratio)
    if not by_host:
        return Row(workload=where, variant=name, points=tuple(points))
    hosts, ratios = [_mean(own) for own in by_host.values()], [own for each in by_host.values() for own in each]
    over = statistics.across_hosts(hosts)
    only = ratios[0] if len(ratios) == 1 else over
    return Row(
        workload=where,
        variant=name,
        points=tuple(points),
        ratio=over.ratio,
        low=only.low,
        high=only.high,
        lowest=min(own.ratio for own in ratios),
        highest=max(own.ratio for own in ratios),
        base_ms=geometric([host.base_ms for host in hosts]),
        variant_ms=geometric([host.variant_ms for host in hosts]),
        cycles=sum(own.cycles for own in ratios),
        hosts=len(hosts),
    )


def _mean(ratios):
    """One ratio for several runs on one host. It has no interval."""
    if len(ratios) == 1:
        return ratios[0]
    base_ms, variant_ms = geometric([own.base_ms for own in ratios]), geometric([own.variant_ms for own in ratios])
    cycles, no_interval = sum(own.cycles for own in ratios), (0.0, math.inf, math.inf)
    return Ratio(base_ms / variant_ms, *no_interval, cycles, base_ms, variant_ms)


def _faster_eager(points):
    """Name an eager variant that took less time than the base that the first cycles chose."""
    for point in points:
        for name, own in point.build.variants.items():
            if own.kind == "eager" and own.status == "pass" and name != point.run.control:
                ratio = point.build.ratio_of(name)
                if ratio is not None and ratio.ratio > FASTER_EAGER:
                    own_ms, base_ms = milliseconds(ratio.variant_ms), milliseconds(ratio.base_ms)
                    return f"{name} took {own_ms} ms where its base took {base_ms}"
    return ""


def _first_build(point):
    """Name the base of the run's first build if it is faster: the ratio then overstates the gain."""
    build = next(iter(point.run.builds.values()))
    base = build.variants.get(build.base)
    if base is None or not base.blocks or build.base == point.build.base or point.ratio is None:
        return ""
    ms = geometric([block.step_ms for block in base.blocks])
    return f"{build.base} of the other build: {milliseconds(ms)} ms" if ms < point.ratio.base_ms / 1.01 else ""


def _spread(points, name):
    """Name the base's fastest and slowest block if the host's pace made them differ."""
    bases = [point.build.variants[name] for point in points if name in point.build.variants]
    times = [block.step_ms for base in bases for block in _blocks(base, points[0].is_busy)]
    if not times or max(times) <= (1 + WIDE_SPREAD) * min(times):
        return ""
    return f"{name} {milliseconds(min(times))} to {milliseconds(max(times))} ms"


def _added(points):
    """Name the memory that a graph adds, from half a GiB."""
    gib = plain.median([point.variant.capture.get("bytes_added") or 0 for point in points]) / 2**30
    return f"adds {gib:.1f} GiB" if gib >= 0.5 else ""
