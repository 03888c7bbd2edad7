"""README's three figures: what a graph gains by the law, why, and how steady a step is from session to session."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from benchmarks import law as points_of
from benchmarks import rows
from benchmarks.figures import words
from benchmarks.figures.evidence import Block, Evidence, Missing
from benchmarks.figures.style import (
    BAND,
    FAINT,
    INK,
    Page,
    beside,
    legend,
    legend_height,
    ratio_axis,
    rows_page,
    width_of,
)
from benchmarks.law import NEAR, Point
from benchmarks.overview_rows import short_gpu

MIN_PAIRS = 5
# A workload's colour; others take FAINT.
COLOURS = {
    "gpt3": "#1b6ca8",
    "rnnt": "#d9a441",
    "stable_diffusion": "#b5402f",
    "llama31": "#0d3c61",
    "llama2_lora": "#7fb0d6",
}
# Of GPU types, by name; a diamond is a session beside busy host processes, as in the other figures.
MARKERS, LOADED = ("o", "s", "^", "v"), "D"
# Of hosts, those with most sessions first; further ones share FAINT. Distinct to colour-blind readers.
HOSTS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b5fc0", "#a08020", "#8c8c8c")
# The workloads that `why` sets beside each other: one bound by the GPU, one by the host.
WHY, WHY_PRESET = ("gpt3", "stable_diffusion"), "bench"
INCOMPLETE = "not all eagers run"


@dataclass(frozen=True)
class Session:
    """One session's main graphed variant beside its base: the point of the law, and both records of each pair.

    name: preset and what the folder's name adds, `bench wavefront x2`, and the GPU where most are of another type.
    is_pooled: the folder's table rests on it. block: key of the folder and the same beside host load.
    """

    evidence: Evidence
    name: str
    point: Point
    pairs: list[tuple[dict, dict]]
    is_incomplete: bool
    is_pooled: bool
    block: str

    def ms(self, side: int, key: str) -> float:
        """Median of a time over the pairs; side 0 is the base, 1 the variant."""
        return statistics.median(pair[side][key] for pair in self.pairs if pair[side][key])


def sessions_of(blocks: list[Block]) -> list[Session]:
    """Sessions with a graph beside its base, with issue and busy time. Raises Missing where there is none."""
    found = [
        (block, evidence, rows.group_of(evidence.whole), point)
        for block in blocks
        for evidence in block.members
        for point in points_of.points(evidence.whole)
        if point.is_main
    ]
    if not found:
        raise Missing("no graph beside its base with issue and busy time")
    [(usual, _)] = Counter(point.gpu for *_, point in found).most_common(1)
    sessions = []
    for block, evidence, group, point in found:
        gpus = f"x{point.num_gpus}" if point.num_gpus > 1 else ""
        name = " ".join(filter(None, (point.preset, block.suffix, gpus)))
        name += "" if point.gpu == usual else f", {short_gpu(point.gpu)}"
        name += f", {point.host_load} busy processes" if point.host_load else ""
        pairs = rows.pairs(group, point.session, point.variant, point.base)
        is_pooled = point.session in rows.standing(group, point.variant)[0]
        incomplete = bool(group.missing(point.session))
        sessions.append(Session(evidence, name, point, pairs, incomplete, is_pooled, block.key))
    return sessions


def _provenance(sessions):
    return words.provenance(list({id(session.evidence): session.evidence for session in sessions}.values()))


def _workload(model, sessions):
    """`RNN-T`, and in words how many of its sessions did not run all eagers."""
    lacking = [session.is_incomplete for session in sessions if session.point.model == model]
    share = "" if all(lacking) else f"{sum(lacking)} of {len(lacking)} "
    return words.of_model(model) + (f" ({share}{INCOMPLETE})" if any(lacking) else "")


# ------------------------------------------------------------------------------------------------
# The law


def law(blocks: list[Block]) -> Page:
    """One point a session: its `full`, its `graph`, or its first graphed variant; the line is max(1, x)."""
    sessions = sessions_of(blocks)
    points = [session.point for session in sessions]
    near = sum(abs(point.off) <= NEAR for point in points)
    note = (
        "A point a session. x: the host's time to issue the base's step over the busy time of the graph's kernels. "
        "Gain: the base's median step over the graph's, since issue time is a median, too. "
        f"Hollow: fewer than {MIN_PAIRS} pairs. Line: max(1, x); band: 10 % to both sides."
    )
    if any(point.host_load for point in points):
        note += " Diamond: beside busy host processes."
    known = [point for point in points if point.queue is not None]
    if known:
        explained = sum(point.is_explained for point in known)
        note += f" Dash: the queue model's gain; {explained} of {len(known)} lie within 10 % of it or of max(1, x)."
    above = sum(point.median > (1 + NEAR) * point.first for point in points)
    title = f"{near} of {len(points)} sessions gain max(1, issue / busy) within 10 %, {above} more, "
    title += f"{len(points) - near - above} less"
    page = Page(title, note, _provenance(sessions), 4.75)
    axes = page.axes(0.75, 0.05, page.WIDTH - 0.75 - page.MARGIN, 4.3)
    low, high = _limits([point.x for point in points])
    bottom, top = _limits([value for point in points for value in (point.median, point.first, point.queue or 1.0)])
    ratio_axis(axes, "x", low, high, "")
    ratio_axis(axes, "y", bottom, top)
    axes.grid(True)
    corner = [low, 1.0, high]
    line = [max(1.0, x) for x in corner]
    axes.fill_between(corner, [y * (1 - NEAR) for y in line], [y * (1 + NEAR) for y in line], color=BAND, linewidth=0)
    axes.plot(corner, line, color=INK, linewidth=1.0, zorder=1)
    axes.set_xlabel("x = issue time of the base / busy time of the graph's kernels (log scale)")
    axes.set_ylabel("gain over the base (log scale)")
    of_gpu = Counter(point.gpu for point in points)
    gpus = sorted(of_gpu, key=lambda gpu: (-of_gpu[gpu], gpu))
    marker_of = {gpu: MARKERS[min(index, len(MARKERS) - 1)] for index, gpu in enumerate(gpus)}
    # Few of a workload stand in front of many.
    num = Counter(point.model for point in points)
    for point in sorted(points, key=lambda point: (-num[point.model], point.group, point.session)):
        _draw(axes, point, LOADED if point.host_load else marker_of[point.gpu])
    signs = [(_workload(model, sessions), COLOURS.get(model, FAINT), "o") for model in sorted(num)]
    signs += [(gpu, FAINT, marker_of[gpu]) for gpu in gpus] if len(gpus) > 1 else []
    axes.legend(handles=[_sign(*sign) for sign in signs], loc="upper left", borderaxespad=0.5, handletextpad=0.2)
    _name_far_points(axes, sessions)
    return page


def _sign(text, colour, marker):
    return Line2D([], [], label=text, color=colour, marker=marker, markersize=5.5, linestyle="")


def _limits(values):
    logs = [math.log(value) for value in values] + [0.0]
    margin = max(0.04, 0.06 * (max(logs) - min(logs)))
    return math.exp(min(logs) - margin), math.exp(max(logs) + margin)


def _draw(axes, point, marker):
    colour = COLOURS.get(point.model, FAINT)
    is_filled = point.num_pairs >= MIN_PAIRS
    if point.queue is not None:
        axes.plot([point.x] * 2, [point.median, point.queue], color=colour, linewidth=0.6, zorder=2)
        axes.plot([point.x], [point.queue], marker="_", markersize=7, color=colour, linestyle="", zorder=2)
    style = {"markersize": 5.5, "markeredgewidth": 1.2, "markeredgecolor": colour, "linestyle": ""}
    style["markerfacecolor"] = colour if is_filled else "none"
    gid = f"{'filled' if is_filled else 'hollow'}-{point.model}-{point.preset}"
    axes.plot([point.x], [point.median], marker=marker, zorder=4 if is_filled else 3, gid=gid, **style)


def _name_far_points(axes, sessions):
    """The name of each folder with sessions outside the band, once, where there is room beside the furthest one."""
    furthest: dict[str, Session] = {}
    for session in sorted(sessions, key=lambda session: abs(session.point.off)):
        if abs(session.point.off) > NEAR:
            furthest[session.point.group] = session
    renderer = axes.figure.canvas.get_renderer()
    centres = axes.transData.transform([(session.point.x, session.point.median) for session in sessions])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    # Points to the right and up: beside the point, then below and above it, then further out.
    spots = [(reach * x, reach * y) for reach in (1, 1.8, 2.6) for x, y in ((6, 0), (-6, 0), (0, -10), (0, 10))]
    spots += [(x, reach * y) for reach in (12, 20, 28) for x in (6, -6) for y in (-1, 1)]
    for session in sorted(furthest.values(), key=lambda session: (-session.point.median, session.point.group)):
        for x, y in spots:
            side = "center" if not x else "left" if x > 0 else "right"
            place = {"textcoords": "offset points", "ha": side, "va": "center"}
            at = session.point.x, session.point.median
            text = axes.annotate(session.name, at, (x, y), fontsize=8, color=FAINT, **place)
            # With room to both sides: another font may be wider.
            box = text.get_window_extent(renderer).expanded(1.06, 1.0)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 <= axes.bbox.y1
            if inside and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


# ------------------------------------------------------------------------------------------------
# Why


def why(blocks: list[Block]) -> Page:
    """Host time to issue a step and GPU busy time over the timed step, of eager and of graph, a panel a workload.

    A panel is the workload's `bench` folder on one GPU without host load; medians over the sessions that pool.
    """
    panels = {}
    for session in sessions_of([block for block in blocks if not block.suffix]):
        point = session.point
        if point.preset == WHY_PRESET and point.num_gpus == 1 and not point.host_load and session.is_pooled:
            panels.setdefault(point.model, {}).setdefault(point.gpu, []).append(session)
    of_gpu = Counter(session.point.gpu for types in panels.values() for own in types.values() for session in own)
    # Of several GPU types that with most sessions.
    shown = {
        model: max(panels[model].values(), key=lambda own: (len(own), of_gpu[own[0].point.gpu]))
        for model in WHY
        if model in panels
    }
    if not shown:
        names = " or ".join(words.of_model(model) for model in WHY)
        raise Missing(f"no session of {names} {WHY_PRESET} on one GPU with a graph beside eager")
    times = {
        model: [[_median(own, side, key) for key in ("statistic_ms", "issue_ms", "busy_ms")] for side in (0, 1)]
        for model, own in shown.items()
    }
    idle = [
        f"{words.percent(max(0.0, 1 - busy / step))} of {words.of_model(model)}'s"
        for model, ((step, _, busy), _) in times.items()
    ]
    page = Page(
        f"Eager leaves the GPU idle for {' step and '.join(idle)}{' step' if len(idle) == 1 else ''}",
        "Grey: the timed step. Medians over sessions. Issue time is measured in passes beside the timed steps: where a "
        "host changes its pace, it can exceed the step.",
        _provenance([session for own in shown.values() for session in own]),
        2.3,
    )
    left, gap = width_of(["host issues"]) + page.MARGIN, 0.3
    width = (page.WIDTH - left - page.MARGIN - gap * (len(shown) - 1)) / len(shown)
    for index, (model, own) in enumerate(shown.items()):
        axes = page.axes(left + index * (width + gap), 0.35, width, 1.7)
        num = f"{len(own)} session{'s' if len(own) > 1 else ''}"
        page.heading(left + index * (width + gap), 0.28, f"{_workload(model, own)}, {num}")
        for top, name, (step, issue, busy) in zip(
            (0, 3.2), (own[0].point.base, own[0].point.variant), times[model], strict=True
        ):
            axes.text(0, top, f"{name}: a step takes {words.ms_text(step)} ms", va="center", fontsize=8.5)
            axes.barh(top + 1.5, step, height=1.9, color=BAND, linewidth=0)
            for y, ms, colour in ((top + 1, issue, "#d9822b"), (top + 2, busy, "#1b6ca8")):
                axes.barh(y, ms, height=0.7, color=colour, linewidth=0, gid=f"{model}-{name}")
                axes.annotate(words.ms_text(ms), (ms, y), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.set_ylim(5.9, -0.5)
        names = ["host issues", "GPU busy"] * 2
        axes.set_yticks([1, 2, 4.2, 5.2], names if not index else [""] * 4, fontsize=8.5)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, 1.15 * max(ms for side in times[model] for ms in side))
        axes.grid(axis="x")
        axes.set_xlabel("ms")
    return page


def _median(sessions, side, key):
    return statistics.median(session.ms(side, key) for session in sessions)


# ------------------------------------------------------------------------------------------------
# How steady


def steady(blocks: list[Block]) -> Page:
    """Two dots a session, the medians of its base's and its graph's step over the folder's shortest graphed step."""
    every_session = sessions_of(blocks)
    of_block = Counter(session.block for session in every_session)
    sessions = [session for session in every_session if of_block[session.block] > 1] or every_session
    left_out = len(set(of_block)) - len({session.block for session in sessions})
    panels: dict[str, dict[str, list[Session]]] = {}
    for session in sorted(sessions, key=lambda session: words.order(session.point.model)):
        panels.setdefault(session.point.model, {}).setdefault(session.point.group, []).append(session)
    shortest = {
        group: min(session.ms(1, "statistic_ms") for session in own)
        for folders in panels.values()
        for group, own in folders.items()
    }
    num = Counter(session.point.boot for session in sessions)
    hosts = sorted(num, key=lambda boot: (-num[boot], boot))
    colour_of = dict(zip(hosts, (*HOSTS, *[FAINT] * len(hosts)), strict=False))
    signs = [("eager", FAINT, "s"), ("graph", FAINT, "o")]
    signs += [(boot, colour_of[boot], "o") for boot in hosts[: len(HOSTS)]]
    more = len(hosts) - len(HOSTS)
    signs += [(f"{more} more host{'s' if more > 1 else ''}", FAINT, "o")] if more > 0 else []
    below = legend_height([label for label, *_ in signs], Page.MARGIN) + 0.1
    page, every = rows_page(
        _steady_title([own for folders in panels.values() for own in folders.values()]),
        "Each session's median step over the shortest graphed one of its row, which the right column states. Square: "
        "eager, the session's base; circle: graph. Colour: host, named by its boot. Hollow, and not in the title: of "
        "other code than the row's newest session."
        + (f" Left out: {left_out} folders with one session." if left_out else ""),
        _provenance(sessions),
        [(_workload(model, sessions), "", [own[0].name for own in panels[model].values()]) for model in panels],
        "step time over the row's shortest graphed step (log scale)",
        [f"{words.ms_text(ms)} ms" for ms in shortest.values()],
        below=below,
    )
    limits = _limits([s.ms(side, "statistic_ms") / shortest[s.point.group] for s in sessions for side in (0, 1)])
    for axes, folders in zip(every, panels.values(), strict=True):
        ratio_axis(axes, "x", *limits)
        axes.axvline(1, color=INK, linewidth=0.9, zorder=1)
        for y, (group, own) in enumerate(folders.items()):
            beside(axes, y, f"{words.ms_text(shortest[group])} ms", FAINT)
            for session in own:
                colour = colour_of[session.point.boot]
                face = colour if session.is_pooled else "none"
                for side, kind, marker in ((0, "eager", "s"), (1, "graph", "o")):
                    style = {"color": colour, "markerfacecolor": face, "markersize": 4.5, "gid": f"{kind}-{group}"}
                    x = session.ms(side, "statistic_ms") / shortest[group]
                    axes.plot([x], [y - 0.22 + 0.44 * side], marker, **style)
    legend(page, [_sign(*sign) for sign in signs], page.MARGIN, page.height - page.foot - below + 0.06)
    return page


def _steady_title(folders):
    spreads = []
    for every in folders:
        own = [session for session in every if session.is_pooled]
        if len(own) > 1:
            sides = [[session.ms(side, "statistic_ms") for session in own] for side in (0, 1)]
            spreads.append([max(side) / min(side) for side in sides])
    if not spreads:
        return "No workload has two sessions of equal code: how much their steps differ is not known yet"
    eager, graph = (max(spread[side] for spread in spreads) for side in (0, 1))
    return f"From session to session eager's step differs by up to {eager:.2f}x, a graph's by up to {graph:.2f}x"
