"""The sweeps of a model: of each quantity and graph a table and a figure, and the size at which its gain ends."""

import re
from pathlib import Path
from typing import NamedTuple

from pandas import DataFrame

from benchmarks import crossing
from benchmarks.frame import Results
from benchmarks.pages import headlines, tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.folders import OWN_STEP
from graph_worth.harness.files.facts import folder_of_sweep, stem
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages import cells
from graph_worth.harness.standing import COUNTED

KEYS = ["gpu", "ranks", "model", "asked_preset", "swept_label", "over", "variant"]


class Sweep(NamedTuple):
    """A graph of a workload at several values of a quantity, on one type of machine.

    Attributes:
        name: of its figure.
        words: preset, flags and GPUs.
        points: of each host and value the newest run that passed, else the newest; `ratio` is missing in the latter.
    """

    name: str
    words: str
    model: str
    over: str
    variant: str
    points: DataFrame

    @property
    def timed(self) -> DataFrame:
        """The points with a gain and an interval."""
        return self.points[self.points["ratio"].notna() & (self.points["cycles"] > 1).fillna(False)]

    @property
    def curves(self) -> dict[str, DataFrame]:
        """The points of each host with a gain."""
        return {str(host): points for host, points in self.timed.groupby("host")}

    @property
    def sentences(self) -> list[str]:
        """Return the size at which the gain ends on each host, with the host's name if there are several."""
        texts = []
        for host, points in self.curves.items():
            columns = points[["value", "low", "kernel_us", "host_us"]].astype(object)
            known = [crossing.Point(*line) for line in columns.where(columns.notna(), None).itertuples(index=False)]
            before = f"Host {host[:6]}: " if len(self.curves) > 1 else ""
            texts.append(f"{before}{crossing.sentence(self.over, known)}")
        return texts


def of(results: Results, model: str = "") -> list[Sweep]:
    """Return the sweeps on GPUs, of one model or of all."""
    points = results.points[(results.points["over"] != "") & (results.points["gpu"] != "CPU")]
    points = points[(points["model"] == model) | (not model)]
    # Eager says why a point does not fit.
    eager = points[(points["kind"] == "eager") & (points["status"] != PASS)].drop_duplicates("run").set_index("run")
    points = points[(points["kind"] != "eager") & ~points["control"] & (points["busy_processes"] == 0)]
    for name in ("status", "reason"):
        points = points.assign(**{name: points["run"].map(eager[name]).astype("string").fillna(points[name])})
    points = points.assign(asked_preset=points["preset"].map(stem))
    # The GPU held fewer layers: it is another program.
    points["ratio"] = points["ratio"].where((points["preset"] == points["asked_preset"]) & (points["status"] == PASS))
    order = points.assign(passed=points["ratio"].notna()).sort_values(["passed", "begin_utc"], kind="stable")
    newest = order.drop_duplicates([*KEYS, "host", "value"], keep="last").sort_values(["host", "value"], kind="stable")
    sweeps = []
    for (gpu, ranks, of_model, preset, label, over, variant), group in newest.groupby(KEYS, sort=True):
        gpus = f"{ranks} {headlines.short(gpu)}" if ranks > 1 else headlines.short(gpu)
        folder = folder_of_sweep(of_model, preset, label, over)
        name = re.sub("[^a-z0-9._]+", "-", f"sweep-{gpus.replace(' ', 'x')}-{folder}-{variant}".lower())
        words = ", ".join(filter(None, [preset if of_model != OWN_STEP else "", label, gpus]))
        sweeps.append(Sweep(name, words, of_model, over, variant, group))
    return sweeps


def markdown(results: Results, page: Path, argument: str = "") -> str:
    """The sweeps of a model, each with a heading, its sentences, a figure and a table; "" without any."""
    return "\n\n".join(_part(results, sweep, page) for sweep in of(results, argument))


def _part(results: Results, sweep: Sweep, page: Path) -> str:
    parts = [f"### By {in_markdown(sweep.over)}: `{sweep.variant}`, {in_markdown(sweep.words)}"]
    parts.append("\n".join(f"{'- ' * (len(sweep.curves) > 1)}{in_markdown(text)}" for text in sweep.sentences))
    if len(sweep.timed) > 1:
        path = tables.relative(results.root / "figures" / f"{sweep.name}.svg", page)
        parts.append(f"![Gain of {sweep.variant} by {in_markdown(sweep.over)}, with 95 % intervals]({path})")
    has_hosts = sweep.points["host"].nunique() > 1
    names = [sweep.over, *["Host"] * has_hosts, "eager ms", "graph ms", "gain (95 %)"]
    names += ["us a kernel", "the host's us a kernel", "Note"]
    lines, before = [], ""
    for point in sweep.points.itertuples():
        is_timed = not cells.is_missing(point.ratio)
        texts = [cells.cell(ms) for ms in (point.base_ms, point.variant_ms)] if is_timed else ["", ""]
        interval = f" ({cells.interval(point.low, point.high)})" if is_timed and point.cycles > 1 else ""
        texts += [f"{cells.times(point.ratio)}{interval}" if is_timed else point.status]
        texts += [cells.cell(us, ".1f") for us in (point.kernel_us, point.host_us)]
        texts += [_note(point) if is_timed else point.reason or f"{point.preset} in the place of the preset"]
        size, host = f"{point.value:,}", [in_markdown(point.host[:6])] * has_hosts
        size = tables.linked_file(size, Path(point.path), page) if point.path != before else size
        lines.append([size, *host, *map(in_markdown, texts)])
        before = point.path
    return "\n\n".join([*filter(None, parts), tables.markdown(names, lines)])


def _note(point) -> str:
    texts = [point.standing_reason] if point.standing not in COUNTED else []
    return "; ".join([*texts, f"{point.cycles} cycles, light" if point.light else "full run"])
