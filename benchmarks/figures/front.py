"""The figures of the front page: how much of its ceiling each graph reached, and a step on each host."""

import re
from collections.abc import Sequence

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import runs
from benchmarks.figures import style
from benchmarks.figures.style import BAND, FAINT, INK, KINDS, MARKS, SMALL, NotDrawn, Page
from benchmarks.files import facts
from benchmarks.files.facts import Run, digits
from benchmarks.files.workload import Workload
from benchmarks.pages import published
from benchmarks.runs import Range, Reached, Row
from benchmarks.statistics import NEAR, SAME

# Ceilings are drawn on a log axis of what they leave to gain, from this on.
LEAST = 0.005
CEILING_TICKS = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
GAIN_TICKS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)

LONGEST = 24  # letters of a name


def name_of(workload: Workload) -> str:
    """Return a workload's name in a figure: GPT-3 without 175B, since most runs hold a share; a user's own label."""
    if workload.model == facts.OWN_STEP:
        name = workload.label.removesuffix("-build")
    else:
        name = re.sub(r" \d+B\b", "", published.title_of(workload.model, workload.preset))
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


def ceiling_title(marks: list[Reached]) -> str:
    """Say how many graphs gained more than their ceiling, and how many of those that gained came near it."""
    above = [mark.share for mark in marks if mark.share > 1 + SAME]
    near = [mark.share >= 1 - NEAR for mark in marks if mark.gain > 1 + NEAR]
    text = "No graph gains more than its ceiling, step / busy"
    if above:
        text = f"{len(above)} of {len(marks)} graphs gain up to {100 * (max(above) - 1):.1f} % more than step / busy"
    percent = f"{100 * NEAR:g} %"
    if near:
        text += f"; of {len(near)} that gain over {percent}, {sum(near)} come within {percent} of it"
    return text


def ceiling(rows: Sequence[Row]) -> Page:
    """Draw the share of its ceiling that each graph reached, by ceiling; raise NotDrawn without any."""
    marks = runs.reached(rows)
    if not marks:
        raise NotDrawn("no graph on a GPU has a ratio and a busy time of the uncaptured program")
    gpus = sorted({mark.row.workload.gpu for mark in marks})
    most, shares = max(mark.ceiling for mark in marks), [mark.share for mark in marks]
    least, highest = min(shares), max(shares)
    note = "Ceiling: a step of the uncaptured program / the GPU's busy time in it. A mark is a graph in one run. "
    note += f"Grey: gains less than {100 * NEAR:g} %. Shaded: within {100 * NEAR:g} % of the ceiling. "
    note += f"Highest mark: {100 * highest:.1f} %."
    note += " Hollow: beside busy processes." if any(mark.point.is_busy for mark in marks) else ""
    page = Page(ceiling_title(marks), note, _footer([mark.point.run for mark in marks]), 4.3)
    axes = page.axes(0.72, 0.37, page.WIDTH - 0.72 - page.MARGIN, 3.35)
    axes.set(xscale="log", xlim=(LEAST, 1.6 * max(most - 1, 0.2)), xlabel="ceiling: the most that a graph can gain")
    axes.set_ylim(min(0.88, least - 0.03), max(1.03, highest + 0.03))
    axes.set_ylabel("gain / ceiling")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    _ticks(axes, CEILING_TICKS, 1)
    axes.grid(True)
    axes.axhspan(1 - NEAR, 1, color=BAND, linewidth=0, zorder=0.5)
    axes.axhline(1, color=INK, linewidth=1.2, gid="ceiling")
    left, right = axes.get_xlim()
    line = [(left * (right / left) ** (step / 200), 1.0) for step in range(201)]
    named, labels = _named(marks), []
    for index, mark in enumerate(marks):
        colour = KINDS[mark.row.kind] if mark.gain > 1 + NEAR else FAINT
        face = "none" if mark.point.is_busy else colour
        x, marker = max(mark.ceiling - 1, LEAST), MARKS[gpus.index(mark.row.workload.gpu) % len(MARKS)]
        axes.plot(x, mark.share, color=colour, marker=marker, mfc=face, markersize=6, zorder=4, gid="point")
        labels.append((x, mark.share, named.get(index, ""), colour))
    style.label_points(axes, labels, line)
    for gpu, marker in zip(gpus, MARKS * len(gpus), strict=False):
        name = gpu.removeprefix("NVIDIA ")
        axes.plot([], [], color=KINDS["graph"], marker=marker, markersize=6, linestyle="", label=name)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, handletextpad=0.2, borderaxespad=0.2, borderpad=0.2)
    return page


def _named(marks: list[Reached]) -> dict[int, str]:
    """Index -> label: of each model's graph that gains most, in its first build, and of each below the band."""
    order = sorted(range(len(marks)), key=lambda index: (bool(marks[index].row.workload.build), -marks[index].gain))
    best: dict[str, int] = {}
    for index in order:
        if not marks[index].point.is_busy:
            best.setdefault(name_of(marks[index].row.workload), index)
    found = {index: name for name, index in best.items()}
    for index, mark in enumerate(marks):
        row, is_below = mark.row, mark.gain > 1 + NEAR and mark.share < 1 - NEAR
        if index not in found and is_below and mark.point is row.newest:
            is_own = row.workload.model == facts.OWN_STEP
            more = row.variant if is_own else row.workload.label or row.variant
            found[index] = f"{name_of(row.workload)} {more}"
    return found


