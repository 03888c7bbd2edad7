"""Where a step's time goes: bars of step time, its scatter, and one step's kernels on a time axis."""

import itertools

import numpy

from benchmarks.figures import words
from benchmarks.figures.evidence import Block, Evidence, Missing, main_variant, read_trace, traces
from benchmarks.figures.style import BAND, FAINT, INK, Page, bar, beside, in_row, look, ratio_axis, rows_page, width_of
from benchmarks.intervals import by_batch, percentile
from common import trace

NUM_CURVE_POINTS = 160
ZOOM_MS = 2.5
# Of a whole step, each as wide as two pixels: narrower ones would hide gaps again.
NUM_BINS = 300


def _timed(block):
    members = [evidence for evidence in block.members if evidence.runs]
    if not members:
        raise Missing("no timed round")
    return members


# ------------------------------------------------------------------------------------------------
# Bars


def step_time(block: Block) -> Page:
    """Bars of step time, ms from zero; a dot for each round and a tick for the host's time to issue the step."""
    members = _timed(block)
    rows = [row for evidence in members for row in evidence.rows]
    page, panels = rows_page(
        _step_title(block.name, members),
        "Bar: median of rounds. Dots: each round. Black tick: host time to issue the step.",
        words.provenance(members),
        [(f"{each.gpu}, {each.host}", "", [row["variant"] for row in each.rows]) for each in members],
        "step time, ms",
        [_step_text(row) for row in rows],
    )
    variants = [row["variant"] for row in rows]
    longest = max(record["statistic_ms"] for evidence in members for record in evidence.runs)
    longest = max([longest, *(row["issue_ms"] or 0 for row in rows)])
    for evidence, axes in zip(members, panels, strict=True):
        axes.set_xlim(0, longest * 1.02)
        for y, row in enumerate(evidence.rows):
            _step_bar(axes, y, row, evidence, look(row["variant"], variants))
    return page


def _step_text(row):
    return f"{words.ms_text(row['step_ms'])} ms" if row["step_ms"] else ""


def _step_bar(axes, y, row, evidence, appearance):
    if row["step_ms"] is None:
        in_row(axes, y, words.status_text(row, 92))
        return
    bar(axes, y, row["step_ms"], appearance)
    rounds = [record["statistic_ms"] for record in evidence.of(row["variant"])]
    if len(rounds) > 1:
        dot = {"markersize": 2.6, "color": INK, "markeredgecolor": "white", "markeredgewidth": 0.4}
        axes.plot(rounds, [y] * len(rounds), "o", **dot)
    if row["issue_ms"] is not None:
        axes.plot([row["issue_ms"]] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=1.6, solid_capstyle="butt", zorder=5)
    # In a column of their own: beside a bar, a number would seem to belong to its last dot.
    beside(axes, y, _step_text(row))
    if row["status"] != "pass":
        in_row(axes, y, f"{row['status']} in a round", color="white")


def _step_title(name, members):
    evidence = next((each for each in members if each.eager and each.eager["step_ms"]), None)
    if evidence is None:
        return f"{name}: step time without an eager run"
    eager, main = evidence.eager, evidence.main
    step, issue, busy = eager["step_ms"], eager["issue_ms"], eager["busy_ms"]
    if issue is None or busy is None:
        return f"{name}: a step of {evidence.base} takes {_ms(step)}"
    bound = "the host" if issue > busy else "the GPU"
    if step > 1.1 * busy and 0.5 * busy < issue <= busy:
        bound = "host and GPU in turn"
    title = f"{name}: {evidence.base} is bound by {bound}, busy {_ms(busy)} and issued in {_ms(issue)}"
    return title + (f" ({main['variant']}: {_ms(main['issue_ms'])})" if main and main["issue_ms"] is not None else "")


