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
    readmes = root / "README.md", *sorted(root.glob("[!.]*/README.md")), root / "examples" / "steps" / "README.md"
    return [path for path in dict.fromkeys((*readmes, *sorted(root.glob("docs/*.md")))) if path.is_file()]


def rendered(path: Path, results: Found, root: Path = ROOT) -> str:
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
        return f"{match[1]}{_TABLES[kind](results, path, argument)}\n{match[4]}"

    return BLOCK.sub(fill, text)


def changed(results: Found, root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file whose tables are not what the runs say."""
    new = {path: rendered(path, results, root) for path in files(root)}
    return {path: text for path, text in new.items() if text != path.read_text()}


def front(results: Found, page: Path, argument: str = "") -> str:
    """Graph and eager of each workload over all hosts, the largest gain first."""
    lines = []
    for line in headlines.of(results):
        name = f"[{in_markdown(line.name)}]({_relative(line.page, page)})"
        name += f" ({line.submitted})" if line.submitted else ""
        name += f", {in_markdown(line.more)}" if line.more else ""
        graph_ms = ", ".join(f"{gpu.ms:,.2f} ({gpu.gpu})" for gpu in line.gpus)
        gib = [f"{gpu.reserved_bytes / GIB:.1f} ({gpu.gpu})" for gpu in line.gpus if gpu.reserved_bytes]
        texts = [graph_ms, tables.two(line.base_ms), tables.two(line.gain, "x"), *(gib[:1] or [""]), line.hosts_text]
        lines.append([name, *map(in_markdown, texts)])
    names = ["Workload (version of MLPerf)", "graph ms", "eager ms over hosts", "gain over hosts", "GiB", "hosts"]
    return tables.markdown(names, lines) if lines else NOTHING


def _relative(path: Path, page: Path) -> str:
    return quote(Path(os.path.relpath(path, page.parent)).as_posix())


def _answers(results, page, argument):
    lines = headlines.of(results)
    if not lines:
        return NOTHING
    by_band = headlines.bands(lines)
    texts = [f"- **{BANDS[band]}** {'; '.join(map(_gain_of, by_band[band]))}." for band in BANDS if by_band[band]]
    issue_us, kernels_us = _issue_us(results), [(us, line) for line in lines if (us := _kernel_us(line))]
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


def _issue_us(results: Found) -> Range | None:
    """The fewest and the most us that a host took to issue an eager step, for each of its kernels."""
    times = []
    for row in headlines.rows(results):
        for point in row.timed:
            kernels = point.judged.build.variants[point.judged.base].profile.kernels
            if kernels and point.base_issue_ms:
                times.append(1e3 * point.base_issue_ms / kernels)
    return runs.range_of(times)


def _kernel_us(line: Headline) -> float | None:
    """The mean time of a kernel of the eager step, in us."""
    newest = next((gpu.run for gpu in line.gpus if gpu.run), None)
    if newest is None:
        return None
    first = next(iter(judged(newest).values()))
    busy_ms, kernels = first.busy_ms(first.base), first.build.variants[first.base].profile.kernels
    return 1e3 * busy_ms / kernels if busy_ms and kernels else None


def _needs(results, page, argument):
    if not headlines.of(results):
        return NOTHING
    reserved = "GiB: the most that torch reserved, the graph alone; what ran on an H100 fits 80 GB."
    minutes = [run_minutes for _, run in results.runs if _is_bench(run) and (run_minutes := minutes_of(run)) > 0]
    took = f"`make bench` took {min(minutes):.1f} to {max(minutes):.1f} minutes a model." if minutes else ""
    return " ".join(filter(None, [took, f"Measured with {_versions(results)}.", reserved]))


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


def _versions(results: Found) -> str:
    on_gpus = [run for _, run in results.runs if run.device == "cuda"]
    names = {"torch": "torch", "transformer_engine": "Transformer Engine", "python": "Python"}
    seen = {title: [run.versions.get(name) for run in on_gpus] for name, title in names.items()}
    seen["driver"] = [run.host.driver for run in on_gpus]
    known = {title: sorted({str(version) for version in versions if version}) for title, versions in seen.items()}
    return ", ".join(
        f"{title} {' and '.join(map(in_markdown, versions))}" for title, versions in known.items() if versions
    )


def _trust(results, page, argument):
    lines = [_hosts_text(results), _controls(results), _ceiling(results.rows), _failed(results, page)]
    return "\n".join(f"- {line}" for line in lines)


def _hosts_text(results):
    hosts = {run.host.boot for _, run in results.runs if run.device == "cuda"}
    more = {host.host for line in headlines.of(results) for host in line.hosts if host.is_archived} - hosts
    files = len({path for path, _ in results.runs})
    text = f"**Hosts.** {runs.counted(len(results.runs), 'workload')} measured in {runs.counted(files, 'file')} "
    text += f"on {runs.counted(len(hosts), 'host')}"
    return f"{text}. {runs.counted(len(more), 'archived host')}: measured before, no intervals." if more else f"{text}."


def _controls(results):
    ratios = [
        ratio
        for row in runs.on_gpus(results.rows)
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


def _failed(results, page):
    points = [point for row in runs.on_gpus(results.rows) for point in row.points]
    failed = [point for point in points if point.verdict.status not in (PASS, "unsupported")]
    if not failed:
        return "**What failed.** Nothing on a GPU."
    where = len({point.run.id for point in failed})
    link = _relative(results.root / "overview.md", page)
    text = (
        f"**What failed.** {runs.counted(len(failed), 'measurement')} in {runs.counted(where, 'run')}: wrong losses, "
    )
    return f"{text}crashes, no memory. Each stands in [all rows]({link})."


def _decide(results, page, argument):
    """By step / busy of a run's eager: what to do, and each workload with the gains of its whole-step graph in it."""
    lines = []
    for low, high, name, advice in CEILINGS:
        seen: dict[str, list[float]] = {}
        for row in headlines.rows(results):
            points = [(point.ceiling, point.ratio) for point in row.timed]
            gains = [ratio.ratio for ceiling, ratio in points if ratio and ceiling and low <= ceiling < high]
            seen.setdefault(in_markdown(headlines.name_of(row.workload)), []).extend(gains)
        texts = [f"{key} {tables.two((min(values), max(values)), 'x')}" for key, values in seen.items() if values]
        lines.append([name, advice, "<br>".join(texts) or "not measured yet"])
    return tables.markdown(["Step / busy", "What to do", "Gains of graphs in runs here"], lines)


def _model(results, page, argument):
    rows = [row for row in runs.on_gpus(results.rows) if row.workload.model == argument]
    timed = [row for row in rows if row.status == PASS]
    if not timed:
        return "Not measured in blocks on a GPU yet."
    left = tables.as_list(tables.not_timed(rows))
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


def _lengths(results, page, argument):
    """RNN-T with changing lengths: padding to buckets and the graph of each pair of buckets, on each host."""
    padded: dict[str, runs.HostMeans] = {}
    graphs: dict[str, runs.HostMeans] = {}
    for row in runs.on_gpus(results.rows):
        if (row.workload.model, row.workload.preset, row.workload.label) == ("rnnt", "bench_lengths", ""):
            by_host = {"eager_padded": padded, "graph_step": graphs}.get(row.variant, {})
            by_host.update({host.host: host for host in row.hosts})
    for where, hosts in results.archived.items():
        if (where.model, where.preset, where.label, where.ranks) == ("rnnt", "bench_lengths", "", 1):
            for host in hosts:
                for name, means in (("eager_padded", padded), ("graph_step", graphs)):
                    if {"eager", name} <= host.ms.keys():
                        means.setdefault(host.boot, runs.HostMeans(host.boot, host.ms["eager"], host.ms[name], True))
    lines = []
    for host in sorted(padded.keys() & graphs.keys()):
        padded_means, graph_means = padded[host], graphs[host]
        name = f"{in_markdown(host[:6])}{' (archived)' if graph_means.is_archived else ''}"
        costs, gain = f"{100 * (padded_means.ms / padded_means.base_ms - 1):.1f} %", padded_means.ms / graph_means.ms
        times = [f"{ms:.2f}" for ms in (padded_means.base_ms, padded_means.ms, graph_means.ms)]
        lines.append([name, *times, costs, f"{gain:.2f}x", f"{graph_means.ratio:.2f}x"])
    names = ["Host", "eager ms", "padded ms", "graph ms", "padding costs", "the graph gains", "gain over eager"]
    return tables.markdown(names, lines) if lines else NOTHING


def _nvidia(results, page, argument):
    lines = []
    for publication in published.published():
        same = [
            row
            for row in runs.on_gpus(results.rows)
            if (row.workload.model, row.variant) == (publication.model, publication.variant)
            and not row.workload.busy
            and stem(row.workload.preset) in publication.presets
        ]
        order = list(publication.presets)

        def rank(row, order=order):
            where = row.workload
            return not row.ratio, order.index(stem(where.preset)), where.ranks, -len(row.hosts), where.build

        if not same:
            continue
        row = min(same, key=rank)
        hosts = row.hosts_text.partition(",")[0]
        text = f"{tables.two(row.gain_range, 'x')}, {hosts}" if row.gain_range else row.status
        gpus = f"{row.workload.ranks} {in_markdown(headlines.short(row.workload.gpu))}"
        differs = f"{gpus}: {publication.presets[stem(row.workload.preset)]}"
        published_gain = f"[{publication.gain_range}]({publication.source})"
        lines.append([publication.title, published_gain, tables.linked(text, row, page), differs])
    names = ["Workload", "NVIDIA's gain", "Ours, the same part captured", "What differs"]
    return tables.markdown(names, lines) if lines else NOTHING


def _ceiling(rows: Sequence[Row]) -> str:
    reached = runs.reached(rows)
    if not reached:
        return NOTHING
    hosts = {graph.point.host for graph in reached}
    most = max(graph.share for graph in reached) - 1
    text = f"**Ceiling.** On {runs.counted(len(hosts), 'host')} none of {len(reached)} graphs gained over "
    worst = min(graph.share * graph.ceiling for graph in reached)
    loss = f" The worst took {1 / worst:.2f} times as long as eager." if worst < 1 else ""
    return f"{text}{100 * max(most, 0.0):.1f} % more than step / busy.{loss}"


def ceiling_text(rows: Sequence[Row]) -> str:
    """Return how many graphs reached step / busy, in a sentence or two."""
    text = _ceiling(rows).removeprefix("**Ceiling.** ")
    after = [graph for graph in runs.reached(rows) if graph.point.run.begin_utc > RULE_WRITTEN]
    if not after:
        return text
    parts = []
    for gains, what in ((True, f"over {100 * intervals.NEAR:g} %"), (False, "less")):
        graphs = [graph for graph in after if (graph.ceiling > 1 + intervals.NEAR) == gains]
        near = sum(graph.share >= 1 - intervals.NEAR for graph in graphs)
        parts += [f"{near} of {len(graphs)} graphs that could gain {what}"] if graphs else []
    return f"{text} In runs made after this rule was written, {' and '.join(parts)} reached it to within 5 %."


def misses(rows: list[Row]) -> list[str]:
    """Return a line for each graph that stayed more than 5 % below its ceiling, with the cause."""
    lines = []
    for graph in runs.reached(rows):
        variant, point, judged_build = graph.row.variant, graph.point, graph.point.judged
        base_busy, busy = judged_build.busy_ms(judged_build.uncaptured(variant)), point.busy_ms
        ms = judged_build.ms(variant, point.is_busy)
        if graph.share >= 1 - intervals.NEAR or not base_busy or not busy or not ms:
            continue
        clocks = judged_build.sm_mhz(variant, point.is_busy), judged_build.sm_mhz(judged_build.base, point.is_busy)
        cause = f"its kernels take {100 * (busy / base_busy - 1):+.1f} %"
        if None not in clocks:
            cause += f" (GPU at {clocks[0]:,.0f} MHz, {judged_build.base} at {clocks[1]:,.0f})"
        cause += f", its GPU waits for {100 * max(0.0, 1 - busy / ms):.1f} % of the step"
        name = f"{graph.row.workload.name} {variant}, {point.run.id}"
        lines.append(f"{name}: {100 * graph.share:.1f} % of {graph.ceiling:.3f}x; {cause}.")
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
