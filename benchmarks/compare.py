"""Tables of all runs below a folder, for a screen.

    python -m benchmarks.compare                     all that is published
    python -m benchmarks.compare runs --model gpt3

Exit status: 0; 1 where a file could not be read, which is named; 2 for a mistake on the command line.
"""

import sys
from pathlib import Path

from benchmarks import frame
from benchmarks.frame import Results
from benchmarks.pages import tables
from graph_worth.harness import command
from graph_worth.harness.command import Mistake, shown
from graph_worth.harness.pages.cells import counted


def found_in(root: str) -> Results:
    """The runs below a folder.

    Raises:
        Mistake: there is no such folder, or nothing in it.
    """
    path = Path(root)
    if not path.is_dir():
        raise Mistake(f"{root}: no such folder")
    results = frame.load(path)
    if not results.runs and not results.faults:
        raise Mistake(f"{root}: no run is there; make bench MODEL=... makes one")
    return results


def report(args) -> int:
    """Print the tables."""
    results = found_in(args.root)
    rows = results.rows[results.rows["model"] == args.model] if args.model else results.rows
    if args.model and rows.empty:
        known = ", ".join(sorted(results.rows["model"].unique()))
        raise Mistake(f"--model {args.model}: {args.root} has runs of {known or 'no model'}")
    if len(rows):
        print(tables.screen(results, rows))
    for fault in results.faults:
        print(f"left out: {fault}")
    if len(rows):
        hosts = counted(len({run.host.boot for _, run in results.runs}), "host")
        where = f"{hosts} in {shown(Path(args.root))}"
        print(f"\n{counted(len(results.runs), 'run')} on {where}. docs/method.md: how to read them; (3): 3 archived")
    return 1 if results.faults else 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("compare", "Tables of all runs below a folder.")
    add = parser.add_argument
    add("root", metavar="DIR", nargs="?", default="results", help="a root of runs, or a folder in one (results)")
    add("--model", metavar="NAME", help="of this model alone")
    args = parser.parse_args(argv)
    return command.exit_status("python -m benchmarks.compare", lambda: report(args))


if __name__ == "__main__":
    sys.exit(main())
