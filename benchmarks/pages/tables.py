"""Rows as text: columns for a screen, as Markdown, or as CSV. A table for people has at most eight columns."""

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.files import runs
from benchmarks.files.run_file import printable
from benchmarks.files.runs import Row
from benchmarks.pages.run_table import milliseconds

SCREEN = 100
FEW = ("workload", "variant", "base ms", "ms", "ratio", "95 %", "cycles, hosts", "note")
WIDE = (
    "issue ms",
    "busy ms",
    "predicted",
    "kernels",
    "in graphs",
    "parity",
    "TFLOP/s",
    "capture s",
    "reserved GiB",
    "added GiB",
    "runs",
)
TEXT = ("workload", "variant", "note", "parity")


def interval(row: Row) -> str:
    """The 95 % interval, or the range of runs where there is none; "" of one cycle."""
    if row.ratio is None:
        return ""
    if row.low is not None:
        return f"{row.low:.3f} to {row.high:.3f}" if row.low else ""
    return f"runs {row.lowest:.3f} to {row.highest:.3f}"


def count(row: Row) -> str:
    """Return cycles and hosts, as in 8, 1 host."""
    return f"{row.cycles}, {runs.counted(row.hosts, 'host')}" if row.cycles else ""


def cells(row: Row, column: str) -> str:
    """The text of a column."""
    return _CELLS[column](row)


def _scaled(number, format_):
    return "" if number is None else format(number, format_)


def _of_variant(row, part, key):
    return getattr(row.newest.variant, part).get(key)


def _parity(row):
    own = row.newest.variant.parity
    return "" if row.control or own is None else own.result


def _added(row):
    added = _of_variant(row, "capture", "bytes_added")
    return "" if added is None else f"{added / 2**30:.2f}"


def _share(row):
    share = _of_variant(row, "profile", "graph_share")
    return "" if share is None else f"{100 * share:.0f} %"


_CELLS: dict[str, Callable[[Row], str]] = {
    "workload": lambda row: row.workload.name,
    "variant": lambda row: f"{row.variant} (base again)" if row.control else row.variant,
    "base ms": lambda row: milliseconds(row.base_ms) if row.ratio else "",
    "ms": lambda row: milliseconds(row.ms) if row.status == "pass" else "",
    "ratio": lambda row: f"{row.ratio:.3f}x" if row.ratio else "base" if row.variant == row.base else "",
    "95 %": interval,
    "cycles, hosts": count,
    "note": lambda row: row.note if row.status == "pass" else row.status,
    "issue ms": lambda row: _scaled(row.median("issue_ms"), ",.1f"),
    "busy ms": lambda row: _scaled(row.median("busy_ms"), ",.1f"),
    "predicted": lambda row: (
        _scaled(row.median("predicted_gain"), ".3f") + "x" if row.ratio and row.median("predicted_gain") else ""
    ),
    "kernels": lambda row: _scaled(_of_variant(row, "profile", "kernels"), ",.0f"),
    "in graphs": _share,
    "parity": _parity,
    "TFLOP/s": lambda row: _scaled(row.tflops, ".0f"),
    "capture s": lambda row: _scaled(_of_variant(row, "capture", "made_s"), ".1f"),
    "reserved GiB": lambda row: _scaled(row.reserved_gib, ".1f"),
    "added GiB": _added,
    "runs": lambda row: str(len(row.points)),
}


# ------------------------------------------------------------------------------------------------
# A screen


def screen(rows: list[Row], wide: bool = False) -> str:
    """Each workload's rows below its name; no line is longer than 100 characters unless `wide`."""
    columns = [name for name in (*FEW, *(WIDE if wide else ())) if name != "workload"]
    parts = []
    for machine, own in runs.of_machines(rows).items():
        lines = [machine]
        shown = [row for row in own if row.status == "pass"]
        table = [columns, *([cells(row, name) for name in columns] for row in shown)]
        widths = [max(len(line[index]) for line in table) for index in range(len(columns))]
        note = columns.index("note")
        lines.append(_line(table[0], columns, widths))
        before = None
        for row, line in zip(shown, table[1:], strict=True):
            if row.workload != before:
                lines.append(row.workload.name)
                before = row.workload
            text = _line(line, columns, widths)
            if len(text) > SCREEN and not wide:
                said, line[note] = line[note], ""
                text = f"{_line(line, columns, widths)}\n      {said}"
            lines.append(text)
        lines += _not_timed(own)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(line, columns, widths):
    padded = [
        text.ljust(width) if name in TEXT else text.rjust(width)
        for text, name, width in zip(line, columns, widths, strict=True)
    ]
    return ("  " + "  ".join(padded)).rstrip()


def _not_timed(rows):
    """Lines for what has no number, equal reasons together."""
    alike: dict = {}
    for row in rows:
        if row.status != "pass":
            alike.setdefault((row.workload.name, row.status, row.reason), []).append(row.variant)
    return [
        printable(f"{where}: {', '.join(names)}: {status}{f' ({reason})' if reason else ''}")
        for (where, status, reason), names in alike.items()
    ]


# ------------------------------------------------------------------------------------------------
# Markdown and CSV


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    """A table of Markdown; columns of numbers stand to the right."""
    marks = [" --- " if name in TEXT or name[:1].isupper() else " ---: " for name in columns]
    rows = [[_plain(text) for text in line] for line in lines]
    return "\n".join(
        [f"| {' | '.join(columns)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _plain(text):
    """A cell that ends no column, no line and no table of a README."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<!--", "< !--")


def rows_as_markdown(rows: list[Row], page: Path, columns=FEW) -> str:
    """Rows with links from `page` to the folders of their runs."""
    lines = [[_linked(row, page) if name == "workload" else cells(row, name) for name in columns] for row in rows]
    return markdown(list(columns), lines)


def _linked(row, page):
    folder = os.path.relpath(row.newest.path.parent, page.parent)
    return f"[{row.workload.name}]({Path(folder).as_posix()})"


def not_timed_as_markdown(rows: list[Row]) -> str:
    """A list of what has no number, and why; "" where all have."""
    return "\n".join(f"- {line}" for line in _not_timed(rows))


def as_csv(rows: list[Row]) -> str:
    """All fields of all rows, unrounded."""
    names: tuple[str, ...] = (
        "machine",
        "model",
        "preset",
        "label",
        "build",
        "busy_processes",
        "variant",
        "kind",
        "base",
        "status",
    )
    names += ("reason", "base_ms", "ms", "ratio", "low", "high", "lowest", "highest", "cycles", "hosts", "runs")
    names += ("issue_ms", "base_issue_ms", "busy_ms", "predicted", "note")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        where = row.workload
        own = (row.variant, row.kind, row.base, row.status, row.reason, row.base_ms, row.ms)
        over = (row.ratio, row.low, row.high, row.lowest, row.highest, row.cycles, row.hosts, len(row.points))
        medians = [row.median(name) for name in ("issue_ms", "base_issue_ms", "busy_ms", "predicted_gain")]
        place = (where.machine, where.model, where.preset, where.label, where.build, where.busy)
        writer.writerow([*place, *own, *over, *medians, row.note])
    return file.getvalue()
