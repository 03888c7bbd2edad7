"""A run's own table, as a screen shows it: one row a variant, at most 100 characters wide."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from graph_worth.folders import OWN_STEP
from graph_worth.harness import intervals
from graph_worth.harness.files.facts import Run, digits
from graph_worth.harness.files.workload import workload_of
from graph_worth.harness.judge import PASS, Judged, judged
from graph_worth.harness.pages.reasons import reason
from graph_worth.text import printable

COLUMNS = ("variant", "base ms", "ms", "ratio", "95 %", "at most", "TFLOP/s", "GiB", "parity", "paid back")
WIDTH = 100
NO_SPEED = "It says nothing about the speed of a GPU."
GIB = 2**30


def report(run: Run) -> str:
    """Return the tables of all builds and lines that explain them, of at most 100 characters but for reasons."""
    builds = judged(run)
    parts = [_build_report(name, own) for name, own in builds.items()]
    text = "\n\n".join(part for part in parts if part)
    if run.device != "cpu" or not any(own.blocks for each in builds.values() for own in each.build.variants.values()):
        return text
    return f"{text}\n{on_a_cpu(builds.values())}"


def on_a_cpu(builds: Iterable[Judged]) -> str:
    """Return what a run on a CPU shows, in a sentence or two."""
    verdicts = [
        (name, verdict)
        for own in builds
        for name, verdict in own.verdicts.items()
        if own.build.variants[name].kind != "eager" and name != own.run.control
    ]
    failed = [name for name, verdict in verdicts if verdict.is_wrong_numbers]
    if failed:
        return f"On a CPU this shows that not all variants train alike: {', '.join(failed)}. {NO_SPEED}"
    if any(verdict.status == PASS for _, verdict in verdicts):
        return f"On a CPU this shows that the variants train alike. {NO_SPEED}"
    return "Measured on a CPU, which says nothing about the speed of a GPU."


def build_title(name: str, fields: dict) -> str:
    """Return a build's name and flags, as in validate (--validate-every 4); "" for the preset itself."""
    flags = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in fields.items())
    return f"{name} ({flags})" if name and flags else name


def milliseconds(value: float | None) -> str:
    """Return a time with three digits or more; - for None."""
    return "-" if value is None else digits(value)


def rates(own: Judged) -> str:
    """Return the FLOP of a step, how they were counted and, of a GPU, each variant's rate; "" where none are known."""
    build = own.build
    notes = build.flops_notes
    if not build.flops_per_step:
        return printable(". ".join(notes))
    parts = [f"{build.flops_per_step / 1e12:.3g} TFLOP a step of each rank"]
    for name in build.variants:
        rate = own.tflops(name) if own.passed(name) and name != own.run.control else None
        parts += [f"{name} {rate:,.0f} TFLOP/s" if rate >= 100 else f"{name} {rate:.3g} TFLOP/s"] if rate else []
    return printable(". ".join([f"{', '.join(parts)} ({build.flops_convention})", *notes]))


def suite(runs: list[Run], has_dates: bool = False) -> str:
    """Return one table of several models: the headline graphs of each, and the time at which each run was begun."""
    rows = [("workload", "variant", *COLUMNS[1:6], *["begun (UTC)"] * has_dates)]
    for run in runs:
        for build_name, own in judged(run).items():
            if own.slowed:
                continue
            graphs = {name: each for name, each in own.build.variants.items() if each.kind in ("graph", "compile")}
            headline = [name for name, each in graphs.items() if each.headline] or graphs
            for name in headline:
                ratio = own.ratio_of(name)
                if ratio is not None:
                    title = workload_of(run, build_name).name
                    date = run.begin_utc[:16].replace("T", " ")
                    rows.append((title, name, *ratio_cells(ratio), times(own.ceiling(name)), *[date] * has_dates))
    return "\n".join(aligned(rows, 2))


def _build_report(name: str, own: Judged) -> str:
    build, run = own.build, own.run
    if not any(each.blocks for each in build.variants.values()):
        return _faults(own)
    lines = [f"{build_title(name, build.fields)}:"] if name else []
    number = max(cycle.busy_processes for cycle in build.cycles)
    for busy in sorted({bool(cycle.busy_processes) for cycle in build.cycles}):
        lines += [f"beside {number} busy processes:" if busy else "quiet cycles:"] if number else []
        lines += _table(own, busy)
    rate = textwrap.fill(rates(own), WIDTH) if run.model == OWN_STEP or build.flops_notes else ""
    lines += [text for text in (_faults(own), _reruns(own), _slowed(own), _meaning(own), rate) if text]
    return "\n".join(lines)


def _table(own: Judged, busy: bool) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name in own.build.variants:
        is_shown = own.passed(name) and own.blocks(name, busy)
        if is_shown and (name == own.base or own.ratio_of(name, busy) is not None):
            rows.append(tuple(cells_of(own, name, busy)[column] for column in COLUMNS))
    return aligned(rows, 1)


