"""Tables inside of READMEs, made from runs.

A table stands between two markers and is made again by `make readme`; a test fails where one is not what the runs say:

    <!-- table: answers -->     which workloads gain on every host, on some, on none, in a line each
    <!-- table: front -->       graph and eager of each workload over all hosts
    <!-- table: needs -->       memory, minutes and versions of the runs
    <!-- table: trust -->       hosts, controls, ceilings and failures, in a line each
    <!-- table: model gpt3 -->  the variants of a model on GPUs beside their bases
    <!-- table: decide -->      what to do, by step / busy, with measured workloads
    <!-- table: scopes -->      Megatron's scopes beside the variants here; "scopes llama31": all of one model
    <!-- table: memory -->      parameterized launches beside eager and other graphs: ms, and memory alone in a process
    <!-- table: lengths -->     RNN-T with changing lengths, host by host
    <!-- table: nvidia -->      NVIDIA's published gains beside the rows of the same mechanism
    <!-- end -->
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from benchmarks import runs
from benchmarks.pages import headlines, memory_table, operator_page, published, scopes, tables
from benchmarks.pages.headlines import Headline
from benchmarks.pages.markdown import in_markdown
from benchmarks.runs import Found, Range, Row
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import intervals
from graph_worth.harness.files.facts import Run, stem
from graph_worth.harness.files.workload import workload_of
from graph_worth.harness.judge import PASS, judged
from graph_worth.harness.pages.run_table import GIB

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BEGIN, END = "<!-- table:", "<!-- end -->"
NOTHING = "Nothing has been measured on a GPU yet."
# Runs begun later show whether the rule on step / busy holds, which was found on earlier ones.
RULE_WRITTEN = "2026-11-25T20:45:00Z"
# Of `headlines.bands`: what to do there.
BANDS = {
    "always": "Capture it:",
    "sometimes": "Measure your host first:",
    "never": "Leave it eager:",
}
# Bounds of step / busy, in words, and what to do.
CEILINGS = (
    (1.2, math.inf, "above 1.2", "Capture the whole step, or as much of it as you can."),
    (1.05, 1.2, "1.05 to 1.2", "Try it; on a slower host it gains more."),
    (0.0, 1.05, "below 1.05", "Leave it eager, unless other hosts issue slower."),
)


class ReadmeError(ValueError):
    """A marker that cannot be filled; the text names file and marker."""


def files(root: Path = ROOT) -> list[Path]:
    """README.md here, in each folder, and of the example steps; and the pages of docs/."""
    own = root / "README.md", *sorted(root.glob("[!.]*/README.md")), root / "examples" / "steps" / "README.md"
    return [path for path in dict.fromkeys((*own, *sorted(root.glob("docs/*.md")))) if path.is_file()]


def rendered(path: Path, found: Found, root: Path = ROOT) -> str:
    """The file's text with every table made again.

    Raises:
        ReadmeError: a marker has no end, or names no table.
    """
    text, name = path.read_text(), path.relative_to(root)
    if not text.count(BEGIN) == text.count(END) == len(BLOCK.findall(text)):
        raise ReadmeError(f"{name}: each '{BEGIN} ... -->' needs its own '{END}'")

    def fill(match):
        kind, _, argument = match[2].partition(" ")
        if kind not in _TABLES:
            raise ReadmeError(f"{name}: no table {match[2]!r}, there are {', '.join(_TABLES)}")
        return f"{match[1]}{_TABLES[kind](found, path, argument)}\n{match[4]}"

    return BLOCK.sub(fill, text)


def changed(found: Found, root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file whose tables are not what the runs say."""
    new = {path: rendered(path, found, root) for path in files(root)}
    return {path: text for path, text in new.items() if text != path.read_text()}


def front(found: Found, page: Path, argument: str = "") -> str:
    """Graph and eager of each workload over all hosts, the largest gain first."""
    lines = []
    for line in headlines.of(found):
        name = f"[{in_markdown(line.name)}]({_relative(line.page, page)})"
        name += f" ({line.submitted})" if line.submitted else ""
        name += f", {in_markdown(line.more)}" if line.more else ""
        graph_ms = ", ".join(f"{own.ms:,.2f} ({own.gpu})" for own in line.gpus)
        gib = [f"{own.reserved_bytes / GIB:.1f} ({own.gpu})" for own in line.gpus if own.reserved_bytes]
        texts = [graph_ms, tables.two(line.base_ms), tables.two(line.gain, "x"), *(gib[:1] or [""]), line.hosts_text]
        lines.append([name, *map(in_markdown, texts)])
    names = ["Workload (version of MLPerf)", "graph ms", "eager ms over hosts", "gain over hosts", "GiB", "hosts"]
    return tables.markdown(names, lines) if lines else NOTHING


