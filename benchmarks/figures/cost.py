"""What graphs take: memory, and how step time and memory depend on the scope of the capture."""

from benchmarks.figures import words
from benchmarks.figures.evidence import Block, Evidence, Missing
from benchmarks.figures.style import FAINT, INK, Page, bar, in_row, look, rows_page, width_of

KEY = "peak_reserved_gib"


# ------------------------------------------------------------------------------------------------
# Memory


def memory(blocks: list[Block]) -> Page:
    """Bars of peak reserved memory beyond that of the best eager, for each variant that is not eager."""
    shown = [
        (block, rows) for block in blocks if (rows := rows_beyond_eager(block.first)) and any(row[KEY] for row in rows)
    ]
    if not shown:
        raise Missing("no graphed variant with reserved memory beside eager's")
    page, panels = rows_page(
        _memory_title(shown),
        "Peak reserved memory of a GPU over the life of the process, less the best eager's. Pools: GiB of the peak "
        "that are in the graphs' memory pools.",
        words.provenance([block.first for block, _ in shown]),
        [
            (
                f"{block.name}, {block.first.gpu}",
                f"{block.first.base} reserves {block.first.eager[KEY]:.1f} GiB",
                [row["variant"] for row in rows],
            )
            for block, rows in shown
        ],
        "GiB more than eager reserves",
        ["+10.0 GiB, pools 10.00"],
    )
    names = [row["variant"] for _, rows in shown for row in rows]
    extras = [_extra(block, row) for block, rows in shown for row in rows if row[KEY] is not None]
    low, high = min([0.0, *extras]), max([0.0, *extras])
    for (block, rows), axes in zip(shown, panels, strict=True):
        axes.set_xlim(1.04 * low - 0.01, 1.04 * high + 0.01)
        axes.axvline(0, color=FAINT, linewidth=0.9)
        for y, row in enumerate(rows):
            if row[KEY] is None:
                in_row(axes, y, words.status_text(row, 90))
                continue
            extra = _extra(block, row)
            bar(axes, y, extra, look(row["variant"], names))
            # Without a minus before zero.
            text = f"{round(extra, 1) + 0.0:+.1f} GiB" + (f", pools {row['pool_gib']:.2f}" if row["pool_gib"] else "")
            in_row(axes, y, text, max(0, extra), 8.5, INK)
    return page


def rows_beyond_eager(evidence: Evidence) -> list[dict]:
    """Rows of variants that are not eager and have a known peak, or came to nothing; none where eager has no peak."""
    if not (evidence.eager and evidence.eager[KEY]):
        return []
    rows = [row for row in evidence.rows if row["kind"] in ("graph", "compile")]
    return [row for row in rows if row[KEY] is not None or row["status"] not in ("pass", "unsupported")]


def _extra(block, row):
    return row[KEY] - block.first.eager[KEY]


def _memory_title(shown):
    more = [(block, main, _extra(block, main)) for block, _ in shown if (main := block.first.main) and main[KEY]]
    if not more:
        return "Peak reserved memory"
    if len({block.what for block, *_ in more}) == 1:
        block, main, extra = more[0]
        share = f"{'+' if extra > 0 else '-'}{words.percent(abs(extra) / block.first.eager[KEY])}"
        text = f"{abs(extra):.1f} GiB {'more' if extra > 0 else 'less'} than {block.first.base}"
        return f"{block.name}: {main['variant']} reserves {text} ({share})"
    ends = [end(more, key=lambda item: item[2]) for end in (min, max)]
    texts = [f"{extra:+.1f} GiB" for _, _, extra in ends]
    if texts[0] == texts[1]:
        return f"Against eager, graphs reserve {texts[0]} in each of {len(more)}"
    return f"Against eager, graphs reserve {texts[0]} ({ends[0][0].name}) to {texts[1]} ({ends[1][0].name})"


# ------------------------------------------------------------------------------------------------
# Scope


def scope(block: Block) -> Page:
    """Step time and pool memory of one model's variants, from nothing captured to the most work in a replay."""
    evidence, height = block.first, 0.5
    rows = scope_rows(evidence)
    if sum(row["kind"] == "graph" for row in rows) < 2:
        raise Missing("fewer than two graphed variants were timed")
    verdicts = [f"{row['variant']} {_short_verdict(row)}" for row in rows if row["kind"] == "graph"]
    page = Page(
        f"{block.name}: {', '.join(verdicts)}",
        "By falling number of replays a step: the fewer, the more each holds. Left: step time. Right: memory in the "
        "graphs' pools.",
        words.provenance([evidence]),
        height * len(rows) + 0.65,
    )
    variants, strategies = [row["variant"] for row in rows], [_scope_text(evidence, row) for row in rows]
    left = max(width_of(variants), width_of(strategies, 7.5)) + page.MARGIN
    width = (page.WIDTH - left - 1.4) / 2
    for y, (variant, text) in enumerate(zip(variants, strategies, strict=True)):
        middle = page.top + 0.1 + height * (y + 0.5)
        page.text(left - 0.1, middle - 0.01, variant, ha="right", va="bottom", fontsize=9)
        page.text(left - 0.1, middle + 0.01, text, ha="right", va="top", fontsize=7.5, color=FAINT)
    for start, label, key, show in (
        (left, "step time, ms", "step_ms", words.ms_text),
        (left + width + 0.7, "graph pools, GiB", "pool_gib", "{:.2f}".format),
    ):
        axes = page.axes(start, 0.1, width, height * len(rows))
        for y, row in enumerate(rows):
            value = row[key] or 0.0
            bar(axes, y, value, look(row["variant"], variants), 0.52)
            in_row(axes, y, show(value), value, 8.5, INK)
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


def _short_verdict(row):
    text = words.verdict_words(row)
    return text.split(",")[0] if row["verdict"] in ("faster", "slower") else text
