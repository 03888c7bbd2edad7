"""What is gained: the speed-up of every variant, against a swept quantity, and against the number of GPUs."""

import math

from matplotlib.ticker import FixedLocator

from benchmarks import tables
from benchmarks.figures import style, words
from benchmarks.figures.evidence import Block, Missing, main_variant
from benchmarks.figures.style import BAND, FAILURE, FAINT, INK, Page, log_axis, look, ratio_axis
from benchmarks.overview_rows import short_gpu

SIGNIFICANT = ("faster", "slower")
VERDICTS = {"faster": "faster for", "slower": "slower for", "same": "the same for", "unclear": "unclear for"}
SAME = 1.005


def limits(rows: list[dict]) -> tuple[float, float]:
    """Ratios that the axis spans: all points, 1, the same band, and intervals that say something.

    An interval of two noisy rounds may span a factor of ten; it is cut off where it would crush all others.
    """
    logs = [math.log(row["speedup"]) for row in rows]
    # Two hosts have a verdict and no interval.
    known = [row for row in rows if row["speedup_low"]]
    wide, told = (
        [math.log(row[key]) for row in some for key in ("speedup_low", "speedup_high")]
        for some in (known, [row for row in known if row["verdict"] in (*SIGNIFICANT, "same")])
    )
    low, high = min([*logs, *told, -0.008]), max([*logs, *told, 0.008])
    margin, reach = 0.06 * (high - low), 0.5 * (high - low)
    low, high = max(min([low, *wide]), low - reach) - margin, min(max([high, *wide]), high + reach) + margin
    return math.exp(low), math.exp(high)


def _mark(axes, x, y, row, colour, marker, size=7.0):
    """A dot, hollow where the row's verdict is neither faster nor slower."""
    is_filled = row["verdict"] in SIGNIFICANT
    face, gid = (colour, "filled") if is_filled else ("white", "hollow")
    shape = {"markerfacecolor": face, "markersize": size, "markeredgewidth": 1.4}
    axes.plot([x], [y], linestyle="", marker=marker, color=colour, gid=f"{gid}-{row['variant']}", zorder=4, **shape)


def _curve(axes, points, appearance):
    """Speed-ups with their intervals over a quantity: points are (x, row)."""
    colour, _, marker, dashes = appearance
    axes.plot([x for x, _ in points], [row["speedup"] for _, row in points], color=colour, linestyle=dashes, zorder=3)
    for x, row in points:
        if row["speedup_low"]:
            axes.plot([x, x], [row["speedup_low"], row["speedup_high"]], color=colour, linewidth=1.2, zorder=3)
        _mark(axes, x, row["speedup"], row, colour, marker)


def _over(axes, quantity, values, low, high):
    """Axes of speed-ups, with 1 and what counts as the same, over values of a quantity."""
    ratio_axis(axes, "y", low, high)
    axes.axhspan(1 / SAME, SAME, color=BAND, zorder=0, linewidth=0)
    axes.axhline(1, color=INK, linewidth=0.9, zorder=1)
    axes.grid(axis="y")
    axes.set_ylabel("speed-up over eager (log scale)")
    _quantity(axes, quantity, values)


def _quantity(axes, quantity, values):
    log_axis(axes, "x", min(values) / 1.25, max(values) * 1.25, FixedLocator(_thinned(values)))
    axes.set_xlabel(f"{quantity} (log scale)")


# ------------------------------------------------------------------------------------------------
# Speed-up of every variant


