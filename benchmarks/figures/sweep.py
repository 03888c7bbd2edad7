"""A sweep: the gain of a graph with its interval at each value of a quantity, and the mean kernel there."""

import itertools
import math
from collections.abc import Callable

from benchmarks import crossing
from benchmarks.figures import roofline
from benchmarks.figures.style import FAINT, Page
from benchmarks.frame import Results
from benchmarks.pages import headlines, sweeps
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.standing import COUNTED

LEFT, TALL = 0.62, 2.6  # inches


def figures(results: Results) -> dict[str, Callable[[Results], Page]]:
    """Return the figure of each sweep that has a curve."""
    drawn = [swept for swept in sweeps.of(results) if len(swept.timed) > 1]
    return {swept.name: lambda _, swept=swept: draw(swept) for swept in drawn}  # type: ignore[misc]


def draw(swept: sweeps.Sweep) -> Page:
    """Draw a curve for each host."""
    points, curves = swept.timed, swept.curves
    first, ends = points.iloc[0], " ".join(swept.sentences)
    name = headlines.title_of(swept.model, first["preset"], first["swept_label"])
    note = f"Bars are 95 % intervals. The dashed line is {crossing.LEAST_GAIN}x. Hollow marks are in no headline."
    title = f"{name}: {ends}"
    if len(curves) > 1:
        title, note = f"{name}: gain of a graph by {swept.over}", f"{note} {ends}"
    footer = f"{swept.variant}, {swept.words}; {counted(len(points), 'point')} on {counted(len(curves), 'host')}"
    rows_of_legend = math.ceil(len(curves) / roofline.COLUMNS) if len(curves) > 1 else 0
    page = Page(title, note, footer, TALL + 0.75 + roofline.ROW * rows_of_legend)
    wide = page.WIDTH - page.MARGIN - LEFT
    axes = page.axes(LEFT, 0.1, wide, TALL)
    values = sorted({*map(int, points["value"])})
    low, high = min(0.9, points["low"].min() / 1.05), max(1.3, points["high"].max() * 1.1)
    # The interval of few cycles may be as wide as it likes; the marks have to be seen.
    up = 0.9 * max(low, 0.5 * points["ratio"].min()), min(high, 3 * points["ratio"].max())
    axes.set(xscale="log", yscale="log", xlim=(values[0] / 1.3, values[-1] * 1.3), ylim=up)
    axes.set_xlabel(f"{'tokens' if swept.over == 'sequence' else swept.over}, and below the mean kernel of eager in us")
    axes.set_ylabel("gain", labelpad=1)
    axes.grid(True)
    roofline.mark(axes.xaxis, values, "", wide)
    kernels = points.groupby("value")["kernel_us"].median().dropna().map("{:.0f}".format)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}\n{kernels.get(value, '')}")
    roofline.mark(axes.yaxis, roofline.GAINS, "x", TALL)
    axes.axhline(crossing.LEAST_GAIN, color=FAINT, linewidth=1.0, linestyle="--", zorder=2, gid="least")
    rows = []
    for colour, (host, curve) in zip(itertools.cycle(roofline.COLOURS), curves.items(), strict=False):
        rows.append((f"host {host[:6]}", "o", colour, roofline.ONE))
        axes.plot(curve["value"], curve["ratio"], color=colour, linewidth=1.2, zorder=3, gid="curve")
        for point in curve.itertuples():
            axes.plot([point.value] * 2, [point.low, point.high], color=colour, linewidth=1.2, zorder=3, gid="interval")
            mfc = colour if point.standing in COUNTED else "#ffffff"
            axes.plot(point.value, point.ratio, "o", color=colour, mfc=mfc, markersize=5, zorder=4, gid="point")
    if len(curves) > 1:
        roofline.legend(page, rows, 0.1 + TALL + 0.65)
    return page
