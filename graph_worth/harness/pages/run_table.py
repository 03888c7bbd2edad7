"""A run's own table, as a screen shows it: one row a variant, at most 100 characters wide."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from graph_worth.folders import OWN_STEP
from graph_worth.harness import intervals, judge
from graph_worth.harness.best import best_of, of_state
from graph_worth.harness.files.facts import Run, joined
from graph_worth.harness.files.workload import workload_of
from graph_worth.harness.judge import PASS, Judged
from graph_worth.harness.pages import cells, roofline
from graph_worth.harness.pages.cells import cell, gib, milliseconds, times
from graph_worth.text import printable

COLUMNS = ("variant", "base ms", "ms", "ratio", "95 %", "at most", "TFLOP/s", "GiB", "parity", "paid back")
# Columns of a run over several ranks, which has two tables.
RANKS = ("waits ms", "skew ms")
WIDTH = 100
NO_SPEED = "It says nothing about the speed of a GPU."
# Below it the GPU is the limit: docs/your_step.md leaves such a step eager.
LEAST_CEILING = 1.05
# Of the busy time or of the overlap of kernels that eager has.
MUCH = 0.02
LEAST_SHARE = 0.8
LEAST_KERNELS = 30


def report(run: Run) -> str:
    """Return the tables of all builds and lines that explain them, of at most 100 characters but for reasons."""
    builds = judge.judged(run)
    parts = [_build_report(name, judged) for name, judged in builds.items()]
    text = "\n\n".join(part for part in parts if part)
    text += across(builds)
    if run.device == "cuda" and run.model != OWN_STEP:
        text += "".join(f"\n{textwrap.fill(line, WIDTH)}" for line in verdicts_of(builds).values())
    if run.device != "cpu" or not any(
        variant.blocks for judged in builds.values() for variant in judged.build.variants.values()
    ):
        return text
    return f"{text}\n{on_a_cpu(builds.values())}"


def verdicts_of(builds: dict[str, Judged]) -> dict[str, str]:
    """Return the best thing to do, under the name of the first build of each state, with that build's fields."""
    sentences: dict[str, str] = {}
    for judged in builds.values():
        state = of_state(builds, judged)
        name, best = next(known for known, build in builds.items() if build is state[0]), best_of(state)
        if best is not None:
            flags = build_title(name, judged.build.fields)
            sentences[name] = f"{flags}: {best.sentence}" if flags else best.sentence
    return sentences


def on_a_cpu(builds: Iterable[Judged]) -> str:
    """Return what a run on a CPU shows, in a sentence or two."""
    verdicts = [
        (name, verdict)
        for judged in builds
        for name, verdict in judged.verdicts.items()
        if judged.build.variants[name].kind != "eager" and name != judged.run.control
    ]
    failed = [name for name, verdict in verdicts if verdict.is_wrong_numbers]
    if failed:
        return f"On a CPU this shows that not all variants train alike: {', '.join(failed)}. {NO_SPEED}"
    if any(verdict.status == PASS for _, verdict in verdicts):
        return f"On a CPU this shows that the variants train alike. {NO_SPEED}"
    return "Measured on a CPU, which says nothing about the speed of a GPU."


def across(builds: dict[str, Judged]) -> str:
    """Return a line for a run whose variants stand apart from others: each compares with the eager of its process."""
    is_apart = len(builds) > 1 and any(judged.build.apart for judged in builds.values())
    return "\n\nEach ratio compares with the eager of its own table, which ran in the same process." * is_apart


def build_title(name: str, fields: dict, apart: str = "") -> str:
    """Return a build's name and flags, as in validate (--validate-every 4); "" for the preset itself."""
    flags = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in fields.items())
    build = name.removesuffix(joined("", apart))
    title = f"{build} ({flags})" if build and flags else build
    return ", ".join(filter(None, [title, f"{apart}, in a process of its own with eager" if apart else ""]))


