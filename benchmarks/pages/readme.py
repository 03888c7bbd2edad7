"""Tables inside of READMEs, made from runs.

A table stands between two markers and is made again by `make readme`; a test fails where one is not what the runs say:

    <!-- table: models -->      the best-measured graph of each model
    <!-- table: model gpt3 -->  all rows of a model on GPUs
    <!-- table: decide -->      what to do, by issue / busy, with a measured row each
    <!-- table: nvidia -->      NVIDIA's published gains beside the rows of the same mechanism
    <!-- table: law -->         how well issue / busy predicts the gain, in a sentence
    <!-- table: memory -->      time and memory of builds with parameterized launches
    <!-- end -->
"""

import os
import re
from pathlib import Path

from benchmarks import ROOT
from benchmarks.files import runs
from benchmarks.files.runs import Row
from benchmarks.pages import published, tables

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BEGIN, END = "<!-- table:", "<!-- end -->"
WITHIN = 0.05
SUBMITTED = "NVIDIA's submission: "
PARAMETERIZED = "graph_parameterized"
NOTHING = "Nothing has been measured on a GPU yet."
# Bounds of issue / busy, in words, and what to do.
BANDS = (
    (1.2, float("inf"), "above 1.2", "Capture the whole step, or as much of it as you can."),
    (0.9, 1.2, "0.9 to 1.2", "Try it: up to 20 %, more on a slower host."),
    (0.0, 0.9, "below 0.9", "Leave it eager, unless host noise delays steps."),
)


class ReadmeError(ValueError):
    """A marker that cannot be filled; the text names file and marker."""


def files(root: Path = ROOT) -> list[Path]:
    """README.md here, in each folder, and of the example steps; and the pages of docs/."""
    own = root / "README.md", *sorted(root.glob("[!.]*/README.md")), root / "examples" / "steps" / "README.md"
    return [path for path in dict.fromkeys((*own, *sorted(root.glob("docs/*.md")))) if path.is_file()]


def rendered(path: Path, rows: list[Row], root: Path = ROOT) -> str:
    """The file's text with every table made again.

    Raises:
        ReadmeError: a marker has no end, or names no table.
    """
    text, name = path.read_text(), path.relative_to(root)
    if not text.count(BEGIN) == text.count(END) == len(BLOCK.findall(text)):
        raise ReadmeError(f"{name}: each '{BEGIN} ... -->' needs its own '{END}'")

    def fill(match):
        kind, _, argument = match[2].partition(" ")
        if kind not in _TABLES:
            raise ReadmeError(f"{name}: no table {match[2]!r}, there are {', '.join(_TABLES)}")
        return f"{match[1]}{_TABLES[kind](rows, path, argument)}\n{match[4]}"

    return BLOCK.sub(fill, text)