def _relative(path: Path, page: Path) -> str:
    return quote(Path(os.path.relpath(path, page.parent)).as_posix())


def _answers(found, page, argument):
    lines = headlines.of(found)
    if not lines:
        return NOTHING
    own = headlines.bands(lines)
    texts = [f"- **{BANDS[band]}** {'; '.join(map(_gain_of, own[band]))}." for band in BANDS if own[band]]
    issue_us, kernels_us = _issue_us(found), [(us, line) for line in lines if (us := _kernel_us(line))]
    if issue_us and kernels_us:
        shown = sorted((us, in_markdown(line.name)) for us, line in kernels_us)
        ends = ", ".join(f"{name} {us:.0f}" for us, name in [*shown[:4], *shown[4:][-1:]])
        text = f"- **Many small kernels?** Hosts took {issue_us[0]:.0f} to {issue_us[1]:.0f} us to issue one: capture "
        texts.append(f"{text}where yours are shorter in the mean, whatever their number. In us: {ends}.")
    return "\n".join(texts)


def _gain_of(line: Headline) -> str:
    hosts = runs.NUMBER_WORDS.get(len(line.hosts), f"{len(line.hosts)} hosts")
    name = line.words + "," * (line.words != line.name)
    return f"{in_markdown(name)} {tables.two(line.gain, 'x')} ({hosts})"


def _issue_us(found: Found) -> Range | None:
    """The fewest and the most us that a host took to issue an eager step, for each of its kernels."""
    times = []
    for row in headlines.rows(found):
        for point in row.timed:
            kernels = point.judged.build.variants[point.judged.base].profile.kernels
            if kernels and point.base_issue_ms:
                times.append(1e3 * point.base_issue_ms / kernels)
    return runs.range_of(times)


def _kernel_us(line: Headline) -> float | None:
    """The mean time of a kernel of the eager step, in us."""
    newest = next((own.run for own in line.gpus if own.run), None)
    if newest is None:
        return None
    own = next(iter(judged(newest).values()))
    busy_ms, kernels = own.busy_ms(own.base), own.build.variants[own.base].profile.kernels
    return 1e3 * busy_ms / kernels if busy_ms and kernels else None


def _needs(found, page, argument):
    if not headlines.of(found):
        return NOTHING
    reserved = "GiB: the most that torch reserved, the graph alone; what ran on an H100 fits 80 GB."
    minutes = [own for _, run in found.runs if _is_bench(run) and (own := minutes_of(run)) > 0]
    took = f"`make bench` took {min(minutes):.1f} to {max(minutes):.1f} minutes a model." if minutes else ""
    return " ".join(filter(None, [took, f"Measured with {_versions(found)}.", reserved]))


def minutes_of(run: Run) -> float:
    """Minutes from the begin of a run to its end; 0 where these are no dates."""
    try:
        begin, end = (datetime.fromisoformat(text) for text in (run.begin_utc, run.end_utc))
        return (end - begin).total_seconds() / 60
    except (ValueError, TypeError):
        return 0.0


def _is_bench(run: Run) -> bool:
    """True for a run as `make bench MODEL=...` makes it, on a GPU."""
    is_model = run.model != OWN_STEP and run.preset == "bench" and not workload_of(run).label
    return run.device == "cuda" and is_model and run.ranks == 1 and run.parity == "courses"


def _versions(found: Found) -> str:
    on_gpus = [run for _, run in found.runs if run.device == "cuda"]
    names = {"torch": "torch", "transformer_engine": "Transformer Engine", "python": "Python"}
    seen = {title: [run.versions.get(name) for run in on_gpus] for name, title in names.items()}
    seen["driver"] = [run.host.driver for run in on_gpus]
    known = {title: sorted({str(one) for one in each if one}) for title, each in seen.items()}
    return ", ".join(f"{title} {' and '.join(map(in_markdown, each))}" for title, each in known.items() if each)


def _trust(found, page, argument):
    lines = [_hosts_text(found), _controls(found), _ceiling(found.rows), _failed(found, page)]
    return "\n".join(f"- {line}" for line in lines)