def speedup(blocks: list[Block]) -> Page:
    """One dot a variant with its 95 % interval; the same under host load below it, as a diamond."""
    several = len({block.what[0] for block in blocks}) > 1
    panels = [(block, _points(block, several), _failures(block)) for block in blocks]
    panels = [panel for panel in panels if panel[1] or panel[2]]
    rows = [row for _, points, _ in panels for _, row, _ in points]
    if not rows:
        raise Missing("no variant has a timed round beside eager's")
    page, every = style.rows_page(
        speedup_title(blocks),
        "Best eager's step time over the variant's, in the same rounds. Whisker: 95 % interval. Hollow: no "
        "verdict of faster or slower. Diamond: beside busy host processes. Grey band: within 0.5 %.",
        words.provenance([evidence for block in blocks for evidence in block.members]),
        [
            (block.name, _fainter(block.first), [name for name, _, _ in points] + [""] * len(failures))
            for block, points, failures in panels
        ],
        "speed-up over eager (log scale)",
        [_point_text(row) for row in rows],
        0.22,
    )
    low, high = limits(rows)
    variants = [row["variant"] for row in rows]
    for (_, points, failures), axes in zip(panels, every, strict=True):
        ratio_axis(axes, "x", low, high)
        # Not behind what came to nothing.
        rows_of_points = (-0.55, len(points) - 0.45)
        axes.fill_betweenx(rows_of_points, 1 / SAME, SAME, color=BAND, zorder=0, linewidth=0)
        axes.vlines([1], *rows_of_points, color=INK, linewidth=0.9, zorder=1)
        for y, (_, row, load) in enumerate(points):
            _point(axes, row, y, look(row["variant"], variants), load, low, high)
            style.beside(axes, y, _point_text(row), INK if row["verdict"] in SIGNIFICANT else FAINT)
        for y, text in enumerate(failures, len(points)):
            style.in_row(axes, y, text, low)
    return page


def _points(block, several):
    """(name, row, host load) of each dot. several: the page shows several models; rows whose sessions did not run all
    eagers are left out of it."""
    points = []
    for row in block.first.rows:
        for evidence in block.members:
            same = evidence.row(row["variant"])
            if same and same["speedup"] is not None and not (several and same["missing_eagers"]):
                lacks = ", not all eagers run" if same["missing_eagers"] else ""
                points.append((f"{row['variant']}{_load_text(evidence)}{lacks}", same, evidence.load))
    return points


def _failures(block):
    """A line for all variants of one status and message."""
    shared: dict[str, list[str]] = {}
    for evidence in block.members:
        for row in evidence.rows:
            if row["status"] != "pass":
                shared.setdefault(f"{_load_text(evidence)}: {words.status_text(row, 72)}", []).append(row["variant"])
    return [f"{', '.join(names)}{text}" for text, names in shared.items()]


def _load_text(evidence):
    return f", {evidence.load} busy processes" if evidence.load else ""


def _fainter(evidence):
    """GPU, and what a variant could gain."""
    where, eager = f"{short_gpu(evidence.gpu_name)} x{evidence.num_gpus}", evidence.eager
    if eager is None or eager["ceiling"] is None:
        return where
    stretch = max((row["profile_stretch"] or 1.0 for row in evidence.rows), default=1.0)
    low, high = f"{eager['ceiling']:.2f}x", f"{eager['ceiling'] * stretch:.2f}x"
    return f"{where}, at most {low}" + (f" to {high}" if high > low else "") + " without gaps"


def _point(axes, row, y, appearance, load, low, high):
    colour, _, marker, _ = appearance
    start, end = row["speedup_low"], row["speedup_high"]
    if start is not None:
        axes.plot([max(start, low), min(end, high)], [y, y], color=colour, zorder=2)
        for beyond, edge, arrow in ((start < low, low, "<"), (end > high, high, ">")):
            if beyond:
                axes.plot([edge], [y], arrow, color=colour, markersize=5, clip_on=False, zorder=3)
    _mark(axes, row["speedup"], y, row, colour, *(("D", 5.5) if load else (marker,)))


def _point_text(row):
    """The interval, and what it is not significant for, or for how much it stands."""
    text = f"{row['speedup']:.3f}x"
    if row["speedup_low"] is not None:
        text += f" [{row['speedup_low']:.3f}, {row['speedup_high']:.3f}]"
    word = "" if row["verdict"] in SIGNIFICANT else row["verdict"] or "no verdict"
    return " ".join(filter(None, (text, word, tables.where(row))))


