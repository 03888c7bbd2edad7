"""Tables inside of READMEs, made from runs.

A table stands between two markers and is made again by `make readme`; a test fails where one is not what the runs say:

    <!-- table: launch -->      the hosts' times to launch a kernel, and what to do with them
    <!-- table: front -->       graph and eager of each workload over all hosts
    <!-- table: fits -->        memory of these graphs
    <!-- table: needs -->       minutes and versions of the runs
    <!-- table: trust -->       hosts, controls, ceilings and failures, in a line each
    <!-- table: row gpt3 -->    the gain of a model's headline graph, in a line
    <!-- table: model gpt3 -->  the variants of a model on GPUs beside their bases
    <!-- table: sweeps gpt3 --> the sweeps of a model, with figures and the sizes at which gains end; "" without any
    <!-- table: decide -->      what to do, by step / busy, with measured workloads
    <!-- table: scopes -->      Megatron's scopes beside the variants here
    <!-- table: memory -->      parameterized launches beside eager and other graphs: ms, and memory alone in a process
    <!-- table: roofline -->    how far graphs lie from the launch roofline
    <!-- table: lengths -->     RNN-T with changing lengths, host by host
    <!-- table: nvidia -->      NVIDIA's published gains beside the rows of the same mechanism
    <!-- table: megatron -->    gpt3 in Megatron-Core beside ours; "megatron best": in a sentence; "megatron llama31"
    <!-- table: epochs -->      real programs with loader, logs and checkpoint
    <!-- end -->
"""

import math
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pandas as pd
from pandas import DataFrame

from benchmarks import frame
from benchmarks.frame import Results, Row
from benchmarks.pages import (
    epochs_table,
    headlines,
    memory_table,
    operator_page,
    published,
    roofline,
    scopes,
    sweeps,
    tables,
)
from benchmarks.pages.markdown import in_markdown
from benchmarks.pages.tables import TWO
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import intervals
from graph_worth.harness.files.facts import Run, stem
from graph_worth.harness.files.workload import workload_of
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages import cells
from graph_worth.harness.pages.cells import counted, gib, span
from graph_worth.harness.standing import ASIDE, BESIDE, OUT, SLOWED

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BEGIN, END = "<!-- table:", "<!-- end -->"
NOTHING = "Nothing has been measured on a GPU yet."
# Runs begun later show whether the rule on step / busy holds, which was found on earlier ones.
RULE_WRITTEN = "2026-11-25T20:45:00Z"
# Bounds of step / busy, in words, and what to do.
CEILINGS = (
    (1.2, math.inf, "above 1.2", "Capture the whole step, or as much of it as you can."),
    (1.05, 1.2, "1.05 to 1.2", "Try it. On a slower host it gains more."),
    (0.0, 1.05, "below 1.05", "Leave it eager, unless your other hosts are slower."),
)


class ReadmeError(ValueError):
    """A marker that cannot be filled; the text names file and marker."""


def files(root: Path = ROOT) -> list[Path]:
    """README.md here, in each folder, and of the example steps; and the pages of docs/."""
    readmes = root / "README.md", *sorted(root.glob("[!.]*/README.md")), root / "examples" / "steps" / "README.md"
    return [path for path in dict.fromkeys((*readmes, *sorted(root.glob("docs/*.md")))) if path.is_file()]


def rendered(path: Path, results: Results, root: Path = ROOT) -> str:
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


