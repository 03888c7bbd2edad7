"""NVIDIA's rules of thumb and its reasons why a captured step is not faster, each beside published runs.

The rules are those of NVIDIA's guide, "CUDA Graph Best Practice for PyTorch". What no run shows says so.
"""

import math
import statistics as plain
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import runs
from benchmarks.files.workload import workload_of
from benchmarks.judge import PASS
from benchmarks.pages import tables
from benchmarks.runs import Found, Point, Reached

LARGE_KERNEL_US = 50.0
NOT_MEASURED = "not measured"
RULES = (
    "A step that keeps the GPU busy for less than 80 % is a candidate.",
    "A graph saves 1 to 5 us a kernel.",
    "Above 90 % a graph still gains 1.05x to 1.15x.",
    f"Large kernels (here {LARGE_KERNEL_US:.0f} us and more, in the mean) gain 1.1x to 1.4x.",
    "Steps vary by 3 to 10 % without graphs, by less than 1 to 2 % with them.",
    "Ranks vary by 5 to 20 % without graphs, by less than 2 % with them.",
)
REASONS = (
    "The GPU is the limit (here: step / busy below 1.05).",
    "The graph holds the wrong part of the step.",
    "Too many small graphs.",
    "Copies of inputs before each replay.",
    "Gradient hooks wait for the end of a captured backward, so the all-reduce does not run beside it.",
    "More streams than the device's 32 connections: kernels that ran side by side run in turn.",
)


def markdown(found: Found, page: Path, argument: str = "") -> str:
    """The table of rules, or with the argument "reasons" that of reasons, with "ranks" that of several ranks."""
    if argument == "ranks":
        return _ranks(found, page)
    marks = [mark for mark in runs.reached(runs.on_gpus(found.rows)) if mark.row.kind == "graph"]
    quiet = [mark for mark in marks if not mark.point.is_busy]
    if argument == "reasons":
        cells: tuple[Callable, ...] = (_gpu_bound, _parts, _small_graphs, _copies, _hooks, _unknown)
        texts = [cell(found, quiet, page) for cell in cells]
        lines = [[reason, text] for reason, text in zip(REASONS, texts, strict=True)]
        return tables.markdown(["Reason", "Our runs"], lines)
    own = (
        _gains(quiet, page, lambda mark: mark.ceiling > 1 / 0.8),
        _saved(quiet, page),
        _gains(quiet, page, lambda mark: mark.ceiling < 1 / 0.9),
        _gains(quiet, page, lambda mark: (_kernel_us(mark.point) or 0) >= LARGE_KERNEL_US),
        _variation(quiet, page),
        _skew(found),
    )
    return tables.markdown(["Rule", "Our runs"], [[rule, text] for rule, text in zip(RULES, own, strict=True)])


def _gains(marks: Sequence[Reached], page: Path, holds: Callable[[Reached], bool]) -> str:
    """The number of graphs, and those that gain least and most."""
    own = sorted((mark for mark in marks if holds(mark)), key=lambda mark: mark.gain)
    if not own:
        return NOT_MEASURED
    num_gain = sum(mark.gain > 1.05 for mark in own)
    text = f"{num_gain} of {runs.counted(len(own), 'graph')} gained over 5 %. Least: {_gain(own[0].point, page)}."
    return f"{text} Most: {_gain(own[-1].point, page)}."


def _gain(point: Point, page: Path) -> str:
    """The gain of a graph in one run, its interval and a link to the run."""
    ratio = point.ratio
    assert ratio is not None
    link = tables.linked_file(f"{workload_of(point.run).name} {point.name}", point.path, page)
    return f"{link} {ratio.ratio:.3f}x ({ratio.low:.3f} to {ratio.high:.3f})"


def _kernels(point: Point) -> float | None:
    return point.judged.build.variants[point.judged.uncaptured(point.name)].profile.kernels


def _kernel_us(point: Point) -> float | None:
    """Mean time of a kernel of the uncaptured program on the GPU."""
    busy, kernels = point.judged.busy_ms(point.judged.uncaptured(point.name)), _kernels(point)
    return 1e3 * busy / kernels if busy and kernels else None


def _saved_us(point: Point) -> float | None:
    kernels = _kernels(point)
    return 1e3 * (point.ratio.base_ms - point.ratio.variant_ms) / kernels if kernels and point.ratio else None


def _saved(marks: Sequence[Reached], page: Path) -> str:
    own = [(saved, mark) for mark in marks if mark.ceiling > 1 / 0.8 and (saved := _saved_us(mark.point)) is not None]
    if not own:
        return NOT_MEASURED
    own.sort(key=lambda each: each[0])
    (low, first), (high, last) = own[0], own[-1]
    text = f"{low:.1f} to {high:.1f} us in {runs.counted(len(own), 'graph')} of steps below 80 %"
    return f"{text}, from {_gain(first.point, page)} to {_gain(last.point, page)}."