def rates(judged: Judged) -> str:
    """Return the FLOP of a step, how they were counted and, of a GPU, each variant's rate; "" where none are known."""
    build = judged.build
    notes = build.flops_notes
    if not build.flops_per_step:
        return printable(". ".join(notes))
    parts = [f"{build.flops_per_step / 1e12:.3g} TFLOP a step of each rank"]
    for name in build.variants:
        rate = judged.tflops(name) if judged.passed(name) and name != judged.run.control else None
        parts += [f"{name} {rate:,.0f} TFLOP/s" if rate >= 100 else f"{name} {rate:.3g} TFLOP/s"] if rate else []
    return printable(". ".join([f"{', '.join(parts)} ({build.flops_convention})", *notes]))


def suite(runs: list[Run], has_dates: bool = False) -> str:
    """Return one table of several models: the headline graphs of each, and the time at which each run was begun."""
    rows = [("workload", "variant", *COLUMNS[1:6], *["begun (UTC)"] * has_dates)]
    lines = []
    for run in runs:
        for build_name, judged in judge.judged(run).items():
            if text := _no_headline(judged):
                lines.append(f"{workload_of(run, build_name).name}: {text}")
            graphs = {
                name: variant for name, variant in judged.build.variants.items() if variant.kind in ("graph", "compile")
            }
            headline = [name for name, variant in graphs.items() if variant.headline] or graphs
            if judged.build.apart and len(run.builds) > 1:
                headline = [name for name in headline if graphs[name].headline]
            for name in headline:
                ratio = judged.ratio_of(name)
                if ratio is not None:
                    title = workload_of(run, build_name).name
                    date = run.begin_utc[:16].replace("T", " ")
                    rows.append((title, name, *ratio_cells(ratio), at_most(judged, name), *[date] * has_dates))
    return "\n".join([*aligned(rows, 2), *lines])


def _build_report(name: str, judged: Judged) -> str:
    build, run = judged.build, judged.run
    if not any(variant.blocks for variant in build.variants.values()):
        return _faults(judged)
    lines = [f"{build_title(name, build.fields, build.apart)}:"] if name else []
    number = max((cycle.busy_processes for cycle in build.cycles), default=0)
    for busy in sorted({bool(cycle.busy_processes) for cycle in build.cycles}):
        lines += [f"beside {number} busy processes:" if busy else "quiet cycles:"] if number else []
        lines += _table(judged, busy)
    rate = textwrap.fill(rates(judged), WIDTH) if run.model == OWN_STEP or build.flops_notes else ""
    not_checked = "\n".join(textwrap.fill(line, WIDTH) for line in unchecked(judged))
    texts = (_faults(judged), not_checked, _reruns(judged), _no_headline(judged), _meaning(judged), rate)
    lines += [text for text in texts if text]
    return "\n".join(lines)


def _table(judged: Judged, busy: bool) -> Iterator[str]:
    rows = []
    for name in judged.build.variants:
        is_shown = judged.passed(name) and judged.blocks(name, busy)
        if is_shown and (name == judged.base or judged.ratio_of(name, busy) is not None):
            rows.append(cells_of(judged, name, busy))
    has_gpus = judged.run.ranks > 1 and judged.run.device == "cuda"
    for columns in (COLUMNS[:-1], ("variant", COLUMNS[-1], *RANKS)) if has_gpus else (COLUMNS,):
        cells = [tuple(row[column] for column in columns) for row in rows]
        yield from aligned([columns, *(line for line in cells if any(line[1:]))], 1)


def cells_of(judged: Judged, name: str, busy: bool = False) -> dict[str, str]:
    """Return the text of each column for a variant that passed, in the quiet cycles or in those beside processes."""
    ratio, memory, rate = judged.ratio_of(name, busy), judged.alone_bytes(name), judged.tflops(name, busy)
    untimed = ("", milliseconds(judged.ms(name, busy)), "base" if name == judged.base else "", "")
    texts = dict(zip(COLUMNS[1:5], ratio_cells(ratio) if ratio else untimed, strict=True))
    texts |= {"variant": name, "GiB": gib(memory)}
    if name == judged.run.control:
        return dict.fromkeys([*COLUMNS, *RANKS], "") | texts | {"variant": f"{name} (base again)"}
    steps = judged.paid_back(name, busy) if judged.build.variants[name].kind != "eager" else None
    return texts | {
        "paid back": cell(steps, ","),
        "at most": at_most(judged, name, busy),
        "TFLOP/s": cell(rate, ",.0f"),
        "parity": judged.verdicts[name].parity or ("losses" if judged.run.parity == "blocks" else ""),
        **dict(zip(RANKS, map(cell, (judged.waiting_ms(name), judged.skew_ms(name, busy))), strict=True)),
    }


