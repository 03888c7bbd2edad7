"""Memory and steps of parameterized launches beside eager and other graphs, each variant alone in a process."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import Results, Row
from benchmarks.pages import headlines, tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.cells import gib, milliseconds, times
from graph_worth.harness.standing import SLOWED

VARIANT = "graph_parameterized"
COLUMNS = ("Run", "Variant", "ms", "gain", "steps GiB", "peak GiB")


def markdown(results: Results, page: Path, _: str = "") -> str:
    """The table: newest run of each workload that measured parameterized launches on a GPU, without a known fault."""
    lines: list[list[str]] = []
    refused: list[str] = []
    rows = results.rows
    for row in results.records((rows["variant"] == VARIANT) & (rows["gpu"] != "CPU") & (rows["standing"] != SLOWED)):
        if row.status == PASS:
            lines += _of_run(results, row, page)
        else:
            refused.append(f"{row.workload}: {row.reason}")
    if not lines and not refused:
        return "Not measured on a GPU yet."
    refused_text = "\n\nRefused:\n\n" + tables.as_list(refused) if refused else ""
    return tables.markdown(list(COLUMNS), lines) + refused_text


def _of_run(results: Results, row: Row, page: Path) -> Iterator[list[str]]:
    builds = results.builds_of(row.memory_run, row.build)
    # Variants that stand apart have an eager of their own.
    judged_by_name = {name: judged for judged in reversed(builds) for name in judged.build.variants}
    gpu = in_markdown(headlines.short(row.gpu))
    link = tables.linked_file(f"{row.workload} ({gpu})", Path(row.memory_path), page)
    for name in dict.fromkeys(name for judged in builds for name in judged.build.variants):
        judged = judged_by_name[name]
        variant = judged.build.variants[name]
        if variant.alone is None or not judged.passed(name):
            continue
        ratio, alone = judged.ratio_of(name), variant.alone
        yield [
            link,
            f"`{name}`",
            milliseconds(judged.ms(name)),
            times(ratio.ratio) if ratio else "base",
            *(gib(size, 2) for size in (alone.steps_reserved_bytes, alone.peak_reserved_bytes)),
        ]
        link = ""
