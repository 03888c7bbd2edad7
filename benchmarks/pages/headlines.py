"""The workloads of the front page: one graph of each beside eager, on every host with any type of GPU.

A headline is wider than a row of `benchmarks.runs`: it has H100 and H200, the number of layers that each GPU held, and
the archive's hosts. Earlier files of a user's step count where eager makes the same kernels.
"""

import statistics as plain
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks import runs
from benchmarks.archive import SAME_KERNELS
from benchmarks.pages import published
from benchmarks.runs import HostMeans, Range, Row
from graph_worth.folders import OWN_STEP
from graph_worth.harness.files.facts import Run, stem
from graph_worth.harness.files.workload import Workload

# Names of the example steps, as their projects write them.
STEPS = {"muon": "Muon", "nanogpt": "nanoGPT", "rssm": "RSSM", "detr": "DETR"}
# A gain from here on pays; below SMALL nobody would notice it.
LARGE, SMALL = 1.2, 1.05
Key = tuple[str, str, str]


@dataclass(frozen=True)
class OnGpu:
    """Hosts with one type of GPU.

    Attributes:
        gpu: short name, as H200.
        reserved_bytes: peak of torch's reserved memory with the graph, the only variant of its process.
        run: the newest run with the graph; None where only the archive has it.
    """

    gpu: str
    hosts: tuple[HostMeans, ...]
    reserved_bytes: int | None
    run: Run | None

    @property
    def ms(self) -> float:
        """The graph's step: the median over hosts."""
        return plain.median(host.ms for host in self.hosts)

    @property
    def hosts_text(self) -> str:
        """5 H200, or 3 archived H200 where none is new."""
        number = "one" if len(self.hosts) == 1 else str(len(self.hosts))
        return f"{number} {'archived ' if all(host.is_archived for host in self.hosts) else ''}{self.gpu}"


@dataclass(frozen=True)
class Headline:
    """One graph of a workload on all its hosts.

    Attributes:
        name: the model's, without preset and layers.
        more: number of layers or the like; "" where nothing has to be said.
        submitted: MLPerf Training's round, or "".
        page: the README with all rows of the model, or the folder of the archive.
        gpus: the type of GPU with most hosts first.
    """

    name: str
    more: str
    submitted: str
    variant: str
    page: Path
    gpus: tuple[OnGpu, ...]

    @cached_property
    def hosts(self) -> list[HostMeans]:
        """All hosts, each once."""
        return [host for gpu in self.gpus for host in gpu.hosts]

    @property
    def words(self) -> str:
        """The name and what makes it another workload, without numbers of layers."""
        return ", ".join([self.name, *(part for part in self.more.split(", ") if part and not part[0].isdigit())])

    @property
    def gain(self) -> Range:
        """The smallest and the largest gain of a host."""
        gains = [host.ratio for host in self.hosts]
        return min(gains), max(gains)

    @property
    def base_ms(self) -> Range:
        """The fastest and the slowest eager step of a host."""
        times = [host.base_ms for host in self.hosts]
        return min(times), max(times)

    @property
    def hosts_text(self) -> str:
        """5 H200, one H100."""
        return ", ".join(gpu.hosts_text for gpu in self.gpus)


def of(results: runs.Found) -> list[Headline]:
    """Return a headline for each workload that ran on a GPU, the largest gain first."""
    grouped: dict[Key, list[Row]] = defaultdict(list)
    for row in rows(results):
        key = _key(row.workload)
        if key is not None:
            grouped[key].append(row)
    lines = [_of_rows(key, group, results.root.parent) for key, group in grouped.items()]
    lines += _of_archive(results, set(grouped))
    return sorted(lines, key=lambda line: (-line.gain[1], line.name))


def rows(results: runs.Found) -> list[Row]:
    """Return the rows of graphs on GPUs that are of a headline's workload and have a host.

    What disturbs a host makes eager slower and a graph's gain larger: such runs stand in the models' tables alone.
    """
    graphs = [row for row in runs.on_gpus(results.rows) if row.kind == "graph" and not row.control]
    undisturbed = [row.undisturbed for row in graphs if _key(row.workload) is not None]
    return [row for row in undisturbed if row.timed]


def name_of(where: Workload) -> str:
    """Return the name of a headline's workload."""
    key = _key(where)
    return _names(key)[0] if key else where.name


