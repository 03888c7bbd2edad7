"""The launch roofline over all runs: its points, and how well it predicts what a graph gains.

The host's time to issue a kernel comes from the eager steps beside the graph, from eager alone in a process, or from
other workloads of the host; see `graph_worth.harness.pages.roofline` for the rule.
"""

from pathlib import Path

import pandas as pd
from pandas import DataFrame, Series

from benchmarks import frame
from benchmarks.frame import Results
from benchmarks.pages import headlines, tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.cells import percent
from graph_worth.harness.pages.roofline import gain
from graph_worth.harness.standing import COUNTED

HOUR = pd.Timedelta(hours=1)
# A graph that gains more shows whether the host's time is right; the others are predicted by 1 alone.
GAINS = 1.1
MISSED = 0.15
BLOCKS, ALONE = "eager in the same blocks", "eager alone in a process"
OTHERS, CORRECTED = "other workloads of the host within an hour", "these, corrected for the program"


def points(results: Results) -> DataFrame:
    """Return the fastest graph of each run and program on GPUs that has about as many kernels as its program.

    Cycles beside busy processes are left out. `counts`: its standing is quiet or unknown.
    """
    every = frame.timed(results.points)
    shown = (every["gpu"] != "CPU") & (every["status"] == PASS) & ~every["control"] & every["headline"]
    graphs = every[shown.fillna(False) & (every["busy_processes"] == 0) & every["program_ratio"].notna()]
    in_order = graphs.sort_values("program_ratio", kind="stable")
    fastest = in_order.drop_duplicates(["run", *frame.WORKLOAD, "program"], keep="last")
    return fastest.assign(counts=fastest["standing"].isin(COUNTED)).sort_index()


def predictions(drawn: DataFrame) -> DataFrame:
    """Return the gain of each point by the roofline, a column for each source of the host's time."""
    alone_us = 1e3 * drawn["base_ms"] / drawn["alone_ratio"] / drawn["base_kernels"]
    others_us, corrected_us = _host_us_of_others(drawn)
    sources = {ALONE: alone_us.where(drawn["program"] == drawn["base"]), OTHERS: others_us, CORRECTED: corrected_us}
    gains = {name: (host_us / drawn["kernel_us"]).map(gain, na_action="ignore") for name, host_us in sources.items()}
    return DataFrame({BLOCKS: drawn["predicted"], **gains})


def errors(drawn: DataFrame) -> DataFrame:
    """Return |measured / predicted - 1| of each point, a column for each source."""
    return predictions(drawn).rdiv(drawn["program_ratio"], axis=0).sub(1).abs()


def _host_us_of_others(drawn: DataFrame) -> tuple[Series, Series]:
    """The host's time to issue a kernel by its other workloads within an hour of each point.

    Returns:
        The median of their times. And that corrected for the program: by how long it and the other programs take on
        other hosts.
    """
    begin, host_us = pd.to_datetime(drawn["begin_utc"]), drawn["host_us"]
    program = drawn["model"] + drawn["label"].str.partition(frame.EARLIER)[0] + drawn["build"] + drawn["program"]
    others, corrected = Series(index=drawn.index, dtype=float), Series(index=drawn.index, dtype=float)
    for index in drawn.index:
        on_host = drawn["host"] == drawn["host"][index]
        is_near = on_host & ((begin - begin[index]).abs() < HOUR) & (drawn["workload"] != drawn["workload"][index])
        elsewhere = host_us[~on_host].groupby(program[~on_host]).agg(frame.geometric_mean)
        usual_us = program.map(elsewhere)
        others[index] = host_us[is_near].median()
        corrected[index] = (host_us / usual_us)[is_near].median() * usual_us[index]
    return others, corrected


def markdown(results: Results, page: Path, _: str = "") -> str:
    """The table: errors by kind of graph and source of the host's time, and below it the misses with their reasons."""
    drawn = points(results)
    if not len(drawn):
        return "Nothing has been measured on a GPU yet."
    deviations, one = errors(drawn), drawn["ranks"] == 1
    whole = one & (drawn["kind"] == "graph") & drawn["variant"].str.startswith("graph_step")
    counts, gains = drawn["counts"], drawn["program_ratio"] > GAINS
    kinds = {
        "whole step, quiet or unknown hosts": whole & counts,
        f"of these, gains above {GAINS}x": whole & counts & gains,
        "whole step, all runs": whole,
        f"of these, gains above {GAINS}x, all runs": whole & gains,
        "layers or another part, all runs": one & (drawn["kind"] == "graph") & ~whole,
        "graphs of compiled code, all runs": one & (drawn["kind"] == "compile"),
        "several GPUs, all runs": ~one,
    }
    lines = [[kind, *map(_cell, deviations[is_kind].to_dict("series").values())] for kind, is_kind in kinds.items()]
    missed = deviations[[ALONE, OTHERS]].gt(MISSED).any(axis=1) & (counts | ~one)
    misses = [_miss(drawn.loc[index], deviations.loc[index], page) for index in drawn.index[missed]]
    title = f"Missed by more than {percent(MISSED)}, on quiet or unknown hosts or over several GPUs:"
    return "\n".join([tables.markdown(["Graphs", *deviations], lines), "", title, "", *(misses or ["None."])])


def _cell(column: Series) -> str:
    """As in 38: 1.5 %, 100 %, 10 %."""
    known = column.dropna()
    shares = percent(known.median(), 1), percent((known <= MISSED).mean()), percent(known.max())
    return f"{len(known)}: {', '.join(shares)}" if len(known) else "-"


def _miss(point: Series, deviations: Series, page: Path) -> str:
    """A line about a prediction that missed, with the likeliest reason as far as the runs tell."""
    name = headlines.title_of(point["model"], point["preset"], point["label"])
    link = tables.linked_file(name, Path(point["path"]), page)
    wrong = " and ".join(
        f"{100 * deviations[name]:.0f} % by {name}" for name in (ALONE, OTHERS) if deviations[name] > MISSED
    )
    why = "not known"
    if deviations[ALONE] > MISSED:
        why = f"eager took {point['alone_ratio']:.2f} times as long in its blocks as alone"
    elif deviations[CORRECTED] <= MISSED:
        why = "the host needs another time a kernel for this program than for the others, and so do other hosts"
    elif not point["counts"]:
        why = f"the host was not quiet, {in_markdown(point['standing_reason'])}"
    gpus = "" if point["ranks"] == 1 else f" on {point['ranks']} GPUs"
    return f"- {link}{gpus}, {point['program_ratio']:.2f}x: missed by {wrong}. Reason: {why}."