def _hosts_text(found):
    own = {run.host.boot for _, run in found.runs if run.device == "cuda"}
    more = {host.host for line in headlines.of(found) for host in line.hosts if host.is_archived} - own
    files = len({path for path, _ in found.runs})
    text = f"**Hosts.** {runs.counted(len(found.runs), 'workload')} measured in {runs.counted(files, 'file')} "
    text += f"on {runs.counted(len(own), 'host')}"
    return f"{text}. {runs.counted(len(more), 'archived host')}: measured before, no intervals." if more else f"{text}."


def _controls(found):
    ratios = [
        ratio
        for row in runs.on_gpus(found.rows)
        if row.control and not row.workload.busy
        for ratio in row.ratios
        if ratio.cycles > 1
    ]
    if not ratios:
        return "**Controls.** None has been measured yet."
    values = [ratio.ratio for ratio in ratios]
    holds = sum(ratio.low <= 1 <= ratio.high for ratio in ratios)
    text = f"**Controls.** Eager against itself: {tables.two((min(values), max(values)), 'x')}; "
    return f"{text}{holds} of {len(ratios)} intervals (95 %) contain 1."


def _failed(found, page):
    points = [point for row in runs.on_gpus(found.rows) for point in row.points]
    failed = [point for point in points if point.verdict.status not in (PASS, "unsupported")]
    if not failed:
        return "**What failed.** Nothing on a GPU."
    where = len({point.run.id for point in failed})
    link = _relative(found.root / "overview.md", page)
    text = (
        f"**What failed.** {runs.counted(len(failed), 'measurement')} in {runs.counted(where, 'run')}: wrong losses, "
    )
    return f"{text}crashes, no memory. Each stands in [all rows]({link})."


def _decide(found, page, argument):
    """By step / busy of a run's eager: what to do, and each workload with the gains of its whole-step graph in it."""
    lines = []
    for low, high, name, advice in CEILINGS:
        seen: dict[str, list[float]] = {}
        for row in headlines.rows(found):
            points = [(point.ceiling, point.ratio) for point in row.timed]
            gains = [ratio.ratio for ceiling, ratio in points if ratio and ceiling and low <= ceiling < high]
            seen.setdefault(in_markdown(headlines.name_of(row.workload)), []).extend(gains)
        texts = [f"{key} {tables.two((min(own), max(own)), 'x')}" for key, own in seen.items() if own]
        lines.append([name, advice, "<br>".join(texts) or "not measured yet"])
    return tables.markdown(["Step / busy", "What to do", "Gains of graphs in runs here"], lines)


def _model(found, page, argument):
    own = [row for row in runs.on_gpus(found.rows) if row.workload.model == argument]
    timed = [row for row in own if row.status == PASS]
    if not timed:
        return "Not measured in blocks on a GPU yet."
    left = tables.as_list(tables.not_timed(own))
    # Each row has its base's ms beside it; results/overview.md has the rows of bases and controls.
    shown = [row for row in timed if row.variant != row.base and not row.control] or timed
    lines, before = [], ""
    for row in shown:
        where = row.workload
        gpus = f"{where.ranks} " * (where.ranks > 1) + headlines.short(where.gpu)
        name = tables.linked(f"{where.name.removeprefix(f'{argument}/')}, {gpus}", row, page)
        cells = [in_markdown(tables.CELLS[column](row)) for column in tables.FEW[1:]]
        lines.append(["" if name == before else name, *cells])
        before = name
    table = tables.markdown(list(tables.FEW), lines)
    return table + (f"\n\nWithout a number:\n\n{left}" if left else "")


def _lengths(found, page, argument):
    """RNN-T with changing lengths: padding to buckets and the graph of each pair of buckets, on each host."""
    padded: dict[str, runs.HostMeans] = {}
    graphs: dict[str, runs.HostMeans] = {}
    for row in runs.on_gpus(found.rows):
        if (row.workload.model, row.workload.preset, row.workload.label) == ("rnnt", "bench_lengths", ""):
            own = {"eager_padded": padded, "graph_step": graphs}.get(row.variant, {})
            own.update({host.host: host for host in row.hosts})
    for where, hosts in found.archived.items():
        if (where.model, where.preset, where.label, where.ranks) == ("rnnt", "bench_lengths", "", 1):
            for host in hosts:
                for name, means in (("eager_padded", padded), ("graph_step", graphs)):
                    if {"eager", name} <= host.ms.keys():
                        means.setdefault(host.boot, runs.HostMeans(host.boot, host.ms["eager"], host.ms[name], True))
    lines = []
    for host in sorted(padded.keys() & graphs.keys()):
        one, other = padded[host], graphs[host]
        name = f"{in_markdown(host[:6])}{' (archived)' if other.is_archived else ''}"
        costs, gain = f"{100 * (one.ms / one.base_ms - 1):.1f} %", one.ms / other.ms
        times = [f"{ms:.2f}" for ms in (one.base_ms, one.ms, other.ms)]
        lines.append([name, *times, costs, f"{gain:.2f}x", f"{other.ratio:.2f}x"])
    names = ["Host", "eager ms", "padded ms", "graph ms", "padding costs", "the graph gains", "gain over eager"]
    return tables.markdown(names, lines) if lines else NOTHING


