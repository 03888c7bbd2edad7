"""What graphs take: memory, set-up that has to pay off, and how much depends on the scope of the capture."""

import math

from matplotlib.ticker import MaxNLocator

from benchmarks.figures.evidence import (
    Block,
    Evidence,
    Missing,
    main_variant,
    ms_text,
    no_verdict_words,
    percent,
    provenance,
    status_text,
    verdict_words,
)
from benchmarks.figures.steps import name_rows
from benchmarks.figures.style import FAILURE, FAINT, INK, Page, look, width_of
from benchmarks.overview_rows import break_even_steps, setup_s, step_gain_ms

REST = "#c9c9c9"
# Memory of a GPU as nvidia-smi states it, MiB. The records do not hold it; of others no line is drawn.
CAPACITY_MIB = {"NVIDIA H200": 143_771, "NVIDIA H100 80GB HBM3": 81_559, "NVIDIA A100-SXM4-80GB": 81_920}


# ------------------------------------------------------------------------------------------------
# Memory


def memory(blocks: list[Block]) -> Page:
    """Stacked bars of peak reserved memory, the graphs' pools and the rest, and the GPU's capacity where known."""
    shown = [block for block in blocks if any(row["peak_reserved_gib"] for row in block.first.rows)]
    if not shown:
        raise Missing("no record says how much memory was reserved")
    rows_of = {block.key: _rows_with_memory(block.first) for block in shown}
    row_height, gap = 0.25, 0.4
    heights = [row_height * len(rows_of[block.key]) for block in shown]
    members = [block.first for block in shown]
    page = Page(
        _memory_title(shown),
        "Peak reserved memory of a GPU over the life of the process; coloured: graphs' pools. Dashed: all it has.",
        provenance(members),
        sum(heights) + gap * len(shown) + 0.38,
    )
    names = [row["variant"] for rows in rows_of.values() for row in rows]
    left = width_of(names, 9) + page.MARGIN
    capacities = {evidence.gpu: _capacity_gib(evidence) for evidence in members}
    largest = max([row["peak_reserved_gib"] or 0 for rows in rows_of.values() for row in rows])
    # The bars stay readable where the GPU is far larger than what is used.
    limit = max([largest * 1.05, *(capacity * 1.02 for capacity in capacities.values() if capacity)])
    top = 0.34
    for block, height in zip(shown, heights, strict=True):
        rows = rows_of[block.key]
        axes = page.axes(left, top, page.WIDTH - left - page.MARGIN - 0.1, height)
        page.heading(left, top, f"{block.name}, {block.first.gpu}")
        for y, row in enumerate(rows):
            _memory_bar(axes, y, row, look(row["variant"], names), limit)
        name_rows(axes, [row["variant"] for row in rows])
        capacity = capacities[block.first.gpu]
        if capacity:
            axes.axvline(capacity, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_xlim(0, limit)
        axes.grid(axis="x")
        if block is shown[-1]:
            axes.set_xlabel("peak reserved memory, GiB")
        else:
            axes.set_xticklabels([])
        top += height + gap
    return page


def _rows_with_memory(evidence):
    return [
        row
        for row in evidence.rows
        if row["peak_reserved_gib"] is not None or row["status"] not in ("pass", "unsupported")
    ]


def _memory_bar(axes, y, row, appearance, limit):
    colour, hatch, _, _ = appearance
    total, pool = row["peak_reserved_gib"], row["pool_gib"] or 0.0
    if total is None:
        axes.text(limit * 0.008, y, status_text(row, 90), color=FAILURE, fontsize=8, va="center")
        return
    axes.barh(y, total - pool, height=0.62, color=REST, linewidth=0)
    if pool:
        axes.barh(y, pool, left=total - pool, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    text = f"{total:.1f} GiB" + (f", pools {pool:.2f}" if pool else "")
    inside = total > 0.72 * limit
    axes.text(
        total - pool - limit * 0.01 if inside else total + limit * 0.008,
        y,
        text,
        ha="right" if inside else "left",
        va="center",
        fontsize=8.5,
        color=INK,
    )


def _capacity_gib(evidence: Evidence) -> float | None:
    mib = CAPACITY_MIB.get(evidence.gpu_name)
    return mib / 1024 if mib else None


def _memory_title(blocks):
    more = []
    for block in blocks:
        eager, main = block.first.eager, block.first.row(main_variant(block.first.rows) or "")
        if eager and main and eager["peak_reserved_gib"] and main["peak_reserved_gib"]:
            more.append((block, main, main["peak_reserved_gib"] - eager["peak_reserved_gib"]))
    if not more:
        return "Peak reserved memory"
    block, main, extra = more[0]
    if len({item[0].what for item in more}) == 1:
        share = extra / block.first.eager["peak_reserved_gib"]
        text = f"{abs(extra):.1f} GiB {'more' if extra > 0 else 'less'} than {block.first.base}"
        return f"{block.name}: {main['variant']} reserves {text} ({'+' if extra > 0 else '-'}{percent(abs(share))})"
    low, high = min(more, key=lambda item: item[2]), max(more, key=lambda item: item[2])
    span = [f"{item[2]:+.1f} GiB" for item in (low, high)]
    if span[0] == span[1]:
        return f"Against eager, graphs reserve {span[0]} in each of {len(more)}"
    return f"Against eager, graphs reserve {span[0]} ({low[0].name}) to {span[1]} ({high[0].name})"


# ------------------------------------------------------------------------------------------------
# Break-even


def break_even(blocks: list[Block]) -> Page:
    """Cumulative time beyond eager's against steps: starts at the set-up seconds, falls where a step is shorter."""
    panels = [(block, _payers(block.first)) for block in blocks]
    panels = [(block, rows) for block, rows in panels if rows]
    if not panels:
        raise Missing("no variant with step time and set-up seconds beside eager's")
    legend = 0.16 * max(len(rows) for _, rows in panels)
    height, gap = 1.6, 0.85 + legend
    num_columns = 1 if len(panels) == 1 else 2
    num_lines = math.ceil(len(panels) / num_columns)
    page = Page(
        _break_even_title(panels),
        "Cumulative time beyond eager's: begins with compilation, capture and what warm-up takes beyond eager's, and "
        "falls by what a step gains. Ring: set-up is paid.",
        provenance([block.first for block, _ in panels]),
        num_lines * (height + gap) + 0.02,
    )
    width = (page.WIDTH - 0.75 * num_columns - 0.25) / num_columns
    gpus = {block.first.gpu for block, _ in panels}
    for index, (block, rows) in enumerate(panels):
        left = 0.7 + (index % num_columns) * (width + 0.75)
        top = 0.3 + (index // num_columns) * (height + gap)
        axes = page.axes(left, top, width, height)
        # One GPU type is named at the foot.
        page.heading(left, top, f"{block.name}, {block.first.gpu}" if len(gpus) > 1 else block.name)
        _break_even_panel(axes, block.first, rows)
    return page


def _payers(evidence):
    eager = evidence.eager
    if eager is None or eager["step_ms"] is None:
        return []
    return [
        row
        for row in evidence.rows
        if row["kind"] != "eager" and row["step_ms"] is not None and row["speedup"]
        if setup_s(row, eager) is not None
    ]


def _break_even_panel(axes, evidence, rows):
    eager = evidence.eager
    crossings = {row["variant"]: break_even_steps(row, eager) for row in rows if row["verdict"] == "faster"}
    # Compilation takes minutes: where a graph is there, its crossing sets the scale, and a compiler's may lie outside.
    graphed = [row for row in rows if row["kind"] == "graph"] or rows
    known = [crossings[row["variant"]] for row in graphed if crossings.get(row["variant"])]
    # Where no verdict bears one, the first crossing that there may be.
    guessed = [break_even_steps(row, eager) for row in graphed if row["verdict"] not in ("slower", "same", "unclear")]
    guessed = sorted(steps for steps in guessed if steps and steps < 1e6)[:1]
    horizon = 1.6 * max(known or [steps for steps in crossings.values() if steps] or guessed or [1250.0])
    highest = 1.35 * max(setup_s(row, eager) for row in graphed) or 1.0
    variants = [row["variant"] for row in rows]
    axes.axhline(0, color=look("eager")[0], linewidth=2)
    for row in rows:
        colour, _, _, dashes = look(row["variant"], variants)
        start, slope = setup_s(row, eager), -step_gain_ms(row, eager) / 1e3
        axes.plot(
            [0, horizon],
            [start, start + slope * horizon],
            color=colour,
            linestyle=dashes,
            label=f"{row['variant']}: {_pay_words(row, eager, crossings.get(row['variant']))}",
        )
        steps = crossings.get(row["variant"])
        if steps is not None:
            axes.plot(
                [steps], [0], "o", color=colour, markerfacecolor="white", markersize=7, markeredgewidth=1.6, zorder=5
            )
    axes.set_xlim(0, horizon)
    axes.set_ylim(-0.3 * highest, highest)
    axes.grid()
    axes.set_xlabel("steps")
    axes.set_ylabel("s more than eager")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(
        frameon=False,
        fontsize=7.5,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.25),
        labelspacing=0.25,
        borderaxespad=0,
        handlelength=1.8,
    )
    axes.text(horizon, 0, "eager ", ha="right", va="bottom", fontsize=8, color=FAINT)


def _pay_words(row, eager, steps):
    if steps is not None:
        return f"{_count(steps)} steps pay for {setup_s(row, eager):.2f} s"
    if row["verdict"] in ("slower", "same"):
        return f"never ({row['verdict']})"
    return f"not settled ({no_verdict_words(row)})"


def _count(steps):
    return f"{steps:,.0f}"


def _break_even_title(panels):
    texts = []
    for block, rows in panels:
        main = main_variant(rows)
        row = next((row for row in rows if row["variant"] == main), None)
        if row is None or block.what in {what for what, _ in texts}:
            continue
        steps = break_even_steps(row, block.first.eager) if row["verdict"] == "faster" else None
        texts.append((block.what, (block.name, row, steps)))
    items = [item for _, item in texts]
    if not items:
        return "When set-up has paid off"
    if len(items) == 1:
        name, row, steps = items[0]
        if steps is not None:
            return f"{name}: {row['variant']} has paid for its set-up after {_count(steps)} steps"
        return f"{name}: {row['variant']} {verdict_words(row)}, so its set-up {_never(row)}"
    paid = sorted((steps, name) for name, _, steps in items if steps is not None)
    never = len(items) - len(paid)
    parts = []
    if paid:
        parts.append(f"within {_count(paid[-1][0])} steps for {len(paid)} of {len(items)}")
        if len(paid) > 1:
            parts[-1] += f" (first {paid[0][1]}, {_count(paid[0][0])})"
    if never:
        parts.append(f"never or not settled for {never}")
    return f"Graphs pay for their set-up {', '.join(parts)}"


def _never(row):
    return "never pays off" if row["verdict"] in ("slower", "same") else "has no settled break-even"


# ------------------------------------------------------------------------------------------------
# Scope


def scope(block: Block) -> Page:
    """Step time and pool memory of one model's variants, from nothing captured to the most work in a replay."""
    evidence = block.first
    rows = scope_rows(evidence)
    if sum(row["kind"] == "graph" for row in rows) < 2:
        raise Missing("fewer than two graphed variants were timed")
    page = Page(
        _scope_title(block.name, rows),
        "By falling number of replays a step: the fewer, the more each holds. Left: step time. Right: memory in the "
        "graphs' pools.",
        provenance([evidence]),
        0.5 * len(rows) + 0.65,
    )
    left = max(
        width_of([row["variant"] for row in rows], 9), width_of([_scope_text(evidence, row) for row in rows], 7.5)
    )
    left += page.MARGIN
    width = (page.WIDTH - left - 1.4) / 2
    bars = page.axes(left, 0.1, width, 0.5 * len(rows))
    pools = page.axes(left + width + 0.7, 0.1, width, 0.5 * len(rows))
    variants = [row["variant"] for row in rows]
    for y, row in enumerate(rows):
        colour, hatch, _, _ = look(row["variant"], variants)
        for axes, value, text in (
            (bars, row["step_ms"], ms_text(row["step_ms"])),
            (pools, row["pool_gib"] or 0.0, f"{row['pool_gib'] or 0.0:.2f}"),
        ):
            axes.barh(y, value, height=0.52, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            axes.annotate(text, (value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
        page.text(
            left - 0.1, page.top + 0.1 + 0.5 * (y + 0.5) - 0.01, row["variant"], ha="right", va="bottom", fontsize=9
        )
        page.text(
            left - 0.1,
            page.top + 0.1 + 0.5 * (y + 0.5) + 0.01,
            _scope_text(evidence, row),
            ha="right",
            va="top",
            fontsize=7.5,
            color=FAINT,
        )
    for axes, label in ((bars, "step time, ms"), (pools, "graph pools, GiB")):
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.set_xlabel(label)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1e-3))
    return page


def scope_rows(evidence: Evidence) -> list[dict]:
    """Timed variants without a compiler, by scope: eager ones first, then by falling number of replays a step."""
    rows = [row for row in evidence.rows if row["step_ms"] is not None and row["kind"] != "compile"]
    return sorted(rows, key=lambda row: (row["kind"] != "eager", -_replays_per_step(evidence, row)))


def _replays_per_step(evidence, row):
    record = evidence.of(row["variant"])[-1]
    return record["capture"]["num_replays"] / max(1, len(record["steps"]["gpu_ms"]))


def _scope_text(evidence, row):
    strategy = evidence.of(row["variant"])[-1]["capture"]["strategy"] or "none"
    if strategy == "none":
        return "nothing captured"
    short = strategy if len(strategy) <= 44 else strategy[:41] + "..."
    replays = _replays_per_step(evidence, row)
    return f"{short}; {replays:g} {'replay' if replays == 1 else 'replays'} a step"


def _scope_title(name, rows):
    graphed = [row for row in rows if row["kind"] == "graph"]
    return f"{name}: {', '.join(row['variant'] + ' ' + _short_verdict(row) for row in graphed)}"


def _short_verdict(row):
    words = verdict_words(row)
    return words.split(",")[0] if row["verdict"] in ("faster", "slower") else words