def speedup_title(blocks: list[Block]) -> str:
    """What the intervals bear, of the variant `graph` (or the first graphed one) of each model."""
    mains = {}
    for block in blocks:
        row = block.first.main
        if row and row["speedup"] is not None:
            mains.setdefault((block.what, block.first.gpu_name), (block, row))
    if not mains:
        return "No graphed variant has a speed-up yet"
    if len(mains) == 1:
        return _title_of_one(*next(iter(mains.values())))
    groups: dict[str, list] = {}
    for block, row in mains.values():
        groups.setdefault(VERDICTS.get(row["verdict"], "without a verdict for"), []).append((row["speedup"], block))
    parts = []
    for kind in (*VERDICTS.values(), "without a verdict for"):
        group = groups.get(kind, [])
        of = f" of {len(mains)}" if not parts else ""
        most = ""
        if group and kind in (VERDICTS["faster"], VERDICTS["slower"]):
            ratio, block = (max if kind == VERDICTS["faster"] else min)(group, key=lambda item: item[0])
            on = f" on {block.first.gpu}" if len({gpu for _, gpu in mains}) > 1 else ""
            most = f" ({'most ' if len(group) > 1 else ''}{block.name}{on}, {ratio:.2f}x)"
        parts += [f"{kind} {len(group)}{of}{most}"] if group else []
    local = sum(row["scope"] == "on this host" for _, row in mains.values())
    where = f"; {'each' if local == len(mains) else f'{local} of them'} on one host alone" if local else ""
    return f"Graphs are {', '.join(parts)}{where}"


def _title_of_one(block, row):
    title = f"{block.name}: {row['variant']} {words.verdict_words(row)}"
    for evidence in block.members[1:]:
        other = evidence.row(row["variant"])
        if other and other["speedup"] is not None:
            is_open = other["verdict"] not in (*SIGNIFICANT, "same")
            title += f"; {evidence.host} {'the gain' if is_open else 'it'} {words.verdict_words(other)}"
    return title


# ------------------------------------------------------------------------------------------------
# Against a swept quantity


def crossover(sweep: dict) -> Page:
    """Speed-up against the swept value with its interval, and where it touches 1.

    sweep: of `evidence.collect`, checked and by value. Raises Missing where no point has a speed-up.
    """
    variant, over = sweep["variant"], sweep["over"]
    points = [
        point | {"variant": variant, "speedup_low": point.get("low"), "speedup_high": point.get("high")}
        for point in sweep["points"]
    ]
    drawn = [point for point in points if point.get("speedup")]
    if not drawn:
        raise Missing(sweep["finding"])
    page = Page(
        f"{words.of_model(sweep['model'])} {sweep['preset']}: {sweep['finding']}",
        f"Speed-up of {variant} over eager at each {over}; band: 95 % interval, grey: within 0.5 %. Hollow: no "
        "significant difference.",
        _sweep_footer(sweep["env"], drawn),
        3.45,
    )
    axes = page.axes(0.75, 0.45, page.WIDTH - 1.0, 2.5)
    low, high = limits(drawn)
    _over(axes, over, [point["value"] for point in points], low, high * (high / low) ** 0.08)
    known = [(point["value"], point["low"], point["high"]) for point in drawn if point["speedup_low"]]
    if known:
        axes.fill_between(*zip(*known, strict=True), color=look(variant)[0], alpha=0.18, linewidth=0)
    _curve(axes, [(point["value"], point) for point in drawn], look(variant))
    if sweep["crossover"]:
        _mark_crossover(axes, sweep["crossover"])
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for point in points:
        if point not in drawn:
            text = "no speed-up" if point["status"] == "pass" else point["status"]
            at = point["value"], 0
            axes.annotate(text, at, (0, 6), va="bottom", rotation=90, fontsize=8.5, color=FAILURE, bbox=box, **place)
    # Above each point the host's share: graphs pay where issuing takes about as long as the work, or longer.
    shares = {point["value"]: point for point in drawn if point.get("issue_ms") and point.get("busy_ms")}
    for value in _thinned(list(shares)):
        share = f"{shares[value]['issue_ms'] / shares[value]['busy_ms']:.2f}"
        axes.annotate(share, (value, 1), (0, 4), fontsize=8, color=FAINT, **place)
    if shares:
        text = "eager: host time to issue a step over GPU busy time"
        page.text(page.MARGIN, page.top + 0.22, text, va="bottom", fontsize=8, color=FAINT)
    return page