def cells_of(own: Judged, name: str, busy: bool = False) -> dict[str, str]:
    """Return the text of each column for a variant that passed, in the quiet cycles or in those beside processes."""
    ratio, memory, rate = own.ratio_of(name, busy), own.alone_bytes(name), own.tflops(name, busy)
    untimed = ("", milliseconds(own.ms(name, busy)), "base" if name == own.base else "", "")
    found = dict(zip(COLUMNS[1:5], ratio_cells(ratio) if ratio else untimed, strict=True))
    found |= {"variant": name, "GiB": "" if memory is None else f"{memory / GIB:.1f}"}
    if name == own.run.control:
        return found | {"variant": f"{name} (base again)", "at most": "", "TFLOP/s": "", "parity": "", "paid back": ""}
    steps = own.paid_back(name, busy) if own.build.variants[name].kind != "eager" else None
    return found | {
        "paid back": "" if steps is None else f"{steps:,}",
        "at most": times(own.ceiling(name, busy)),
        "TFLOP/s": "" if rate is None else f"{rate:,.0f}",
        "parity": own.verdicts[name].parity or ("losses" if own.run.parity == "blocks" else ""),
    }


def ratio_cells(ratio: intervals.Ratio) -> tuple[str, str, str, str]:
    """Return base ms, ms, ratio and interval, which is "" for a single cycle."""
    interval = f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio.cycles > 1 else ""
    return milliseconds(ratio.base_ms), milliseconds(ratio.variant_ms), f"{ratio.ratio:.3f}x", interval


def times(value: float | None) -> str:
    """Return 1.234x; "" for None."""
    return "" if value is None else f"{value:.3f}x"


def aligned(rows: Sequence[tuple[str, ...]], num_left: int) -> Iterator[str]:
    """Yield lines of a table whose first `num_left` columns are flush left, without columns that are empty."""
    columns = [column for column in zip(*rows, strict=True) if len(rows) == 1 or any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH + 2 else " "
    for row in zip(*columns, strict=True):
        cells = [text.ljust(width) for text, width in zip(row[:num_left], widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(row[num_left:], widths[num_left:], strict=True)]
        yield gap.join(cells).rstrip()


def _faults(own: Judged) -> str:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, verdict in own.verdicts.items():
        if verdict.reason:
            alike[verdict.status, verdict.reason].append(name)
    lines = (f"{status}: {', '.join(names)} ({reason})" for (status, reason), names in alike.items())
    return "\n".join(map(printable, lines))


def _reruns(own: Judged) -> str:
    """A line for each variant that may run steps again."""
    lines = []
    for name, variant in own.build.variants.items():
        counted = [block.reruns for block in variant.blocks if block.reruns and own.passed(name)]
        steps, reruns = sum(each.steps for each in counted), sum(each.reruns for each in counted)
        if steps:
            total_ms = sum((each.rerun_ms or 0.0) * each.reruns for each in counted)
            cost = f", which took {milliseconds(total_ms / reruns)} ms each" if reruns else ""
            lines.append(f"{name}: {reruns} of {steps:,} timed steps ran again without fixed buffers{cost}.")
    return "\n".join(lines)


def _slowed(own: Judged) -> str:
    if not own.slowed:
        return ""
    times = f"{own.slowed:.2f} times as long in this run as alone in a process"
    return f"{own.base} takes {times}: another variant slows it, or the host was slower. These ratios are no headline."


def _meaning(own: Judged) -> str:
    """Say what the numbers mean: the ceiling, then a sentence for each graph."""
    if own.run.device == "cpu" or not own.base:
        return ""
    lines, ceiling, issue = [], own.ceiling(own.base), own.issue_ms(own.base)
    if ceiling is not None:
        said = f"A step of {own.base} takes {milliseconds(own.ms(own.base))} ms and keeps the GPU busy for "
        lines.append(f"{said}{milliseconds(own.busy_ms(own.base))}: a graph can gain {ceiling:.2f}x at most.")
    if issue is not None:
        lines.append(f"This host issues it in {milliseconds(issue)} ms; a slower host takes longer, a graph does not.")
    for name, variant in own.build.variants.items():
        ratio = own.ratio_of(name) if variant.kind not in ("eager", "control") and name != own.run.control else None
        if ratio is not None and ratio.cycles > 1:
            word = intervals.word(ratio)
            lines.append(f"{name}: {word} on this host now{_beside(own, name, ratio)}.")
            why = reason(own, name) if word in ("same", "slower") else ""
            lines += [f"Why not faster: {why}."] if why else []
            lines += _graphs_of(variant)
    return "\n".join(line for text in lines for line in textwrap.wrap(text, WIDTH))


def _graphs_of(variant) -> list[str]:
    """A sentence about the graphs of a variant, where the file knows the share of the GPU's time in them."""
    share, capture = variant.profile.graph_time_share, variant.capture
    if share is None or capture.made_s is None:
        return []
    number = "no graph" if not capture.graphs else f"{capture.graphs:,} graph{'s' * (capture.graphs > 1)}"
    made = f"made in {milliseconds(capture.made_s)} s with warm-up and compiler"
    return [f"{number}, with {100 * share:.0f} % of the GPU's time, {made}."]


def _beside(own: Judged, name: str, ratio: intervals.Ratio) -> str:
    """How sure it is, how much of its ceiling it reached, and the control beside a small effect."""
    text = f", to within {100 * ratio.half_width:.1f} %"
    reached, clocks = own.reached(name), (own.sm_mhz(name), own.sm_mhz(own.base))
    if reached is not None:
        text += f"; {100 * reached:.1f} % of the most"
        if None not in clocks and reached < 1 - intervals.NEAR:
            text += f" ({clocks[0]:.0f} MHz, {own.base} {clocks[1]:.0f})"
    control = own.ratio_of(own.run.control) if own.run.control in own.build.variants else None
    if control is not None and abs(ratio.ratio - 1) < intervals.SMALL_EFFECT:
        text += f"; control {control.ratio:.3f}x, to within {100 * control.half_width:.1f} %"
    return text
