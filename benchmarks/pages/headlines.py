"""The workloads of the front page: one graph of each beside eager, on every host with any type of GPU.

A headline is wider than a row of `benchmarks.frame`: it has H100 and H200, the number of layers that each GPU held, and
the archive's hosts. Earlier files of a user's step count where eager makes the same kernels.
"""

import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from pandas import DataFrame

from benchmarks import frame
from benchmarks.archive import SAME_KERNELS
from benchmarks.frame import Results
from benchmarks.pages import published
from graph_worth.folders import OWN_STEP
from graph_worth.harness.files.facts import stem
from graph_worth.harness.files.workload import Workload
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.cells import is_missing

# Names of the example steps, as their projects write them.
STEPS = {"muon": "Muon", "nanogpt": "nanoGPT", "rssm": "RSSM", "detr": "DETR"}
# A gain from here on pays; below SMALL nobody would notice it.
LARGE, SMALL = 1.2, 1.05
Key = tuple[str, str, str]
# A headline's workload and one of its graphs, with one type of GPU that held one number of layers.
_ON_GPU = ["key", "variant", "short", "preset"]


class HostMeans(NamedTuple):
    """A graph's means on one host, over its runs there; `archived`: of the archive."""

    host: str
    base_ms: float
    ms: float
    gain: float
    archived: bool


@dataclass(frozen=True)
class OnGpu:
    """Hosts with one type of GPU.

    Attributes:
        gpu: short name, as H200.
        reserved_bytes: peak of torch's reserved memory with the graph, the only variant of its process.
        has_run: False where only the archive has it.
        kernel_us: mean time of a kernel of the eager step in the newest run; None without a profile.
    """

    gpu: str
    hosts: tuple[HostMeans, ...]
    reserved_bytes: int | None
    has_run: bool
    kernel_us: float | None

    @property
    def ms(self) -> float:
        """The graph's step: the median over hosts."""
        return plain.median(host.ms for host in self.hosts)

    @property
    def hosts_text(self) -> str:
        """5 H200, or 3 archived H200 where none is new."""
        number = "one" if len(self.hosts) == 1 else str(len(self.hosts))
        return f"{number} {'archived ' if all(host.archived for host in self.hosts) else ''}{self.gpu}"


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
    def gain(self) -> tuple[float, float]:
        """The smallest and the largest gain of a host."""
        gains = [host.gain for host in self.hosts]
        return min(gains), max(gains)

    @property
    def base_ms(self) -> tuple[float, float]:
        """The fastest and the slowest eager step of a host."""
        times = [host.base_ms for host in self.hosts]
        return min(times), max(times)

    @property
    def hosts_text(self) -> str:
        """5 H200, one H100."""
        return ", ".join(gpu.hosts_text for gpu in self.gpus)


def of(results: Results) -> list[Headline]:
    """Return a headline for each workload that ran on a GPU, the largest gain first."""
    measured = points(results)
    archived = _of_archive(results.archive)
    archived = archived[~archived["key"].isin(frame.timed(measured)["key"])]
    lines = []
    for hosts in (_of_points(results, measured), archived):
        runs = frame.timed(measured)[[*_ON_GPU, "row", "begin_utc", "alone_bytes", "first_kernel_us"]]
        lines += [_headline(results, group, runs) for _, group in hosts.groupby("key", sort=False)]
    return sorted(lines, key=lambda line: (-line.gain[1], line.name))


def points(results: Results) -> DataFrame:
    """Return the passing points of graphs on GPUs that are of a headline's workload.

    What disturbs a host makes eager slower and a graph's gain larger: such runs stand in the models' tables alone.
    """
    rows = results.rows
    graphs = rows["row"][(rows["kind"] == "graph") & ~rows["control"] & (rows["gpu"] != "CPU")]
    every = results.points
    is_quiet = (every["others"] == 0) & (every["slowed"] == 0) & (every["status"] == PASS)
    kept = _with_key(every[every["row"].isin(graphs) & is_quiet])
    return kept[kept["row"].isin(frame.timed(kept)["row"])]


def name_of(where: Workload) -> str:
    """Return the name of a headline's workload."""
    key = _key(where)
    return _names(key)[0] if key else where.name


def short(gpu: str) -> str:
    """Return H100 for NVIDIA H100 80GB HBM3."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _with_key(table: DataFrame) -> DataFrame:
    """The lines of a table that are of a headline's workload, with its key and the short name of the GPU."""
    keys = [_key(frame.where_of(line)) for line in table[frame.WORKLOAD].itertuples()]
    texts = ["\n".join(key) if key else None for key in keys]
    table = table.assign(key=pd.Series(texts, index=table.index, dtype="string"), short=table["gpu"].map(short))
    return table[table["key"].notna()]


