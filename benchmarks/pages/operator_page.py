"""The table of docs/operators.md, from the file that benchmarks/operators.py writes."""

from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.frame import Results
from benchmarks.pages import tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.measuring.operator_table import AGAINST, INSTEAD, PASSES, meaning_of, newest


def markdown(results: Results, page: Path, argument: str = "") -> str:
    """Return the counts of operators, a line for each refused one that has a replacement, and the names of the rest."""
    newest_file = newest(results.root)
    if newest_file is None:
        return "Not measured on a GPU yet."
    path, file = newest_file
    counts = [
        Counter(operator[kind]["outcome"] for operator in file["operators"].values() if kind in operator)
        for kind in PASSES
    ]
    lines: list[list[str]] = []
    others: dict[str, list[str]] = defaultdict(list)
    for name, passes in file["operators"].items():
        against = [kind for kind in PASSES if passes.get(kind, {}).get("outcome") in AGAINST]
        if not against:
            continue
        first = passes[against[0]]
        samples, why = meaning_of(first["why"])
        if name in INSTEAD:
            lines.append([f"`{name}`", *map(in_markdown, (samples, why)), f"`{INSTEAD[name]}`"])
            continue
        tried, _, total = samples.partition(" of ")
        where = "all samples" if tried == total else "some samples"
        where = "the backward alone" if against == ["backward"] else where
        others[f"{first['outcome'].capitalize()} in {where}"].append(f"`{name}`")
    summary = "; ".join(
        f"{kind}: {', '.join(f'{number} {outcome}' for outcome, number in outcomes.most_common())}"
        for kind, outcomes in zip(PASSES, counts, strict=True)
    )
    source = tables.linked_file(f"torch {file['torch']}, {file['gpu']}", path, page)
    table = tables.markdown(["Operator", "Refused samples", "Why", "Instead"], lines)
    return "\n\n".join(
        [f"{source}: {summary}.", table, *(f"{where}: {', '.join(names)}." for where, names in others.items())]
    )
