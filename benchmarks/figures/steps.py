"""Where a step's time goes: bars of step time, its scatter, and one step's kernels on a time axis."""

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from benchmarks.figures.evidence import (
    Block,
    Evidence,
    Missing,
    main_variant,
    ms_text,
    percent,
    provenance,
    read_trace,
    status_text,
    traces,
)
from benchmarks.figures.style import FAILURE, FAINT, INK, Page, look, ratio_axis, width_of
from benchmarks.intervals import by_batch, percentile
from common import trace

NUM_CURVE_POINTS = 160
ZOOM_MS = 2.5
# Gaps below this share of the step are thinner than a pixel; kernels around them are drawn as one.
THINNEST = 1 / 1500


# ------------------------------------------------------------------------------------------------
# Bars


def step_time(block: Block) -> Page:
    """Bars of step time, ms from zero; a dot for each round and a tick for the host's time to issue the step."""
    members = [evidence for evidence in block.members if evidence.runs]
    if not members:
        raise Missing("no timed round")
    row_height, gap = 0.27, 0.42
    heights = [row_height * len(evidence.rows) for evidence in members]
    page = Page(
        _step_title(block.name, members),
        "Bar: median of rounds. Dots: each round. Black tick: host time to issue the step.",
        provenance(members),
        sum(heights) + gap * len(members) + 0.36,
    )
    left = width_of([row["variant"] for evidence in members for row in evidence.rows], 9) + page.MARGIN
    numbers = [f"{ms_text(row['step_ms'])} ms" for evidence in members for row in evidence.rows if row["step_ms"]]
    # What is right of the axes begins at 1.035 of the longest bar, they end at 1.02.
    width = 0.985 * (page.WIDTH - left - page.MARGIN - width_of(numbers, 8.5))
    longest = max(_longest(evidence) for evidence in members)
    variants = [row["variant"] for evidence in members for row in evidence.rows]
    top = 0.34
    for evidence, height in zip(members, heights, strict=True):
        axes = page.axes(left, top, width, height)
        page.heading(left, top, f"{evidence.gpu}, {evidence.host}")
        for y, row in enumerate(evidence.rows):
            _bar(axes, y, row, evidence, look(row["variant"], variants), longest)
        name_rows(axes, [row["variant"] for row in evidence.rows])
        axes.set_xlim(0, longest * 1.02)
        axes.grid(axis="x")
        if evidence is members[-1]:
            axes.set_xlabel("step time, ms")
        else:
            axes.set_xticklabels([])
        top += height + gap
    return page