def at_most(judged: Judged, name: str, busy: bool = False) -> str:
    """Return a variant's ceiling as 2.177x, with a word where it is estimated or where there is none."""
    ceiling = judged.ceiling_of(name, busy)
    if ceiling.value is None:
        return cells.NO_CEILING if ceiling.note else ""
    return " ".join(filter(None, [times(ceiling.value), ceiling.note]))


def busy_sentence(judged: Judged) -> str:
    """Return how long a step of the base is and keeps the GPU busy, and the most that a graph can gain."""
    ceiling, working = judged.ceiling_of(judged.base), judged.working(judged.base)
    if ceiling.value is None or working.value is None:
        return f"{cells.NO_CEILING.capitalize()}: {ceiling.note}." if ceiling.note else ""
    estimated = f" ({working.note}, without waiting for other ranks)" if working.note else ""
    opening = f"A step of {judged.base} takes {milliseconds(judged.ms(judged.base))} ms and keeps the GPU busy for "
    return f"{opening}{milliseconds(working.value)}{estimated}: a graph can gain {ceiling.value:.2f}x at most."


def ratio_cells(ratio: intervals.Ratio) -> tuple[str, str, str, str]:
    """Return base ms, ms, ratio and interval, which is "" for a single cycle."""
    interval = cells.interval(ratio.low, ratio.high) if ratio.cycles > 1 else ""
    return milliseconds(ratio.base_ms), milliseconds(ratio.variant_ms), times(ratio.ratio), interval


