"""Rows as text: columns for a screen, as Markdown, or as CSV. A table for people has at most eight columns."""

import csv
import io
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from benchmarks import runs
from benchmarks.pages.markdown import in_markdown
from benchmarks.runs import Row
from graph_worth.harness import intervals
from graph_worth.harness.files.facts import digits
from graph_worth.harness.judge import PASS, judged
from graph_worth.harness.pages.run_table import GIB, milliseconds
from graph_worth.text import printable

SCREEN = 100
FEW = ("workload", "variant", "base ms over hosts", "ms over hosts", "gain over hosts", "at most", "hosts", "note")
ON_SCREEN = ("variant", "base ms", "ms", "gain", "95 % or range", "most", "on hosts", "note")
WIDE = (
    *("reached", "typical ms", "issue ms", "busy ms", "kernels", "in graphs", "parity", "TFLOP/s", "J a step", "MHz"),
    *("capture s", "alone GiB", "added GiB", "runs"),
)
# A row names the scatter of its base's blocks if they differ by more.
WIDE_SPREAD = 0.10
TEXT = ("workload", "variant", "note", "parity", "hosts", "on hosts")


def _interval(row):
    """The 95 % interval of a row with one run; "" of others."""
    return f"{row.interval[0]:.3f} to {row.interval[1]:.3f}" if row.interval else ""


def gain(row: Row) -> str:
    """The gain of one host, or its range over hosts."""
    if row.gain_range is None:
        return "base" if row.variant == row.base else ""
    if len(row.hosts) == 1:
        return f"{row.ratio:.3f}x"
    return f"{row.gain_range[0]:.3f} to {row.gain_range[1]:.3f}x"


def gain_and_interval(row: Row) -> str:
    """The gain of one host with its interval, or its range over hosts."""
    return f"{gain(row)} ({_interval(row)})" if row.interval else gain(row)


def two(over: runs.Range, unit: str = "") -> str:
    """A range with two decimals, as in 1.62 to 2.86x; one number where both ends read the same."""
    low, high = (f"{value:,.2f}" for value in over)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def with_range(value: float | None, over: runs.Range | None) -> str:
    """Ms with the range over hosts, as in 127.0 (126.8 to 129.0); without it where there is one host."""
    if value is None or over is None or over[0] == over[1]:
        return "" if value is None else digits(value)
    return f"{digits(value)} ({digits(over[0])} to {digits(over[1])})"


def note(row: Row) -> str:
    """All that a reader has to know beside the numbers. It rests on timed, passing runs alone."""
    texts = [row.word if row.word in ("same", "unclear") else ""]
    texts.append("" if row.base in ("eager", "", row.variant) or row.control else f"against {row.base}")
    texts.append("no eager variant passed" if not row.base and row.kind != "eager" else "")
    if row.timed and not row.control:
        part = row.newest.variant.traits.get("part")
        texts.append(f"its graphs hold {part} alone" if part else "")
        texts.append(_first_build(row.newest))
        texts.append("a process for each block" if any(point.variant.apart for point in row.timed) else "")
        texts += [_control_beside(row), _spread(row), _others(row), _slowed(row), _added(row)]
        texts += row.newest.judged.build.flops_notes
    texts.append("" if row.is_committed else "uncommitted source")
    return "; ".join(filter(None, texts))


def _first_build(point):
    """Name the base of the run's first build if it is faster: the ratio then overstates the gain."""
    first = next(iter(judged(point.run).values()))
    if first.base in ("", point.judged.base) or point.ratio is None:
        return ""
    ms = first.ms(first.base)
    return f"{first.base} of the other build: {digits(ms)} ms" if ms and ms < point.ratio.base_ms / 1.01 else ""


def _control_beside(row):
    """Name the control where the effect is small: two equal programs differed by so much in the same run."""
    if row.interval is None or abs(row.ratio - 1) >= intervals.SMALL_EFFECT:
        return ""
    point = row.timed[0]
    control = point.judged.ratio_of(point.run.control, point.is_busy) if point.run.control else None
    return f"control {control.ratio:.3f}x +- {100 * control.half_width:.1f} %" if control else ""


def _slowed(row):
    """Say by how much a base took longer than alone: such a run is no headline."""
    most = max(point.judged.slowed for point in row.timed)
    return f"{row.base} slowed {most:.2f} times in a run" if most else ""


def _others(row):
    """Say how many benchmarks ran on other GPUs of a row's hosts."""
    beside = [point.others for point in row.timed if point.others]
    if not beside:
        return ""
    text = f"{runs.counted(max(beside), 'benchmark')} on other GPUs"
    number = len(row.timed)
    return f"beside {text}" if number == 1 else f"{len(beside)} of {number} runs beside up to {text}"


