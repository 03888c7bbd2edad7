"""Every row of a table in a README is a row of a table that was made from committed records."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def rows(path):
    """Data rows of the Markdown tables that `compare` writes: those under a header that begins with `variant`."""
    lines, found, inside = path.read_text().splitlines(), [], False
    for line in lines:
        if line.startswith("| variant |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("| ---"):
            found.append(line)
    return found


def test_every_row_of_the_readme_stands_in_a_committed_table():
    committed = {line for table in (ROOT / "results").rglob("table.md") for line in rows(table)}
    shown = rows(ROOT / "README.md")
    assert shown and set(shown) <= committed


@pytest.mark.parametrize("folder", sorted((ROOT / "results").glob("*/*")), ids=lambda path: path.name)
def test_committed_tables_follow_from_their_records(folder):
    from benchmarks import compare

    found, faults = compare.load(folder)
    assert found and not faults
    written = rows(folder / "table.md")
    assert written == rows_of(compare.markdown_table(compare.summarise(found)))


def rows_of(table):
    return [
        line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| variant", "| ---"))
    ]
