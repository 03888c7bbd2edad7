"""The figure of the front page: a step on each host, and each graph's gain beside its ceiling."""

from collections.abc import Callable, Sequence

from matplotlib.ticker import FixedLocator, NullLocator
from pandas import DataFrame

from benchmarks.figures import rank_variation, style
from benchmarks.figures.style import BAND, INK, KINDS, MARKS, SMALL, NotDrawn, Page
from benchmarks.frame import Results
from benchmarks.pages import headlines
from benchmarks.pages.headlines import Headline, HostMeans
from graph_worth.harness.files.facts import Run
from graph_worth.harness.intervals import NEAR
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.standing import COUNTED

TICKS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
# Inches.
ROW, NAME_Y, MARKS_Y = 0.44, 0.11, 0.30
APART = 0.07
LEFT, GAP, TALL = 2.95, 0.62, 2.5
LONGEST = 40  # letters of a name


def gain(results: Results) -> Page:
    """Draw a row of hosts for each workload, and every graph beside its ceiling; raise NotDrawn without any graph."""
    lines = headlines.of(results)
    if not lines:
        raise NotDrawn("no graph on a GPU has a gain")
    counts = results.points["standing"].isin(COUNTED) & (results.points["busy_processes"] == 0)
    reached = results.points[results.points["reached"].notna() & counts]
    reached = reached.assign(short=reached["gpu"].map(headlines.short), gain=reached["ceiling"] * reached["reached"])
    names = {gpu.gpu for line in lines for gpu in line.gpus} | {*reached["short"]}
    gpus = {name: MARKS[index % len(MARKS)] for index, name in enumerate(sorted(names, reverse=True))}
    note = "Runs beside other work are left out. Left: a mark is one host's mean step, over the graph's median with "
    note += "that GPU. Right: a mark is a graph in one run; the line is its ceiling, the eager step / the time that "
    note += "the GPU is busy in it."
    if any(host.is_mixed for line in lines for host in line.hosts):
        note += " The title leaves out graphs in whose process reduce_overhead ran, which makes their replays slower."
    height = max(ROW * len(lines), TALL + 0.55 + 0.2 * (len(gpus) + 3))
    drawn = {*reached["run"], *headlines.points(results)["run"]}
    used = [run for _, run in results.runs if run.id in drawn]
    page = Page(title_of(lines), note, _footer(used, lines), height + 0.55)
    _hosts(page, lines, gpus)
    _ceilings(page, reached, gpus)
    _legend(page, lines, gpus)
    return page


def title_of(lines: Sequence[Headline]) -> str:
    """Say by how much steps differ between hosts with the same GPU, of graphs and of eager."""
    groups = [hosts for line in lines for hosts in (gpu.hosts for gpu in line.gpus) if len(hosts) > 1]
    if not groups:
        high = lines[0].gain[1]
        name = lines[0].name if len(lines[0].name) <= LONGEST else f"{lines[0].name[: LONGEST - 3]}..."
        return f"{name}: a graph gains {_percent(high)}, the time for which the host made the GPU wait"
    alike = [[host for host in hosts if not host.is_mixed] for hosts in groups]
    graph = max((_spread(hosts, "ms") for hosts in alike if hosts), default=1.0)
    eager = max(_spread(hosts, "base_ms") for hosts in groups)
    text = f"Between hosts with the same GPU a graph's step differs by up to {_percent(graph)}, an eager step by up to "
    return f"{text}{_percent(eager)}: a graph gains what the host makes the GPU wait"


def _spread(hosts: Sequence[HostMeans], name: str) -> float:
    times = [getattr(host, name) for host in hosts]
    return max(times) / min(times)


def _percent(ratio: float) -> str:
    value = 100 * (ratio - 1)
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f} %"


