"""The front page's figures: whether issue / busy predicts the gain, why graphs gain, and each model's ratios."""

from benchmarks.figures import choice, style
from benchmarks.figures.choice import Shown, digits, short
from benchmarks.figures.style import BAND, CLEAR, CONTROL, EAGER, FAINT, INK, NotDrawn, Page, look
from benchmarks.files import runs
from benchmarks.files.runs import Row
from benchmarks.pages import readme, tables

GPU_COLOUR, HOST_COLOUR, *_ = style.PALETTE
WITHIN = f"{100 * readme.WITHIN:g} %"


def law_title(points: list) -> str:
    """How many gains lie near max(1, issue / busy), from `readme.predictions`."""
    above = [off for *_, off in points if off > 1 + readme.WITHIN]
    below = [off for *_, off in points if off < 1 - readme.WITHIN]
    near = len(points) - len(above) - len(below)
    text = f"Graphs gain max(1, issue / busy): {near} of {len(points)} lie within {WITHIN} of it"
    text += f", {len(above)} above, by up to {100 * (max(above) - 1):.1f} %" if above else ""
    return text + (f", {len(below)} below, by up to {100 * (1 - min(below)):.1f} %" if below else "")


def law(shown: Shown) -> Page:
    """Measured gain against issue / busy, a mark a run and graph.

    Raises:
        NotDrawn: no graph on a GPU has a ratio with both times.
    """
    points = readme.predictions(shown.rows)
    if not points:
        raise NotDrawn("no graph on a GPU has a ratio, eager's issue time and its own busy time")
    note = "Issue: the host's time to issue an eager step. Busy: the GPU's time in a step of the graph. Line: max(1, "
    note += f"issue / busy), grey: within {WITHIN} of it. Each mark is a graph in one run on one host; bar: its 95 % "
    note += "interval, for that host in those minutes."
    note += " Hollow: beside busy processes." if any(row.workload.busy for row, *_ in points) else ""
    page = Page(law_title(points), note, choice.footer([row for row, *_ in points]), 4.4)
    axes = page.axes(0.65, 0.15, page.WIDTH - 0.65 - page.MARGIN, 3.8)
    axes.set(xlabel="issue / busy", ylabel="measured gain over eager")
    # A prediction has both times and a ratio.
    issue_and_busy = [(point.base_issue_ms, point.busy_ms) for _, point, _ in points]
    xs = [issue / busy for issue, busy in issue_and_busy if issue is not None and busy is not None]
    ratios = [point.ratio for _, point, _ in points if point.ratio is not None]
    tops = [ratio.high if ratio.cycles > 1 else ratio.ratio for ratio in ratios]
    left, right = min(0.8, *xs) / 1.1, max(1.2, *xs) * 1.12
    style.ratio_axis(axes, "x", left, right)
    style.ratio_axis(axes, "y", min(0.94, *(r.ratio for r in ratios)) / 1.05, max(right, *tops) * 1.03)
    line = sorted([1.0, *(left * (right / left) ** (step / 60) for step in range(61))])
    predicted = [max(1.0, x) for x in line]
    near = 1 + readme.WITHIN
    axes.fill_between(line, [y / near for y in predicted], [y * near for y in predicted], color=BAND, linewidth=0)
    axes.plot(line, predicted, color=FAINT, linewidth=1.2, gid="law")
    labels, taken = [], list(zip(line, predicted, strict=True))
    for (row, point, _), x, ratio in zip(points, xs, ratios, strict=True):
        colour, marker = look(shown.models.index(row.workload.model))
        if ratio.cycles > 1:
            axes.plot([x, x], [ratio.low, ratio.high], color=colour, linewidth=1.1, zorder=3)
            taken += [(x, ratio.low * (ratio.high / ratio.low) ** (step / 30)) for step in range(31)]
        face = "none" if row.workload.busy else colour
        axes.plot(x, ratio.ratio, color=colour, marker=marker, mfc=face, markersize=6, zorder=4, gid="point")
        name = choice.named(row.variant, row.workload.build)
        labels.append((x, ratio.ratio, name if point is row.newest and not row.workload.busy else "", colour))
    style.label_points(axes, labels, taken)
    for index, model in enumerate(shown.models):
        if any(row.workload.model == model for row, *_ in points):
            colour, marker = look(index)
            axes.plot([], [], color=colour, marker=marker, markersize=6, linestyle="", label=short(model))
    axes.legend(loc="upper left", handletextpad=0.2, borderaxespad=0.4)
    return page


