"""results/overview.md and .csv, and the tables in READMEs, made from the run files.

python -m benchmarks.overview              says what is not what the runs say; exit status 1 where something is not
python -m benchmarks.overview --write      makes it so
"""

import sys
from pathlib import Path

from benchmarks import ROOT, command
from benchmarks.command import shown
from benchmarks.compare import found_in
from benchmarks.files import runs
from benchmarks.pages import readme, tables
from common.files import write_text

# A table for people has at most eight columns.
TIME = ("workload", "variant", "issue ms", "busy ms", "predicted", "kernels", "in graphs", "parity")
MEMORY = ("workload", "variant", *(name for name in tables.WIDE if name not in TIME))


def parse(argv=None):
    """The command line."""
    parser = command.parser_of("overview", "Pages and tables in READMEs from the runs in results/.")
    parser.add_argument("--write", action="store_true", help="write what is not what the runs say")
    return parser.parse_args(argv)


def page_of(found: runs.Found, page: Path) -> str:
    """The text of overview.md."""
    hosts = len({run.host.get("boot") for _, run in found.runs})
    parts = [
        "# All runs",
        f"{len(found.runs)} runs on {hosts} host{'s' if hosts != 1 else ''}. Base ms / ms is the ratio; above 1 the "
        "variant is faster. *95 %* speaks for that host in those minutes, from three hosts on for hosts. `control` is "
        "the base once more: what two equal programs differ by. [How it is measured](../docs/method.md). Runs from "
        "before blocks are in [the archive](archive/README.md). All fields: [overview.csv](overview.csv).",
        "## The best-measured graph of each model",
        readme.models(found.rows, page),
    ]
    for machine, rows in runs.of_machines(found.rows).items():
        timed = [row for row in rows if row.status == "pass"]
        parts += [f"## {machine}", tables.rows_as_markdown(timed, page)]
        left = tables.not_timed_as_markdown(rows)
        parts += ["Without a number:", left] if left else []
        parts += ["Where a step's time goes:", tables.rows_as_markdown(timed, page, TIME)]
        parts += ["Rate, memory and capture:", tables.rows_as_markdown(timed, page, MEMORY)]
    parts += _predicted(found.rows)
    if found.faults:
        parts += ["## Left out", "\n".join(f"- {fault}" for fault in found.faults)]
    return "\n\n".join(parts) + "\n"


def _predicted(rows):
    points = readme.predictions(rows)
    if not points:
        return []
    lines = [
        [
            *(row.workload.name, row.variant, point.run.id, f"{point.base_issue_ms:,.1f}", f"{point.busy_ms:,.1f}"),
            *(f"{point.predicted_gain:.3f}x", f"{point.ratio.ratio:.3f}x", f"{off:.3f}"),
        ]
        for row, point, off in points
        if point.ratio is not None
    ]
    columns = ["workload", "variant", "run", "issue ms", "busy ms", "predicted", "ratio", "measured / predicted"]
    missed = [
        f"- {row.workload.name} {row.variant}, {point.run.id}: {point.why_missed}."
        for row, point, off in points
        if abs(off - 1) > readme.WITHIN
    ]
    return [
        "## Predicted from issue and busy",
        f"{readme.law(rows)} Issue is eager's and of the same cycles, busy the graph's own.",
        tables.markdown(columns, lines),
        *(["Where it misses:", "\n".join(missed)] if missed else []),
    ]


def wanted(found: runs.Found, root: Path = ROOT) -> dict[Path, str]:
    """Every file that is not what the runs say, with its right text."""
    page, sheet = found.root / "overview.md", found.root / "overview.csv"
    own = {page: page_of(found, page), sheet: tables.as_csv(found.rows)}
    own = {path: text for path, text in own.items() if not path.exists() or path.read_text() != text}
    return own | readme.changed(found.rows, root)


def work(args) -> int:
    """Compare, or write."""
    found = found_in(str(ROOT / "results"))
    stale = wanted(found)
    for path, text in stale.items():
        if args.write:
            write_text(path, text.encode())
        print(f"{'wrote' if args.write else 'is not what the runs say:'} {shown(path)}")
    for fault in found.faults:
        print(f"left out: {fault}")
    return 1 if found.faults or (stale and not args.write) else 0


def main(argv=None) -> int:
    """The program."""
    args = parse(argv)
    return command.exit_status("python -m benchmarks.overview", lambda: work(args), (readme.ReadmeError,))


if __name__ == "__main__":
    sys.exit(main())
