"""The launch roofline: each graph's gain by the mean kernel of its eager step, with a line for each kind of host."""

import math
from collections.abc import Callable, Sequence

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.figures import style
from benchmarks.figures.style import FAINT, INK, SMALL, NotDrawn, Page
from benchmarks.frame import Results
from benchmarks.pages import headlines, roofline
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.pages.roofline import GAINS, HOSTS, KERNELS, limits, line, ticks

# One for each workload in the order of its name, read on light and dark pages; others share the last.
COLOURS = "#3f87c6", "#d97a16", "#2b9a58", "#d9455f", "#9a6fc9", "#a8734d", "#cf6bb3", "#1f9aa8", "#8f8f1f", "#858585"
ONE, SEVERAL = 5.0, 8.0  # points: a mark of one GPU, and of several
LEFT, TALL, ROW, COLUMNS = 0.62, 3.5, 0.2, 2  # inches


def draw(results: Results) -> Page:
    """Draw every graph that `roofline.points` has; raise NotDrawn without any."""
    points = roofline.points(results)
    if not len(points):
        raise NotDrawn("no graph on a GPU has a gain and a profile")
    names = [headlines.title_of(*where) for where in points[["model", "preset", "swept_label"]].itertuples(index=False)]
    points = points.assign(name=names, short=points["gpu"].map(headlines.short))
    # Workloads with most points first: those beyond the colours share one.
    most = sorted(set(names), key=lambda name: (-names.count(name), name))
    order = sorted(most[: len(COLOURS) - 1])
    colours = dict(zip(order, COLOURS, strict=False))
    if set(names) - set(order):
        colours["others"] = COLOURS[-1]
    markers = dict(zip(sorted(set(points["short"]), reverse=True), style.MARKS, strict=False))
    error = (points["program_ratio"] / points["predicted"] - 1).abs()
    note = (
        "A mark is a graph in one run. Lines: gain = the host's time to launch a kernel / the mean kernel, never "
        f"below 1. Graphs lie {100 * error.median():.0f} % (median) from the line of their own host. "
        "Hollow: in no headline, by other work, the pace of the host or a known fault. "
        "With a rim: compiled code, with its graph's gain over it."
    )
    footer = f"{counted(len(points), 'graph')} in {counted(points['run'].nunique(), 'run')} on "
    footer += f"{counted(points['host'].nunique(), 'host')}, {int(points['counts'].sum())} on quiet or unknown hosts"
    rows = math.ceil((len(colours) + len(markers) + 2) / COLUMNS)
    title = "A graph gains where the mean kernel is shorter than the host's time to launch one"
    page = Page(title, note, footer, TALL + 0.65 + ROW * rows)
    axes = page.axes(LEFT, 0.1, page.WIDTH - page.MARGIN - LEFT, TALL)
    across, up = limits(points["kernel_us"], points["program_ratio"])
    axes.set(xscale="log", yscale="log", xlim=across, ylim=up)
    axes.set_xlabel("mean kernel of the eager step, us")
    axes.set_ylabel("gain", labelpad=1)
    axes.grid(True)
    mark(axes.xaxis, KERNELS, "", page.WIDTH - page.MARGIN - LEFT)
    mark(axes.yaxis, GAINS, "x", TALL)
    for host_us in HOSTS:
        axes.plot(*zip(*line(host_us, across), strict=True), color=FAINT, linewidth=1.0, zorder=2, gid="host")
        axes.text(host_us, 0.97, f"{host_us} us", color=INK, fontsize=SMALL, ha="center", va="top")
    for point in points.sort_values("counts").itertuples():
        colour = colours.get(point.name, COLOURS[-1])
        look = {"color": colour, "mfc": colour if point.counts else "#ffffff", "marker": markers[point.short]}
        look["mec"] = colour if point.program == point.base else INK
        size = ONE if point.ranks == 1 else SEVERAL
        axes.plot(point.kernel_us, point.program_ratio, markersize=size, zorder=3 + point.counts, gid="point", **look)
    marks = [(name, "s", colour, ONE) for name, colour in colours.items()]
    marks += [(name, marker, INK, ONE) for name, marker in markers.items()]
    legend(page, [*marks, ("several GPUs", "o", INK, SEVERAL)], 0.1 + TALL + 0.55)
    return page


def mark(axis, values: Sequence[float], unit: str, inches: float) -> None:
    """Mark those of the values that stand at least 0.3 inches apart on a log axis."""
    axis.set_major_locator(FixedLocator(ticks(values, axis.get_view_interval(), 0.3 / inches)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}{unit}")


def legend(page: Page, parts: Sequence[tuple[str, str, str, float]], top: float) -> None:
    """Draw text, marker, colour, size of each part in columns, from so many inches below the note."""
    rows = math.ceil(len(parts) / COLUMNS)
    width = (page.WIDTH - 2 * page.MARGIN) / COLUMNS
    axes = page.axes(page.MARGIN, top, page.WIDTH - 2 * page.MARGIN, ROW * rows)
    axes.set(xlim=(0, page.WIDTH - 2 * page.MARGIN), ylim=(ROW * rows, 0))
    axes.set_axis_off()
    for index, (text, marker, colour, size) in enumerate(parts):
        column, row = divmod(index, rows)
        axes.plot(column * width + 0.1, ROW * (row + 0.5), color=colour, marker=marker, markersize=size, gid="legend")
        while style.width_of(text, SMALL) > width - 0.3:
            text = f"{text.removesuffix('...')[:-1]}..."
        axes.text(column * width + 0.25, ROW * (row + 0.5), text, va="center", fontsize=SMALL)


FIGURES: dict[str, Callable[[Results], Page]] = {"roofline": draw}
