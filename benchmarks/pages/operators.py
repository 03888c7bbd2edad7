"""The table of docs/operators.md, from the file that benchmarks/operators.py writes."""

from collections import Counter
from pathlib import Path

from benchmarks.pages import tables
from benchmarks.runs import Found
from common.measuring.operator_table import AGAINST, INSTEAD, PASSES, meaning_of, newest
from common.text import in_markdown


def markdown(found: Found, page: Path, argument: str = "") -> str:
    """How many operators a graph holds, and a line for each that it does not hold or replays wrongly."""
    own = newest(found.root)
    if own is None:
        return "Not measured on a GPU yet."
    path, file = own
    counts = [Counter(each[kind]["outcome"] for each in file["operators"].values() if kind in each) for kind in PASSES]
    lines = []
    for name, passes in file["operators"].items():
        against = [kind for kind in PASSES if passes.get(kind, {}).get("outcome") in AGAINST]
        if against:
            texts = [passes[kind]["outcome"] if kind in passes else "" for kind in PASSES]
            instead = f"`{INSTEAD[name]}`" if name in INSTEAD else ""
            lines.append([f"`{name}`", *texts, *map(in_markdown, meaning_of(passes[against[0]]["why"])), instead])
    said = "; ".join(
        f"{kind}: {', '.join(f'{number} {outcome}' for outcome, number in own.most_common())}"
        for kind, own in zip(PASSES, counts, strict=True)
    )
    source = tables.linked_file(f"torch {file['torch']}, {file['gpu']}", path, page)
    names = ["Operator", "Forward", "Backward", "Samples", "Why", "Instead"]
    return f"{source}: {said}.\n\n{tables.markdown(names, lines)}"
