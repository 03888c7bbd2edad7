"""The workloads of the front page: one graph of each beside eager, on every host with any type of GPU.

A headline is wider than a row of `benchmarks.frame`: it has H100 and H200, the number of layers that each GPU held, and
the archive's hosts. Earlier files of a user's step count where eager makes the same kernels. Which runs count is the
frame's rule.
"""

import re
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
from benchmarks.pages.tables import TWO
from graph_worth.folders import OWN_STEP
from graph_worth.harness.files.facts import stem
from graph_worth.harness.files.workload import Workload
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages import cells
from graph_worth.harness.pages.cells import span
from graph_worth.harness.standing import ASIDE, BESIDE, COUNTED, REASONS, UNKNOWN

# The example steps: their names, as their projects write them, and their batch and precision, which no run records.
STEPS = {
    "muon": ("Muon", "512 rows, FP32"),
    "nanogpt": ("nanoGPT", "16,384 characters, BF16"),
    "gpt2-transformers": ("GPT-2 124M", "2,048 tokens, BF16"),
    "vit-timm": ("ViT-S/16", "32 images, BF16"),
    "rssm": ("RSSM", ""),
    "detr": ("DETR", ""),
}
# The same of workloads that the archive alone has.
ARCHIVED = {("llama31", "full"): "16,384 tokens, FP8", ("rnnt", "bench_lengths"): "8 utterances, FP16"}
# The part of a step that a graph holds, where it has a short name.
PARTS = {"graph_step": "the whole step", "graph_layer": "each layer", "graph_fwd_bwd": "forward and backward"}
PRECISION = re.compile(r"\b(fp8|nvfp4|bf16|fp16)\b")
# GPUs whose hosts gain more different amounts than this in the geometric mean stand apart.
APART = 0.05
Key = tuple[str, str, str]
# A headline's workload and one of its graphs, with one type of GPU that held one number of layers.
_GRAPH = ["key", "variant"]
_ON_GPU = [*_GRAPH, "short", "preset"]


class HostMeans(NamedTuple):
    """A graph's means on one host, over its runs there.

    `archived`: of the archive; `standing`: of its best run; `light_cycles`: of light runs alone, else 0; `is_mixed`:
    reduce_overhead ran in the same process.
    """

    host: str
    base_ms: float
    ms: float
    gain: float
    archived: bool
    standing: str
    light_cycles: int
    is_mixed: bool


def hosts_text(hosts: Sequence[HostMeans], word: str = "") -> str:
    """Return a number of hosts in words, archived and unknown ones marked, as 5 H200 (2 unknown).

    Where all of them had light runs alone, with the cycles of these.
    """
    archived = sum(host.archived for host in hosts)
    unknown = sum(host.standing == UNKNOWN for host in hosts) - archived
    text, cycles = cells.hosts_text(len(hosts), archived, unknown, word), [host.light_cycles for host in hosts]
    if not all(cycles):
        return text
    marks = f"{span(min(cycles), max(cycles), 'd')} cycles"
    return f"{text.removesuffix(')')}; {marks})" if text.endswith(")") else f"{text} ({marks})"


@dataclass(frozen=True)
class OnGpu:
    """Hosts with one type of GPU.

    Attributes:
        gpu: short name, as H200.
        beside, unsteady: hosts on which the graph ran beside other work, or while eager's time was not steady.
        ceilings: step / busy of the runs that count.
        reserved_bytes: peak of torch's reserved memory with the graph, the only variant of its process.
        has_run: False where only the archive has it.
    """

    gpu: str
    hosts: tuple[HostMeans, ...]
    beside: tuple[HostMeans, ...]
    unsteady: tuple[HostMeans, ...]
    ceilings: tuple[float, ...]
    reserved_bytes: int | None
    has_run: bool

    @property
    def ms(self) -> float:
        """The graph's step: the median over hosts."""
        return plain.median(host.ms for host in self.hosts)

    @property
    def hosts_text(self) -> str:
        """5 H200 (3 archived), as marked."""
        return hosts_text(self.hosts, self.gpu)


