"""Rows as text: columns for a screen, as Markdown, or as CSV. A table for people has at most eight columns."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

from pandas import DataFrame

from benchmarks import frame
from benchmarks.crossing import LEAST_GAIN
from benchmarks.frame import Results, Row
from benchmarks.pages.markdown import in_markdown
from graph_worth.harness.best import EAGER
from graph_worth.harness.judge import ESTIMATED, PASS
from graph_worth.harness.pages import cells
from graph_worth.harness.pages.cells import cell, gib, milliseconds, percent, span, times, with_span
from graph_worth.harness.standing import BESIDE, OUT
from graph_worth.text import printable

SCREEN = 100
# Decimals of ranges on pages for people.
TWO = ",.2f"
FEW = ("workload", "variant", "base ms over hosts", "ms over hosts", "gain over hosts", "at most", "hosts", "note")
# Of a model's page; the hosts stand behind the gain.
OF_MODEL = ("workload", "variant", "base ms over hosts", "ms over hosts", "gain, hosts", "at most", "fastest", "note")
ON_SCREEN = ("variant", "base ms", "ms", "gain", "95 % or range", "most", "on hosts", "note")
TEXT = ("workload", "variant", "note", "parity", "hosts", "on hosts", "fastest")
# Columns of overview.csv, a row of `frame.rows` each.
CSV = (
    *("machine", "model", "preset", "label", "build", "busy_processes", "variant", "kind", "base", "status", "reason"),
    *("base_ms", "base_ms_low", "base_ms_high", "ms", "ms_low", "ms_high", "gain", "gain_low", "gain_high"),
    *("interval_low", "interval_high", "ceiling", "reached", "cycles", "hosts", "archived_hosts", "runs"),
    *("issue_ms", "base_issue_ms", "busy_ms", "standing", "unknown_hosts"),
    *("beside_low", "beside_high", "beside_hosts", "headline", "note"),
)


def at_most(row: Row, text: str) -> str:
    """A text of a row's ceiling, with a word where it is estimated or where there is none."""
    if row.control or not row.ceiling_note:
        return "" if row.control else text
    return f"{text} ({row.ceiling_note})" if text and row.ceiling_note == ESTIMATED else text or cells.NO_CEILING


def gain(row: Row) -> str:
    """The gain of one host, or its range over hosts."""
    if row.gain is None:
        return "base" if row.variant == row.base else ""
    return times(row.gain) if row.hosts == 1 else f"{cells.interval(row.gain_low, row.gain_high)}x"


def gain_and_interval(row: Row) -> str:
    """The gain of one host with its interval, or its range over hosts."""
    interval = cells.interval(row.interval_low, row.interval_high)
    return f"{gain(row)} ({interval})" if interval else gain(row)


# Words before the gains of a row whose runs do not count.
_BEFORE = {BESIDE: "beside other work ", **dict.fromkeys(OUT, "no headline: ")}


def with_beside(text: str, row: Row, form: str = ".3f") -> str:
    """A row's gain, and behind it the gains beside other work."""
    text = f"{_BEFORE.get(row.standing, '')}{text}" if row.gain is not None else text
    apart = cells.beside(row.beside_low, row.beside_high, (row.gain_low, row.gain_high), form)
    return "; ".join(filter(None, [text, apart]))


def gain_range(row: Row) -> str:
    """The gain as pages for people have it, with two decimals; "" without any."""
    return with_beside(span(row.gain_low, row.gain_high, TWO, "x"), row, TWO)


def gain_and_hosts(row: Row, gpu: str = "") -> str:
    """The same with the number of hosts behind the range that they are of; `gpu`: their name."""
    return _behind_first(gain_range(row), cells.hosts_text(row.hosts, row.archived_hosts, row.unknown_hosts, gpu))


def _behind_first(gains: str, hosts_text: str) -> str:
    """Gains, with the hosts behind the first range."""
    first, *more = gains.split("; ")
    return "; ".join([", ".join(filter(None, [first, hosts_text])), *more]) if first else ""


def hosts(row: Row) -> str:
    """The number of a row's hosts, archived and unknown ones marked."""
    return cells.hosts_text(row.hosts, row.archived_hosts, row.unknown_hosts * (row.gpu != "CPU"))


def _advice(row: Row) -> str:
    before = _BEFORE.get(row.standing, "").replace("work ", "work: ")
    return row.fastest and f"{before}{row.fastest}{'; gains under 5 %' * _is_small(row)}"


def _is_small(row: Row) -> bool:
    return row.fastest not in ("", EAGER) and (row.gain or LEAST_GAIN) < LEAST_GAIN


