"""One page about a run, for a browser: its verdict, why, blocks over time, a step before and after, memory.

    python -m benchmarks.report runs/h200x1/gpt3-bench/ID.json         writes ID.html beside it
    python -m benchmarks.report RUN.json --out page.html

The page is one file without a link to anything, readable on a phone, light and dark.
"""

import argparse
import math
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape

from benchmarks import command, statistics
from benchmarks.files import run_file
from benchmarks.files.run_file import Build, Run
from benchmarks.pages.run_table import build_title, milliseconds, rates
from common.files import write_text

TEMPLATE = "report.html.j2"
GIB = 2**30


def page_of(run: Run, findings: str = "", verdict: str = "") -> str:
    """Return the page of a run.

    Args:
        run: of `benchmarks.files.run_file`.
        findings: the doctor's text, or "".
        verdict: in a sentence, in the place of the one that the run's numbers give.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "pages"), autoescape=select_autoescape(default=True)
    )
    gpus = sorted({gpu["name"] for gpu in run.host.get("gpus", [])})
    facts = {
        "run": run,
        "machine": f"{run.ranks} x {', '.join(gpus)}" if gpus else f"CPU, {run.host.get('cores', '?')} cores",
        "findings": findings,
        "builds": [
            _build(run, name, build) | ({"verdict": verdict} if verdict else {})
            for name, build in run.builds.items()
            if build.base in build.variants
        ],
    }
    return environment.get_template(TEMPLATE).render(facts)


def _build(run: Run, name: str, build: Build) -> dict:
    rows = [_row(run, build, variant) for variant in build.variants]
    timed = [row for row in rows if row["ms"] is not None]
    graphs = [row for row in timed if row["kind"] in ("graph", "compile") and row["ratio"]]
    best = max(graphs, key=lambda row: row["low"], default=None)
    return {
        "title": build_title(name, build.fields),
        "verdict": _verdict(run, best, build.base),
        "rows": rows,
        "why": _why(build),
        "rates": rates(run, build),
        "series": _series(build, [row["name"] for row in timed]),
        "timelines": [found for row in timed if (found := _timeline(build, row["name"]))],
    }


def _row(run, build, name) -> dict:
    own = build.variants[name]
    ratio = build.ratio_of(name) if own.status == "pass" else None
    times = [block.step_ms for block in own.blocks if not block.busy_processes]
    ms = math.exp(sum(map(math.log, times)) / len(times)) if times and own.status == "pass" else None
    parity = own.parity.result if own.parity and name != run.control else ""
    added = own.capture.get("bytes_added")
    return {
        "name": f"{name} (base again)" if name == run.control else name,
        "kind": "control" if name == run.control else own.kind,
        "help": own.help,
        "status": own.status,
        "reason": own.reason,
        "ms": ms,
        "ms_text": milliseconds(ms),
        "is_base": name == build.base,
        "ratio": f"{ratio.ratio:.3f}x" if ratio and name != build.base else "",
        "interval": f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio and ratio.cycles > 1 and name != build.base else "",
        "low": ratio.low if ratio else 0.0,
        "word": statistics.word(ratio) if ratio and ratio.cycles > 1 else "",
        "parity": parity,
        "added": f"{added / GIB:.2f} GiB" if added is not None and own.kind != "eager" else "",
    }


def _verdict(run, best, base) -> str:
    if run.device == "cpu":
        return "On a CPU this shows that the variants train alike. It says nothing about the speed of a GPU."
    if best is None:
        return "No graph has a time."
    word = {"faster": "is faster than", "slower": "is slower than", "same": "is as fast as"}.get(best["word"])
    said = f"{best['name']} {word} {base}" if word else f"Whether {best['name']} is faster than {base} is unclear"
    return f"{said}: {best['ratio']}, {best['interval']}, on this host in these minutes."


def _why(build: Build) -> dict | None:
    """Issue and busy of the base as two bars."""
    base = build.variants[build.base]
    issue, busy = base.issue_ms(), base.profile.get("busy_ms")
    if not issue or not busy:
        return None
    gain = statistics.predicted_gain(issue, busy)
    return {
        "bars": [
            {"label": "host: issue", "text": milliseconds(issue), "width": 100 * issue / max(issue, busy)},
            {"label": "GPU: busy", "text": milliseconds(busy), "width": 100 * busy / max(issue, busy)},
        ],
        "text": f"The GPU waits for the host: issue / busy is {gain:.2f}."
        if gain > 1.01
        else "The host is faster than the GPU: a graph has little to remove.",
    }


def _series(build: Build, names: list[str]) -> dict:
    """Ms of each variant's blocks in the order of time, as points of a chart of 600 x 220."""
    plain = [name.removesuffix(" (base again)") for name in names]
    blocks = {name: build.variants[name].blocks for name in plain}
    order = sorted({(block.cycle, block.place) for own in blocks.values() for block in own})
    if not order:
        return {}
    step = 560 / max(1, len(order) - 1)
    where = {place: 30 + index * step for index, place in enumerate(order)}
    every = [block.step_ms for own in blocks.values() for block in own]
    top = 1.05 * max(every)
    lines = []
    for index, (name, own) in enumerate(blocks.items()):
        points = [(where[(b.cycle, b.place)], 200 - 185 * b.step_ms / top) for b in own]
        points.sort()
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append({"name": name, "points": points, "text": text, "color": index % 7})
    unit = 10 ** math.floor(math.log10(top))
    tick = next(unit * factor for factor in (5, 2, 1, 0.5) if unit * factor <= top / 1.5)
    marks = [{"y": 200 - 185 * n * tick / top, "text": f"{n * tick:g}"} for n in range(1, int(top / tick) + 1)]
    return {"lines": lines, "marks": marks}


def _timeline(build: Build, name: str) -> dict | None:
    """Busy intervals of one step, as rectangles of a strip 600 wide."""
    profile = build.variants.get(name.removesuffix(" (base again)"))
    if profile is None or " (base" in name or not profile.profile.get("timeline_us"):
        return None
    found = [own.profile.get("timeline_step_us") or 0.0 for own in build.variants.values()]
    longest = max(found) or 1.0
    spans = [(start / longest * 600, (end - start) / longest * 600) for start, end in profile.profile["timeline_us"]]
    length_us = profile.profile["timeline_step_us"]
    return {"name": name, "spans": spans, "width": length_us / longest * 600, "text": milliseconds(length_us / 1e3)}


def write(path: Path, out: Path | None = None, findings: str = "", verdict: str = "") -> Path:
    """Write the page of a run file, beside it unless told, and return its path.

    Raises:
        benchmarks.files.run_file.Damaged: the file is no run.
    """
    page = page_of(run_file.read(path), findings, verdict)
    target = out or path.with_suffix(".html")
    write_text(target, page)
    return target


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("report", "One page about a run, for a browser.")
    parser.add_argument("run", metavar="RUN.json", type=Path, help="a run file")
    parser.add_argument("--out", metavar="PAGE.html", type=Path, help="the page (beside the run file)")
    args: argparse.Namespace = parser.parse_args(argv)

    def work() -> int:
        try:
            print(command.shown(write(args.run, args.out).absolute()))
        except run_file.Damaged as error:
            raise command.Mistake(str(error)) from None
        return 0

    return command.exit_status("python -m benchmarks.report", work)


if __name__ == "__main__":
    sys.exit(main())