class Gain(NamedTuple):
    """The gains of a headline: of all its hosts, or with `gpu` of those with one type of GPU."""

    gpu: str
    gpus: tuple[OnGpu, ...]

    @property
    def hosts(self) -> list[HostMeans]:
        """The hosts that count."""
        return [host for gpu in self.gpus for host in gpu.hosts]

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest gain of a host."""
        gains = [host.gain for host in self.hosts]
        return min(gains), max(gains)

    @property
    def ceiling(self) -> float | None:
        """Step / busy: the median over runs."""
        ceilings = [ceiling for gpu in self.gpus for ceiling in gpu.ceilings]
        return plain.median(ceilings) if ceilings else None

    @property
    def span(self) -> str:
        """The range of the hosts that count, behind the GPU where it stands apart; of unsteady ones where none does."""
        standing = {host.standing for host in self.hosts}
        return " ".join(filter(None, [self.gpu, "unsteady" * (standing == {ASIDE}), span(*self.ends, TWO, "x")]))

    @property
    def text(self) -> str:
        """The range, and those that do not count."""
        texts = [self.span]
        for words, kind in (("beside other work", "beside"), ("unsteady", "unsteady")):
            gains = [host.gain for gpu in self.gpus for host in getattr(gpu, kind)]
            texts += [cells.beside(min(gains), max(gains), self.ends, TWO, words)] if gains else []
        return "; ".join(texts)


@dataclass(frozen=True)
class Headline:
    """One graph of a workload on all its hosts.

    Attributes:
        name: the model's, without preset and layers.
        more: number of layers or the like; "" where nothing has to be said.
        submitted: MLPerf Training's round, or "".
        setting: items of a step and precision, as in 8,192 tokens, FP8; "" where no run of today has them.
        page: the README with all rows of the model, or the folder of the archive.
        gpus: the type of GPU with most hosts first.
    """

    name: str
    more: str
    submitted: str
    setting: str
    variant: str
    page: Path
    gpus: tuple[OnGpu, ...]

    @property
    def part(self) -> str:
        """The part of the step in the graphs."""
        return PARTS.get(self.variant, self.variant)

    @cached_property
    def hosts(self) -> list[HostMeans]:
        """All hosts, each once."""
        return [host for gpu in self.gpus for host in gpu.hosts]

    @property
    def words(self) -> str:
        """The name and what makes it another workload, without numbers of layers."""
        return ", ".join([self.name, *(part for part in self.more.split(", ") if part and not part[0].isdigit())])

    @cached_property
    def gains(self) -> list[Gain]:
        """The gains over all hosts; those of each GPU where they part."""
        means = [frame.geometric_mean(host.gain for host in gpu.hosts) for gpu in self.gpus]
        if max(means) <= (1 + APART) * min(means):
            return [Gain("", self.gpus)]
        return [Gain(gpu.gpu, (gpu,)) for gpu in self.gpus]

    @property
    def gain(self) -> tuple[float, float]:
        """The smallest and the largest gain of a host."""
        return Gain("", self.gpus).ends

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
    """Return a headline for each workload that ran on a GPU, the largest gain first, archived ones last."""
    graphs = _graphs(results)
    measured, archived = _of_points(results, graphs), _of_archive(results.archive)
    counted = measured["key"][measured["standing"].isin(COUNTED)]
    archived = archived[~archived["key"].isin(counted)]
    unsteady = measured["key"][measured["standing"] == ASIDE]
    measured = measured[measured["key"].isin([*counted, *unsteady[~unsteady.isin(archived["key"])]])]
    lines = []
    for hosts in (measured, archived):
        lines += [_headline(results, group, graphs) for _, group in hosts.groupby("key", sort=False)]
    # Workloads of the archive alone come last.
    return sorted(lines, key=lambda line: (not any(gpu.has_run for gpu in line.gpus), -line.gain[1], line.name))


def points(results: Results) -> DataFrame:
    """Return the timed points of graphs on GPUs that count and are of a headline's workload."""
    graphs = _graphs(results)
    return graphs[graphs["standing"].isin(COUNTED)]


def _graphs(results: Results) -> DataFrame:
    """The timed points of graphs on GPUs that are of a headline's workload, without those that no full run opened.

    A full run on any host is enough: what it checks of a graph holds for light runs, too.
    """
    rows = results.rows
    graphs = rows["row"][(rows["kind"] == "graph") & ~rows["control"] & (rows["gpu"] != "CPU")]
    every = frame.timed(results.points)
    # A point of a sweep stands in the sweep's table.
    kept = _with_key(every[every["row"].isin(graphs) & (every["status"] == PASS) & (every["over"] == "")])
    opened = kept[kept["row"].isin(frame.opened(kept))]
    return kept[pd.MultiIndex.from_frame(kept[_GRAPH]).isin(pd.MultiIndex.from_frame(opened[_GRAPH]))]


def name_of(where: Workload) -> str:
    """Return the name of a headline's workload."""
    key = _key(where)
    return _names(key)[0] if key else where.name


def title_of(model: str, preset: str, label: str) -> str:
    """Return the name of a workload's model, as GPT-3 175B; of a user's step its own, whatever file it was of."""
    return _names((model, stem(preset), label.partition(frame.EARLIER)[0]))[0]


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
    label = where.label.partition(frame.EARLIER)[0]
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
        return STEPS.get(name, (name,))[0], "", ""
    if publication is None:
        return model, "", ""
    title = published.title_of(model, preset)
    submitted = publication.submitted or "" if title == publication.title else ""
    return title, publication.headlines.get(preset, ""), submitted


