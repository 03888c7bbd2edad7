"""What is gained: the speed-up of every variant, against a swept quantity, and against the number of GPUs."""

import math

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.figures.evidence import (
    NAMES,
    Block,
    Missing,
    interval_text,
    main_variant,
    provenance,
    status_text,
    verdict_words,
)
from benchmarks.figures.style import BAND, FAILURE, FAINT, INK, STYLE, Page, look, ratio_axis, width_of

SIGNIFICANT = ("faster", "slower")
SAME = 1.005


# ------------------------------------------------------------------------------------------------
# Speed-up of every variant


def limits(rows: list[dict]) -> tuple[float, float]:
    """Ratios that the axis spans: all points, 1, the same band, and intervals that say something.

    An interval of two noisy rounds may span a factor of ten; it is cut off where it would crush all others.
    """
    logs = [math.log(row["speedup"]) for row in rows]
    ends = [
        math.log(row[key])
        for row in rows
        # Two hosts have a verdict and no interval.
        if row["verdict"] in (*SIGNIFICANT, "same") and row["speedup_low"]
        for key in ("speedup_low", "speedup_high")
    ]
    low, high = min([*logs, *ends, -0.008]), max([*logs, *ends, 0.008])
    margin = 0.06 * (high - low)
    wide = [math.log(row[key]) for row in rows if row["speedup_low"] for key in ("speedup_low", "speedup_high")]
    reach = 0.5 * (high - low)
    low = max(min([low, *wide]), low - reach) - margin
    high = min(max([high, *wide]), high + reach) + margin
    return math.exp(low), math.exp(high)


