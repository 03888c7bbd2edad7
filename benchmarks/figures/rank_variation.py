"""The figure of several ranks: by how much a step varies, eager and in graphs."""

import math

from matplotlib.ticker import FuncFormatter

from benchmarks import runs
from benchmarks.figures import style
from benchmarks.figures.style import KINDS, SMALL, NotDrawn, Page
from benchmarks.runs import Found, Point
from graph_worth.harness.judge import PASS

ROW, NAMES = 0.24, 3.0  # inches


def ranks(results: Found) -> Page:
    """Draw each variant's 5th to 95th percentile over its mean step; raise NotDrawn without several ranks."""
    rows = [row for row in runs.on_gpus(results.rows) if row.workload.ranks > 1 and not row.workload.busy]
    points = [(row.workload.name, point) for row in rows if not row.control for point in row.points]
    passed = [(name, point) for name, point in points if point.verdict.status == PASS]
    lines = [(name, point, percentiles) for name, point in passed if (percentiles := _ends(point))]
    if not lines:
        raise NotDrawn("no run of several ranks on a GPU has steps")
    lines.sort(key=lambda line: (line[0], line[1].run.id, line[1].variant.kind != "eager", line[1].name))
    widest = {
        kind: max(
            (high / low - 1 for _, point, (low, high) in lines if (point.variant.kind == "eager") == is_eager),
            default=0,
        )
        for kind, is_eager in (("eager", True), ("graph", False))
    }
    title = f"On several GPUs an eager step varies by up to {100 * widest['eager']:.0f} %, "
    title += f"a graph's by up to {100 * widest['graph']:.0f} %"
    note = "Grey eager, blue graphs: a bar goes from the 5th to the 95th percentile of a run's steps over their mean. "
    note += (
        "They vary by its end / its begin. Where buffers are static some steps run again: such variants are left out."
    )
    hosts = len({point.run.host.boot for _, point, _ in lines})
    page = Page(
        title, note, f"{runs.counted(len(lines), 'variant')} on {runs.counted(hosts, 'host')}", ROW * len(lines) + 0.6
    )
    axes = page.axes(NAMES, 0.1, page.WIDTH - NAMES - page.MARGIN, ROW * len(lines))
    ends = [end for _, _, percentiles in lines for end in percentiles]
    axes.set(ylim=(len(lines), 0), yticks=[], xlim=(min(ends) - 0.02, max(ends) + 0.02), xlabel="step / its mean")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
    for index, (name, point, (low, high)) in enumerate(lines):
        kind = point.variant.kind if point.variant.kind in KINDS else "graph"
        axes.plot(
            [low, high], [index + 0.5] * 2, color=KINDS[kind], linewidth=5, solid_capstyle="butt", gid=f"{kind}-steps"
        )
        text = f"{name}, {point.name}"
        while style.width_of(text, SMALL) > NAMES - page.MARGIN - 0.1:
            text = text[:-4] + "..."
        page.text(page.MARGIN, 0.1 + ROW * (index + 0.5), text, va="center", fontsize=SMALL)
    return page


def _ends(point: Point) -> tuple[float, float] | None:
    blocks = point.judged.blocks(point.name, False)
    steps = sorted(ms for block in blocks for ms in block.step_ms)
    if len(steps) < 20 or any(block.reruns for block in blocks):
        return None
    mean = math.fsum(steps) / len(steps)
    return steps[len(steps) // 20] / mean, steps[math.ceil(0.95 * len(steps)) - 1] / mean
