"""Figures of one workload or model: blocks over cycles, the GPU's busy intervals in a step, and TFLOP/s by memory."""

import re
from itertools import pairwise

from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from benchmarks.figures import choice, style
from benchmarks.figures.choice import Shown, digits, short
from benchmarks.figures.style import BAND, CONTROL, EAGER, FAINT, INK, NotDrawn, Page, look
from benchmarks.files import runs
from benchmarks.files.run_file import Block, Build, Run
from benchmarks.files.runs import Row
from benchmarks.files.workload import Workload
from benchmarks.pages import published
from benchmarks.pages.run_table import build_title, milliseconds

Line = tuple[list[list[float]], float]


def file_name(kind: str, workload: Workload, shown: Shown) -> str:
    """blocks-gpt3-bench, with label, ranks and, where there are several, the GPU behind it; safe as a file's name."""
    parts = [kind, workload.model, workload.preset, workload.label, f"x{workload.ranks}" if workload.ranks > 1 else ""]
    parts.append(workload.gpu if len({own.gpu for own in shown.workloads}) > 1 else "")
    return safe("-".join(filter(None, parts)))


def safe(name: str) -> str:
    """The name, with _ for whatever could lead to another folder."""
    return re.sub(r"[^\w.-]+", "_", name)


def lines_of(build: Build) -> dict[str, list[Block]]:
    """Variant -> its blocks in order; of those that passed and have some."""
    passed = {name: own.blocks for name, own in build.variants.items() if own.status == "pass" and own.blocks}
    return {name: sorted(own, key=lambda block: (block.cycle, block.place)) for name, own in passed.items()}


def graphs_of(build: Build) -> list[str]:
    """Graphs with blocks, the fastest first."""
    found = {name: _mean(own) for name, own in lines_of(build).items() if build.variants[name].kind == "graph"}
    return sorted(found, key=found.__getitem__)


def _mean(blocks):
    return runs.geometric(_quiet_ms(blocks))


def _quiet_ms(blocks):
    """Return the step times of the quiet blocks, or of all blocks where none is quiet."""
    return [block.step_ms for block in blocks if not block.busy_processes] or [block.step_ms for block in blocks]


def blocks_title(run: Run) -> str:
    """Least and most ms of a quiet block of the base and of the fastest graph, in the first build with a graph."""
    builds = [build for build in run.builds.values() if lines_of(build)]
    build = next((build for build in builds if graphs_of(build)), builds[0])
    lines, said = lines_of(build), []
    names = [build.base if build.base in lines else next(iter(lines)), *graphs_of(build)[:1]]
    for name in dict.fromkeys(names):
        quiet = _quiet_ms(lines[name])
        said.append(f"{milliseconds(min(quiet))} to {milliseconds(max(quiet))} ms a step with {name}")
    return f"{short(run.model)}: a block takes {', '.join(said)}"


def blocks(shown: Shown, workload: Workload) -> Page:
    """Times of blocks over the cycles of the run with most, the newest of these: a panel a build, a line a variant.

    Raises:
        NotDrawn: no run has a variant with blocks that passed.
    """
    found = [run for run in shown.runs_of(workload) if any(map(lines_of, run.builds.values()))]
    if not found:
        raise NotDrawn("no variant has blocks")
    run = max(found, key=lambda run: max(build.cycles for build in run.builds.values()))
    builds = {name: build for name, build in run.builds.items() if lines_of(build)}
    busy = max(b.busy_processes for build in builds.values() for own in lines_of(build).values() for b in own)
    note = f"{choice.share(workload)}. Each mark is a block, some steps in a row. Variants take turns."
    note += f" Shaded: cycles beside {busy} busy processes." if busy else ""
    panel = 2.2 if len(builds) > 1 else 2.9
    page = Page(shown.title(blocks_title(run)), note, choice.footer(used=[run]), panel * len(builds) + 0.25)
    names = [_end_label(name, own) for build in builds.values() for name, own in lines_of(build).items()]
    right = max(style.width_of(name, 8) for name in names) + 0.2 + page.MARGIN
    for index, (name, build) in enumerate(builds.items()):
        top, room = panel * index, 0.27 if len(builds) > 1 else 0.1
        page.heading(0.7, top + 0.05, (build_title(name, build.fields) or "the preset itself") if room > 0.1 else "")
        axes = page.axes(0.7, top + room, page.WIDTH - 0.7 - right, panel - room - 0.28)
        _draw_blocks(axes, build, run.control)
        axes.set_ylabel("ms a step")
    axes.set_xlabel("cycle")
    return page