def _nvidia(found, page, argument):
    lines = []
    for own in published.published():
        same = [
            row
            for row in runs.on_gpus(found.rows)
            if (row.workload.model, row.variant) == (own.model, own.variant)
            and not row.workload.busy
            and stem(row.workload.preset) in own.presets
        ]
        order = list(own.presets)

        def rank(row, order=order):
            where = row.workload
            return not row.ratio, order.index(stem(where.preset)), where.ranks, -len(row.hosts), where.build

        if not same:
            continue
        row = min(same, key=rank)
        hosts = row.hosts_text.partition(",")[0]
        text = f"{tables.two(row.gain_range, 'x')}, {hosts}" if row.gain_range else row.status
        gpus = f"{row.workload.ranks} {in_markdown(headlines.short(row.workload.gpu))}"
        differs = f"{gpus}: {own.presets[stem(row.workload.preset)]}"
        lines.append([own.title, f"[{own.gain_range}]({own.source})", tables.linked(text, row, page), differs])
    names = ["Workload", "NVIDIA's gain", "Ours, the same part captured", "What differs"]
    return tables.markdown(names, lines) if lines else NOTHING


def _ceiling(rows: Sequence[Row]) -> str:
    found = runs.reached(rows)
    if not found:
        return NOTHING
    hosts = {each.point.host for each in found}
    most = max(each.share for each in found) - 1
    text = f"**Ceiling.** On {runs.counted(len(hosts), 'host')} none of {len(found)} graphs gained over "
    worst = min(each.share * each.ceiling for each in found)
    loss = f" The worst took {1 / worst:.2f} times as long as eager." if worst < 1 else ""
    return f"{text}{100 * max(most, 0.0):.1f} % more than step / busy.{loss}"


def ceiling_text(rows: Sequence[Row]) -> str:
    """Return how many graphs reached step / busy, in a sentence or two."""
    text = _ceiling(rows).removeprefix("**Ceiling.** ")
    after = [each for each in runs.reached(rows) if each.point.run.begin_utc > RULE_WRITTEN]
    if not after:
        return text
    parts = []
    for gains, what in ((True, f"over {100 * intervals.NEAR:g} %"), (False, "less")):
        own = [each for each in after if (each.ceiling > 1 + intervals.NEAR) == gains]
        near = sum(each.share >= 1 - intervals.NEAR for each in own)
        parts += [f"{near} of {len(own)} graphs that could gain {what}"] if own else []
    return f"{text} In runs made after this rule was written, {' and '.join(parts)} reached it to within 5 %."


def misses(rows: list[Row]) -> list[str]:
    """Return a line for each graph that stayed more than 5 % below its ceiling, with the cause."""
    lines = []
    for each in runs.reached(rows):
        variant, point, own = each.row.variant, each.point, each.point.judged
        base_busy, busy, ms = own.busy_ms(own.uncaptured(variant)), point.busy_ms, own.ms(variant, point.is_busy)
        if each.share >= 1 - intervals.NEAR or not base_busy or not busy or not ms:
            continue
        clocks = own.sm_mhz(variant, point.is_busy), own.sm_mhz(own.base, point.is_busy)
        said = f"its kernels take {100 * (busy / base_busy - 1):+.1f} %"
        if None not in clocks:
            said += f" (GPU at {clocks[0]:,.0f} MHz, {own.base} at {clocks[1]:,.0f})"
        said += f", its GPU waits for {100 * max(0.0, 1 - busy / ms):.1f} % of the step"
        name = f"{each.row.workload.name} {variant}, {point.run.id}"
        lines.append(f"{name}: {100 * each.share:.1f} % of {each.ceiling:.3f}x; {said}.")
    return lines


_TABLES: dict[str, Callable[[Found, Path, str], str]] = {
    "answers": _answers,
    "front": front,
    "needs": _needs,
    "trust": _trust,
    "model": _model,
    "decide": _decide,
    "scopes": scopes.markdown,
    "operators": operator_page.markdown,
    "memory": memory_table.markdown,
    "lengths": _lengths,
    "nvidia": _nvidia,
}
