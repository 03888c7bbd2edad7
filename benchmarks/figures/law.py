"""The law: what a graph gains against the host's time to issue an eager step over the GPU's busy time."""

import math
from collections import Counter

from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks import law as points_of
from benchmarks.figures.evidence import NAMES, Block, Missing, provenance
from benchmarks.figures.style import BAND, FAINT, INK, Page, width_of
from benchmarks.law import NEAR, Point

MIN_PAIRS = 5
# A workload's colour, of the style's palette; others take FAINT.
COLOURS = {
    "gpt3": "#1b6ca8",
    "rnnt": "#d9a441",
    "stable_diffusion": "#b5402f",
    "llama31": "#0d3c61",
    "llama2_lora": "#7fb0d6",
}
# Of GPU types, by name; a diamond is a session beside busy host processes, as in the other figures.
MARKERS, LOADED = ("o", "s", "^", "v"), "D"
LABEL_SIZE = 7.5


def law(blocks: list[Block]) -> Page:
    """One point a session: its `graph`, or the variant with most in its graph; the line is max(1, x).

    Raises Missing where no session timed a graph beside its base.
    """
    found = [(evidence, points_of.points(evidence.whole)) for block in blocks for evidence in block.members]
    members = [evidence for evidence, own in found if own]
    points = [point for _, own in found for point in own if point.is_main]
    if not points:
        raise Missing("no graph beside its base with issue and busy time")
    gpus = sorted({point.gpu for point in points})
    near = sum(abs(point.off) <= NEAR for point in points)
    explained = sum(point.is_explained for point in points)
    has_queue = any(point.queue is not None for point in points)
    title = f"Issue time over busy time sets the gain: {near} of {len(points)} sessions lie within 10 % of max(1, x)"
    if has_queue:
        title += f", {explained} within 10 % of it or of the queue model"
    note = (
        "A point a session. x: the host's time to issue the base's step over the busy time of the graph's kernels. "
        "Gain: 10th percentile of the base's step over the graph's (medians where steps exceed 0.4 s). "
        f"Hollow: fewer than {MIN_PAIRS} pairs. Line: max(1, x); band: 10 % to both sides."
    )
    if any(point.host_load for point in points):
        note += " Diamond: beside busy host processes."
    if has_queue:
        note += " Dash: what the queue model foretells."
    page = Page(title, note, provenance(members), 4.95)
    axes = page.axes(0.75, 0.05, page.WIDTH - 0.75 - page.MARGIN, 4.5)
    low, high = _limits([point.x for point in points])
    bottom, top = _limits([value for point in points for value in (point.measured, point.first, point.queue or 1.0)])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)
    _ticks(axes.xaxis, low, high, "")
    _ticks(axes.yaxis, bottom, top, "x")
    axes.grid(True)
    corner = [low, 1.0, high] if low < 1.0 < high else [low, high]
    line = [max(1.0, x) for x in corner]
    axes.fill_between(corner, [y * (1 - NEAR) for y in line], [y * (1 + NEAR) for y in line], color=BAND, linewidth=0)
    axes.plot(corner, line, color=INK, linewidth=1.0, zorder=1)
    axes.set_xlabel("x = issue time of the base / busy time of the graph's kernels (log scale)")
    axes.set_ylabel("gain over the base (log scale)")
    # Few of a workload stand in front of many.
    num = Counter(point.model for point in points)
    for point in sorted(points, key=lambda point: (-num[point.model], point.group, point.session)):
        _draw(axes, point, LOADED if point.host_load else MARKERS[min(gpus.index(point.gpu), len(MARKERS) - 1)])
    _legend(page, axes, points, gpus)
    _labels(axes, points)
    return page


def _limits(values):
    logs = [math.log(value) for value in values] + [0.0]
    margin = max(0.04, 0.06 * (max(logs) - min(logs)))
    return math.exp(min(logs) - margin), math.exp(max(logs) + margin)