def aligned(rows: Sequence[tuple[str, ...]], num_left: int) -> Iterator[str]:
    """Yield lines of a table whose first `num_left` columns are flush left, without columns that are empty."""
    columns = [column for column in zip(*rows, strict=True) if len(rows) == 1 or any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH + 2 else " "
    for row in zip(*columns, strict=True):
        cells = [text.ljust(width) for text, width in zip(row[:num_left], widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(row[num_left:], widths[num_left:], strict=True)]
        yield gap.join(cells).rstrip()


def _faults(judged: Judged) -> str:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, verdict in judged.verdicts.items():
        if verdict.reason:
            alike[verdict.status, verdict.reason].append(name)
    lines = (f"{status}: {', '.join(names)} ({reason})" for (status, reason), names in alike.items())
    return "\n".join(map(printable, lines))


def unchecked(judged: Judged) -> list[str]:
    """Return lines that say what no check looked at in the variants of the table."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in filter(judged.passed, judged.verdicts):
        alike[judged.unchecked(name)].append(name)
    return [printable(f"not checked: {', '.join(names)} ({text})") for text, names in alike.items() if text]


def _reruns(judged: Judged) -> str:
    """A line for each variant that may run steps again."""
    lines = []
    for name, variant in judged.build.variants.items():
        counted = [block.reruns for block in variant.blocks if block.reruns and judged.passed(name)]
        steps, reruns = sum(count.steps for count in counted), sum(count.reruns for count in counted)
        if steps:
            total_ms = sum((count.rerun_ms or 0.0) * count.reruns for count in counted)
            cost = f", which took {milliseconds(total_ms / reruns)} ms each" if reruns else ""
            lines.append(f"{name}: {reruns} of {steps:,} timed steps ran again without fixed buffers{cost}.")
    return "\n".join(lines)


def _no_headline(judged: Judged) -> str:
    """A line where the base in its blocks and alone do not agree."""
    text = judged.disagrees_with_alone
    return f"{text}. These ratios are no headline." if text else ""


def _meaning(judged: Judged) -> str:
    """Say what the numbers mean: the ceiling, then a sentence for each graph."""
    if judged.run.device == "cpu" or not judged.base:
        return ""
    lines = [text for text in [busy_sentence(judged)] if text]
    for name, variant in judged.build.variants.items():
        ratio = (
            judged.ratio_of(name) if variant.kind not in ("eager", "control") and name != judged.run.control else None
        )
        if ratio is not None and ratio.cycles > 1:
            word = intervals.word(ratio)
            lines.append(f"{name}: {word} on this host now{_beside(judged, name, ratio)}.")
            why = reason(judged, name) if word in ("same", "slower") else ""
            lines += [f"Why not faster: {why}."] if why else []
            lines += _graphs_of(judged, name)
    lines += filter(None, [roofline.sentence(roofline.points_of(judged))])
    return "\n".join(line for text in lines for line in textwrap.wrap(text, WIDTH))


def reason(judged: Judged, name: str) -> str:
    """Return why a graph is not faster, by NVIDIA's five reasons (docs/nvidia_rules.md); "" without a GPU's profile."""
    variant, base = judged.build.variants[name], judged.build.variants.get(judged.base)
    graph, eager = variant.profile, base.profile if base else None
    ceiling, base_ms = judged.ceiling(judged.base), judged.ms(judged.base) if base else None
    graph_ms, eager_ms = judged.working(name).value, judged.working(judged.base).value
    if eager is None or not graph_ms or not eager_ms or ceiling is None or not base_ms:
        return ""
    lost_ms = (eager.overlap_ms or 0.0) - (graph.overlap_ms or 0.0)
    added_ms = graph_ms - eager_ms
    if lost_ms > MUCH * eager_ms and added_ms > MUCH * eager_ms:
        effect = f"kernels that ran side by side in eager, for {eager.overlap_ms:.3g} ms, run in turn"
        cause = (
            "gradients wait for the end of a captured backward pass"
            if judged.run.ranks > 1
            else "streams share a queue"
        )
        return f"{effect}: {cause}"
    kernels = (graph.kernels or 0.0) - (eager.kernels or 0.0)
    if added_ms > MUCH * eager_ms and kernels > 0:
        return f"its copies of inputs: {kernels:,.0f} kernels more than eager, {added_ms:.3g} ms more of busy time"
    if ceiling < LEAST_CEILING:
        return f"the GPU is the limit, busy for {100 / ceiling:.0f} % of an eager step"
    if graph.graph_share is not None and graph.graph_share < LEAST_SHARE:
        return f"the graphs hold the wrong part of the step, {100 * graph.graph_share:.0f} % of its kernels"
    graphs = variant.capture.graphs
    if graphs > 1 and graph.kernels and graph.kernels / graphs < LEAST_KERNELS:
        return f"too many small graphs, {graphs:,} with {graph.kernels / graphs:.0f} kernels on average"
    return "none of NVIDIA's five reasons shows in the profile"


def _graphs_of(judged: Judged, name: str) -> list[str]:
    """A sentence about the graphs of a variant, where the file knows the share of the GPU's time in them."""
    variant, made_s = judged.build.variants[name], judged.made_s(name)
    share, capture, report = variant.profile.graph_time_share, variant.capture, variant.capture.report or {}
    if share is None or made_s is None:
        return []
    number = "no graph" if not capture.graphs else f"{capture.graphs:,} graph{'s' * (capture.graphs > 1)}"
    cost = f"made in {milliseconds(made_s)} s with warm-up and compiler"
    if cached := report.get("from_cache"):
        cost += f", whose cache had {cached} of {cached + report['compiled']} passes"
    breaks = [f"the compiler leaves its graph at {line}" for line in report.get("breaks", ())]
    return [f"{number}, with {100 * share:.0f} % of the GPU's time, {'; '.join([cost, *breaks])}."]


def _beside(judged: Judged, name: str, ratio: intervals.Ratio) -> str:
    """Return the width of the interval, the share of the ceiling, and the control where the effect is small."""
    text = f", to within {100 * ratio.half_width:.1f} %"
    reached, clocks = judged.reached(name), (judged.sm_mhz(name), judged.sm_mhz(judged.base))
    if reached is not None:
        text += f"; {100 * reached:.1f} % of the most"
        if None not in clocks and reached < 1 - intervals.NEAR:
            text += f" ({clocks[0]:.0f} MHz, {judged.base} {clocks[1]:.0f})"
    control = judged.ratio_of(judged.run.control) if judged.run.control in judged.build.variants else None
    if control is not None and abs(ratio.ratio - 1) < intervals.SMALL_EFFECT:
        text += f"; control {control.ratio:.3f}x, to within {100 * control.half_width:.1f} %"
    return text