def _bar(axes, y, row, evidence, appearance, longest):
    colour, hatch, _, _ = appearance
    if row["step_ms"] is None:
        axes.text(longest * 0.01, y, status_text(row, 92), color=FAILURE, fontsize=8, va="center")
        return
    axes.barh(y, row["step_ms"], height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    rounds = [record["statistic_ms"] for record in evidence.of(row["variant"])]
    if len(rounds) > 1:
        axes.plot(
            rounds, [y] * len(rounds), "o", markersize=2.6, color=INK, markeredgecolor="white", markeredgewidth=0.4
        )
    if row["issue_ms"] is not None:
        axes.plot([row["issue_ms"]] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=1.6, solid_capstyle="butt", zorder=5)
    failed = "" if row["status"] == "pass" else f"  {row['status']} in a round"
    # In a column of their own: beside a bar, a number would seem to belong to its last dot.
    axes.text(longest * 1.035, y, f"{ms_text(row['step_ms'])} ms", va="center", fontsize=8.5, clip_on=False)
    if failed:
        axes.text(longest * 0.01, y, failed, va="center", fontsize=8, color="white", fontweight="bold")


def _longest(evidence):
    times = [record["statistic_ms"] for record in evidence.runs] + [row["issue_ms"] or 0 for row in evidence.rows]
    return max(times)


def _step_title(name, members):
    evidence = next((evidence for evidence in members if evidence.eager and evidence.eager["step_ms"]), None)
    if evidence is None:
        return f"{name}: step time without an eager run"
    eager = evidence.eager
    if eager["issue_ms"] is None or eager["busy_ms"] is None:
        return f"{name}: a step of {evidence.base} takes {_ms(eager['step_ms'])}"
    bound = "the host" if eager["issue_ms"] > eager["busy_ms"] else "the GPU"
    if eager["step_ms"] > 1.1 * eager["busy_ms"] and 0.5 * eager["busy_ms"] < eager["issue_ms"] <= eager["busy_ms"]:
        bound = "host and GPU in turn"
    title = f"{name}: {evidence.base} is bound by {bound}, busy {_ms(eager['busy_ms'])} and issued in "
    title += _ms(eager["issue_ms"])
    main = evidence.row(main_variant(evidence.rows) or "")
    if main and main["issue_ms"] is not None:
        title += f" ({main['variant']}: {_ms(main['issue_ms'])})"
    return title


def _ms(value):
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"


def name_rows(axes, names: list[str]):
    """Names of horizontal bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.spines["left"].set_visible(False)


# ------------------------------------------------------------------------------------------------
# Jitter


def relative_steps(evidence: Evidence, variant: str) -> list[float]:
    """Every step of all rounds over the median of its kind of batch in its round, sorted."""
    values = []
    for record in evidence.of(variant):
        times, batch = record["steps"]["gpu_ms"], record["steps"]["batch"]
        medians = {kind: percentile(group, 0.5) for kind, group in by_batch(times, batch).items()}
        values += [ms / medians[kind] for ms, kind in zip(times, batch, strict=True)]
    return sorted(values)


def jitter(block: Block) -> Page:
    """Share of steps that take at most x times the median of their kind of batch; marks at p50, p95 and p99."""
    members = [evidence for evidence in block.members if evidence.runs]
    if not members:
        raise Missing("no timed round")
    curves = [
        {row["variant"]: relative_steps(evidence, row["variant"]) for row in evidence.rows if row["step_ms"]}
        for evidence in members
    ]
    page = Page(
        _jitter_title(block.name, members, curves),
        "Steps of all rounds pooled, each over the median of its kind of batch in its round. Marks: p50, p95, p99. "
        "Log scale.",
        provenance(members),
        2.15 * len(members) + 0.3,
    )
    everything = [values for panel in curves for values in panel.values()]
    low = min(percentile(values, 0.01) for values in everything)
    high = max(percentile(values, 0.99) for values in everything)
    reach = (high / low) ** 0.06
    variants = [variant for panel in curves for variant in panel]
    left, right = 0.75, width_of([f"{variant}  p95 1.000  p99 1.000" for variant in variants], 8.5) + 0.45
    for index, (evidence, panel) in enumerate(zip(members, curves, strict=True)):
        top = 0.3 + 2.15 * index
        axes = page.axes(left, top, page.WIDTH - left - right - page.MARGIN, 1.7)
        page.heading(left, top, f"{evidence.gpu}, {evidence.host}")
        axes.set_xscale("log")
        for variant, values in panel.items():
            _curve(axes, variant, values, look(variant, variants))
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
        axes.set_xlim(low / reach, high * reach)
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.5, 0.95], ["0", "0.5", "0.95"])
        axes.grid()
        ratio_axis(axes.xaxis, low / reach, high * reach)
        axes.set_ylabel("share of steps")
        if evidence is members[-1]:
            axes.set_xlabel("step time over its batch's median")
    return page


def _curve(axes, variant, values, appearance):
    colour, _, marker, dashes = appearance
    shares = [index / (NUM_CURVE_POINTS - 1) for index in range(NUM_CURVE_POINTS)]
    axes.plot([percentile(values, share) for share in shares], shares, color=colour, linestyle=dashes)
    marks = (0.5, 0.95, 0.99)
    places = [percentile(values, share) for share in marks]
    style = {"color": colour, "marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.6}
    axes.plot(places, marks, linestyle="none", zorder=4, **style)
    label = f"{variant}  p95 {places[1]:.3f}  p99 {places[2]:.3f}"
    axes.plot([], [], linestyle=dashes, label=label, **style)


def _jitter_title(name, members, curves):
    parts = []
    for evidence, panel in zip(members, curves, strict=True):
        main = main_variant([row for row in evidence.rows if row["variant"] in panel])
        shown = [variant for variant in (evidence.base, main) if variant in panel]
        if shown:
            tails = ", ".join(f"{variant} {percent(percentile(panel[variant], 0.95) - 1)}" for variant in shown)
            parts.append(f"{evidence.host} {tails}" if evidence is not members[0] else tails)
    return f"{name}, p95 of a step beyond its median: {'; '.join(parts)}" if parts else f"{name}: scatter of steps"


# ------------------------------------------------------------------------------------------------
# Timeline


def timeline(block: Block) -> Page:
    """One profiled step of each variant on one ms axis, eager on top, and its first milliseconds enlarged."""
    evidence = block.first
    paths, is_older = traces(evidence)
    if not paths:
        raise Missing("no trace beside the records")
    lanes, broken = {}, []
    for row in evidence.rows:
        if row["variant"] in paths:
            try:
                lanes[row["variant"]] = read_trace(paths[row["variant"]])
            except Missing as error:
                broken.append(str(error))
    if not lanes:
        raise Missing(broken[0])
    spans = {variant: trace.busy(work) for variant, work in lanes.items()}
    longest = max(span for _, span, _ in spans.values()) / 1e3
    zoom = min(ZOOM_MS, longest / 8)
    heights = {variant: 0.3 + 0.14 * (_num_streams(work) - 1) for variant, work in lanes.items()}
    total = sum(heights.values()) + 0.16 * len(lanes)
    page = Page(
        _timeline_title(block.name, spans, evidence),
        f"GPU kernels and copies of one profiled step, {evidence.host}. The profiler slows the host, so eager's gaps "
        "read long; the timed step is at the right. Gaps thinner than a pixel are not drawn but count as idle."
        + (" Traced in an older session than the timed steps are of." if is_older else ""),
        provenance([evidence]),
        2 * total + 1.27,
    )
    left = width_of(lanes, 9) + page.MARGIN
    right = width_of(["139.2 ms, 3.1 % idle"], 8) + 0.1
    width = page.WIDTH - left - right - page.MARGIN
    for top, limit, label in (
        (0.27, longest, f"the whole step, {next(iter(spans))} on top" if len(spans) > 1 else "the whole step"),
        (0.27 + total + 0.6, zoom, f"its first {zoom:.2g} ms: dark and light take turns, kernel by kernel"),
    ):
        axes = page.axes(left, top, width, total)
        page.heading(left, top, label)
        y = 0.0
        ticks = []
        for variant, work in lanes.items():
            ticks.append(y + heights[variant] / 2)
            _lane(axes, work, y, heights[variant], look(variant, lanes), limit, enlarged=limit is zoom)
            if limit is longest:
                _lane_label(page, evidence.row(variant), spans[variant], page.top + top + ticks[-1], left + width + 0.1)
            y += heights[variant] + 0.16
        axes.set_ylim(y - 0.06, -0.06)
        axes.set_yticks(ticks, list(lanes))
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, limit)
        axes.grid(axis="x")
        axes.set_xlabel("ms from the step's first kernel" if limit is zoom else "")
    return page


def _num_streams(work):
    return len({event["stream"] for event in work})


def _lane(axes, work, y, height, appearance, limit, enlarged):
    colour = appearance[0]
    streams = sorted({event["stream"] for event in work}, key=lambda stream: -_length(work, stream))
    row = height / len(streams)
    for index, stream in enumerate(streams):
        intervals = [
            (event["start_us"] / 1e3, event["duration_us"] / 1e3)
            for event in work
            if event["stream"] == stream and event["start_us"] / 1e3 < limit
        ]
        place = (y + row * index, row - (0.02 if len(streams) > 1 else 0))
        if enlarged:
            _rectangles(axes, intervals[::2], place, colour, 1.0)
            _rectangles(axes, intervals[1::2], place, colour, 0.55)
        else:
            _rectangles(axes, merged(intervals, limit * THINNEST), place, colour, 1.0)


def _rectangles(axes, intervals, place, colour, alpha):
    """One path of all rectangles: as a collection each would have its style in the SVG again."""
    low, high = place[0], place[0] + place[1]
    corners = [
        point
        for start, length in intervals
        for point in ((start, low), (start + length, low), (start + length, high), (start, high), (start, low))
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(intervals)
    if corners:
        axes.add_patch(PathPatch(Path(corners, codes), facecolor=colour, alpha=alpha, linewidth=0))


def _length(work, stream):
    return sum(event["duration_us"] for event in work if event["stream"] == stream)


def merged(intervals: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """(start, length) sorted by start, those with less than `gap` between them joined."""
    result: list[list[float]] = []
    for start, length in intervals:
        if result and start - result[-1][1] < gap:
            result[-1][1] = max(result[-1][1], start + length)
        else:
            result.append([start, start + length])
    return [(start, end - start) for start, end in result]


def _lane_label(page, row, span, y, x):
    busy_us, span_us, _ = span
    text = f"{span_us / 1e3:.1f} ms, {percent(1 - busy_us / span_us)} idle"
    page.text(x, y - 0.01, text, va="bottom", fontsize=8, color=INK)
    page.text(x, y + 0.01, f"timed: {ms_text(row['step_ms'])} ms", va="top", fontsize=8, color=FAINT)


def _timeline_title(name, spans, evidence):
    idle = {variant: percent(1 - busy / span) for variant, (busy, span, _) in spans.items()}
    base = evidence.base if evidence.base in idle else "eager"
    main = main_variant([row for row in evidence.rows if row["variant"] in idle])
    others = [variant for variant in (main, *idle) if variant and variant != base]
    if base not in idle or not others:
        variant = base if base in idle else next(iter(idle))
        return f"{name}: the GPU idles {idle[variant]} of a profiled {variant} step"
    return f"{name}: profiled, the GPU idles {idle[base]} of {_a(base)} step and {idle[others[0]]} of {others[0]}'s"


def _a(name):
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