def _ticks(axis, low, high, unit):
    """Round numbers, 1 among them; halves of a power of two where the axis is short."""
    steps = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
    inside = [step for step in steps if low <= step <= high]
    axis.set_major_locator(FixedLocator(inside if len(inside) > 2 else [low, 1.0, high]))
    axis.set_major_formatter(lambda value, _: f"{value:.3g}{unit}")
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _draw(axes, point, marker):
    colour = COLOURS.get(point.model, FAINT)
    enough = point.num_pairs >= MIN_PAIRS
    if point.queue is not None:
        axes.plot([point.x] * 2, [point.measured, point.queue], color=colour, linewidth=0.6, zorder=2)
        axes.plot([point.x], [point.queue], marker="_", markersize=7, color=colour, linestyle="", zorder=2)
    axes.plot(
        [point.x],
        [point.measured],
        marker=marker,
        markersize=5.5,
        markeredgewidth=1.1,
        markeredgecolor=colour,
        markerfacecolor=colour if enough else "none",
        linestyle="",
        zorder=4 if enough else 3,
        gid=f"{'filled' if enough else 'hollow'}-{point.model}-{point.preset}",
    )


def _legend(page, axes, points, gpus):
    """Workloads in their colour and, of several GPU types, their marks, in the empty corner above the line's bend."""
    models = sorted({point.model for point in points})
    rows = [(NAMES.get(model, model), COLOURS.get(model, FAINT), "o") for model in models]
    if len(gpus) > 1:
        rows += [(gpu, FAINT, MARKERS[min(index, len(MARKERS) - 1)]) for index, gpu in enumerate(gpus)]
    for index, (text, colour, marker) in enumerate(rows):
        y = 0.96 - 0.05 * index
        axes.plot([0.02], [y], marker=marker, markersize=5.5, color=colour, linestyle="", transform=axes.transAxes)
        axes.text(0.035, y, text, transform=axes.transAxes, va="center", fontsize=8.5, color=INK)


def _labels(axes, points):
    """The name of each preset and folder suffix with sessions outside the band, once, at the one furthest out."""
    furthest: dict[str, Point] = {}
    for point in points:
        if abs(point.off) > NEAR:
            kept = furthest.get(point.group)
            furthest[point.group] = point if kept is None or abs(point.off) > abs(kept.off) else kept
    box = axes.get_position()
    page_width, page_height = axes.figure.get_size_inches()
    width, height = box.width * page_width, box.height * page_height

    def place(x, y):
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        return width * math.log(x / left) / math.log(right / left), height * math.log(y / bottom) / math.log(
            top / bottom
        )

    taken = [(px - 0.06, py - 0.06, px + 0.06, py + 0.06) for px, py in (place(p.x, p.measured) for p in points)]
    for point in sorted(furthest.values(), key=lambda point: (-point.measured, point.group)):
        text = _name(point)
        x, y = place(point.x, point.measured)
        long, tall = width_of([text], LABEL_SIZE) - 0.08, 0.13
        # Right, left, below and above, then further out.
        spots = [
            (x + side, y + lift)
            for reach in (0.0, 0.14, 0.28, 0.42)
            for side, lift in (
                (0.09, -tall / 2 - reach),
                (-0.09 - long, -tall / 2 - reach),
                (-long / 2, -0.09 - tall - reach),
                (0.09, -tall / 2 + reach),
                (-0.09 - long, -tall / 2 + reach),
                (-long / 2, 0.09 + reach),
            )
        ]
        for left, bottom in spots:
            spot = (left, bottom, left + long, bottom + tall)
            inside = left >= 0 and bottom >= 0 and spot[2] <= width and spot[3] <= height
            if inside and not any(_overlap(spot, other) for other in taken):
                taken.append(spot)
                axes.text(
                    left / width,
                    (bottom + tall / 2) / height,
                    text,
                    transform=axes.transAxes,
                    va="center",
                    fontsize=LABEL_SIZE,
                    color=FAINT,
                )
                break


def _overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _name(point):
    """`bench_lengths wavefront`: the preset and what the folder's name adds to it."""
    folder = point.group.rpartition("/")[2]
    suffix = folder.removeprefix(f"{point.model}-{point.preset}").strip("-")
    gpus = f" x{point.num_gpus}" if point.num_gpus > 1 else ""
    return " ".join(filter(None, (point.preset, suffix))) + gpus