def _variation(marks: Sequence[Reached], page: Path) -> str:
    """Standard deviation / mean of all timed steps of a run, of eager and of its graphs."""
    eager: dict[str, tuple[float, Point]] = {}
    graphs = []
    # A build that validates has two kinds of steps.
    for point in (mark.point for mark in marks if not mark.row.workload.build):
        for name, is_base in ((point.judged.base, True), (point.name, False)):
            blocks = point.judged.blocks(name, False)
            times = [ms for block in blocks for ms in block.step_ms]
            # A step that runs again takes twice as long for a reason of its own.
            if len(times) > 1 and not any(block.reruns for block in blocks):
                value = plain.stdev(times) / plain.fmean(times), point
                graphs += [] if is_base else [value]
                if is_base:
                    eager[point.run.id] = value
    if not graphs or not eager:
        return NOT_MEASURED
    texts = []
    for name, own in (("Eager", list(eager.values())), ("Graphs", graphs)):
        most, point = max(own, key=lambda each: each[0])
        middle = plain.median(value for value, _ in own)
        link = tables.linked_file(workload_of(point.run).name, point.path, page)
        text = f"{name}: {100 * middle:.1f} % in the median, {100 * most:.1f} % at most"
        texts.append(f"{text} ({link}, {len(own)} cases)")
    return ". ".join(texts) + "."


def of_ranks(found: Found) -> list[tuple[str, Point]]:
    """Each variant of each run of several ranks that passed, in quiet cycles, with the name of its workload."""
    rows = [row for row in runs.on_gpus(found.rows) if row.workload.ranks > 1 and not row.workload.busy]
    points = [(row.workload.name, point) for row in rows if not row.control for point in row.points]
    return [(name, point) for name, point in points if point.verdict.status == PASS]


def _skews(point: Point) -> list[float]:
    """The slowest rank's time / the fastest's, less 1, for each step; [] in older files."""
    blocks = point.judged.blocks(point.name, False)
    pairs = [pair for block in blocks for pair in zip(block.step_ms, block.fastest_ms, strict=False)]
    return [slowest / fastest - 1 for slowest, fastest in pairs]


def _skew(found) -> str:
    texts = []
    for name, kind in (("Eager", "eager"), ("Graphs", "graph")):
        every = [_skews(point) for _, point in of_ranks(found) if point.variant.kind == kind]
        own = [plain.median(skews) for skews in every if skews]
        if not own:
            return NOT_MEASURED
        over = f"{100 * min(own):.1f} to {100 * max(own):.1f} %"
        over = "under 0.05 %" if max(own) < 5e-4 else over
        texts.append(f"{name}: {over} in the median step ({runs.counted(len(own), 'case')})")
    return ". ".join(texts) + ", two ranks each."


def _ranks(found: Found, page: Path) -> str:
    """Steps of several ranks, by how much ranks part, and what runs beside their collectives; not of older files."""
    lines = []
    for name, point in sorted(of_ranks(found), key=lambda each: (each[0], each[1].run.id)):
        steps = [ms for block in point.judged.blocks(point.name, False) for ms in block.step_ms]
        skews, profile = _skews(point), point.variant.profile
        if not skews:
            continue
        numbers = [f"{plain.fmean(steps):.2f}", f"{_p95(steps):.2f}"]
        numbers += [f"{100 * plain.median(skews):.1f} %", f"{100 * _p95(skews):.1f} %"]
        numbers += ["" if ms is None else f"{max(0.0, ms):.2f}" for ms in (profile.collective_ms, profile.overlap_ms)]
        lines.append([tables.linked_file(name, point.path, page), point.name, *numbers])
    names = ["Two ranks", "variant", "step ms", "p95", "skew", "p95", "collectives ms", "overlap ms"]
    return tables.markdown(names, lines) if lines else NOT_MEASURED


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _gpu_bound(found, marks, page):
    return _gains(marks, page, lambda mark: mark.ceiling < 1.05)


def _beside(found: Found, page: Path, model: str, run_id: str, names: Sequence[str], more: Callable) -> str:
    """Variants of one run, each with its gain, interval and a word."""
    points = {
        point.name: point
        for row in found.rows
        for point in row.timed
        if point.run.id == run_id and row.workload.model == model and not point.is_busy
    }
    if not set(names) <= points.keys():
        return NOT_MEASURED
    return "; ".join(f"{_gain(points[name], page)}, {more(points[name])}" for name in names)


def _ms(point: Point) -> str:
    return f"{point.ratio.variant_ms:.2f} ms" if point.ratio else ""


def _graphs(point: Point) -> str:
    return f"{runs.counted(point.variant.capture.graphs, 'graph')}, {_ms(point)}"


def _with_kernels(point: Point) -> str:
    return f"{point.variant.profile.kernels or 0:,.0f} kernels, {_ms(point)}"


def _parts(found, marks, page):
    names = ("graph_networks", "graph_step")
    return _beside(found, page, "rnnt", "20261126T000004Z-e0133d8c", names, _share)


def _share(point: Point) -> str:
    return f"{100 * (point.variant.profile.graph_share or 0):.0f} % of the kernels in graphs"


def _small_graphs(found, marks, page):
    names = ("graph_layer", "graph_step")
    return _beside(found, page, "llama2_lora", "20261125T212109Z-f31e7f2a", names, _graphs)


def _copies(found, marks, page):
    names = ("graph_layer", "graph_layer_te")
    return _beside(found, page, "gpt3", "20261125T212617Z-f31e7fb0", names, _with_kernels)


def _hooks(found, marks, page):
    names = ("graph_networks", "graph_step")
    text = _beside(found, page, "rnnt", "20261125T205403Z-5a889493", names, _ms)
    return f"{NOT_MEASURED} by itself. Two H100 of one host: {text}" if text != NOT_MEASURED else text


def _unknown(found, marks, page):
    return NOT_MEASURED