def _spread(row):
    """Name the base's fastest and slowest block of one host if the host's pace made them differ."""
    if len(row.timed) != 1:
        return ""
    times = [block.mean_ms for block in row.timed[0].judged.blocks(row.base, row.timed[0].is_busy)]
    if not times or max(times) <= (1 + WIDE_SPREAD) * min(times):
        return ""
    return f"{row.base} {digits(min(times))} to {digits(max(times))} ms"


def _added(row):
    """Name the memory that a graph needs alone beyond eager alone, from half a GiB."""
    judged_build = row.newest_with_memory.judged
    added, steps = judged_build.added_bytes(row.variant) or 0, judged_build.added_bytes_in_steps(row.variant)
    if added < GIB / 2:
        return ""
    is_brief = steps is not None and added - steps >= GIB / 2
    return f"adds {added / GIB:.1f} GiB" + (f" in its capture, {steps / GIB:.1f} in steps" if is_brief else "")


def _scaled(number, format_, unit=""):
    return "" if number is None else f"{format(number, format_)}{unit}"


def _times(over):
    """A range as in 1.228 to 1.393x, or one number."""
    if over is None:
        return ""
    low, high = (f"{value:.3f}" for value in over)
    return f"{low}x" if low == high else f"{low} to {high}x"


def _number_of_hosts(row):
    return f"{len(row.hosts)} ({len(row.archived)})" if row.archived else str(len(row.hosts)) if row.hosts else ""


def _parity(row):
    return "" if row.control else row.newest.verdict.parity


def _of_newest(row, name):
    """A number of `Judged` in the newest run."""
    return getattr(row.newest.judged, name)(row.variant, row.newest.is_busy)


def _gib(size, places):
    return "" if size is None else f"{size / GIB:.{places}f}"


def _percent(share, places=0):
    return "" if share is None else f"{100 * share:.{places}f} %"


CELLS: dict[str, Callable[[Row], str]] = {
    "workload": lambda row: row.workload.name,
    "variant": lambda row: f"{row.variant} (base again)" if row.control else row.variant,
    "base ms": lambda row: milliseconds(row.base_ms) if row.ratio else "",
    "ms": lambda row: milliseconds(row.ms) if row.status == PASS else "",
    "base ms over hosts": lambda row: with_range(row.base_ms, row.base_ms_range),
    "ms over hosts": lambda row: with_range(row.ms, row.ms_range) if row.status == PASS else "",
    "gain": lambda row: gain(row) if len(row.hosts) < 2 else "",
    "95 % or range": lambda row: _interval(row) if len(row.hosts) < 2 else gain(row),
    "most": lambda row: "" if row.control else _scaled(row.median("ceiling"), ".3f", "x"),
    "on hosts": _number_of_hosts,
    "gain over hosts": gain_and_interval,
    "at most": lambda row: "" if row.control else _times(runs.range_of(row.over_runs("ceiling"))),
    "hosts": lambda row: row.hosts_text if row.hosts else "",
    "note": lambda row: note(row) if row.status == PASS else row.status,
    "reached": lambda row: "" if row.control else _percent(row.median("reached"), 1),
    "typical ms": lambda row: milliseconds(_of_newest(row, "typical_ms")) if row.status == PASS else "",
    "issue ms": lambda row: _scaled(row.median("issue_ms"), ",.1f"),
    "busy ms": lambda row: _scaled(row.median("busy_ms"), ",.1f"),
    "kernels": lambda row: _scaled(row.newest.variant.profile.kernels, ",.0f"),
    "in graphs": lambda row: _percent(row.newest.variant.profile.graph_share),
    "parity": _parity,
    "TFLOP/s": lambda row: _scaled(_of_newest(row, "tflops"), ".0f"),
    "J a step": lambda row: _scaled(_of_newest(row, "joules"), ".1f"),
    "MHz": lambda row: _scaled(_of_newest(row, "sm_mhz"), ".0f"),
    "capture s": lambda row: _scaled(row.newest.variant.capture.made_s, ".1f"),
    "alone GiB": lambda row: _gib(row.newest_with_memory.judged.alone_bytes(row.variant), 1),
    "added GiB": lambda row: _gib(row.newest_with_memory.judged.added_bytes(row.variant), 2),
    "runs": lambda row: str(len(row.timed)),
}


