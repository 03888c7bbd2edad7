"""The figure of several ranks: by how much a step varies, eager and in graphs."""

import math

from matplotlib.ticker import FuncFormatter

from benchmarks.figures import style
from benchmarks.figures.style import KINDS, SMALL, NotDrawn, Page
from benchmarks.frame import Results
from graph_worth.harness.judge import PASS, Judged
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.standing import COUNTED

ROW, NAMES = 0.24, 3.0  # inches


def ranks(results: Results) -> Page:
    """Draw each variant's 5th to 95th percentile over its mean step; raise NotDrawn without several ranks."""
    points = results.points[(results.points["gpu"] != "CPU") & (results.points["ranks"] > 1)]
    points = points[(points["busy_processes"] == 0) & ~points["control"] & (points["status"] == PASS)]
    points = points[points["standing"].isin(COUNTED)]
    points = points.assign(graph=points["kind"] != "eager").sort_values(["workload", "run", "graph", "variant"])
    ends_of = [(point, _ends(results.judged[point.run, point.process], point.variant)) for point in points.itertuples()]
    lines = [(point, percentiles) for point, percentiles in ends_of if percentiles]
    if not lines:
        raise NotDrawn("no run of several ranks on a GPU has steps")
    widest = {
        kind: max((high / low - 1 for point, (low, high) in lines if point.graph != is_eager), default=0)
        for kind, is_eager in (("eager", True), ("graph", False))
    }
    title = f"On several GPUs an eager step varies by up to {100 * widest['eager']:.0f} %, "
    title += f"a graph's by up to {100 * widest['graph']:.0f} %"
    note = (
        "Runs beside other work are left out. Grey eager, blue graphs: a bar goes from the 5th to the 95th percentile "
    )
    note += (
        "of a run's steps over their mean. They vary by its end / its begin. Where buffers are static some steps run "
    )
    note += "again: such variants are left out."
    hosts = len({point.host for point, _ in lines})
    page = Page(title, note, f"{counted(len(lines), 'variant')} on {counted(hosts, 'host')}", ROW * len(lines) + 0.6)
    axes = page.axes(NAMES, 0.1, page.WIDTH - NAMES - page.MARGIN, ROW * len(lines))
    ends = [end for _, percentiles in lines for end in percentiles]
    axes.set(ylim=(len(lines), 0), yticks=[], xlim=(min(ends) - 0.02, max(ends) + 0.02), xlabel="step / its mean")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
    for index, (point, (low, high)) in enumerate(lines):
        kind = point.kind if point.kind in KINDS else "graph"
        axes.plot(
            [low, high], [index + 0.5] * 2, color=KINDS[kind], linewidth=5, solid_capstyle="butt", gid=f"{kind}-steps"
        )
        text = f"{point.workload}, {point.variant}"
        while style.width_of(text, SMALL) > NAMES - page.MARGIN - 0.1:
            text = text[:-4] + "..."
        page.text(page.MARGIN, 0.1 + ROW * (index + 0.5), text, va="center", fontsize=SMALL)
    return page


def _ends(judged: Judged, variant: str) -> tuple[float, float] | None:
    blocks = judged.blocks(variant)
    steps = sorted(ms for block in blocks for ms in block.step_ms)
    if len(steps) < 20 or any(block.reruns for block in blocks):
        return None
    mean = math.fsum(steps) / len(steps)
    return steps[len(steps) // 20] / mean, steps[math.ceil(0.95 * len(steps)) - 1] / mean
