"""The table of a sweep, for the screen and as Markdown."""

import textwrap

from benchmarks.pages.run_table import milliseconds
from common.config import flag_of

COLUMNS = ("base ms", "ms", "ratio", "95 %", "word", "issue ms", "busy ms", "predicted")
WIDTH = 100


def ratio(point: dict) -> str:
    """Return a point's ratio as people read it, or its status."""
    interval = f" ({point['low']:.3f} to {point['high']:.3f})" if point["low"] else ""
    return point["status"] if point["ratio"] is None else f"{point['ratio']:.3f}x{interval}  {point['word']}"


def report(result: dict, left_out: list[str], is_markdown: bool = False) -> str:
    """Return finding, table and notes, in lines of at most WIDTH characters.

    Args:
        result: what sweep.json holds.
        left_out: a line for each file that does not count.
        is_markdown: for table.md, else for the screen.
    """
    finding, notes = textwrap.fill(result["finding"], WIDTH - 4), [*_notes(result), *left_out]
    mark = "- " if is_markdown else ""
    notes = [textwrap.fill(note, WIDTH, initial_indent=mark, subsequent_indent="  ") for note in notes]
    rows = [(result["over"], *COLUMNS), *map(_row, result["points"])]
    if is_markdown:
        lines = [f"| {' | '.join(row)} |" for row in [rows[0], ["--:"] * len(rows[0]), *rows[1:]]]
        return "\n\n".join([f"**{finding}**", "\n".join(lines), "\n".join(notes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "\n\n".join(["\n".join(lines), "\n".join(notes), finding])


def _row(point):
    interval = f"{point['low']:.3f} to {point['high']:.3f}" if point["low"] else "-"
    base_ms, ms, issue_ms, busy_ms = (milliseconds(point[name]) for name in ("base_ms", "ms", "issue_ms", "busy_ms"))
    own, predicted = (f"{point[name]:.3f}x" if point[name] else "-" for name in ("ratio", "predicted"))
    word = point["word"] or point["status"]
    return (str(point["value"]), base_ms, ms, own, interval, word, issue_ms, busy_ms, predicted)


def _notes(result):
    over, (first, *others) = result["over"], map(flag_of, result["fields"])
    notes = [f"{over} {each['value']}: {each['message']}" for each in result["points"] if each["message"]]
    what = f"{over} is {first} of {result['model']}, preset {result['preset']}; {result['variant']} against eager"
    what += f"; {', '.join(others)} in proportion" if others else ""
    what += f"; beside {result['host_load']} busy processes" if result["host_load"] else ""
    versions = [f"{name} {text}" for name, text in sorted(result["versions"].items()) if text]
    sources = f"source {' and '.join(result['sources']) or 'unknown'}"
    return [*notes, what, ", ".join([f"{result['gpu'] or 'CPU'} x{result['ranks']}", *versions, sources])]