def _key(where: Workload) -> Key | None:
    """Model, preset without its layers, and label; None for a workload that is no headline."""
    label = where.label.removesuffix(frame.EARLIER)
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


def _of_points(results: Results, points: DataFrame) -> DataFrame:
    """The hosts of all graphs of all headlines, those of the archive last."""
    newest = frame.newest(points).reset_index()
    reference = newest.sort_values("begin_utc", ascending=False, kind="stable").drop_duplicates("key")
    kernels = newest["key"].map(reference.set_index("key")["base_kernels"]).astype(float)
    is_same = (newest["base_kernels"] - kernels).abs() <= SAME_KERNELS * kernels
    counted = newest[is_same | ~newest["label"].str.endswith(frame.EARLIER)]
    # Of several bases the one with most runs comes first.
    counted = counted.drop_duplicates([*frame.WORKLOAD, "variant"])
    old = results.hosts[results.hosts["archived"]]
    hosts = pd.concat([frame.host_means(points), old]) if len(old) else frame.host_means(points)
    hosts = counted[["row", *_ON_GPU]].merge(hosts, on="row")
    return hosts.assign(folder="", reserved_bytes=pd.NA)


def _of_archive(archive: DataFrame) -> DataFrame:
    """The hosts of all graphs of the archive, in the order of their names."""
    archive = _with_key(archive[archive["label"] == ""])
    # The page of a workload is that of its first machine.
    archive["folder"] = archive.groupby("key")["folder"].transform("first")
    eager = archive[archive["variant"] == "eager"][[*frame.WORKLOAD, "host", "ms"]]
    graphs = archive[archive["variant"].str.startswith("graph")]
    hosts = graphs.merge(eager.rename(columns={"ms": "base_ms"}), on=[*frame.WORKLOAD, "host"])
    hosts = hosts.assign(row=-1, archived=True, gain=hosts["base_ms"] / hosts["ms"])
    return hosts.sort_values("variant", kind="stable")


def _headline(results: Results, hosts: DataFrame, runs: DataFrame) -> Headline:
    """The graph with most hosts, of several the one with the largest gain."""
    # Of a GPU that held several numbers of layers, the number with most hosts.
    most = hosts.groupby(_ON_GPU, sort=False).size().rename("number").reset_index()
    most = most.sort_values("number", ascending=False, kind="stable").drop_duplicates(["variant", "short"])
    kept = hosts.merge(most[_ON_GPU], on=_ON_GPU)
    once = kept.groupby([*_ON_GPU, "host"], sort=False).last().reset_index()
    ranked = once.groupby("variant", sort=False).agg(hosts=("host", "size"), mean=("gain", frame.geometric_mean))
    variant = ranked.sort_values(["hosts", "mean"], ascending=False, kind="stable").index[0]
    model, preset, label = hosts["key"].iloc[0].split("\n")
    folder = Path("examples", "steps") if model == OWN_STEP else Path(model)
    page = hosts["folder"].iloc[0] or results.root.parent / folder / "README.md"
    gpus = [
        _on_gpu(gpu, group, kept[(kept["variant"] == variant) & (kept["short"] == gpu)], runs)
        for gpu, group in once[once["variant"] == variant].groupby("short", sort=False)
    ]
    gpus.sort(key=lambda on_gpu: (-len(on_gpu.hosts), on_gpu.gpu))
    return Headline(*_names((model, preset, label)), variant, Path(page), tuple(gpus))


def _on_gpu(gpu: str, hosts: DataFrame, kept: DataFrame, runs: DataFrame) -> OnGpu:
    used = runs[runs["row"].isin(kept["row"])].sort_values("begin_utc", ascending=False, kind="stable")
    sizes = [size for table in (used["alone_bytes"], kept["reserved_bytes"]) for size in table.dropna() if size]
    means = tuple(HostMeans(*line) for line in hosts[list(HostMeans._fields)].itertuples(index=False))
    kernel_us = [None if is_missing(us) else us for us in used["first_kernel_us"]]
    return OnGpu(gpu, means, max(sizes, default=None), len(used) > 0, kernel_us[0] if kernel_us else None)


def bands(lines: Sequence[Headline]) -> dict[str, list[Headline]]:
    """Return "always", "sometimes", "never" -> the workloads that gain over LARGE on each host, on some, or nowhere."""
    by_band: dict[str, list[Headline]] = {"always": [], "sometimes": [], "never": []}
    for line in lines:
        low, high = line.gain
        by_band["always" if low >= LARGE else "never" if high < SMALL else "sometimes"].append(line)
    return by_band