def screen(rows: list[Row], wide: bool = False) -> str:
    """Each workload's rows below its name; no line is longer than 100 characters unless `wide`."""
    columns = [*ON_SCREEN, *(WIDE if wide else ())]
    parts = []
    for machine, machine_rows in runs.of_machines(rows).items():
        lines = [machine]
        shown = [row for row in machine_rows if row.status == PASS]
        table = [columns, *([CELLS[name](row) for name in columns] for row in shown)]
        note_index = columns.index("note")
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines.append(_line(table[0], columns, widths))
        for before, row, line in zip([None, *shown], shown, table[1:], strict=False):
            if before is None or row.workload != before.workload:
                lines.append(row.workload.name)
            text = _line(line, columns, widths)
            if len(text) > SCREEN and not wide:
                note_text, line[note_index] = line[note_index], ""
                text = f"{_line(line, columns, widths)}\n      {note_text}"
            lines.append(text)
        lines += not_timed(machine_rows)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(line, columns, widths):
    padded = [
        text.ljust(width) if name in TEXT else text.rjust(width)
        for text, name, width in zip(line, columns, widths, strict=True)
    ]
    return ("  " + "  ".join(padded)).rstrip()


def not_timed(rows: list[Row]) -> list[str]:
    """Lines for what has no number, in all runs or in some, equal reasons together."""
    alike: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        left = [point for point in row.points if point.verdict.status != PASS]
        for point in left:
            where = f"{row.workload.name}, {point.run.id}" if len(left) < len(row.points) else row.workload.name
            alike[where, point.verdict.status, point.verdict.reason][row.variant] = None
    return [
        printable(f"{where}: {', '.join(names)}: {status}{f' ({reason})' if reason else ''}")
        for (where, status, reason), names in alike.items()
    ]


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    """A table of cells that are Markdown; columns of numbers stand to the right."""
    marks = [" --- " if name in TEXT or name[:1].isupper() else " ---: " for name in columns]
    return "\n".join(
        [f"| {' | '.join(columns)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(line)} |" for line in lines)]
    )


def rows_as_markdown(rows: list[Row], page: Path, columns=FEW) -> str:
    """Rows with links from `page` to the folders of their runs."""
    lines = []
    for row in rows:
        texts = {name: in_markdown(CELLS[name](row)) for name in columns}
        lines.append([*(texts | {"workload": linked(row.workload.name, row, page)}).values()])
    return markdown(list(columns), lines)


def linked(text: str, row: Row, page: Path) -> str:
    """A text with a link from `page` to the folder of a row's newest run."""
    path = Path(os.path.relpath(row.newest.path.parent, page.parent)).as_posix()
    return f"[{in_markdown(text)}]({quote(path)})"


def linked_file(text: str, path: Path, page: Path) -> str:
    """A text with a link from `page` to a run file."""
    return f"[{in_markdown(text)}]({quote(Path(os.path.relpath(path, page.parent)).as_posix())})"


def as_list(lines: list[str]) -> str:
    """A list of Markdown, of lines that are text."""
    return "\n".join(f"- {in_markdown(line)}" for line in lines)


_CSV: dict[str, Callable[[Row], object]] = {
    "machine": lambda row: row.workload.machine,
    "model": lambda row: row.workload.model,
    "preset": lambda row: row.workload.preset,
    "label": lambda row: row.workload.label,
    "build": lambda row: row.workload.build,
    "busy_processes": lambda row: row.workload.busy,
    "variant": lambda row: row.variant,
    "kind": lambda row: row.kind,
    "base": lambda row: row.base,
    "status": lambda row: row.status,
    "reason": lambda row: row.newest.verdict.reason,
    "base_ms": lambda row: row.base_ms,
    "base_ms_low": lambda row: row.base_ms_range and row.base_ms_range[0],
    "base_ms_high": lambda row: row.base_ms_range and row.base_ms_range[1],
    "ms": lambda row: row.ms,
    "ms_low": lambda row: row.ms_range and row.ms_range[0],
    "ms_high": lambda row: row.ms_range and row.ms_range[1],
    "gain": lambda row: row.ratio,
    "gain_low": lambda row: row.gain_range and row.gain_range[0],
    "gain_high": lambda row: row.gain_range and row.gain_range[1],
    "interval_low": lambda row: row.interval and row.interval[0],
    "interval_high": lambda row: row.interval and row.interval[1],
    "ceiling": lambda row: row.median("ceiling"),
    "reached": lambda row: row.median("reached"),
    "cycles": lambda row: row.cycles,
    "hosts": lambda row: len(row.hosts),
    "archived_hosts": lambda row: len(row.archived),
    "runs": lambda row: len(row.timed),
    "issue_ms": lambda row: row.median("issue_ms"),
    "base_issue_ms": lambda row: row.median("base_issue_ms"),
    "busy_ms": lambda row: row.median("busy_ms"),
    "note": lambda row: note(row) if row.status == PASS else "",
}


def as_csv(rows: list[Row]) -> str:
    """All fields of all rows, unrounded."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_CSV)
    writer.writerows([value(row) for value in _CSV.values()] for row in rows)
    return file.getvalue()
