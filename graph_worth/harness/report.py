"""One page about a run, for a browser: its verdict, why, blocks over time, and a step before and after.

    python -m benchmarks.report runs/h200x1/gpt3-bench/ID.json         writes ID.html beside it
    python -m benchmarks.report RUN.json --out page.html

The page is one file without a link to anything, readable on a phone, light and dark.
"""

import math
import sys
from pathlib import Path

from graph_worth.files import write_text
from graph_worth.harness import command, judge
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Run
from graph_worth.harness.judge import Judged
from graph_worth.harness.pages import roofline, web
from graph_worth.harness.pages import run_table as table
from graph_worth.harness.pages.cells import milliseconds


def page_of(run: Run, findings: str = "", verdict: str = "") -> str:
    """Return the page of a run, with the doctor's findings, and a verdict in the place of that of the run's numbers."""
    gpus = sorted({gpu.name for gpu in run.host.gpus})
    builds = judge.judged(run)
    sentences = table.verdicts_of(builds)
    data = [{"blocks": web.blocks(judged), "timelines": _timelines(judged)} for judged in builds.values()]
    return web.page(
        {"builds": data},
        run=run,
        machine=f"{run.ranks} x {', '.join(gpus)}" if gpus else f"CPU, {run.host.cores or '?'} cores",
        findings=findings,
        verdict=verdict or (table.on_a_cpu(builds.values()) if run.device == "cpu" else ""),
        builds=[_build(name, judged, sentences.get(name, "")) for name, judged in builds.items()],
    )


def _build(name: str, judged: Judged, verdict: str) -> dict:
    rows = [_row(judged, variant_name) for variant_name in web.timed(judged)]
    best = max((row for row in rows if row["is_graph"]), key=lambda row: row["low"], default=None)
    return {
        "title": table.build_title(name, judged.build.fields, judged.build.apart),
        "verdict": verdict or ("" if best else "No graph has a time."),
        "rows": rows,
        "has_memory": any(row["cells"]["GiB"] for row in rows),
        "faults": [(variant_name, verdict) for variant_name, verdict in judged.verdicts.items() if verdict.reason],
        "unchecked": table.unchecked(judged),
        "why": _why(judged, best["name"] if best else ""),
        "roofline": _roofline(judged),
        "rates": table.rates(judged),
    }


def _row(judged: Judged, name: str) -> dict:
    """A variant that passed, as a row of the table. Times and ratios are of quiet cycles."""
    variant, is_control, ratio = judged.build.variants[name], name == judged.run.control, judged.ratio_of(name)
    return {
        "name": name,
        "cells": table.cells_of(judged, name),
        "kind": "control" if is_control else variant.kind,
        "is_graph": ratio is not None and not is_control and variant.kind != "eager",
        "help": variant.help,
        "typical": milliseconds(judged.typical_ms(name)),
        "low": ratio.low if ratio else 0.0,
    }


def _why(judged: Judged, best: str) -> dict | None:
    """The base's step with its busy and its idle part, and the step of the best graph, as bars."""
    if judged.run.device != "cuda" or not judged.base:
        return None
    base_ms, sentence = judged.ms(judged.base), table.busy_sentence(judged)
    busy_ms, ceiling = judged.working(judged.base).value, judged.ceiling(judged.base)
    share, ms = (judged.reached(best), judged.ms(best)) if best else (None, None)
    if not busy_ms or not base_ms or not ceiling:
        return {"bars": [], "text": sentence} if sentence else None
    idle = max(0.0, 1 - busy_ms / base_ms)
    text = sentence.removesuffix(".") + (f"; {best} reached {100 * share:.1f} % of that." if share else ".")
    widest = max(base_ms, busy_ms, ms or 0.0)
    bars = [
        {
            "kind": "eager",
            "text": f"{judged.base}, {milliseconds(base_ms)} ms: the GPU is idle for {100 * idle:.0f} % of it",
            "width": 100 * base_ms / widest,
            "busy": 100 * min(1.0, busy_ms / base_ms),
        }
    ]
    if best and ms:
        kind = judged.build.variants[best].kind
        bars.append({"kind": kind, "text": f"{best}, {milliseconds(ms)} ms", "width": 100 * ms / widest, "busy": 100})
    return {"bars": bars, "text": text}


