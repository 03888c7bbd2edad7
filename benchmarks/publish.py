"""Copy packed sessions, unchanged, into results/; say whether what is there is as it was; list sessions.

    python -m benchmarks.publish publish runs/h200x1/gpt3-bench/20261122T031500Z-13f405-c77b
    python -m benchmarks.publish verify results
    python -m benchmarks.publish list runs

Exit status: 0; 1 where something is refused or damaged, with a line for each; 2 for a mistake on the command line.
"""

import sys
from pathlib import Path

from benchmarks import ROOT, compare, sessions
from benchmarks.command import parser_of


def main(argv=None) -> int:
    parser = parser_of("publish", "Sessions of records.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="publish|verify|list")
    one = commands.add_parser("publish", help="copy packed sessions into results/")
    one.add_argument("sessions", nargs="+", type=Path, metavar="SESSION")
    one.add_argument("--into", type=Path, default=ROOT / "results", metavar="DIR", help="results/")
    for name, text, default in (
        ("verify", "whether published files are as they were", "results"),
        ("list", "sessions below a root", "runs"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("root", nargs="?", type=Path, default=ROOT / default, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        return {"publish": _publish, "verify": _verify, "list": _list}[args.command](args)
    except (sessions.Damaged, sessions.Refused) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{parser.prog}: {error.filename or error}: {error.strerror or ''}".rstrip(": "), file=sys.stderr)
        return 1


def _publish(args):
    for session in args.sessions:
        target = sessions.publish(session, args.into)
        compare.write_summary(target.parent)
        print(f"{target}\n{target.parent}/: table.md and summary.csv made again")
    print("make readme writes the overview and the tables of the READMEs; then commit all of it")
    return 0


def _verify(args):
    faults = sessions.verify(args.root)
    for fault in faults:
        print(f"{args.root}/{fault}")
    print(f"{len(sessions.find(args.root))} sessions, {len(faults)} faults")
    return 1 if faults else 0


def _list(args):
    for path in sessions.find(args.root):
        meta = sessions.read_meta(path)
        number = len(sessions.record_files(path)) if sessions.is_open(path) else meta.get("num_records")
        state = "open" if sessions.is_open(path) else meta.get("closed") or "closed"
        print(f"{path.parent.relative_to(args.root)}/{path.name}  {number} records  {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