def _hosts(page: Page, lines: Sequence[Headline], gpus: dict[str, str]) -> None:
    """The left side: a row a workload, with a mark of eager and of the graph for each host."""
    axes = page.axes(page.MARGIN, 0.1, LEFT - page.MARGIN, ROW * len(lines))
    axes.set(ylim=(ROW * len(lines), 0), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    shares = [time / gpu.ms for line in lines for gpu in line.gpus for host in gpu.hosts for time in _times(host)]
    axes.set(xscale="log", xlim=(min(0.9, *shares) / 1.04, max(1.3, *shares) * 1.08))
    axes.set_xlabel("step / the graph's step")
    _ticks(axes.xaxis, axes.get_xlim(), axes.bbox.width / axes.figure.dpi / 0.4)
    for index, line in enumerate(lines):
        top = index * ROW
        if index:
            axes.axhline(top, color=style.GRID, linewidth=0.7)
        text = ", ".join(gain.span for gain in line.gains)
        room = LEFT - page.MARGIN - style.width_of(text, SMALL) - 0.2
        page.text(page.MARGIN, 0.1 + top + NAME_Y, _fitting(line, room), va="center", fontsize=9, fontweight="bold")
        page.text(LEFT, 0.1 + top + NAME_Y, text, va="center", ha="right", fontsize=SMALL)
        for gpu in line.gpus:
            # Marks of different GPUs stand apart.
            y = top + MARKS_Y + APART * (list(gpus).index(gpu.gpu) - (len(gpus) - 1) / 2)
            for host in gpu.hosts:
                for kind, time in zip(("eager", "graph"), _times(host), strict=True):
                    face = "#ffffff" if host.archived else KINDS[kind]
                    look = {"color": KINDS[kind], "mfc": face, "marker": gpus[gpu.gpu], "markersize": 5.5}
                    layer = 3 + (kind == "graph")
                    axes.plot(time / gpu.ms, y, zorder=layer, gid=f"{kind}-host", clip_on=False, **look)


def _times(host: HostMeans) -> tuple[float, float]:
    return host.base_ms, host.ms


def _fitting(line: Headline, room: float) -> str:
    """The name with its words if they fit, else the name, cut where it is too long."""
    for text in (line.words, line.name):
        if len(text) <= LONGEST and style.width_of(text, 9, "bold") <= room:
            return text
    text = line.name[:LONGEST]
    while style.width_of(f"{text}...", 9, "bold") > room:
        text = text[:-1]
    return f"{text}..."


def _ceilings(page: Page, reached: DataFrame, gpus: dict[str, str]) -> None:
    """The right side: gain by ceiling, and the line that no graph passes."""
    left = LEFT + GAP
    axes = page.axes(left, 0.1, page.WIDTH - page.MARGIN - left, TALL)
    axes.set(xscale="log", yscale="log", xlabel="your step / busy", ylabel="gain")
    ends = [*reached["ceiling"], *reached["gain"]]
    limits = min(0.9, *ends, 1) / 1.05, max(2.0, *ends, 1) * 1.15
    axes.set(xlim=limits, ylim=limits)
    axes.set_ylabel("gain", labelpad=1)
    axes.grid(True)
    _ticks(axes.xaxis, limits, axes.bbox.width / axes.figure.dpi / 0.4)
    _ticks(axes.yaxis, limits, axes.bbox.height / axes.figure.dpi / 0.3)
    axes.fill_between(limits, [value * (1 - NEAR) for value in limits], limits, color=BAND, linewidth=0, zorder=0.5)
    axes.plot(limits, limits, color=INK, linewidth=1.2, gid="ceiling")
    for mark in reached.itertuples():
        colour, marker = KINDS[mark.kind], gpus[mark.short]
        axes.plot(mark.ceiling, mark.gain, color=colour, marker=marker, markersize=5.5, zorder=4, gid="point")


def _legend(page: Page, lines: Sequence[Headline], gpus: dict[str, str]) -> None:
    """Below the right side: marks of GPUs, colours of variants, hollow marks of the archive."""
    left, top = LEFT + GAP - 0.15, 0.1 + TALL + 0.6
    parts = [(name, mark, INK, INK) for name, mark in gpus.items()]
    parts += [(text, "s", KINDS[kind], KINDS[kind]) for kind, text in (("eager", "eager"), ("graph", "graph"))]
    if any(host.archived for line in lines for host in line.hosts):
        parts.append(("hollow: archived run", "o", INK, "#ffffff"))
    room = 0.2 * len(parts)
    axes = page.axes(left, top, 0.2, room)
    axes.set(xlim=(0, 1), ylim=(len(parts), 0))
    axes.set_axis_off()
    for index, (text, marker, colour, face) in enumerate(parts):
        axes.plot(0.5, index + 0.5, color=colour, mfc=face, marker=marker, markersize=5.5, gid="legend")
        page.text(left + 0.25, top + 0.2 * index + 0.1, text, va="center", fontsize=9)


def _ticks(axis, limits: tuple[float, float], most: float) -> None:
    """Mark ratios on a log axis that has room for `most` texts, so far apart that these do not touch."""
    least = (limits[1] / limits[0]) ** (1 / most)
    kept: list[float] = []
    for value in TICKS:
        if limits[0] <= value <= limits[1] and (not kept or value >= kept[-1] * least):
            kept.append(value)
    axis.set_major_locator(FixedLocator(kept))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:.4g}x")


def _footer(used: Sequence[Run], lines: Sequence[Headline]) -> str:
    """Return number of runs, hosts, days and versions of torch."""
    torch = sorted({str(run.versions["torch"]) for run in used if run.versions.get("torch")})
    days = sorted({run.begin_utc[:10] for run in used})
    text = f"{counted(len(used), 'run')} on {counted(len({run.host.boot for run in used}), 'host')}"
    archived = {host.host for line in lines for host in line.hosts if host.archived}
    text += f", {len(archived)} archived" if archived else ""
    text += "; " + " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    return text + (f"; torch {', '.join(torch)}" if torch else "")


FIGURES: dict[str, Callable[[Results], Page]] = {"gain": gain, "ranks": rank_variation.ranks}