# Of the roofline's drawing, whose width is 360: left, right, top and bottom of the plot.
PLOT = (38.0, 344.0, 8.0, 186.0)


def _roofline(judged: Judged) -> dict | None:
    """The points of a build, and lines of hosts, at places of the drawing; None without any."""
    points = roofline.points_of(judged)
    if not points:
        return None
    gains = [point.gain or point.expected for point in points]
    across, up = roofline.limits([point.kernel_us for point in points], gains)
    left, right, top, bottom = PLOT

    def place(us: float, ratio: float) -> tuple[float, float]:
        x, y = (math.log(value / low) / math.log(high / low) for value, (low, high) in ((us, across), (ratio, up)))
        return round(left + x * (right - left), 1), round(bottom - y * (bottom - top), 1)

    def path(host_us: float) -> str:
        return " ".join(f"{x},{y}" for x, y in (place(*corner) for corner in roofline.line(host_us, across, up[1])))

    colors = web.timed(judged)
    return {
        "plot": PLOT,
        "text": roofline.sentence(points),
        "hosts": [(path(us), place(us, 1.0)[0], us) for us in roofline.HOSTS],
        "foot": place(across[0], 1.0)[1],
        "here": [path(host_us) for host_us in dict.fromkeys(point.host_us for point in points)],
        "across": [(place(us, 1.0)[0], us) for us in roofline.ticks(roofline.KERNELS, across, 0.1)],
        "up": [(place(across[0], ratio)[1], ratio) for ratio in roofline.ticks(roofline.GAINS, up, 0.1)],
        "points": [
            (*place(point.kernel_us, ratio), colors.get(point.name, "eager0"), f"{point.name}, {ratio:.2f}x")
            for point, ratio in zip(points, gains, strict=True)
        ],
        "is_expected": points[0].gain is None,
    }


def _timelines(judged: Judged) -> list[dict]:
    """Busy intervals in ms of one profiled step of each variant, as report.js draws them."""
    timelines = []
    for name, color in web.timed(judged).items():
        profile, busy_ms, ms = judged.build.variants[name].profile, judged.busy_ms(name), judged.ms(name)
        spans = [span for span in profile.timeline_us if len(span) == 2 and 0 <= span[0] <= span[1]]
        if name == judged.run.control or not profile.timeline_step_us or not spans:
            continue
        length_ms = profile.timeline_step_us / 1e3
        text = f"{name}: {milliseconds(ms)} ms"
        if busy_ms and ms:
            text += f", the GPU is idle for {100 * max(0.0, 1 - busy_ms / ms):.0f} % of it"
        text += f" ({milliseconds(length_ms)} ms under the profiler, as drawn)"
        in_ms = [[round(end / 1e3, 4) for end in span] for span in spans]
        timelines.append({"name": name, "text": text, "color": color, "length": length_ms, "spans": in_ms})
    return timelines


def write(path: Path, out: Path | None = None, findings: str = "", verdict: str = "") -> Path:
    """Write the page of a run file, by default beside it, and return its path.

    Raises:
        Mistake: the file is no run.
    """
    try:
        page = page_of(run_file.read(path), findings, verdict)
    except run_file.Damaged as error:
        raise command.Mistake(str(error)) from None
    target = out or path.with_suffix(".html")
    write_text(target, page)
    return target


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = command.parser_of("report", "One page about a run, for a browser.")
    parser.add_argument("run", metavar="RUN.json", type=Path, help="a run file")
    parser.add_argument("--out", metavar="PAGE.html", type=Path, help="the page (beside the run file)")
    args = parser.parse_args(argv)

    def work() -> int:
        print(command.shown(write(args.run, args.out).absolute()))
        return 0

    return command.exit_status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