def changed(rows: list[Row], root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file whose tables are not what the rows say."""
    new = {path: rendered(path, rows, root) for path in files(root)}
    return {path: text for path, text in new.items() if text != path.read_text()}


# ------------------------------------------------------------------------------------------------
# The tables


def _on_gpu(rows):
    return [row for row in rows if not row.workload.machine.startswith("CPU")]


def models(rows: list[Row], page: Path, argument: str = "") -> str:
    """The best-measured graph of each model; models that NVIDIA submitted stand there without a run, too."""
    best = {row.workload.model: row for row in runs.best_measured(_on_gpu(rows))}
    if not best:
        return NOTHING
    lines = []
    for model in dict.fromkeys([*(own.model for own in published.PUBLISHED), *best]):
        own, row = published.of_model(model), best.get(model)
        title = own.title if own else model
        if row is None:
            graphs = [each for each in _on_gpu(rows) if (each.workload.model, each.kind) == (model, "graph")]
            seen = [f"no graph has a time ([{each.status}]({_folder(each, page)}))" for each in graphs[:1]]
            lines.append([title, *(seen or ["not measured in blocks yet"]), *[""] * 5])
            continue
        captured = f"{row.newest.variant.help.removeprefix(SUBMITTED)} (`{row.variant}`)"
        numbers = [tables.cells(row, name) for name in ("base ms", "ms", "ratio", "95 %")]
        hosts = f"{row.hosts} ({row.workload.gpu.removeprefix('NVIDIA ')})"
        lines.append([f"[{title}, {row.workload.preset}]({_folder(row, page)})", captured, *numbers, hosts])
    return tables.markdown(["Workload", "Captured", "eager ms", "graph ms", "ratio", "95 %", "hosts"], lines)


def _decide(rows, page, argument):
    """By issue / busy of eager: what to do, and the best-measured row of such a step."""
    best = runs.best_measured(_on_gpu(rows))
    lines = []
    for low, high, name, advice in BANDS:
        seen = []
        for row in best:
            issue, busy = row.median("base_issue_ms"), row.median("busy_ms")
            if issue and busy and low <= issue / busy < high:
                text = f"{issue:,.3g} / {busy:,.3g} ms: {row.ratio:.3f}x, {tables.interval(row)}"
                seen.append(f"[{row.workload.name}]({_folder(row, page)}) {text}")
        lines.append([name, advice, "<br>".join(seen) or "not measured yet"])
    return tables.markdown(["Issue / busy", "What to do", "Measured here"], lines)


def _memory(rows, page, argument):
    """Each workload in which parameterized launches were timed, with its other variants."""
    own: dict = {}
    for row in _on_gpu(rows):
        if not row.control and row.status == "pass":
            own.setdefault(row.workload, []).append(row)
    lines = []
    for workload, alike in own.items():
        if PARAMETERIZED not in [row.variant for row in alike]:
            continue
        eager = next((row for row in alike if row.variant == "eager"), None)
        for row in alike:
            peak, base = _captured(row, "peak_reserved_bytes"), _captured(eager, "peak_reserved_bytes")
            over = None if None in (peak, base) else peak - base
            name = f"[{workload.name}]({_folder(row, page)}), {workload.machine.removeprefix('NVIDIA ')}"
            sizes = (peak, over, _captured(row, "pool_bytes"), _captured(row, "driver_bytes"))
            coverage = (_captured(row, "report") or {}).get("coverage")
            share = "" if coverage is None else f"{100 * coverage:.0f} %"
            lines.append([name, row.variant, tables.cells(row, "ms"), *map(_gib, sizes), share])
    columns = ["workload", "variant", "ms", "peak GiB", "over eager", "pools GiB", "driver GiB", "in regions"]
    return tables.markdown(columns, lines) if lines else NOTHING


def _captured(row, key):
    return None if row is None else row.newest.variant.capture.get(key)


def _gib(size):
    return "" if size is None else f"{size / 2**30:.2f}"


def _folder(row, page):
    return Path(os.path.relpath(row.newest.path.parent, page.parent)).as_posix()


def _model(rows, page, argument):
    own = [row for row in _on_gpu(rows) if row.workload.model == argument]
    timed = [row for row in own if row.status == "pass"]
    if not timed:
        has_notes = (page.parents[1] / "results" / "archive" / f"notes-{argument}.md").is_file()
        earlier = "; [the archive](../results/archive/README.md) has earlier runs" if has_notes else ""
        return f"Not measured in blocks on a GPU yet{earlier}."
    left = tables.not_timed_as_markdown(own)
    return tables.rows_as_markdown(timed, page) + (f"\n\nWithout a number:\n\n{left}" if left else "")


def _nvidia(rows, page, argument):
    lines = []
    for own in published.PUBLISHED:
        found = [
            row
            for row in _on_gpu(rows)
            if (row.workload.model, row.variant) == (own.model, own.variant)
            and not row.workload.busy
            and published.stem(row.workload.preset) in own.presets
        ]
        order = list(own.presets)
        found.sort(
            key=lambda row: (not row.ratio, order.index(published.stem(row.workload.preset)), row.workload.build)
        )
        here, differs = "not measured yet", next(reversed(own.presets.values()))
        if found:
            row = found[0]
            hosts = f" ({row.hosts} host{'s' if row.hosts > 1 else ''})"
            text = (
                f"{row.ratio:.3f}x, {tables.interval(row)}{hosts}"
                if row.ratio
                else f"{row.status}: {row.reason.partition(':')[0]}"
            )
            here = f"[{row.workload.name}]({_folder(row, page)}) {row.variant}: {text}"
            gpus = f"{row.workload.ranks} {row.workload.gpu.removeprefix('NVIDIA ')}"
            differs = f"{gpus}: {own.presets[published.stem(row.workload.preset)]}"
        lines.append([own.title, own.mechanism, f"[{own.gain_range}]({own.source})", here, differs])
    return tables.markdown(
        ["Workload", "NVIDIA's mechanism", "NVIDIA's gain", "Here, same scope", "What differs"], lines
    )


def predictions(rows: list[Row]) -> list[tuple[Row, runs.Point, float]]:
    """(row, point, measured gain / predicted gain) of each graph in each run on a GPU, contended cycles too."""
    return [
        (row, point, point.ratio.ratio / point.predicted_gain)
        for row in _on_gpu(rows)
        if row.kind == "graph"
        for point in row.points
        if point.ratio is not None and point.predicted_gain
    ]


def law(rows: list[Row], page: Path | None = None, argument: str = "") -> str:
    """How many gains lie within 5 % of max(1, issue / busy), in a sentence."""
    found = predictions(rows)
    if not found:
        return NOTHING
    near = sum(abs(off - 1) <= WITHIN for _, _, off in found)
    above = [off for _, _, off in found if off > 1 + WITHIN]
    below = [off for _, _, off in found if off < 1 - WITHIN]
    hosts = len({point.host for _, point, _ in found})
    where = f"{hosts} host{'s' if hosts > 1 else ''}"
    text = f"In runs on {where}, {near} of {len(found)} graphs gain max(1, issue / busy) to within {100 * WITHIN:g} %, "
    text += "with the graph's own busy time"
    if above:
        text += f"; {len(above)} gain{'s' if len(above) == 1 else ''} up to {100 * (max(above) - 1):.1f} % more"
    if below:
        text += f"; {len(below)} gain{'s' if len(below) == 1 else ''} up to {100 * (1 - min(below)):.1f} % less"
    # What needs no capture, and what needs no thought.
    gains = [(point.ratio.ratio, point.early_prediction or 1.0) for _, point, _ in found if point.ratio is not None]
    before = sum(abs(gain / early - 1) <= WITHIN for gain, early in gains)
    none = sum(abs(gain - 1) <= WITHIN for gain, _ in gains)
    return (
        f'{text}. With eager\'s busy time, known before a capture, it holds for {before}; "no gain" holds for {none}.'
    )


def _law(rows, page, argument):
    return law(rows)


_TABLES = {"models": models, "decide": _decide, "model": _model, "nvidia": _nvidia, "law": _law, "memory": _memory}
