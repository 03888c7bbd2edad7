"""All runs below a folder as one page for a browser: filters, the figure, a step of your own, and blocks over time.

    python -m benchmarks.site                    results/ as runs/site.html
    python -m benchmarks.site runs --out mine.html

The page loads nothing and is made of run files alone. Exit status: 0; 1 where there is no run; 2 for a mistake.
"""

import os
import re
import sys
from pathlib import Path
from urllib.parse import quote

from benchmarks import command, runs
from benchmarks.command import Mistake, shown
from benchmarks.judge import PASS
from benchmarks.pages import readme, tables, web
from benchmarks.pages.run_table import build_title
from benchmarks.runs import Point, Reached, Row
from common.files import write_text
from common.folders import OWN_STEP

CELLS = ("base ms over hosts", "ms over hosts", "gain over hosts", "at most")
COLUMNS = ("workload", "variant", "GPU", "base ms", "ms", "gain", "at most")
FILTERS = {"model": "all models", "gpu": "all GPUs", "ranks": "any number", "variant": "all variants"}


def page_of(found: runs.Found, page: Path) -> str:
    """Return the text of a page that will stand at a path, from which links to run files start."""
    rows = sorted(found.rows, key=lambda row: row.workload.model == OWN_STEP)
    points = {id(point.judged): point for row in rows for point in row.points}
    order = sorted(points.values(), key=lambda point: (_name(point), point.run.begin_utc))
    numbers = {id(point.judged): number for number, point in enumerate(order)}
    places = {id(row): place for place, row in enumerate(rows)}
    data = {
        "rows": [_row(row) | {"run": numbers[id(row.newest.judged)]} for row in rows],
        "marks": [
            _mark(mark) | {"row": places[id(mark.row)], "run": numbers[id(mark.point.judged)]}
            for mark in sorted(runs.reached(rows), key=lambda mark: mark.ceiling)
        ],
        "runs": [_run(point, found.root, page) for point in order],
    }
    hosts = len({run.host.boot for _, run in found.runs})
    return web.page(
        "site.html.j2",
        ["site.js"],
        data,
        text=readme.ceiling_text(rows),
        counted=f"{runs.counted(len(found.runs), 'run')} on {runs.counted(hosts, 'host')}",
        filters=FILTERS,
        columns=COLUMNS,
        faults=found.faults,
    )


def _short(gpu: str) -> str:
    """Return H100 for NVIDIA H100 80GB HBM3."""
    return re.sub(r" \d+GB.*", "", gpu.removeprefix("NVIDIA "))


def _row(row: Row) -> dict:
    where, verdict = row.workload, row.newest.verdict
    gpu = _short(where.gpu)
    texts = [tables.CELLS[name](row) for name in CELLS]
    return {
        "model": where.label if where.model == OWN_STEP else where.model,
        "gpu": gpu,
        "ranks": where.ranks,
        "variant": row.variant,
        "cells": [
            where.name,
            tables.CELLS["variant"](row),
            f"{where.ranks} x {gpu}" if where.ranks > 1 else gpu,
            *texts,
        ],
        "hosts": tables.CELLS["hosts"](row),
        "note": tables.note(row) if row.status == PASS else f"{verdict.status}: {verdict.reason}",
    }


def _mark(mark: Reached) -> dict:
    """A point of the figure. Its ceiling is the base's step / the busy time of the uncaptured program."""
    point, row = mark.point, mark.row
    cells = web.cells_of(point.judged, point.name, point.is_busy)
    ratio = point.ratio
    base_ms = ratio.base_ms if ratio else 0.0
    gain = " ".join(filter(None, [cells["ratio"], cells["95 %"] and f"({cells['95 %']})"]))
    text = f"{row.workload.name} {row.variant}, {row.workload.machine}\n"
    text += f"{cells['base ms']} to {cells['ms']} ms: {gain} of {mark.ceiling:.3f}x at most"
    return {"x": mark.ceiling, "y": mark.gain, "base": base_ms, "busy": base_ms / mark.ceiling, "text": text}


def _name(point: Point) -> str:
    run, build = point.run, point.judged.build
    names = [name for name, own in run.builds.items() if own is build]
    label = run.label if run.label != run.title else ""
    return " ".join(filter(None, [run.title, label, *(build_title(name, build.fields) for name in names)]))


def _run(point: Point, root: Path, page: Path) -> dict:
    run, gpus = point.run, sorted({_short(gpu.name) for gpu in point.run.host.gpus})
    machine = f"{run.ranks} x {', '.join(gpus)}" if gpus else "CPU"
    return {
        "name": f"{_name(point)}, {machine}, {run.begin_utc[:16].replace('T', ' ')}",
        "text": f"{run.id}, torch {run.versions.get('torch', '?')}",
        "path": (Path(root.name) / point.path.relative_to(root)).as_posix(),
        "href": quote(Path(os.path.relpath(point.path.resolve(), page.parent.resolve())).as_posix()),
        "blocks": web.blocks(point.judged),
    }


def work(args) -> int:
    """Write the page; return the exit status."""
    root, page = Path(args.root), args.out or command.RUNS / "site.html"
    if not root.is_dir():
        raise Mistake(f"{root}: no such folder")
    found = runs.read(root)
    for fault in found.faults:
        print(f"left out: {fault}")
    if not found.runs:
        print(f"no page: no run is in {root}; make bench MODEL=... makes one", file=sys.stderr)
        return 1
    write_text(page, page_of(found, page))
    print(f"{runs.counted(len(found.runs), 'run')} in {shown(page.absolute())}")
    return 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("site", "All runs below a folder as one page for a browser.")
    parser.add_argument("root", metavar="ROOT", nargs="?", default="results", help="a root of runs (results)")
    parser.add_argument("--out", metavar="PAGE.html", type=Path, help="the page (runs/site.html)")
    args = parser.parse_args(argv)
    return command.exit_status("python -m benchmarks.site", lambda: work(args), stopped="")


if __name__ == "__main__":
    sys.exit(main())