def speedup(blocks: list[Block]) -> Page:
    """One dot a variant with its 95 % interval; the same under host load below it, as a diamond."""
    several = len({block.what[0] for block in blocks}) > 1
    lines = [line for block in blocks for line in _lines(block, several)]
    points = [row for kind, row, *_ in lines if kind == "point"]
    if not points:
        raise Missing("no variant has a timed round beside eager's")
    members = [evidence for block in blocks for evidence in block.members]
    heights = {"heading": 0.34, "point": 0.22, "status": 0.2}
    body = sum(heights[kind] for kind, *_ in lines) + 0.1
    page = Page(
        speedup_title(blocks),
        "Best eager's step time over the variant's, in the same rounds. Whisker: 95 % interval. Hollow: no "
        "verdict of faster or slower. Diamond: beside busy host processes. Grey band: within 0.5 %.",
        provenance(members),
        body + 0.42,
    )
    left = max(1.0, width_of([text for kind, _, text, *_ in lines if kind == "point"], 9) + 0.1)
    right = width_of([_point_text(row) for row in points], 8.5)
    axes = page.axes(left, 0, page.WIDTH - left - right - page.MARGIN, body)
    low, high = limits(points)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(body, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    ratio_axis(axes.xaxis, low, high)
    axes.set_xlabel("speed-up over eager (log scale)")
    variants = [row["variant"] for row in points]
    y = 0.05
    for kind, row, text, evidence in lines:
        y += heights[kind] / 2
        if kind == "point":
            # The grid is drawn row by row, so that headings stand free.
            inside = (y - heights[kind] / 2, y + heights[kind] / 2)
            axes.fill_betweenx(inside, 1 / SAME, SAME, color=BAND, zorder=0, linewidth=0)
            axes.vlines(axes.get_xticks(), *inside, color=STYLE["grid.color"], linewidth=0.7, zorder=0)
            axes.vlines([1], *inside, color=INK, linewidth=0.9, zorder=1)
        if kind == "heading":
            page.text(page.MARGIN, page.top + y + 0.03, text[0], va="center", fontsize=9, fontweight="bold", color=INK)
            end = page.MARGIN + width_of([text[0]], 9, "bold")
            page.text(end, page.top + y + 0.03, text[1], va="center", fontsize=8, color=FAINT)
        elif kind == "status":
            page.text(
                page.MARGIN + 0.12,
                page.top + y,
                text,
                va="center",
                fontsize=8,
                color=FAILURE,
            )
        else:
            page.text(left - 0.08, page.top + y, text, va="center", ha="right", fontsize=9, color=INK)
            _point(axes, row, y, look(row["variant"], variants), bool(evidence.load), low, high)
            _point_label(page, row, page.WIDTH - right - page.MARGIN + 0.12, page.top + y)
        y += heights[kind] / 2
    return page


def _lines(block, several):
    """(kind, row, text, evidence) from top to bottom; variants with one status and message share a line.

    several: the page shows several models. Rows whose sessions did not run all eagers are left out of it.
    """
    gpus = f"on {block.first.gpu}"
    yield "heading", None, (block.name, ", ".join(filter(None, (gpus, _ceiling_text(block.first))))), block.first
    for row in block.first.rows:
        for evidence in block.members:
            same = evidence.row(row["variant"])
            if same and same["speedup"] is not None and not (several and same["missing_eagers"]):
                load = f", {evidence.load} busy processes" if evidence.load else ""
                lacks = ", not all eagers run" if same["missing_eagers"] else ""
                yield "point", same, f"{row['variant']}{load}{lacks}", evidence
    for evidence in block.members:
        shared: dict[str, list[str]] = {}
        for row in evidence.rows:
            if row["status"] != "pass":
                shared.setdefault(status_text(row, 100), []).append(row["variant"])
        load = f", {evidence.load} busy processes" if evidence.load else ""
        for text, variants in shared.items():
            yield "status", None, f"{', '.join(variants)}{load}: {text}", evidence


def _ceiling_text(evidence):
    eager = evidence.eager
    if eager is None or eager["ceiling"] is None:
        return ""
    stretch = max((row["profile_stretch"] or 1.0 for row in evidence.rows), default=1.0)
    low, high = f"{eager['ceiling']:.2f}x", f"{eager['ceiling'] * stretch:.2f}x"
    return f"removing gaps can gain at most {low}" + (f" to {high}" if high > low else "")


def _point(axes, row, y, appearance, contended, low, high):
    colour, _, marker, _ = appearance
    start, end = row["speedup_low"], row["speedup_high"]
    if start is not None:
        axes.plot([max(start, low), min(end, high)], [y, y], color=colour, linewidth=1.6, zorder=2)
        for beyond, edge, arrow in ((start < low, low, "<"), (end > high, high, ">")):
            if beyond:
                axes.plot([edge], [y], arrow, color=colour, markersize=5, clip_on=False, zorder=3)
    axes.plot(
        [row["speedup"]],
        [y],
        linestyle="",
        marker="D" if contended else marker,
        color=colour,
        markerfacecolor=colour if row["verdict"] in SIGNIFICANT else "white",
        markersize=5.5 if contended else 7,
        markeredgewidth=1.4,
        zorder=4,
        gid=f"{'filled' if row['verdict'] in SIGNIFICANT else 'hollow'}-{row['variant']}",
    )


def _point_label(page, row, x, y):
    significant = row["verdict"] in SIGNIFICANT
    page.text(
        x,
        y,
        _point_text(row),
        va="center",
        fontsize=8.5,
        color=INK if significant else FAINT,
    )


def _point_text(row):
    """The interval, and what it is not significant for, or for how much it stands."""
    text = interval_text(row["speedup"], row["speedup_low"], row["speedup_high"])
    word = "" if row["verdict"] in SIGNIFICANT else row["verdict"] or "no verdict"
    return " ".join(filter(None, (text, word, row["scope"] if row["scope"] == "on this host" else "")))


def speedup_title(blocks: list[Block]) -> str:
    """What the intervals bear, of the variant `graph` (or the first graphed one) of each model."""
    mains = []
    seen = set()
    for block in blocks:
        variant = main_variant(block.first.rows)
        row = block.first.row(variant) if variant else None
        if (block.what, block.first.gpu_name) not in seen and row and row["speedup"] is not None:
            seen.add((block.what, block.first.gpu_name))
            mains.append((block, row))
    if not mains:
        return "No graphed variant has a speed-up yet"
    if len(mains) == 1:
        return _title_of_one(*mains[0])
    parts = []
    for verdict, words in (
        ("faster", "faster for"),
        ("slower", "slower for"),
        ("same", "the same for"),
        ("unclear", "unclear for"),
        (None, "without a verdict for"),
    ):
        known = ("faster", "slower", "same", "unclear")
        group = [
            (b, row) for b, row in mains if row["verdict"] == verdict or (not verdict and row["verdict"] not in known)
        ]
        if not group:
            continue
        text = f"{words} {len(group)} of {len(mains)}" if not parts else f"{words} {len(group)}"
        if verdict in SIGNIFICANT:
            end = max if verdict == "faster" else min
            block, row = end(group, key=lambda item: item[1]["speedup"])
            gpus = {other.first.gpu_name for other, _ in mains}
            where = block.name if len(gpus) == 1 else f"{block.name} on {block.first.gpu}"
            text += f" ({'most ' if len(group) > 1 else ''}{where}, {row['speedup']:.2f}x)"
        parts.append(text)
    local = sum(row["scope"] == "on this host" for _, row in mains)
    where = f"; {'each' if local == len(mains) else f'{local} of them'} on one host alone" if local else ""
    return f"Graphs are {', '.join(parts)}{where}"


def _title_of_one(block, row):
    title = f"{block.name}: {row['variant']} {verdict_words(row)}"
    for evidence in block.members[1:]:
        other = evidence.row(row["variant"])
        if other and other["speedup"] is not None:
            unclear = other["verdict"] not in (*SIGNIFICANT, "same")
            title += f"; {evidence.host} {'the gain' if unclear else 'it'} {verdict_words(other)}"
    return title


# ------------------------------------------------------------------------------------------------
# Against a swept quantity


def crossover(sweep: dict) -> Page:
    """Speed-up against the swept value with its interval, and where it touches 1.

    sweep: of `evidence.collect`, checked and by value. Raises Missing where no point has a speed-up.
    """
    points = sweep["points"]
    drawn = [point for point in points if point.get("speedup")]
    if not drawn:
        raise Missing(sweep["finding"])
    page = Page(
        f"{NAMES.get(sweep['model'], sweep['model'])} {sweep['preset']}: {sweep['finding']}",
        f"Speed-up of {sweep['variant']} over eager at each {sweep['over']}; band: 95 % interval, grey: within 0.5 %. "
        "Hollow: no significant difference.",
        _sweep_footer(sweep, drawn),
        3.45,
    )
    axes = page.axes(0.75, 0.45, page.WIDTH - 1.0, 2.5)
    values = [point["value"] for point in drawn]
    speeds = [point["speedup"] for point in drawn]
    colour, _, marker, _ = look(sweep["variant"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhspan(1 / SAME, SAME, color=BAND, zorder=0, linewidth=0)
    axes.axhline(1, color=INK, linewidth=0.9, zorder=1)
    known = [point for point in drawn if point.get("low")]
    rows = [
        {
            "speedup": point["speedup"],
            "verdict": point["verdict"],
            "speedup_low": point["low"] if point in known else None,
            "speedup_high": point["high"] if point in known else None,
        }
        for point in drawn
    ]
    low, high = limits([row if row["speedup_low"] else {**row, "verdict": "one round"} for row in rows])
    if len(known) > 1:
        axes.fill_between(
            [point["value"] for point in known],
            [point["low"] for point in known],
            [point["high"] for point in known],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    axes.plot(values, speeds, color=colour, zorder=3)
    for point in drawn:
        significant = point["verdict"] in SIGNIFICANT
        if point in known:
            axes.plot([point["value"]] * 2, [point["low"], point["high"]], color=colour, linewidth=1, zorder=3)
        axes.plot(
            [point["value"]],
            [point["speedup"]],
            linestyle="",
            marker=marker,
            color=colour,
            markerfacecolor=colour if significant else "white",
            markeredgewidth=1.4,
            markersize=7,
            zorder=4,
        )
    if sweep["crossover"]:
        _mark_crossover(axes, sweep["crossover"])
    failed = [point for point in points if point not in drawn]
    for point in failed:
        axes.annotate(
            "no speed-up" if point["status"] == "pass" else point["status"],
            (point["value"], 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 6),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            color=FAILURE,
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            zorder=5,
        )
    ticks = [point["value"] for point in points]
    axes.set_xlim(min(ticks) / 1.25, max(ticks) * 1.25)
    axes.set_ylim(low, high * (high / low) ** 0.08)
    axes.xaxis.set_major_locator(FixedLocator(_thinned(ticks)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    ratio_axis(axes.yaxis, low, high)
    axes.grid(axis="y")
    axes.set_xlabel(f"{sweep['over']} (log2 scale)")
    axes.set_ylabel("speed-up over eager (log scale)")
    _host_ratio(axes, drawn)
    return page


def _mark_crossover(axes, bracket):
    low, high = bracket["low"], bracket["high"]
    middle = math.sqrt(low * high)
    axes.axvspan(low, high, color=INK, alpha=0.05, linewidth=0, zorder=0)
    axes.axvline(middle, color=INK, linewidth=1, linestyle=(0, (3, 2)), zorder=2)
    axes.annotate(
        f"crossover between {low} and {high}",
        (middle, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color=INK,
    )


def _host_ratio(axes, points):
    """Above each point the host's share: graphs pay where issuing takes about as long as the work, or longer."""
    known = [point for point in points if point.get("issue_ms") and point.get("busy_ms")]
    shown = _thinned([point["value"] for point in known])
    for point in known:
        if point["value"] in shown:
            axes.annotate(
                f"{point['issue_ms'] / point['busy_ms']:.2f}",
                (point["value"], 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=FAINT,
            )
    if known:
        axes.annotate(
            "eager: host time to issue a step over GPU busy time",
            (0, 1),
            xycoords="axes fraction",
            xytext=(-40, 17),
            textcoords="offset points",
            fontsize=8,
            color=FAINT,
        )


def _thinned(values, factor=1.25):
    """Of sorted values those that stand apart enough on a log axis for a label each, the last one always."""
    kept: list = []
    for value in values:
        if kept and value / kept[-1] < factor:
            if value != values[-1]:
                continue
            kept.pop()
        kept.append(value)
    return kept


def _sweep_footer(sweep, points):
    env = sweep["env"]
    count = env.get("world_size") or env.get("num_gpus") or 1
    parts = [f"{env['gpu_name']} x{count}"] if env.get("gpu_name") else []
    parts += [
        f"{name} {env[key]}"
        for key, name in (("torch", "torch"), ("cuda", "CUDA"), ("driver", "driver"))
        if env.get(key)
    ]
    if env.get("git_sha"):
        parts.append(f"git {env['git_sha'][:12]}{' (changed)' if env.get('git_dirty') else ''}")
    rounds = [point["rounds"] for point in points if "rounds" in point]
    if rounds:
        span = f"{min(rounds)}" if min(rounds) == max(rounds) else f"{min(rounds)} to {max(rounds)}"
        parts.append(f"{len(points)} points of {span} rounds")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------
# Against the number of GPUs


def scaling(blocks: list[Block]) -> Page:
    """Speed-up and tail against the number of GPUs, for blocks of one model, preset and GPU type.

    Raises Missing where only one number of GPUs was measured.
    """
    members = sorted((block.first for block in blocks), key=lambda evidence: evidence.num_gpus)
    counts = [evidence.num_gpus for evidence in members]
    if len(set(counts)) < 2:
        raise Missing("measured on one number of GPUs only")
    variants = list(dict.fromkeys(row["variant"] for evidence in members for row in evidence.rows if row["step_ms"]))
    points = [row for evidence in members for row in evidence.rows if row["speedup"] is not None]
    if not points:
        raise Missing("no variant has a timed round beside eager's")
    page = Page(
        _scaling_title(blocks[0].name, members, variants),
        "Left: speed-up over eager with 95 % interval; hollow: no significant difference. Right: p95 of a step over "
        "its batch's median. Points only where measured.",
        provenance(members),
        3.1,
    )
    # The legend's marks, and the names beside them.
    legend = 0.6 + width_of(variants, 8.5)
    width = (page.WIDTH - 0.75 - 0.8 - legend - page.MARGIN) / 2
    speed = page.axes(0.75, 0.1, width, 2.4)
    tails = page.axes(0.75 + width + 0.8, 0.1, width, 2.4)
    low, high = limits(points)
    speed.set_yscale("log")
    speed.set_ylim(low, high)
    speed.axhspan(1 / SAME, SAME, color=BAND, zorder=0, linewidth=0)
    speed.axhline(1, color=INK, linewidth=0.9, zorder=1)
    ratio_axis(speed.yaxis, low, high)
    for index, variant in enumerate(variants):
        colour, _, marker, dashes = look(variant, variants)
        shift = 2 ** (0.06 * (index - (len(variants) - 1) / 2))
        rows = [(evidence.num_gpus * shift, evidence.row(variant)) for evidence in members if evidence.row(variant)]
        timed = [(x, row) for x, row in rows if row["speedup"] is not None]
        speed.plot([x for x, _ in timed], [row["speedup"] for _, row in timed], color=colour, linestyle=dashes)
        for x, row in timed:
            if row["speedup_low"] is not None:
                speed.plot([x, x], [row["speedup_low"], row["speedup_high"]], color=colour, linewidth=1.2)
            face = colour if row["verdict"] in SIGNIFICANT else "white"
            dot = {"linestyle": "", "marker": marker, "markeredgewidth": 1.4}
            speed.plot([x], [row["speedup"]], color=colour, markerfacecolor=face, **dot)
        steps = [(x, row["tail"]) for x, row in rows if row["tail"] is not None]
        tails.plot(*zip(*steps, strict=True), color=colour, linestyle=dashes, marker=marker, label=variant)
    for axes in (speed, tails):
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(counts) / 1.3, max(counts) * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(counts))))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
        axes.set_xlabel("GPUs (log2 scale)")
    speed.set_ylabel("speed-up over eager (log scale)")
    tails.set_ylabel("p95 / p50 of step time")
    most = max([row["tail"] for evidence in members for row in evidence.rows if row["tail"]], default=1.0)
    tails.set_ylim(1.0, 1.0 + 1.15 * max(most - 1.0, 0.005))
    tails.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return page


def _scaling_title(name, members, variants):
    variant = main_variant(members[0].rows) or variants[-1]
    parts = [
        f"on {evidence.num_gpus} GPU{'s' if evidence.num_gpus > 1 else ''} it {verdict_words(evidence.row(variant))}"
        for evidence in (members[0], members[-1])
    ]
    return f"{name}, {variant}: {', '.join(parts)}"