CELLS: dict[str, Callable[[Row], str]] = {
    "workload": lambda row: row.workload,
    "variant": lambda row: f"{row.variant} (base again)" if row.control else row.variant,
    "base ms": lambda row: cell(row.base_ms),
    "ms": lambda row: milliseconds(row.ms) if row.status == PASS else "",
    "base ms over hosts": lambda row: with_span(row.base_ms, row.base_ms_low, row.base_ms_high),
    "ms over hosts": lambda row: with_span(row.ms, row.ms_low, row.ms_high) if row.status == PASS else "",
    "gain": lambda row: gain(row) if row.hosts < 2 else "",
    "95 % or range": lambda row: cells.interval(row.interval_low, row.interval_high) if row.hosts < 2 else gain(row),
    "most": lambda row: at_most(row, times(row.ceiling)),
    "on hosts": lambda row: str(row.hosts or "") + (f" ({row.archived_hosts})" if row.archived_hosts else ""),
    "gain over hosts": lambda row: with_beside(gain_and_interval(row), row),
    "gain, hosts": lambda row: _behind_first(with_beside(gain_and_interval(row), row), hosts(row) if row.hosts else ""),
    "fastest": lambda row: _advice(row),
    "at most": lambda row: at_most(row, span(row.ceiling_low, row.ceiling_high, ".3f", "x")),
    "hosts": lambda row: hosts(row) if row.hosts else "",
    "note": lambda row: row.note if row.status == PASS else row.status,
    "reached": lambda row: "" if row.control else percent(row.reached, 1),
    "typical ms": lambda row: milliseconds(row.typical_ms) if row.status == PASS else "",
    "issue ms": lambda row: cell(row.issue_ms, ",.1f"),
    "busy ms": lambda row: cell(row.busy_ms, ",.1f"),
    "kernels": lambda row: cell(row.kernels, ",.0f"),
    "in graphs": lambda row: percent(row.graph_share),
    "parity": lambda row: "" if row.control else row.parity,
    "TFLOP/s": lambda row: cell(row.tflops, ".0f"),
    "J a step": lambda row: cell(row.joules, ".1f"),
    "MHz": lambda row: cell(row.sm_mhz, ".0f"),
    "capture s": lambda row: cell(row.made_s, ".1f"),
    "alone GiB": lambda row: gib(row.alone_bytes),
}


def by_machine(rows: DataFrame) -> dict[str, DataFrame]:
    """Return machine -> its rows, first the machine with most rows, last CPUs."""
    groups = {str(machine): group for machine, group in rows.groupby("machine", sort=False)}
    return dict(sorted(groups.items(), key=lambda item: (item[0].startswith("CPU"), -len(item[1]), item[0])))


def screen(results: Results, rows: DataFrame) -> str:
    """Rows of runs below their workload's name; no line is longer than 100 characters."""
    columns, parts = list(ON_SCREEN), []
    for machine, machine_rows in by_machine(rows).items():
        lines = [machine]
        shown = frame.records(machine_rows[machine_rows["status"] == PASS])
        table = [columns, *([CELLS[name](row) for name in columns] for row in shown)]
        note_index = columns.index("note")
        for row, line in zip(shown, table[1:], strict=True):
            apart = cells.beside(row.beside_low, row.beside_high, (row.gain_low, row.gain_high))
            line[note_index] = "; ".join(filter(None, [apart, line[note_index]]))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines.append(_line(table[0], columns, widths))
        for before, row, line in zip([None, *shown], shown, table[1:], strict=False):
            if before is None or frame.where_of(row) != frame.where_of(before):
                lines.append(row.workload)
            text = _line(line, columns, widths)
            if len(text) > SCREEN:
                note_text, line[note_index] = line[note_index], ""
                text = f"{_line(line, columns, widths)}\n      {note_text}"
            lines.append(text)
        lines += not_timed(results, machine_rows)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(line, columns, widths):
    padded = [
        text.ljust(width) if name in TEXT else text.rjust(width)
        for text, name, width in zip(line, columns, widths, strict=True)
    ]
    return ("  " + "  ".join(padded)).rstrip()


def not_timed(results: Results, rows: DataFrame) -> list[str]:
    """Lines for what has no number, in all runs or in some, equal reasons together."""
    points = results.points[results.points["row"].isin(rows["row"])]
    left = points[points["status"] != PASS]
    is_in_all = left["row"].map(points.groupby("row")["run"].size()) == left.groupby("row")["run"].transform("size")
    where = left["workload"].where(is_in_all, left["workload"] + ", " + left["run"])
    alike = left.assign(where=where).groupby(["where", "status", "reason"], sort=False)["variant"]
    return [
        printable(f"{where}: {', '.join(names)}: {status}{f' ({reason})' if reason else ''}")
        for (where, status, reason), names in alike.unique().items()
    ]


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    """A table of cells that are Markdown; columns of numbers stand to the right."""
    marks = [" --- " if name in TEXT or name[:1].isupper() else " ---: " for name in columns]
    return "\n".join(
        [f"| {' | '.join(columns)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(line)} |" for line in lines)]
    )


def rows_as_markdown(rows: Iterable[Row], page: Path, columns=FEW) -> str:
    """Rows with links from `page` to the folders of their runs."""
    lines = []
    for row in rows:
        texts = {name: in_markdown(CELLS[name](row)) for name in columns}
        lines.append([*(texts | {"workload": linked(row.workload, row, page)}).values()])
    return markdown(list(columns), lines)


def linked(text: str, row: Row, page: Path) -> str:
    """A text with a link from `page` to the folder of a row's newest run."""
    return linked_file(text, Path(row.path).parent, page)


def linked_file(text: str, path: Path, page: Path) -> str:
    """A text with a link from `page` to a run file."""
    return f"[{in_markdown(text)}]({relative(path, page)})"


def relative(path: Path, page: Path) -> str:
    """The address of a file in a link from `page`."""
    return quote(Path(os.path.relpath(path, page.parent)).as_posix())


def as_list(lines: list[str]) -> str:
    """A list of Markdown, of lines that are text."""
    return "\n".join(f"- {in_markdown(line)}" for line in lines)


def as_csv(rows: DataFrame) -> str:
    """Columns of all rows, unrounded."""
    return rows[list(CSV)].to_csv(index=False, lineterminator="\n")
