"""Memory and steps of parameterized launches beside eager and other graphs, each variant alone in a process."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks import runs
from benchmarks.pages import headlines, tables
from benchmarks.pages.markdown import in_markdown
from benchmarks.runs import Found
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.run_table import GIB, milliseconds

VARIANT = "graph_parameterized"
COLUMNS = ("Run", "Variant", "ms", "gain", "steps GiB", "peak GiB", "driver GiB", "patched")


def markdown(results: Found, page: Path, _: str = "") -> str:
    """The table: newest run of each workload that measured parameterized launches on a GPU."""
    lines: list[list[str]] = []
    refused: list[str] = []
    for row in runs.on_gpus(results.rows):
        if row.variant != VARIANT:
            continue
        if row.status == PASS:
            lines += _of_run(row, page)
        else:
            refused.append(f"{row.workload.name}: {row.newest.verdict.reason}")
    if not lines and not refused:
        return "Not measured on a GPU yet."
    refused_text = "\n\nRefused:\n\n" + tables.as_list(refused) if refused else ""
    return tables.markdown(list(COLUMNS), lines) + refused_text


def _of_run(row, page) -> Iterator[list[str]]:
    point = row.newest_with_memory
    judged = point.judged
    gpu = in_markdown(headlines.short(row.workload.gpu))
    link = tables.linked_file(f"{row.workload.name} ({gpu})", point.path, page)
    for name, variant in judged.build.variants.items():
        if variant.alone is None or not judged.passed(name):
            continue
        ratio, alone = judged.ratio_of(name), variant.alone
        report = variant.capture.report or {}
        patched = report.get("patched_per_launch")
        yield [
            link,
            f"`{name}`",
            milliseconds(judged.ms(name)),
            f"{ratio.ratio:.3f}x" if ratio else "base",
            *(_gib(size) for size in (alone.steps_reserved_bytes, alone.peak_reserved_bytes, alone.driver_bytes)),
            "" if patched is None else f"{patched:.1f}",
        ]
        link = ""


def _gib(size) -> str:
    return "" if size is None else f"{size / GIB:.2f}"
