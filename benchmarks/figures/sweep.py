"""A sweep: the gain of a graph with its interval at each value of a quantity, and the mean kernel there."""

from collections.abc import Callable

from benchmarks import crossing
from benchmarks.figures import roofline
from benchmarks.figures.style import FAINT, INK, SMALL, Page
from benchmarks.frame import Results
from benchmarks.pages import headlines, sweeps
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.standing import COUNTED

LEFT, TALL, ROW = 0.62, 2.6, 0.2  # inches


def figures(results: Results) -> dict[str, Callable[[Results], Page]]:
    """Return the figure of each sweep that has a curve."""
    drawn = [swept for swept in sweeps.of(results) if swept.is_drawn]
    return {swept.name: lambda _, swept=swept: draw(swept) for swept in drawn}  # type: ignore[misc]


def draw(swept: sweeps.Sweep) -> Page:
    """Draw a curve for each host."""
    points, hosts = swept.timed, swept.hosts
    first = points.iloc[0]
    name = headlines.title_of(swept.model, first["preset"], first["swept_label"])
    title = f"{name}: {swept.sentence(hosts[0])}" if len(hosts) == 1 else f"{name}: gain of a graph by {swept.over}"
    several = " ".join(swept.sentences) if len(hosts) > 1 else ""
    note = "Bars: 95 % intervals. Below a mark: the mean kernel of eager in us. Dashed: a gain of 1.05. "
    note += f"Hollow: no quiet host. {several}"
    footer = f"{swept.variant}, {swept.words}; {counted(len(points), 'point')} on {counted(len(hosts), 'host')}"
    page = Page(title, note.strip(), footer, TALL + 0.6 + ROW * len(hosts) * (len(hosts) > 1))
    wide = page.WIDTH - page.MARGIN - LEFT
    axes = page.axes(LEFT, 0.1, wide, TALL)
    values = sorted({*map(int, points["value"])})
    low, high = min(0.9, points["low"].min() / 1.05), max(1.3, points["high"].max() * 1.1)
    # The interval of few cycles may be as wide as it likes; the marks have to be seen.
    ends = 0.9 * max(low, 0.5 * points["ratio"].min()), min(high, 3 * points["ratio"].max())
    axes.set(xscale="log", yscale="log", xlim=(values[0] / 1.25, values[-1] * 1.45), ylim=ends)
    axes.set_xlabel("tokens" if swept.over == "sequence" else swept.over)
    axes.set_ylabel("gain", labelpad=1)
    axes.grid(True)
    roofline.mark(axes.xaxis, values, "", wide)
    roofline.mark(axes.yaxis, roofline.GAINS, "x", TALL)
    axes.axhline(crossing.LEAST_GAIN, color=FAINT, linewidth=1.0, linestyle="--", zorder=2, gid="least")
    colours = roofline.COLOURS * (1 + len(hosts) // len(roofline.COLOURS))
    for colour, host in zip(colours, hosts, strict=False):
        curve = points[points["host"] == host]
        axes.plot(curve["value"], curve["ratio"], color=colour, linewidth=1.2, zorder=3, gid="curve")
        for point in curve.itertuples():
            axes.plot([point.value] * 2, [point.low, point.high], color=colour, linewidth=1.2, zorder=3, gid="interval")
            mfc = colour if point.standing in COUNTED else "#ffffff"
            axes.plot(point.value, point.ratio, "o", color=colour, mfc=mfc, markersize=5, zorder=4, gid="point")
            if host == hosts[0] and point.kernel_us > 0:
                text = f"{point.kernel_us:.0f}"
                where = {"textcoords": "offset points", "xytext": (0, -7), "ha": "center", "va": "top"}
                axes.annotate(text, (point.value, point.ratio), fontsize=SMALL, color=INK, zorder=5, **where)
    if len(hosts) > 1:
        legend = page.axes(LEFT, TALL + 0.55, wide, ROW * len(hosts))
        legend.set(xlim=(0, wide), ylim=(ROW * len(hosts), 0))
        legend.set_axis_off()
        for index, (colour, host) in enumerate(zip(colours, hosts, strict=False)):
            legend.plot(0.1, ROW * (index + 0.5), "o", color=colour, markersize=5, gid="legend")
            legend.text(0.25, ROW * (index + 0.5), f"host {host[:6]}", va="center", fontsize=SMALL)
    return page