def _ms(value):
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 1 else f"{value:.2g} ms"


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
    members = _timed(block)
    curves = [
        {row["variant"]: relative_steps(evidence, row["variant"]) for row in evidence.rows if row["step_ms"]}
        for evidence in members
    ]
    page = Page(
        _jitter_title(block.name, members, curves),
        "Steps of all rounds pooled, each over the median of its kind of batch in its round. Marks: p50, p95, p99. "
        "Log scale.",
        words.provenance(members),
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
        ratio_axis(axes, "x", low / reach, high * reach)
        for variant, values in panel.items():
            _curve(axes, variant, values, look(variant, variants))
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.5, 0.95], ["0", "0.5", "0.95"])
        axes.grid()
        axes.set_ylabel("share of steps")
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
            tails = ", ".join(f"{variant} {words.percent(percentile(panel[variant], 0.95) - 1)}" for variant in shown)
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
    work, broken = {}, []
    for row in evidence.rows:
        if row["variant"] in paths:
            try:
                work[row["variant"]] = read_trace(paths[row["variant"]])
            except Missing as error:
                broken.append(str(error))
    if not work:
        raise Missing(broken[0])
    spans = {variant: trace.busy(events) for variant, events in work.items()}
    lanes = {variant: by_stream(events) for variant, events in work.items()}
    longest = max(span for _, span, _ in spans.values()) / 1e3
    zoom = min(ZOOM_MS, longest / 8)
    heights = {variant: 0.3 + 0.14 * (len(streams) - 1) for variant, streams in lanes.items()}
    total = sum(heights.values()) + 0.16 * len(lanes)
    page = Page(
        _timeline_title(block.name, spans, evidence),
        f"GPU kernels and copies of one profiled step, {evidence.host}; a stream a row, small ones together. Grey is "
        "idle. The profiler slows the host, so eager's gaps read long; the timed step is at the right. Whole step: "
        f"filled is the busy share of every {1e3 * longest / NUM_BINS:,.0f} us."
        + (" Traced in an older session than the timed steps are of." if is_older else ""),
        words.provenance([evidence]),
        2 * total + 1.27,
    )
    left = width_of(lanes) + page.MARGIN
    right = width_of(["139.2 ms, 3.1 % idle"], 8) + 0.1
    width = page.WIDTH - left - right - page.MARGIN
    for top, limit, label, draw in (
        (0.27, longest, f"the whole step, {next(iter(spans))} on top" if len(spans) > 1 else "the whole step", _shares),
        (0.87 + total, zoom, f"its first {zoom:.2g} ms: dark and light take turns, kernel by kernel", _kernels),
    ):
        axes = page.axes(left, top, width, total)
        page.heading(left, top, label)
        y, ticks = 0.0, []
        for variant, streams in lanes.items():
            ticks.append(y + heights[variant] / 2)
            row = heights[variant] / len(streams)
            for index, intervals in enumerate(streams):
                low, high = y + row * (index + 1) - (0.02 if len(streams) > 1 else 0), y + row * index
                axes.fill_between([0, min(limit, spans[variant][1] / 1e3)], low, high, color=BAND, linewidth=0)
                for edges, shares, alpha in draw(intervals, limit):
                    style = {"color": look(variant, lanes)[0], "alpha": alpha, "linewidth": 0, "fill": True}
                    axes.stairs(low + (high - low) * numpy.asarray(shares), edges, baseline=low, **style)
            if limit is longest:
                _lane_label(page, evidence.row(variant), spans[variant], page.top + top + ticks[-1], left + width + 0.1)
            y += heights[variant] + 0.16
        axes.set_ylim(y - 0.06, -0.06)
        axes.set_yticks(ticks, list(lanes))
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, limit)
        axes.grid(axis="x")
    axes.set_xlabel("ms from the step's first kernel")
    return page


def by_stream(work: list[dict], most: int = 4) -> list[list[tuple[float, float]]]:
    """(start, end) in ms of the work in each stream, the busiest first; beyond `most` streams the rest is one list."""
    streams: dict = {}
    for event in work:
        start, length = event["start_us"] / 1e3, event["duration_us"] / 1e3
        streams.setdefault(event["stream"], []).append((start, start + length))
    lists = sorted(streams.values(), key=lambda intervals: -sum(end - start for start, end in intervals))
    small = sorted(itertools.chain(*lists[most - 1 :]))
    return lists if len(lists) <= most else [*lists[: most - 1], small]


def busy_shares(intervals: list[tuple[float, float]], limit: float, num_bins: int) -> numpy.ndarray:
    """The share of each of num_bins equal parts of [0, limit] that (start, end) intervals cover, overlaps once."""
    starts, ends = numpy.array(sorted(intervals)).T
    ends = numpy.maximum.accumulate(ends)
    starts = numpy.maximum(starts, numpy.concatenate(([starts[0]], ends[:-1])))
    covered = numpy.concatenate(([0.0], numpy.cumsum(ends - starts)))
    times = numpy.column_stack((starts, ends)).ravel()
    busy = numpy.column_stack((covered[:-1], covered[1:])).ravel()
    return numpy.diff(numpy.interp(numpy.linspace(0, limit, num_bins + 1), times, busy)) * num_bins / limit


def _shares(intervals, limit):
    """(edges, heights, opacity) of the filled steps that show a whole step."""
    yield numpy.linspace(0, limit, NUM_BINS + 1), busy_shares(intervals, limit, NUM_BINS), 1.0


def _kernels(intervals, limit):
    """The same of single kernels: those of odd number in a lighter shade."""
    shown = [interval for interval in intervals if interval[0] < limit]
    for some, alpha in ((shown[::2], 1.0), (shown[1::2], 0.55)):
        if some:
            yield numpy.ravel(some), [1.0, *[0.0, 1.0] * (len(some) - 1)], alpha


def _lane_label(page, row, span, y, x):
    busy_us, span_us, _ = span
    text = f"{span_us / 1e3:.1f} ms, {words.percent(1 - busy_us / span_us)} idle"
    page.text(x, y - 0.01, text, va="bottom", fontsize=8)
    page.text(x, y + 0.01, f"timed: {words.ms_text(row['step_ms'])} ms", va="top", fontsize=8, color=FAINT)


def _timeline_title(name, spans, evidence):
    idle = {variant: words.percent(1 - busy / span) for variant, (busy, span, _) in spans.items()}
    base = evidence.base if evidence.base in idle else "eager"
    main = main_variant([row for row in evidence.rows if row["variant"] in idle])
    others = [variant for variant in (main, *idle) if variant and variant != base]
    if base not in idle or not others:
        variant = base if base in idle else next(iter(idle))
        return f"{name}: the GPU idles {idle[variant]} of a profiled {variant} step"
    article = "an" if base[0] in "aeiou" else "a"
    return (
        f"{name}: profiled, the GPU idles {idle[base]} of {article} {base} step and {idle[others[0]]} of {others[0]}'s"
    )
