"""The launch roofline: what a graph gains, read off the mean kernel and the host's time to issue one.

With k = busy time / kernels of the eager step and h = the host's time to issue a step / its kernels, a graph of the
step gains max(1, h / k). `points` has the graphs; `markdown` says how well this predicts.
"""

from pathlib import Path

import pandas as pd
from pandas import DataFrame

from benchmarks import frame
from benchmarks.frame import Results
from benchmarks.pages import tables
from graph_worth.harness.judge import PASS, SAME_PROGRAM
from graph_worth.harness.pages.cells import percent
from graph_worth.harness.standing import COUNTED

HOUR = pd.Timedelta(hours=1)


def points(results: Results) -> DataFrame:
    """Return the fastest graph of each run and workload on GPUs that has about as many kernels as its base.

    Cycles beside busy processes are left out. `counts`: its standing is quiet or unknown.
    `predicted`: its gain by the roofline.
    """
    every = frame.timed(results.points)
    shown = (every["gpu"] != "CPU") & (every["kind"] == "graph") & (every["status"] == PASS) & ~every["control"]
    shown &= every["headline"] & (every["busy_processes"] == 0) & (every["kernel_us"] > 0) & (every["host_us"] > 0)
    is_same = (every["kernels"] / every["base_kernels"] - 1).abs() <= SAME_PROGRAM
    graphs = every[shown.fillna(False) & is_same.fillna(False)]
    fastest = graphs.sort_values("ratio", kind="stable").drop_duplicates(["run", *frame.WORKLOAD], keep="last")
    fastest = fastest.assign(counts=fastest["standing"].isin(COUNTED))
    return fastest.assign(predicted=gain(fastest["host_us"] / fastest["kernel_us"])).sort_index()


def gain(ratio):
    """Return the roofline's gain for ratios of the host's time to the kernel's."""
    return ratio.clip(lower=1.0)


def markdown(results: Results, page: Path, _: str = "") -> str:
    """The table: errors of the roofline, by where the host's time comes from."""
    drawn = points(results)
    if not len(drawn):
        return "Nothing has been measured on a GPU yet."
    alone = gain(drawn["base_ms"] / drawn["alone_ratio"] / (drawn["kernel_us"] * drawn["base_kernels"] / 1e3))
    sources = {
        "eager in the same blocks": drawn["predicted"],
        "eager alone in a process": alone,
        "other workloads of the host, within an hour": gain(_host_us_of_others(drawn) / drawn["kernel_us"]),
    }
    lines = []
    for source, predicted in sources.items():
        error = (drawn["ratio"] / predicted - 1).abs().dropna()
        several = drawn["ranks"].loc[error.index] > 1
        counts = drawn["counts"].loc[error.index]
        kinds = {"one GPU, quiet or unknown hosts": counts & ~several, "one GPU, all runs": ~several}
        for kind, is_kind in {**kinds, "several GPUs, all runs": several}.items():
            errors = error[is_kind]
            if len(errors):
                within = [percent((errors <= bound).mean()) for bound in (0.10, 0.15)]
                lines.append(
                    [source, kind, f"{len(errors)}", percent(errors.median(), 1), *within, percent(errors.max())]
                )
    names = ["The host's time from", "Graphs", "number", "median error", "within 10 %", "within 15 %", "largest"]
    return tables.markdown(names, lines)


def _host_us_of_others(drawn: DataFrame) -> pd.Series:
    """The median time to issue a kernel of the host's other workloads within an hour of each point."""
    begin = pd.to_datetime(drawn["begin_utc"])

    def of(index):
        is_near = (begin - begin[index]).abs() < HOUR
        on_host = (drawn["host"] == drawn["host"][index]) & (drawn["workload"] != drawn["workload"][index])
        return drawn["host_us"][is_near & on_host].median()

    return pd.Series({index: of(index) for index in drawn.index}, dtype=float)