def short(gpu: str) -> str:
    """Return H100 for NVIDIA H100 80GB HBM3."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _key(where: Workload) -> Key | None:
    """Model, preset without its layers, and label; None for a workload that is no headline."""
    label = where.label.removesuffix(runs.EARLIER)
    if where.busy or where.ranks > 1 or where.build:
        return None
    if where.model == OWN_STEP:
        return where.model, "", label
    publication = published.of_model(where.model)
    presets = publication.headlines if publication else ("bench",)
    return (where.model, stem(where.preset), "") if stem(where.preset) in presets and not label else None


def _names(key: Key) -> tuple[str, str, str]:
    model, preset, label = key
    publication = published.of_model(model)
    if model == OWN_STEP:
        name = label.removesuffix("-build")
        return STEPS.get(name, name), "", ""
    if publication is None:
        return model, "", ""
    title = published.title_of(model, preset)
    submitted = publication.submitted or "" if title == publication.title else ""
    return title, publication.headlines.get(preset, ""), submitted


def _of_rows(key: Key, rows: list[Row], root: Path) -> Headline:
    """The graph with most hosts, of several the one with the largest gain."""
    by_variant: dict[str, list[Row]] = defaultdict(list)
    newest = max(rows, key=lambda row: row.newest.run.begin_utc)
    for row in rows:
        # Of several bases the one with most runs comes first.
        is_first = not any(row.workload == kept_row.workload for kept_row in by_variant[row.variant])
        if is_first and (not row.workload.label.endswith(runs.EARLIER) or _same_kernels(row, newest)):
            by_variant[row.variant].append(row)
    gpus_by_variant = {name: _gpus(variant_rows) for name, variant_rows in by_variant.items() if variant_rows}

    def rank(name):
        hosts = [host for gpu in gpus_by_variant[name] for host in gpu.hosts]
        return len(hosts), plain.geometric_mean([host.ratio for host in hosts])

    variant = max(gpus_by_variant, key=rank)
    folder = Path("examples", "steps") if key[0] == OWN_STEP else Path(key[0])
    return Headline(*_names(key), variant, root / folder / "README.md", gpus_by_variant[variant])


def _gpus(rows: list[Row]) -> tuple[OnGpu, ...]:
    """The hosts by type of GPU; of a type that held several numbers of layers, the number with most hosts."""
    by_gpu: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_gpu[short(row.workload.gpu)][row.workload.preset].append(row)
    gpus = [_on_gpu(gpu, max(by_preset.values(), key=_num_hosts)) for gpu, by_preset in by_gpu.items()]
    return tuple(sorted(gpus, key=lambda one: (-len(one.hosts), one.gpu)))


def _on_gpu(gpu: str, rows: list[Row]) -> OnGpu:
    hosts = {host.host: host for row in rows for host in row.hosts}
    points = [point for row in rows for point in row.timed]
    alone = [size for point in points if (size := point.judged.alone_bytes(point.name))]
    run = max((point.run for point in points), key=lambda run: run.begin_utc)
    return OnGpu(gpu, tuple(hosts.values()), max(alone, default=None), run)


def _num_hosts(rows: list[Row]) -> int:
    return sum(len(row.hosts) for row in rows)


def _same_kernels(row: Row, newest: Row) -> bool:
    kernels, reference = (one.newest.judged.build.variants[one.base].profile.kernels for one in (row, newest))
    return kernels is not None and reference is not None and abs(kernels - reference) <= SAME_KERNELS * reference


def _of_archive(results: runs.Found, known: set[Key]) -> list[Headline]:
    """Headlines of presets that only the archive has."""
    grouped: dict[Key, dict[str, list]] = defaultdict(dict)
    for where, hosts in results.archived.items():
        key = _key(where)
        if key is not None and key not in known and not where.label:
            grouped[key][short(where.gpu)] = hosts
    lines = []
    for key, by_gpu in grouped.items():
        best: tuple[tuple[int, float], str, tuple[OnGpu, ...]] | None = None
        for name in sorted({name for hosts in by_gpu.values() for host in hosts for name in host.ms}):
            if name.startswith("graph"):
                gpus = _archived_gpus(by_gpu, name)
                means = [host for gpu in gpus for host in gpu.hosts]
                rank = len(means), plain.geometric_mean([host.ratio for host in means])
                best = max(best or (rank, name, gpus), (rank, name, gpus), key=lambda candidate: candidate[0])
        if best is not None:
            folder = next(host.folder for hosts in by_gpu.values() for host in hosts)
            lines.append(Headline(*_names(key), best[1], folder, best[2]))
    return lines


def _archived_gpus(by_gpu: dict[str, list], name: str) -> tuple[OnGpu, ...]:
    gpus = []
    for gpu, hosts in by_gpu.items():
        both = [host for host in hosts if name in host.ms and "eager" in host.ms]
        means = tuple(HostMeans(host.boot, host.ms["eager"], host.ms[name], True) for host in both)
        peak = max((host.reserved_bytes.get(name, 0) for host in both), default=0)
        gpus += [OnGpu(gpu, means, peak or None, None)] if means else []
    return tuple(sorted(gpus, key=lambda one: -len(one.hosts)))


def bands(lines: Sequence[Headline]) -> dict[str, list[Headline]]:
    """Return "always", "sometimes", "never" -> the workloads that gain over LARGE on each host, on some, or nowhere."""
    by_band: dict[str, list[Headline]] = {"always": [], "sometimes": [], "never": []}
    for line in lines:
        low, high = line.gain
        by_band["always" if low >= LARGE else "never" if high < SMALL else "sometimes"].append(line)
    return by_band