def changed(results: Results, root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file whose tables are not what the runs say."""
    new = {path: rendered(path, results, root) for path in files(root)}
    return {path: text for path, text in new.items() if text != path.read_text()}


def front(results: Results, page: Path, argument: str = "") -> str:
    """Graph and eager of each workload over all hosts, the largest gain first."""
    lines = []
    for line in headlines.of(results):
        name = f"[{in_markdown(line.name)}]({tables.relative(line.page, page)})"
        name += f" ({line.submitted})" if line.submitted else ""
        name += f", {in_markdown(line.more)}" if line.more else ""
        graph_ms = ", ".join(f"{cells.cell(gpu.ms, ',.2f')} ({gpu.gpu})" for gpu in line.gpus)
        sizes = [f"{gib(gpu.reserved_bytes)} ({gpu.gpu})" for gpu in line.gpus if gpu.reserved_bytes]
        texts = [line.part, line.setting, graph_ms, span(*line.base_ms, TWO), "", *(sizes[:1] or [""]), line.hosts_text]
        texts = [*map(in_markdown, texts)]
        texts[4] = "<br>".join(in_markdown(gain.text) for gain in line.gains)
        lines.append([name, *texts])
    names = ["Workload (version of MLPerf)", "Captured", "A step has", "graph ms", "eager ms over hosts"]
    names += ["gain over hosts", "GiB", "hosts"]
    return tables.markdown(names, lines) if lines else NOTHING


def _launch(results, page, argument):
    """Return the times in which counted hosts launch a kernel of an eager step, in a sentence with the rule."""
    points = roofline.points(results)
    eager = points["counts"] & ~points["host_slowed"] & (points["ranks"] == 1) & (points["program"] == points["base"])
    eager = points[eager & points["host_us"].notna()]
    times = eager["host_us"]
    if not len(times):
        return NOTHING
    hosts = counted(eager["host"].nunique(), "host")
    text = f"In {counted(len(times), 'measurement')} that count, on {hosts}, the host took "
    text += f"{span(times.min(), times.max(), '.0f')} us to launch a kernel of an eager step, "
    text += f"{times.median():.0f} us in the median. "
    return f"{text}`make watch` measures yours. If your kernels take less than your host's launch, capture the step."


def _needs(results, page, argument):
    minutes = [run_minutes for _, run in results.runs if _is_bench(run) and (run_minutes := minutes_of(run)) > 0]
    took = f"`make bench` took {min(minutes):.1f} to {max(minutes):.1f} minutes a model." if minutes else ""
    whole = [run for _, run in results.runs if "doctor" in run.seconds and len(run.builds) > 1]
    seconds = max((sum(run.seconds.values()) for run in whole), default=0.0)
    measured = f"`make measure` with compiled variants took at most {seconds:.0f} s." if seconds else ""
    versions = f"Measured with {_versions(results)}." if took else ""
    return " ".join(filter(None, [took, measured, versions])) or NOTHING


def _fits_text(results, page, argument):
    lines = headlines.of(results)
    large = " and ".join(in_markdown(line.words) for line in lines if not _fits(line))
    text = "GiB is the peak memory that torch reserved when only this graph ran. All rows"
    text += f"{f' but {large}' if large else ''} fit into 80 GB: they ran on an H100, with the layers that the "
    text += "row names, or need under 70 GiB."
    return text if lines else NOTHING


def _fits(line: headlines.Headline) -> bool:
    return any(gpu.gpu == "H100" or 0 < (gpu.reserved_bytes or 0) < 70 * 2**30 for gpu in line.gpus)


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


def _versions(results: Results) -> str:
    on_gpus = [run for _, run in results.runs if run.device == "cuda"]
    names = {"torch": "torch", "transformer_engine": "Transformer Engine", "python": "Python"}
    seen = {title: [run.versions.get(name) for run in on_gpus] for name, title in names.items()}
    seen["driver"] = [run.host.driver for run in on_gpus]
    known = {title: sorted({str(version) for version in versions if version}) for title, versions in seen.items()}
    return ", ".join(
        f"{title} {' and '.join(map(in_markdown, versions))}" for title, versions in known.items() if versions
    )


def _trust(results, page, argument):
    lines = [_hosts_text(results), _left_out(results, page), _controls(results), _ceiling(results.points)]
    return "\n".join(f"- {line}" for line in lines)


def _hosts_text(results):
    hosts = {run.host.boot for _, run in results.runs if run.device == "cuda"}
    more = {host.host for line in headlines.of(results) for host in line.hosts if host.archived} - hosts
    files = len({path for path, _ in results.runs})
    workloads = results.points[[name for name in frame.WORKLOAD if name != "digest"]].drop_duplicates()
    text = f"**Hosts.** {counted(len(results.runs), 'run')} of {counted(len(workloads), 'workload')} in "
    text += f"{counted(files, 'file')}, on {counted(len(hosts), 'host')}. A host is one boot of a machine. On "
    text += "*unknown* hosts, which have older files, other programs may have run."
    if more:
        text += (
            f" Another {counted(len(more), '*archived* host')} were measured with an older method, without intervals."
        )
    return text


def _on_gpus(table: DataFrame) -> DataFrame:
    return table[table["gpu"] != "CPU"]


def _controls(results):
    points = frame.timed(_on_gpus(results.points))
    points = points[points["control"] & (points["busy_processes"] == 0) & (points["cycles"] > 1)]
    if not len(points):
        return "**Controls.** None has been measured yet."
    ratios = points["ratio"]
    holds = ((points["low"] <= 1) & (points["high"] >= 1)).sum()
    text = f"**Controls.** Eager against itself: {span(ratios.min(), ratios.max(), TWO, 'x')}; "
    return f"{text}{holds} of {len(ratios)} intervals (95 %) contain 1."


def _left_out(results, page):
    """Return how many graphs no headline counts, by which rule, and how many measurements have failed."""
    points = _on_gpus(results.points)
    graphs = frame.timed(points)
    graphs = graphs[(graphs["kind"] == "graph") & (graphs["status"] == PASS) & (graphs["busy_processes"] == 0)]
    beside, aside, slowed = ((graphs["standing"] == standing).sum() for standing in (BESIDE, ASIDE, SLOWED))
    rule, rows = (tables.relative(path, page) for path in (ROOT / "docs" / "method.md", results.root / "overview.md"))
    out = beside + aside + slowed
    text = f"**Left out.** The headlines count {len(graphs) - out} of {counted(len(graphs), 'measurement')} of a "
    text += f"graph. Of the other {out}, which stand in [all rows]({rows}), "
    text += f"in {slowed} a known fault slowed eager, " if slowed else ""
    text += f"{beside} ran beside other work, and in {aside} eager's time was not steady or the file has another fault "
    text += f"([the rule]({rule}#quiet-hosts-and-busy-ones)). "
    failed = points[~points["status"].isin([PASS, "unsupported"])]
    if not len(failed):
        return f"{text}Nothing failed on a GPU."
    text += (
        f"{counted(len(failed), 'measurement')} in {counted(failed['run'].nunique(), 'run')} failed with wrong losses, "
    )
    return f"{text}crashes or no memory ([all rows]({rows}))."


def _decide(results, page, argument):
    """By step / busy: what to do, and the headlines whose runs have such a quotient in the median, with their graph."""
    gains = [(line, gain, gain.ceiling) for line in headlines.of(results) for gain in line.gains if gain.ceiling]
    lines = []
    for least, below, ceilings, advice in CEILINGS:
        texts = [
            f"{in_markdown(line.words)}, `{line.variant}`: {gain.text}"
            for line, gain, ceiling in gains
            if least <= ceiling < below
        ]
        lines.append([ceilings, advice, "<br>".join(texts) or "not measured on a quiet host"])
    return tables.markdown(["Step / busy", "What to do", "Gains of graphs in runs here"], lines)


def _model(results, page, argument):
    rows = _on_gpus(results.rows)
    # The points of a sweep have a table of their own.
    rows = rows[(rows["model"] == argument) & (rows["over"] == "")]
    timed = frame.records(rows[rows["status"] == PASS])
    if not timed:
        return "Not measured in blocks on a GPU yet."
    left = tables.as_list(tables.not_timed(results, rows))
    # Each row has its base's ms beside it. results/overview.md also has the rows of bases and controls, and of earlier
    # files of a step whose eager was slowed.
    shown = [row for row in timed if row.variant != row.base and not row.control and not _is_superseded(row)] or timed
    lines, before = [], ""
    for row in shown:
        gpus = f"{row.ranks} " * (row.ranks > 1) + headlines.short(row.gpu)
        name = tables.linked(f"{row.workload.removeprefix(f'{argument}/')}, {gpus}", row, page)
        texts = [in_markdown(tables.CELLS[column](row)) for column in tables.OF_MODEL[1:]]
        lines.append(["" if name == before else name, *texts])
        before = name
    table = tables.markdown(list(tables.OF_MODEL), lines)
    return table + (f"\n\nWithout a number:\n\n{left}" if left else "")


def _is_superseded(row):
    return frame.EARLIER in row.workload and row.standing == SLOWED


def _row(results, page, argument):
    """Return a line for each headline of a model: its graph, its gain and its hosts."""
    lines = [line for line in headlines.of(results) if line.page.parent.name == argument]
    gains = [
        f"Gains of **`{line.variant}`** of {in_markdown(line.words)}: "
        f"{in_markdown('; '.join(gain.text for gain in line.gains))}. Hosts: {in_markdown(line.hosts_text)}."
        for line in lines
    ]
    return "\n\n".join(gains) or NOTHING


def _lengths(results, page, argument):
    """RNN-T with changing lengths: padding to buckets and the graph of each pair of buckets, on each host."""
    names, workload = ["host", "variant", "base_ms", "ms", "archived"], ["rnnt", "bench_lengths", ""]
    rows, old = (
        table[(table[["model", "preset", "label"]] == workload).all(axis=1)]
        for table in (_on_gpus(results.rows), results.archive[results.archive["ranks"] == 1])
    )
    measured = results.hosts.merge(rows[["row", "variant"]], on="row").drop_duplicates(["host", "variant"], keep="last")
    eager = old[old["variant"] == "eager"][["host", "ms"]].rename(columns={"ms": "base_ms"})
    old = old.merge(eager, on="host").assign(archived=True)
    hosts = pd.concat([measured[names], old[names]]) if len(old) else measured
    hosts = hosts.drop_duplicates(["host", "variant"])
    padded, graphs = (hosts[hosts["variant"] == name].set_index("host") for name in ("eager_padded", "graph_step"))
    lines = []
    for host in sorted(padded.index.intersection(graphs.index)):
        pad, graph = padded.loc[host], graphs.loc[host]
        name = f"{in_markdown(host[:6])}{' (archived)' if graph.archived else ''}"
        times = [cells.cell(ms, ".2f") for ms in (pad.base_ms, pad.ms, graph.ms)]
        costs = cells.percent(pad.ms / pad.base_ms - 1, 1)
        gains = [cells.cell(gain, ".2f", "x") for gain in (pad.ms / graph.ms, graph.base_ms / graph.ms)]
        lines.append([name, *times, costs, *gains])
    columns = ["Host", "eager ms", "padded ms", "graph ms", "padding costs", "the graph gains", "gain over eager"]
    return tables.markdown(columns, lines) if lines else NOTHING


def _nvidia(results, page, argument):
    lines = []
    rows = _on_gpus(results.rows)
    rows = rows[(rows["busy_processes"] == 0) & (rows["over"] == "")]
    for publication in published.published():
        order = list(publication.presets)
        same = rows[(rows["model"] == publication.model) & (rows["variant"] == publication.variant)]
        same = [row for row in frame.records(same) if stem(row.preset) in order]

        def rank(row: Row, order=order):
            return not row.gain, row.standing in OUT, order.index(stem(row.preset)), row.ranks, -row.hosts, row.build

        if not same:
            continue
        row = min(same, key=rank)
        text = tables.gain_and_hosts(row, headlines.short(row.gpu)) or row.status
        # The same on other GPUs, where it counts.
        where = _without_gpu(row)
        alike = [again for again in same if _without_gpu(again) == where and again.gpu != row.gpu]
        counted_alike = [again for again in alike if again.standing not in OUT]
        texts = [tables.gain_and_hosts(again, headlines.short(again.gpu)) for again in counted_alike]
        differs = f"{counted(row.ranks, 'GPU')}: {publication.presets[stem(row.preset)]}"
        published_gain = f"[{publication.gain_range}]({publication.source})"
        # The folder has no file of an archived host.
        path = results.root / "overview.md" if row.hosts == row.archived_hosts > 0 else Path(row.path).parent
        ours = "<br>".join([f"{tables.linked_file(text, path, page)}, `{row.variant}`", *filter(None, texts)])
        lines.append([publication.title, published_gain, ours, differs])
    names = ["Workload", "NVIDIA's gain", "Ours, the same part captured", "What differs"]
    return tables.markdown(names, lines) if lines else NOTHING


def _without_gpu(row: Row) -> tuple:
    return stem(row.preset), row.ranks, row.build, row.label, row.base


def _ceiling(points: DataFrame) -> str:
    # Each graph in each run on a GPU that has a gain, contended cycles apart; a ceiling over ranks may not be known.
    graphs = points[points["ratio"].notna() & (points["kind"] != "eager") & ~points["control"]]
    reached = points.dropna(subset=["ratio", "ceiling"])
    if not len(reached):
        return NOTHING
    most, worst = (reached["ratio"] / reached["ceiling"]).max() - 1, graphs["ratio"].min()
    text = f"**Ceiling.** {len(reached)} of {counted(len(graphs), 'measurement')} of graphs and compiled code, on "
    text += f"{counted(reached['host'].nunique(), 'host')}, have a ceiling, step / busy. None gained over "
    loss = f" The worst of all took {1 / worst:.2f} times as long as eager." if worst < 1 else ""
    return f"{text}{math.ceil(1000 * max(most, 0.0)) / 10:.1f} % more.{loss}"


def ceiling_text(points: DataFrame) -> str:
    """Return how many graphs reached step / busy, in a sentence or two."""
    text, reached = _ceiling(points).removeprefix("**Ceiling.** "), points.dropna(subset="reached")
    after = reached[reached["begin_utc"] > RULE_WRITTEN]
    if not len(after):
        return text
    parts = []
    for gains, much in ((True, f"over {100 * intervals.NEAR:g} %"), (False, "less")):
        shares = after["reached"][(after["ceiling"] > 1 + intervals.NEAR) == gains]
        near = (shares >= 1 - intervals.NEAR).sum()
        parts += [f"{near} of {len(shares)} graphs that could gain {much}"] if len(shares) else []
    return f"{text} In runs made after this rule was written, {' and '.join(parts)} reached it to within 5 %."


def misses(points: DataFrame) -> list[str]:
    """Return a line for each graph that stayed more than 5 % below its ceiling, with the cause."""
    lines = []
    for graph in points[points["reached"] < 1 - intervals.NEAR].itertuples():
        if not graph.working_ms > 0 or not graph.ms > 0:
            continue
        cause = f"its kernels take {100 * (graph.working_ms / graph.uncaptured_busy_ms - 1):+.1f} %"
        if graph.sm_mhz > 0 and graph.base_mhz > 0:
            cause += f" (GPU at {graph.sm_mhz:,.0f} MHz, {graph.base} at {graph.base_mhz:,.0f})"
        cause += f", its GPU waits for {100 * max(0.0, 1 - graph.working_ms / graph.ms):.1f} % of the step"
        name = f"{graph.workload} {graph.variant}, {graph.run}"
        lines.append(f"{name}: {100 * graph.reached:.1f} % of {graph.ceiling:.3f}x; {cause}.")
    return lines


_TABLES: dict[str, Callable[[Results, Path, str], str]] = {
    "launch": _launch,
    "front": front,
    "needs": _needs,
    "fits": _fits_text,
    "trust": _trust,
    "row": _row,
    "model": _model,
    "sweeps": sweeps.markdown,
    "decide": _decide,
    "scopes": scopes.markdown,
    "operators": operator_page.markdown,
    "memory": memory_table.markdown,
    "roofline": roofline.markdown,
    "lengths": _lengths,
    "epochs": epochs_table.markdown,
    "nvidia": _nvidia,
    "megatron": scopes.megatron,
}
