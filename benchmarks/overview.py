"""Write results/overview.md, .csv and corrections.md, and the tables in READMEs, from the run files: make readme.

Exit status: 0; 1 where a run file could not be read, which is named.
"""

import re
import statistics
import sys
from pathlib import Path

from pandas import DataFrame

from benchmarks import corrections, frame
from benchmarks.compare import found_in
from benchmarks.corrections import Corrections
from benchmarks.frame import Results
from benchmarks.pages import readme, tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.files import write_text
from graph_worth.folders import ROOT
from graph_worth.harness import command
from graph_worth.harness.command import Mistake, shown
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.cells import counted
from graph_worth.harness.standing import NOTE

# A table for people has at most eight columns.
TIME = ("workload", "variant", "typical ms", "issue ms", "busy ms", "reached", "kernels", "in graphs")
OTHER = ("workload", "variant", "parity", "TFLOP/s", "J a step", "MHz", "capture s", "alone GiB")
# Columns of the table of hosts.
CALLS = {"operator": "operator us", "linear": "linear layer us", "graph": "graph launch us"}


def page_of(results: Results, page: Path) -> str:
    """The text of overview.md."""
    hosts = len({run.host.boot for _, run in results.runs})
    machines = tables.by_machine(results.rows)
    hosts_table = _hosts(results)
    names = ["Best rows", *machines, "Step / busy as a ceiling"]
    names += [*(["Hosts"] if hosts_table else []), *(["Left out"] if results.faults else [])]
    parts = [
        "# All runs",
        f"{counted(len(results.runs), 'run')} on {counted(hosts, 'host')}. "
        "[How they were made](../docs/method.md). All fields: [overview.csv](overview.csv).",
        "\n".join(f"- [{in_markdown(name)}](#{_anchor(name)})" for name in names),
        "## Best rows",
        "Each workload has its graph with the most hosts. Times are mean steps. With several hosts, the table has the "
        "median of the graph, and the fastest and the slowest host of eager and of the gain.",
        readme.front(results, page),
        "*Archived* hosts were measured [with an older method](archive/README.md), and have no intervals. Archived "
        "hosts and earlier files of a step count where eager makes the same kernels.",
        "In the tables below a gain is base ms / ms. One host has a 95 % interval for those minutes, and several hosts "
        "have a range. *At most* is the base's step / the busy time of the uncaptured step. `control` is the base "
        "measured once more. Workloads with the largest gain come first.",
    ]
    for machine, rows in machines.items():
        timed = frame.records(_largest_gain_first(rows[rows["status"] == PASS]))
        parts += [f"## {in_markdown(machine)}", tables.rows_as_markdown(timed, page)]
        left = tables.as_list(tables.not_timed(results, rows))
        parts += ["Without a number:", left] if left else []
        parts += ["Parts of a step's time:", tables.rows_as_markdown(timed, page, TIME)]
        parts += ["Parity, rate, energy, capture and memory:", tables.rows_as_markdown(timed, page, OTHER)]
    missed = readme.misses(results.points)
    parts += ["## Step / busy as a ceiling", readme.ceiling_text(results.points)]
    if missed:
        text = "These graphs stayed more than 5 % below it. A GPU that does not wait for its host has a lower clock."
        parts += [text, tables.as_list(missed)]
    if hosts_table:
        text = "This is the quiet host's time in one call: us at the 50th (99th) percentile, the median of its runs."
        parts += ["## Hosts", f"{text} [The calls](../docs/your_step.md#your-host).", hosts_table]
    if results.faults:
        parts += ["## Left out", tables.as_list(results.faults)]
    return "\n\n".join(parts) + "\n"


def corrections_page(corrections: Corrections) -> str:
    """The text of corrections.md."""
    cells = [
        [entry.file, "" if entry.kind == NOTE else entry.kind, entry.says, entry.correct]
        for entry in corrections.published
    ]
    parts = [
        "# Corrections",
        "## Published runs",
        "Published files never change. This table corrects statements in some of them. Runs that are *disturbed*, "
        "*unclean* or *superseded* are in no headline: [the rule](../docs/method.md#quiet-hosts-and-busy-ones).",
        tables.markdown(["File", "Reason", "The file says", "Correct"], cells),
    ]
    for sentences in corrections.pages:
        parts += [f"## {sentences.title}", *([sentences.text] if sentences.text else [])]
        parts.append(tables.markdown(["The page said", "Correct", "Now"], [[*row] for row in sentences.rows]))
    return "\n\n".join(parts) + "\n"


def _hosts(results: Results) -> str:
    """The table of hosts whose runs have the times of single calls; "" without any."""
    by_boot: dict[str | None, list] = {}
    for _, run in results.runs:
        if run.host.calls:
            by_boot.setdefault(run.host.boot, []).append(run.host)
    lines = []
    for hosts in by_boot.values():
        gpus = ", ".join(sorted({gpu.name for host in hosts for gpu in host.gpus})) or "none"
        cells = [in_markdown(hosts[0].cpu or ""), in_markdown(gpus), str(len(hosts))]
        for name in CALLS:
            calls = [host.calls[name] for host in hosts if name in host.calls]
            p50, p99 = ([getattr(call, key) for call in calls] for key in ("p50_us", "p99_us"))
            cells.append(f"{statistics.median(p50):.1f} ({statistics.median(p99):.1f})" if calls else "")
        lines.append(cells)
    return tables.markdown(["CPU", "GPU", "runs", *CALLS.values()], sorted(lines)) if lines else ""


def _anchor(heading: str) -> str:
    """The name of a heading in links on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def _largest_gain_first(rows: DataFrame) -> DataFrame:
    """The rows of a workload together, by the largest gain of a graph of it."""
    gains = rows["gain"].where(rows["kind"] == "graph", 0.0).fillna(0.0)
    most = gains.groupby([rows[name] for name in frame.WORKLOAD]).transform("max")
    return rows.loc[most.sort_values(ascending=False, kind="stable").index]


def wanted(results: Results, root: Path = ROOT) -> dict[Path, str]:
    """Every file that is not what the runs say, with its right text."""
    page, sheet = results.root / "overview.md", results.root / "overview.csv"
    texts = {page: page_of(results, page), sheet: tables.as_csv(results.rows)}
    known = corrections.read(results.root)
    texts |= {results.root / "corrections.md": corrections_page(known)} if known.is_of_root else {}
    texts = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    return texts | readme.changed(results, root)


def work() -> int:
    """Write every file that is not what the runs say."""
    results, known = found_in(str(ROOT / "results")), corrections.read(ROOT / "results")
    # Without its corrections a disturbed run would be a headline.
    if known.unread or not known.is_of_root:
        raise Mistake("; ".join(known.unread) or f"results/{corrections.NAME} is missing: no page is written")
    for path, text in wanted(results).items():
        write_text(path, text)
        print(f"wrote {shown(path)}")
    for fault in results.faults:
        print(f"left out: {fault}")
    return 1 if results.faults else 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    command.parser_of("overview", "Pages and tables in READMEs from the runs in results/.").parse_args(argv)
    return command.exit_status("python -m benchmarks.overview", work, (readme.ReadmeError,))


if __name__ == "__main__":
    sys.exit(main())