def _of_points(results: Results, points: DataFrame) -> DataFrame:
    """The hosts of all graphs of all headlines, those beside other work too, those of the archive last."""
    newest = frame.newest(points).reset_index()
    reference = newest.sort_values("begin_utc", ascending=False, kind="stable").drop_duplicates("key")
    kernels = newest["key"].map(reference.set_index("key")["base_kernels"]).astype(float)
    is_same = (newest["base_kernels"] - kernels).abs() <= SAME_KERNELS * kernels
    counted = newest[is_same | ~newest["label"].str.contains(frame.EARLIER, regex=False)]
    # Of several bases the one with most runs comes first.
    counted = counted.drop_duplicates([*frame.WORKLOAD, "variant"])
    old = results.hosts[results.hosts["archived"]]
    # A run that a correction takes out measured another thing.
    unsteady = points[(points["standing"] == ASIDE) & ~points["standing_reason"].str.startswith(REASONS)]
    parts = [frame.host_means(points[points["standing"].isin(COUNTED)]), frame.beside(points)]
    parts += [frame.host_means(unsteady), old]
    hosts = pd.concat([part for part in parts if len(part)] or parts[:1])
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
    hosts = hosts.assign(row=-1, standing=UNKNOWN, **frame.ARCHIVED, gain=hosts["base_ms"] / hosts["ms"])
    return hosts.sort_values("variant", kind="stable")


def _headline(results: Results, hosts: DataFrame, runs: DataFrame) -> Headline:
    """The graph with most hosts, of several the one with the largest gain; unsteady hosts where no other has run."""
    apart = {kind: hosts[hosts["standing"] == kind] for kind in (BESIDE, ASIDE)}
    counted = hosts[hosts["standing"].isin(COUNTED)]
    hosts = counted if len(counted) else apart[ASIDE]
    apart[ASIDE] = apart[ASIDE] if len(counted) else apart[ASIDE].iloc[:0]
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
    kept = kept[kept["variant"] == variant]
    for kind, table in apart.items():
        table = table[table["variant"] == variant].merge(most[_ON_GPU], on=_ON_GPU)
        apart[kind] = table.groupby(["short", "host"], sort=False).last().reset_index()
    gpus = [
        _on_gpu(gpu, group, apart, kept[kept["short"] == gpu], runs)
        for gpu, group in once[once["variant"] == variant].groupby("short", sort=False)
    ]
    gpus.sort(key=lambda on_gpu: (-len(on_gpu.hosts), on_gpu.gpu))
    known = STEPS.get(label.removesuffix("-build"), ("", ""))[1]
    setting = known if model == OWN_STEP else _setting(results, runs, kept) or ARCHIVED.get((model, preset), "")
    return Headline(*_names((model, preset, label)), setting, variant, Path(page), tuple(gpus))


def _setting(results: Results, runs: DataFrame, kept: DataFrame) -> str:
    """The items of a step and the precision in the newest run of some rows."""
    used = runs[runs["row"].isin(kept["row"])].sort_values("begin_utc")
    if not len(used):
        return ""
    point = used.iloc[-1]
    judged = results.judged[point["run"], point["process"]]
    items = f"{judged.build.items_per_step:,.0f} {judged.run.unit}" if judged.build.items_per_step else ""
    precision = PRECISION.search(" ".join(judged.build.card))
    return ", ".join(filter(None, [items, precision[1].upper() if precision else ""]))


def _on_gpu(gpu: str, hosts: DataFrame, apart: dict, kept: DataFrame, graphs: DataFrame) -> OnGpu:
    beside, unsteady = (apart[kind][apart[kind]["short"] == gpu] for kind in (BESIDE, ASIDE))
    every = graphs.sort_values("begin_utc", ascending=False, kind="stable")
    used = every[every["row"].isin(kept["row"]) & every["standing"].isin(hosts["standing"])]
    # Other work changes no memory.
    measured = every["alone_bytes"][every["row"].isin([*kept["row"], *beside["row"]])]
    sizes = [size for table in (measured, kept["reserved_bytes"]) for size in table.dropna() if size]
    return OnGpu(
        gpu,
        _means(hosts),
        _means(beside),
        _means(unsteady),
        tuple(used["ceiling"].dropna()),
        max(sizes, default=None),
        len(used) > 0,
    )


def _means(hosts: DataFrame) -> tuple[HostMeans, ...]:
    return tuple(HostMeans(*line) for line in hosts[list(HostMeans._fields)].itertuples(index=False))
