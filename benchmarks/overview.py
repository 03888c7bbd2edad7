"""One comparison over all folders of records below a root: every model, preset and variant against eager.

    python -m benchmarks.overview results
    python -m benchmarks.overview results --markdown            also --csv, --json; to stdout
    python -m benchmarks.overview results --write --readme      results/overview.*, and the tables in the READMEs

Each group of sessions is a block of rows; docs/method.md says how sessions and hosts pool. GPU types and CPUs
stand under headings of their own. A group measured beside busy processes joins the quiet group of the same
work as a column of its own. Break-even is the number of steps after which the variant has paid for its
compilation, its capture, and what its warm-up takes beyond eager's. A folder that holds sweep.json
is a sweep, with a table of its own. Reads records only: no torch, no GPU.

Exit status: 0; 1 where a file is no sound record, a folder cannot be shown, or there is nothing to show (the rest is
shown, but nothing is written); 2 for a mistake on the command line or in a README's marker.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pandas

from benchmarks import frame, overview_tables, readme
from benchmarks.command import parser_of
from benchmarks.overview_rows import blocks_of, rows_of
from benchmarks.published import PUBLISHED, RATES

SCHEMA = 4

# ------------------------------------------------------------------------------------------------
# For programs


def document(blocks, faults) -> dict:
    """The overview as JSON: rows with full precision, folders, published figures."""
    folders = [
        {
            "folder": block.name,
            **{key: getattr(block, key) for key in ("model", "preset", "device", "gpu", "num_gpus", "host_load")},
            "gpu_uuids": sorted({record["env"]["gpu_uuid"] for record in block.found} - {None}),
            "sessions": sorted(set(block.runs["session"])),
            "source_hashes": sorted(map(str, block.sources)),
            "git_shas": sorted({record["env"]["git_sha"] for record in block.found} - {None}),
            "num_records": len(block.found),
        }
        for block in blocks
    ]
    rows = [
        {key: value for key, value in row.items() if key not in ("label", "is_base", "pooled")}
        for row in rows_of(blocks)
    ]
    return {
        "schema": SCHEMA,
        "rows": rows,
        "folders": folders,
        "published": [asdict(each) for each in PUBLISHED],
        "published_rates": [asdict(each) for each in RATES],
        "left_out": faults,
    }


def csv_text(blocks) -> str:
    rows = document(blocks, [])["rows"]
    return pandas.DataFrame(rows, dtype=object).to_csv(index=False) if rows else ""


def json_text(blocks, faults) -> str:
    """The document with a line for each row, folder and figure."""
    whole = document(blocks, faults)
    lists = {
        key: ",\n  ".join(json.dumps(each, allow_nan=False) for each in whole[key]) for key in whole if key != "schema"
    }
    parts = [f'"schema": {SCHEMA}', *(f'"{key}": [\n  {text}\n ]' for key, text in lists.items())]
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def files_of(root, blocks, faults) -> dict[Path, str]:
    """overview.md, .csv and .json of a root, by path, as text."""
    root = Path(root)
    text = overview_tables.text_of(root, blocks, faults, markdown=True, link_from=root)
    return {
        root / "overview.md": f"# Every variant against eager\n\n{text}\n",
        root / "overview.csv": csv_text(blocks),
        root / "overview.json": json_text(blocks, faults),
    }


# ------------------------------------------------------------------------------------------------
# Command


def add_forms(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    for name, text in (("markdown", "Markdown"), ("csv", "the overview as CSV"), ("json", "the overview as JSON")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=f"print {text}")


def main(argv=None) -> int:
    parser = parser_of("overview", "One comparison over all folders of records below a root.")
    parser.add_argument("root", nargs="?", default="results", metavar="DIR", help="folder of folders (results)")
    add_forms(parser)
    parser.add_argument("--write", action="store_true", help="write overview.md, .csv and .json into DIR")
    parser.add_argument("--readme", action="store_true", help="make the tables in README.md and */README.md again")
    args = parser.parse_args(argv)
    try:
        runs = frame.read(args.root)
        blocks, faults, refused = blocks_of(runs, args.root)
    except FileNotFoundError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for line in [*(f"left out: {fault}" for fault in faults), *(f"refused: {line}" for line in refused)]:
        print(f"{parser.prog}: {line}", file=sys.stderr)
    if (faults or refused) and (args.write or args.readme):
        parser.exit(1, f"{parser.prog}: nothing written\n")
    if not blocks:
        parser.exit(1, f"{parser.prog}: {_nothing(args.root, runs)}\n")
    # All texts are made before the first is written.
    try:
        texts = files_of(args.root, blocks, faults) if args.write else {}
        texts |= readme.changed() if args.readme else {}
    except readme.ReadmeError as error:
        parser.exit(2, f"{parser.prog}: {error}: nothing written\n")
    for path, text in texts.items():
        path.write_text(text)
        print(path.relative_to(readme.ROOT) if path.is_relative_to(readme.ROOT) else path)
    if args.form == "csv":
        print(csv_text(blocks), end="")
    elif args.form == "json":
        print(json_text(blocks, faults), end="")
    elif args.form == "markdown" or not (args.write or args.readme):
        markdown = args.form == "markdown"
        print(overview_tables.text_of(args.root, blocks, faults, markdown=markdown, sweeps=runs.sweeps))
    return 1 if faults or refused else 0


def _nothing(root, runs):
    sweeps = runs.sweeps
    if not runs.frame.empty or not sweeps:
        return f"no records in or below {root}"
    more = ", ..." if len(sweeps) > 1 else ""
    return f"{root} holds sweeps alone: each has its table.md, and is shown by its own name ({sweeps[0]}{more})"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