def _mark_crossover(axes, bracket):
    low, high = bracket["low"], bracket["high"]
    middle = math.sqrt(low * high)
    axes.axvspan(low, high, color=INK, alpha=0.05, linewidth=0, zorder=0)
    axes.axvline(middle, color=INK, linewidth=1, linestyle=(0, (3, 2)), zorder=2)
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    axes.annotate(f"crossover between {low} and {high}", (middle, 1), (4, -3), fontsize=8.5, **place)


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


def _sweep_footer(env, points):
    parts = [f"{env['gpu_name']} x{env['world_size'] or env['num_gpus'] or 1}"] if env["gpu_name"] else []
    parts += words.versions([env])
    rounds = [point["rounds"] for point in points if "rounds" in point]
    return ", ".join(parts + ([f"{len(points)} points of {words.span(rounds)} rounds"] if rounds else []))


# ------------------------------------------------------------------------------------------------
# Against the number of GPUs


def scaling(blocks: list[Block]) -> Page:
    """Speed-up and tail against the number of GPUs, for blocks of one model, preset and GPU type.

    Raises Missing where no variant has a speed-up on two numbers of GPUs.
    """
    members = sorted((block.first for block in blocks), key=lambda evidence: evidence.num_gpus)
    counts = sorted({evidence.num_gpus for evidence in members})
    if len(counts) < 2:
        raise Missing("measured on one number of GPUs only")
    rows: dict[str, list] = {}
    for evidence in members:
        for row in evidence.rows:
            if row["speedup"] is not None:
                rows.setdefault(row["variant"], []).append((evidence.num_gpus, row))
    rows = {variant: own for variant, own in rows.items() if len({count for count, _ in own}) > 1}
    if not rows:
        raise Missing("no variant has a speed-up on more than one number of GPUs")
    tails = {name: _tails(members, name) for name in (*{evidence.base: 0 for evidence in members}, *rows)}
    variants = [name for name, own in tails.items() if own]
    page = Page(
        _scaling_title(blocks[0].name, rows),
        "Left: speed-up over eager with 95 % interval; hollow: no significant difference. Right: p95 of a step over "
        "its batch's median. Points only where measured.",
        words.provenance(members),
        2.95,
    )
    width = (page.WIDTH - 0.75 - 0.8 - page.MARGIN) / 2
    left, right = page.axes(0.75, 0.1, width, 2.4), page.axes(0.75 + width + 0.8, 0.1, width, 2.4)
    _over(left, "GPUs", counts, *limits([row for own in rows.values() for _, row in own]))
    _quantity(right, "GPUs", counts)
    for index, variant in enumerate(variants):
        colour, _, marker, dashes = look(variant, variants)
        right.plot(*zip(*tails[variant], strict=True), color=colour, linestyle=dashes, marker=marker, label=variant)
        shift = 2 ** (0.06 * (index - (len(variants) - 1) / 2))
        _curve(left, [(count * shift, row) for count, row in rows.get(variant, ())], look(variant, variants))
    right.grid(axis="y")
    right.set_ylabel("p95 / p50 of step time")
    most = max([tail for own in tails.values() for _, tail in own], default=1.0)
    # The legend has the upper part to itself.
    right.set_ylim(1.0, 1.0 + 1.15 * max(most - 1.0, 0.005) * (1 + 0.1 * len(variants)))
    right.legend(loc="upper left")
    return page


def _tails(members, variant):
    rows = [(evidence.num_gpus, evidence.row(variant)) for evidence in members]
    return [(count, row["tail"]) for count, row in rows if row and row["tail"] is not None]


def _scaling_title(name, rows):
    variant = main_variant([row for own in rows.values() for _, row in own]) or next(iter(rows))
    parts = [
        f"on {count} GPU{'s' if count > 1 else ''} it {words.verdict_words(row)}"
        for count, row in (rows[variant][0], rows[variant][-1])
    ]
    return f"{name}, {variant}: {', '.join(parts)}"
