"""Tables inside of READMEs, made from runs.

A table stands between two markers and is made again by `make readme`; a test fails where one is not what the runs say:

    <!-- table: models -->      the best-measured graph of each model
    <!-- table: model gpt3 -->  all rows of a model on GPUs
    <!-- table: decide -->      what to do, by step / busy, with a measured row each
    <!-- table: nvidia -->      NVIDIA's published gains beside the rows of the same mechanism
    <!-- table: ceiling -->     how many graphs reached step / busy, in a sentence or two
    <!-- end -->
"""

import re
from pathlib import Path

from benchmarks import ROOT, runs, statistics
from benchmarks.files.facts import stem
from benchmarks.judge import PASS
from benchmarks.pages import published, tables
from benchmarks.runs import Row
from common.text import in_markdown

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BEGIN, END = "<!-- table:", "<!-- end -->"
SUBMITTED = "NVIDIA's submission: "
FIGURES = ("ms over hosts", "base ms over hosts", "gain over hosts", "at most")
NOTHING = "Nothing has been measured on a GPU yet."
# Runs begun later show whether the rule on step / busy holds, which was found on earlier ones.
RULE_WRITTEN = "2026-11-25T20:45:00Z"
# Bounds of step / busy, in words, and what to do.
BANDS = (
    (1.2, float("inf"), "above 1.2", "Capture the whole step, or as much of it as you can."),
    (1.05, 1.2, "1.05 to 1.2", "Try it; on a slower host it gains more."),
    (0.0, 1.05, "below 1.05", "Leave it eager, unless other hosts issue slower."),
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


def models(rows: list[Row], page: Path, argument: str = "") -> str:
    """The best-measured graph of each model; models that NVIDIA submitted stand there without a run, too."""
    best = {row.workload.model: row for row in runs.best_measured(runs.on_gpus(rows))}
    if not best:
        return NOTHING
    lines = []
    for model in dict.fromkeys([*(own.model for own in published.published()), *best]):
        own, row = published.of_model(model), best.get(model)
        title = own.title if own else model
        if row is None:
            graphs = [each for each in runs.on_gpus(rows) if (each.workload.model, each.kind) == (model, "graph")]
            seen = [f"no graph has a time ({tables.linked(each.status, each, page)})" for each in graphs[:1]]
            lines.append([in_markdown(title), *(seen or ["not measured in blocks yet"]), *[""] * 5])
            continue
        captured = f"{in_markdown(row.newest.variant.help.removeprefix(SUBMITTED))} ({_code(row.variant)})"
        numbers = [tables.CELLS[name](row) for name in FIGURES]
        hosts = f"{row.hosts_text} ({in_markdown(row.workload.gpu.removeprefix('NVIDIA '))})"
        name = tables.linked(f"{title}, {row.workload.preset}", row, page)
        lines.append([name, captured, *numbers, hosts])
    return tables.markdown(["Workload", "Captured", "graph ms", "eager ms", "gain", "at most", "hosts"], lines)


def _code(name):
    """A name as code, in which Markdown escapes nothing."""
    return f"`{name}`" if re.fullmatch(r"[\w. -]+", name, re.ASCII) else in_markdown(name)


def _decide(rows, page, argument):
    """By step / busy of eager: what to do, and the best-measured row of such a step."""
    best = runs.best_measured(runs.on_gpus(rows))
    lines = []
    for low, high, name, advice in BANDS:
        seen = []
        for row in best:
            ceiling = row.median("ceiling")
            if ceiling and low <= ceiling < high:
                link = tables.linked(row.workload.name, row, page)
                seen.append(f"{link} {ceiling:.2f}: {tables.gain_and_interval(row)}, {row.hosts_text}")
        lines.append([name, advice, "<br>".join(seen) or "not measured yet"])
    return tables.markdown(["Step / busy", "What to do", "Measured here"], lines)


def _model(rows, page, argument):
    own = [row for row in runs.on_gpus(rows) if row.workload.model == argument]
    timed = [row for row in own if row.status == PASS]
    if not timed:
        return "Not measured in blocks on a GPU yet."
    left = tables.as_list(tables.not_timed(own))
    return tables.rows_as_markdown(timed, page) + (f"\n\nWithout a number:\n\n{left}" if left else "")


def _nvidia(rows, page, argument):
    lines = []
    for own in published.published():
        found = [
            row
            for row in runs.on_gpus(rows)
            if (row.workload.model, row.variant) == (own.model, own.variant)
            and not row.workload.busy
            and stem(row.workload.preset) in own.presets
        ]
        order = list(own.presets)

        def rank(row, order=order):
            where = row.workload
            return not row.ratio, order.index(stem(where.preset)), where.ranks, -len(row.hosts), where.build

        here, differs = "not measured yet", next(reversed(own.presets.values()))
        if found:
            row = min(found, key=rank)
            text = f"{tables.gain_and_interval(row)}, {row.hosts_text}" if row.ratio else row.status
            here = f"{tables.linked(row.workload.name, row, page)} {in_markdown(row.variant)}: {in_markdown(text)}"
            gpus = f"{row.workload.ranks} {in_markdown(row.workload.gpu.removeprefix('NVIDIA '))}"
            differs = f"{gpus}: {own.presets[stem(row.workload.preset)]}"
        lines.append([own.title, own.mechanism, f"[{own.gain_range}]({own.source})", here, differs])
    return tables.markdown(
        ["Workload", "NVIDIA's mechanism", "NVIDIA's gain", "Here, same scope", "What differs"], lines
    )


def ceiling_text(rows: list[Row], page: Path | None = None, argument: str = "") -> str:
    """Return how many graphs reached step / busy, in a sentence or two."""
    found = runs.reached(rows)
    if not found:
        return NOTHING
    hosts = {each.point.host for each in found}
    most = max(each.share for each in found) - 1
    text = f"In runs on {runs.counted(len(hosts), 'host')}, none of {len(found)} graphs gained over "
    text += f"{100 * max(most, 0.0):.1f} % more than step / busy of the uncaptured step."
    after = [each for each in found if each.point.run.begin_utc > RULE_WRITTEN]
    if not after:
        return text
    parts = []
    for gains, what in ((True, f"over {100 * statistics.NEAR:g} %"), (False, "less")):
        own = [each for each in after if (each.ceiling > 1 + statistics.NEAR) == gains]
        near = sum(each.share >= 1 - statistics.NEAR for each in own)
        parts += [f"{near} of {len(own)} graphs that could gain {what}"] if own else []
    return f"{text} In runs made after this rule was written, {' and '.join(parts)} reached it to within 5 %."


def misses(rows: list[Row]) -> list[str]:
    """Return a line for each graph that stayed more than 5 % below its ceiling, with the cause."""
    lines = []
    for each in runs.reached(rows):
        variant, point, own = each.row.variant, each.point, each.point.judged
        base_busy, busy, ms = own.busy_ms(own.uncaptured(variant)), point.busy_ms, own.ms(variant, point.is_busy)
        if each.share >= 1 - statistics.NEAR or not base_busy or not busy or not ms:
            continue
        clocks = own.sm_mhz(variant, point.is_busy), own.sm_mhz(own.base, point.is_busy)
        said = f"its kernels take {100 * (busy / base_busy - 1):+.1f} %"
        if None not in clocks:
            said += f" (GPU at {clocks[0]:,.0f} MHz, {own.base} at {clocks[1]:,.0f})"
        said += f", its GPU waits for {100 * max(0.0, 1 - busy / ms):.1f} % of the step"
        name = f"{each.row.workload.name} {variant}, {point.run.id}"
        lines.append(f"{name}: {100 * each.share:.1f} % of {each.ceiling:.3f}x; {said}.")
    return lines


_TABLES = {"models": models, "decide": _decide, "model": _model, "nvidia": _nvidia, "ceiling": ceiling_text}