def bars_of(shown: Shown) -> list[tuple[Row, list[tuple[str, float, str]]]]:
    """(row, bars) of each model's best-measured graph with all four times; a bar is name, ms of a step and colour."""
    found = []
    for row in sorted(runs.best_measured(shown.rows), key=lambda row: shown.models.index(row.workload.model)):
        times = [row.median(what) for what in ("base_issue_ms", "base_busy_ms", "busy_ms")] + [row.variant_ms]
        base = row.base or "eager"
        names = (f"{base}: host issues", f"{base}: GPU busy", f"{row.variant}: GPU busy", f"{row.variant}: step")
        colours = (HOST_COLOUR, GPU_COLOUR, GPU_COLOUR, EAGER)
        known = [time for time in times if time]
        found += [(row, list(zip(names, known, colours, strict=True)))] if len(known) == len(names) else []
    return found


def why_title(bars: list) -> str:
    """Three times of the model that gains most, in a sentence."""
    row, times = max(bars, key=lambda own: own[0].ratio)
    issue, busy, _, step = (digits(value) for _, value, _ in times)
    name = short(row.workload.model)
    return f"{name}: the host needs {issue} ms to issue a step that the GPU runs in {busy}; a graph takes {step}"


def why(shown: Shown) -> Page:
    """The host's and the GPU's time in eager's step, and the GPU's and the whole one of the graph, a group a model.

    Raises:
        NotDrawn: no graph has the times of host and GPU.
    """
    bars = bars_of(shown)
    if not bars:
        raise NotDrawn("no graph has a ratio, eager's issue and busy times and its own busy time")
    note = (
        "An eager step takes about as long as the slower of host and GPU, a graph's about as long as the GPU. Bars: ms "
    )
    note += "of a step, as a share of eager's step, which is the dashed line."
    group, step = 1.06, 0.18
    height = group * len(bars)
    page = Page(shown.title(why_title(bars)), note, choice.footer([row for row, _ in bars]), height + 0.6)
    left = page.MARGIN + max(style.width_of(name, 8.5) for _, own in bars for name, *_ in own) + 0.12
    axes = style.rows_axes(page, left, page.WIDTH - left - page.MARGIN, height)
    shares = [value / row.base_ms for row, own in bars if row.base_ms is not None for _, value, _ in own]
    axes.set_xlim(0, max(1.0, *shares) * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("share of eager's step")
    axes.grid(False)
    for index, (row, own) in enumerate(bars):
        if row.base_ms is None or row.variant_ms is None:
            continue  # a row with bars has both
        top = index * group
        said = f"{choice.preset(row.workload)}; {row.base or 'eager'} {digits(row.base_ms)} ms a step, {row.variant} "
        said += f"{digits(row.variant_ms)} ms: {row.ratio:.3f}x ({runs.counted(row.hosts, 'host')})"
        page.heading(page.MARGIN, 0.1 + top + 0.03, short(row.workload.model), said)
        axes.plot([1, 1], [top + 0.24, top + group - 0.08], color=INK, linewidth=1.2, linestyle=(0, (3, 1.5)))
        for place, (name, value, colour) in enumerate(own):
            y, share = top + 0.34 + step * place + (0.03 if place > 1 else 0), value / row.base_ms
            axes.barh(y, share, height=step - 0.03, color=colour, linewidth=0, gid="bar")
            at = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": CLEAR, "zorder": 5}
            axes.annotate(f"{digits(value)} ms", (share, y), (5, 0), **at)
            page.text(left - 0.08, 0.1 + y, name, ha="right", va="center", fontsize=8.5)
    return page


def ratio_rows(shown: Shown) -> dict[str, list[Row]]:
    """Model -> its headline graphs and controls, build by build; empty for a submitted model without a run."""
    found = {}
    for model in shown.models:
        own = choice.main_rows(shown.rows, model)
        own = [row for row in own if (row.kind == "graph" and row.headline) or (row.control and row.ratio)]
        found[model] = sorted(own, key=lambda row: (row.workload.build, row.control))
    return found


def models(shown: Shown) -> Page:
    """The ratio of each headline graph with its interval, and the control beside it.

    Raises:
        NotDrawn: no graph has a ratio.
    """
    best = sorted(runs.best_measured(shown.rows), key=lambda row: -(row.ratio or 0.0))
    if not best:
        raise NotDrawn("no graph has a ratio")
    said = ", ".join(f"{short(row.workload.model)} {row.ratio:.3f}x" for row in best)
    note = (
        "Ratio: eager's step / the graph's. Bar: its 95 % interval, for one host in those minutes or over three hosts "
    )
    note += "and more. Grey: the control, eager measured once more as if it were a variant."
    groups, right = ratio_rows(shown), 2.75
    every = [row for own in groups.values() for row in own]
    lines, height = _lines(groups, right - 0.15)
    page = Page(shown.title(f"Graphs run {said} as fast as eager"), note, choice.footer(every), height + 0.6)
    names = [_label(row) for row in every] + [short(model) for model in groups]
    left = page.MARGIN + max(style.width_of(name, 9, "bold") for name in names) + 0.15
    axes = style.rows_axes(page, left, page.WIDTH - left - right - page.MARGIN, height)
    ends = [end for row in every if row.ratio for end in _ends(row)]
    style.ratio_axis(axes, "x", min(0.98, *ends) / 1.03, max(1.02, *ends) * 1.03)
    axes.axvline(1, color=INK, linewidth=1.0)
    axes.set_xlabel("eager's step / the graph's step")
    for y, row, model, texts in lines:
        if row is None:
            page.heading(page.MARGIN, 0.1 + y - 0.08, short(model), *texts)
            continue
        page.text(left - 0.1, 0.1 + y, _label(row), ha="right", va="center", fontsize=8.5)
        if row.ratio:
            colour = CONTROL if row.control else look(shown.models.index(model))[0]
            axes.plot(_ends(row), [y, y], color=colour, linewidth=1.6, gid="interval")
            axes.plot(row.ratio, y, color=colour, marker="o", markersize=6, gid="ratio")
        for place, text in enumerate(texts):
            size, ink = (7.5, FAINT) if place else (8.5, INK)
            where = page.WIDTH - right - page.MARGIN + 0.15, 0.1 + y + 0.14 * place + (0.02 if place else 0)
            page.text(*where, text, va="center", fontsize=size, color=ink)
    return page


def _label(row):
    return choice.named("control" if row.control else row.variant, row.workload.build)


def _ends(row):
    """Ends of the interval, or of the range of runs; low is 0 where one cycle gave none."""
    return (row.low, row.high) if row.low else (row.lowest, row.highest)


def _lines(groups, room):
    """(y in inches, row or None for a heading, model, texts) of each line, and the height of all."""
    lines, y = [], 0.0
    for model, rows in groups.items():
        lines.append((y + 0.14, None, model, [choice.share(rows[0].workload) if rows else "graphs not measured yet"]))
        y += 0.26
        for row in rows:
            if row.ratio is None:
                texts = [row.status, *style.wrap(row.reason[:120], room, 7.5)]
            else:
                said = ", ".join(
                    filter(None, [f"{row.ratio:.3f}x", tables.interval(row), runs.counted(row.hosts, "host")])
                )
                texts = [said, *style.wrap("" if row.control else row.note, room, 7.5)]
            lines.append((y + 0.12, row, model, texts))
            y += 0.24 + 0.14 * (len(texts) - 1)
        y += 0.06
    return lines, y