def shown_hosts(rows: Sequence[Row]) -> list[Row]:
    """Return the best-measured graph of each model on a GPU, in the order of gains, and of each step of a user."""
    on_gpus = [row for row in runs.on_gpus(rows) if not row.workload.busy]
    best = runs.best_measured(on_gpus)
    own: dict[Workload, Row] = {}
    for row in on_gpus:
        if row.workload.model == facts.OWN_STEP and row.kind == "graph" and row.ratio is not None:
            own[row.workload] = max(own.get(row.workload, row), row, key=lambda each: each.ratio or 0.0)
    return sorted([*best, *own.values()], key=lambda row: (-len(row.hosts), -(row.ratio or 0.0)))


def hosts_title(rows: list[Row]) -> str:
    """Say the step of a graph and of eager over hosts, for the workload whose eager step differs most."""
    row = max(rows, key=lambda row: (_spread(row.base_ms_range), row.ratio or 0.0))
    where = f" on {len(row.hosts)} hosts" if len(row.hosts) > 1 else ""
    text = f"{name_of(row.workload)}{where}: a step takes {_span(row.ms_range)} ms with a graph"
    return f"{text}, {_span(row.base_ms_range)} ms without"


def hosts(rows: Sequence[Row]) -> Page:
    """Draw a step of eager and of the graph on each host, a pair of lines a workload; raise NotDrawn without any."""
    drawn = shown_hosts(rows)
    if not drawn:
        raise NotDrawn("no graph on a GPU has a ratio")
    note = "A mark is the mean step on one host, over the graph's median step. Grey: the eager program, blue: the "
    note += "graph. A graph runs as fast as the GPU works; eager also waits for the host."
    note += " Hollow: the archive's runs." if any(row.archived for row in drawn) else ""
    step, height = 0.56, 0.56 * len(drawn)
    used = [point.run for row in drawn for point in row.timed]
    archived = {own.host for row in drawn for own in row.archived}
    more = f"; {runs.counted(len(archived), 'host')} of the archive" if archived else ""
    page = Page(hosts_title(drawn), note, _footer(used) + more, height + 0.55)
    texts = [(f"{row.base} {_span(row.base_ms_range)} ms", f"graph {_span(row.ms_range)} ms") for row in drawn]
    left = page.MARGIN + max(style.width_of(name_of(row.workload), 9.5, "bold") for row in drawn)
    left = max(left, page.MARGIN + max(style.width_of(_where(row), SMALL) for row in drawn)) + 0.2
    room = max(style.width_of(text, SMALL) for pair in texts for text in pair) + 0.2
    axes = page.axes(left, 0.1, page.WIDTH - left - room - page.MARGIN, height)
    axes.set(ylim=(height, 0), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    ends = [each / (row.ms or 1.0) for row in drawn for own in row.hosts for each in (own.ms, own.base_ms)]
    axes.set(xscale="log", xlim=(min(0.95, *ends) / 1.04, max(1.2, *ends) * 1.08))
    axes.set_xlabel("step / the graph's median step")
    _ticks(axes, GAIN_TICKS, 0)
    axes.axvline(1, color=INK, linewidth=1.0)
    for index, (row, pair) in enumerate(zip(drawn, texts, strict=True)):
        y, middle = index * step + 0.17, row.ms or 1.0
        if index:
            axes.axhline(index * step, color=style.GRID, linewidth=0.7)
        page.text(page.MARGIN, 0.1 + y, name_of(row.workload), va="center", fontsize=9.5, fontweight="bold")
        page.text(page.MARGIN, 0.1 + y + 0.2, _where(row), va="center", fontsize=SMALL, color=FAINT)
        for place, (kind, text) in enumerate(zip(("eager", row.kind), pair, strict=True)):
            colour = KINDS[kind]
            page.text(page.WIDTH - page.MARGIN, 0.1 + y + 0.2 * place, text, va="center", ha="right", fontsize=SMALL)
            for own in row.hosts:
                value = (own.ms if place else own.base_ms) / middle
                face, layer = ("#ffffff", 3) if own.is_archived else (colour, 4)
                look = {"color": colour, "mfc": face, "marker": "o", "markersize": 6, "zorder": layer}
                axes.plot(value, y + 0.2 * place, **look, gid=f"{kind}-host")
    return page


def _where(row: Row) -> str:
    gpu = row.workload.gpu.removeprefix("NVIDIA ").partition(" ")[0]
    ranks = f"{row.workload.ranks} x " if row.workload.ranks > 1 else ""
    return f"{runs.counted(len(row.hosts), 'host')}, {ranks}{gpu}"


def _span(span: Range | None) -> str:
    """Return 38.54 to 38.79, or a single number where both ends read the same."""
    texts = [digits(value) for value in span or ()]
    return " to ".join(dict.fromkeys(texts))


def _spread(span: Range | None) -> float:
    return span[1] / span[0] if span else 1.0


def _ticks(axes, values: Sequence[float], offset: int) -> None:
    """Mark ratios on a log x axis of ratio - offset, so far apart that their texts do not touch."""
    left, right = axes.get_xlim()
    least = (right / left) ** (0.47 * axes.figure.dpi / axes.bbox.width)
    kept: list[float] = []
    for value in values:
        at = value - offset
        if left <= at <= right and (not kept or at >= kept[-1] * least):
            kept.append(at)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value + offset:.4g}x")


def _footer(used: Sequence[Run]) -> str:
    """Return number of runs, hosts, days and versions of torch."""
    own = {run.id: run for run in used}.values()
    torch = sorted({str(run.versions["torch"]) for run in own if run.versions.get("torch")})
    days = sorted({run.begin_utc[:10] for run in own})
    text = f"{runs.counted(len(own), 'run')} on {runs.counted(len({run.host.boot for run in own}), 'host')}; "
    text += days[0] + (f" to {days[-1]}" if len(days) > 1 else "")
    return text + (f"; torch {', '.join(torch)}" if torch else "")


FIGURES = {"ceiling": ceiling, "hosts": hosts}