def _end_label(name, own):
    return f"{name} {milliseconds(_mean(own))} ms"


def _draw_blocks(axes, build, control):
    lines = lines_of(build)
    every = [block for own in lines.values() for block in own]
    places = 1 + max(block.place for block in every)
    for cycle in sorted({block.cycle for block in every if block.busy_processes}):
        axes.axvspan(cycle, cycle + 1, color=BAND, linewidth=0, gid="busy")
    axes.set_xlim(min(block.cycle for block in every), 1 + max(block.cycle for block in every))
    low, high = min(block.step_ms for block in every), max(block.step_ms for block in every)
    room = 0.08 * (high - low) or 0.05 * high
    axes.set_ylim(low - room, high + room)
    axes.grid(axis="y")
    axes.xaxis.get_major_locator().set_params(integer=True)
    gap = 0.15 * axes.figure.dpi / axes.bbox.height * (high - low + 2 * room)
    ends = style.apart([own[-1].step_ms for own in lines.values()], gap, high + room)
    others = [name for name in build.variants if name not in (build.base, control)]
    looks = {build.base: (EAGER, "s"), control: (CONTROL, "X"), **{own: look(i) for i, own in enumerate(others)}}
    for (name, own), y in zip(lines.items(), ends, strict=True):
        colour, marker = looks[name]
        xs = [block.cycle + (block.place + 0.5) / places for block in own]
        dashes = {"linewidth": 1.3, "linestyle": (0, (2, 1.5)) if name == control else "-", "gid": f"line-{name}"}
        axes.plot(xs, [block.step_ms for block in own], color=colour, marker=marker, markersize=3.5, **dashes)
        at = axes.get_yaxis_transform(), "offset points"
        ink = FAINT if name == control else colour
        axes.annotate(_end_label(name, own), (1, y), (8, 0), *at, va="center", fontsize=8, color=ink)


def line_of(profile: dict) -> Line | None:
    """Busy intervals and length of a profiled step in ms; None where the profile has none, or not in order."""
    found, length = profile.get("timeline_us"), profile.get("timeline_step_us")
    if not isinstance(length, (int, float)) or not isinstance(found, list) or not found:
        return None
    if not all(isinstance(each, list) and len(each) == 2 for each in found):
        return None
    edges = [0, *(edge for each in found for edge in each), length]
    if not all(isinstance(edge, (int, float)) for edge in edges) or any(not a <= b for a, b in pairwise(edges)):
        return None
    return ([[edge / 1000 for edge in each] for each in found], length / 1000) if length > 0 else None


def timelines_of(shown: Shown, workload: Workload) -> tuple[Run, dict[str, Line]]:
    """The newest run with timelines of a base and of a graph, and these two: the graph is the build's fastest.

    Raises:
        NotDrawn: no run has both.
    """
    for run in shown.runs_of(workload):
        for build in run.builds.values():
            lines = {name: line for name, own in build.variants.items() if (line := line_of(own.profile))}
            graphs = [name for name in graphs_of(build) if name in lines]
            if build.base in lines and graphs:
                return run, {name: lines[name] for name in (build.base, graphs[0])}
    raise NotDrawn("no run has a timeline of eager and of a graph")


def idle_of(line: Line) -> float:
    """Share of the step in which the GPU did nothing."""
    busy, length = line
    return 1 - sum(end - start for start, end in busy) / length


