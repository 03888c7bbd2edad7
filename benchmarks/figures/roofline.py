"""The launch roofline: each graph's gain by the mean kernel of its eager step, with a line for each kind of host."""

import math
from collections.abc import Sequence

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.figures import style
from benchmarks.figures.style import FAINT, INK, PALE, SMALL, NotDrawn, Page
from benchmarks.frame import Results
from benchmarks.pages import headlines, roofline
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.pages.roofline import GAINS, HOSTS, KERNELS, limits, line, ticks
from graph_worth.harness.standing import SLOWED

# One for each workload in the order of its name, also apart for the colour-blind; others share the last.
COLOURS = "#ea8a64", "#298630", "#fa0007", "#7859be", "#d7a2ff", "#0299d3", "#e6b909", "#175fff", "#858585"
ONE, SEVERAL, SLOW = 4.3, 7.0, 3.0  # points: a mark of one GPU, of several, and of a slowed eager
LEFT, TALL, ROW, COLUMNS = 0.62, 3.5, 0.2, 2  # inches


def draw(results: Results) -> Page:
    """Draw every graph that `roofline.points` has; raise NotDrawn without any."""
    points = roofline.points(results)
    if not len(points):
        raise NotDrawn("no graph on a GPU has a gain and a profile")
    names = [headlines.title_of(*where) for where in points[["model", "preset", "swept_label"]].itertuples(index=False)]
    points = points.assign(name=names, short=points["gpu"].map(headlines.short), slow=points["standing"] == SLOWED)
    # Workloads with most points first: those beyond the colours share one.
    names = [*points["name"][~points["slow"]]]
    most = sorted(set(names), key=lambda name: (-names.count(name), name))
    order = sorted(most[: len(COLOURS) - 1]) + ["others"] * (len(most) >= len(COLOURS))
    colours = dict(zip(order, COLOURS, strict=False))
    markers = dict(zip(sorted(set(points["short"]), reverse=True), style.MARKS, strict=False))
    note = (
        "Each mark is one graph in one run. A line is the gain of a host that needs {}, {}, {} or {} us to launch a "
        "kernel. Filled marks count for the headlines. Hollow and grey ones do not: other work ran, eager's time was "
        "not steady, a variable slowed eager, or the file has another fault."
    ).format(*HOSTS)
    filled, grey = points["counts"].sum(), points["slow"].sum()
    footer = f"{counted(len(points), 'graph')} in {counted(points['run'].nunique(), 'run')} on "
    footer += f"{counted(points['host'].nunique(), 'host')}: {filled} filled, {grey} grey"
    rows = math.ceil((len(colours) + len(markers) + 3) / COLUMNS)
    title = "A graph gains where the mean kernel is shorter than the host's time to launch one"
    page = Page(title, note, footer, TALL + 0.65 + ROW * rows)
    wide = page.WIDTH - page.MARGIN - LEFT
    axes = page.axes(LEFT, 0.1, wide, TALL)
    across, up = limits(points["kernel_us"], points["program_ratio"])
    axes.set(xscale="log", yscale="log", xlim=across, ylim=up, xlabel="mean kernel of the eager step, us")
    axes.set_ylabel("gain", labelpad=1)
    axes.grid(True)
    mark(axes.xaxis, KERNELS, "", wide)
    mark(axes.yaxis, GAINS, "x", TALL)
    angle = math.degrees(math.atan2(-TALL / math.log(up[1] / up[0]), wide / math.log(across[1] / across[0])))
    along = {"ha": "center", "va": "center", "rotation": angle, "rotation_mode": "anchor", "color": INK}
    along["bbox"] = {"facecolor": "#ffffff", "edgecolor": "none", "pad": 1}
    for host_us in HOSTS:
        corners = line(host_us, across, up[1])
        axes.plot(*zip(*corners, strict=True), color=FAINT, linewidth=1.0, zorder=2, gid="host")
        at = max(2 * across[0], 1.35 * corners[0][0])
        axes.text(at, host_us / at, f"host {host_us} us", fontsize=SMALL, **along)
    points = points.sort_values(["counts", "slow", "ranks", "kernel_us"], ascending=[True, False, False, True])
    for point in points.itertuples():
        colour = PALE if point.slow else colours.get(point.name, COLOURS[-1])
        marker = markers[point.short] if point.program == point.base else style.COMPILED
        size = SLOW if point.slow else ONE if point.ranks == 1 else SEVERAL
        # Filled marks have a rim of the page's colour, which parts them from each other.
        look = {"mfc": colour, "mec": "#ffffff", "mew": 0.5} if point.counts else {"mfc": "#ffffff", "mec": colour}
        look["markersize"] = size + point.counts
        axes.plot(point.kernel_us, point.program_ratio, marker, color=colour, zorder=4, gid="point", **look)
    marks = [(name, "o", colour, ONE) for name, colour in colours.items()]
    marks += [(name, marker, INK, ONE) for name, marker in markers.items()]
    marks += [("compiled code", style.COMPILED, INK, ONE), ("several GPUs", "o", INK, SEVERAL)]
    legend(page, [*marks, ("eager slowed by a variable", "o", PALE, SLOW)], 0.1 + TALL + 0.55)
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
        look = {"color": colour, "mfc": "#ffffff" if colour == PALE else colour, "markersize": size}
        axes.plot(column * width + 0.1, ROW * (row + 0.5), marker, gid="legend", **look)
        while style.width_of(text, SMALL) > width - 0.3:
            text = f"{text.removesuffix('...')[:-1]}..."
        axes.text(column * width + 0.25, ROW * (row + 0.5), text, va="center", fontsize=SMALL)