def timeline(shown: Shown, workload: Workload) -> Page:
    """Busy intervals of the GPU in one profiled step of eager, above those of a graph.

    Raises:
        NotDrawn: no run has both.
    """
    run, lines = timelines_of(shown, workload)
    said = [f"{100 * idle_of(own):.0f} % of {digits(own[1])} ms with {name}" for name, own in lines.items()]
    title = f"{short(run.model)}: in a profiled step the GPU idles {', '.join(said)}"
    note = f"{choice.share(workload)}. Filled: the GPU works; light: it waits. The profiler slows the host, so "
    note += "eager's step may be longer here than in tables. Gaps below 1/2000 of the step are not drawn."
    page = Page(shown.title(title), note, choice.footer(used=[run]), 1.75)
    left = page.MARGIN + max(style.width_of(name, 9) for name in lines) + 0.15
    axes = style.rows_axes(page, left, page.WIDTH - left - page.MARGIN, 1.15)
    axes.set(xlim=(0, 1.005 * max(length for _, length in lines.values())), xlabel="ms from the step's begin")
    for index, (name, (busy, length)) in enumerate(lines.items()):
        y, colour = 0.3 + 0.55 * index, look(0)[0] if index else EAGER
        axes.barh(y, length, height=0.42, color=BAND, linewidth=0)
        # One outline for all: a bar each would make the SVG five times as large.
        low, high = y - 0.21, y + 0.21
        corners = [at for a, b in busy for at in ((a, low), (b, low), (b, high), (a, high), (a, low))]
        codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(busy)
        axes.add_patch(PathPatch(Outline(corners, codes), facecolor=colour, linewidth=0, gid=f"busy-{name}"))
        page.text(left - 0.1, 0.1 + y, name, ha="right", va="center")
    return page


def rates_of(shown: Shown, model: str) -> list[tuple[Row, float, float]]:
    """(row, TFLOP/s of a GPU, GiB reserved) of each quiet variant of a model that has both; without controls."""
    found = []
    for row in shown.rows:
        if row.workload.model == model and not row.workload.busy and not row.control:
            ms, gib, flops = row.ms, row.reserved_gib, row.newest.build.flops_per_step
            found += [(row, flops / ms / 1e9, gib)] if ms and gib and flops else []
    return found


def throughput_title(model: str, rates: list[tuple[Row, float, float]]) -> str:
    """TFLOP/s of the fastest variant and of its base, and NVIDIA's rate where there is one."""
    row, most, _ = max(rates, key=lambda rate: rate[1])
    base, own = row.newest.build.base, published.rate_of(model)
    text = f"{short(model)}, {choice.preset(row.workload)}: {row.variant} reaches {digits(most)} TFLOP/s"
    for other, rate, _ in rates:
        if other.workload == row.workload and other.variant == base != row.variant:
            text += f", {base} {digits(rate)}"
    return text + (f"; NVIDIA published {digits(own.tflops)} on 8 GPUs" if own else "")


def throughput(shown: Shown, model: str) -> Page:
    """Useful TFLOP/s of each variant against the GiB that its process reserves.

    Raises:
        NotDrawn: no variant has FLOP, a time and reserved memory.
    """
    rates, own = rates_of(shown, model), published.rate_of(model)
    if not rates:
        raise NotDrawn("no variant has FLOP, a time and reserved memory")
    note = "Model FLOP of a step over its time, recomputed work not counted, on each GPU. Variants of a build share a "
    note += "process: its GiB are those of all. Hollow: eager." + (f" Line: NVIDIA's {own.where}." if own else "")
    page = Page(shown.title(throughput_title(model, rates)), note, choice.footer([row for row, *_ in rates]), 3.7)
    axes = page.axes(0.75, 0.15, page.WIDTH - 0.75 - page.MARGIN, 3.1)
    axes.set(xlabel="GiB reserved", ylabel="useful TFLOP/s", xlim=_limits([gib for *_, gib in rates], 0.35, 0.2))
    axes.set_ylim(*_limits([*(rate for _, rate, _ in rates), *([own.tflops] if own else [])], 0.12, 0.05))
    axes.grid(True)
    low, high = axes.get_xlim()
    line = [(low + (high - low) * step / 200, own.tflops) for step in range(201)] if own else []
    labels = [(low + 0.08 * (high - low), own.tflops, f"NVIDIA {digits(own.tflops)}", INK)] if own else []
    if own:
        axes.axhline(own.tflops, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), gid="published")
    every = list(dict.fromkeys(choice.whole(row) for row, *_ in rates))
    for row, rate, gib in rates:
        colour, marker = look(every.index(choice.whole(row)))
        face = "none" if row.kind == "eager" else colour
        axes.plot(gib, rate, color=colour, marker=marker, mfc=face, markersize=6.5, gid="point")
        where = [choice.preset(row.workload)] if len(every) > 1 else []
        labels.append((gib, rate, " ".join([*where, choice.named(row.variant, row.workload.build)]), colour))
    style.label_points(axes, labels, line)
    return page


def _limits(values, air, least):
    room = max(air * (max(values) - min(values)), least * max(values))
    return max(0.0, min(values) - room), max(values) + room
