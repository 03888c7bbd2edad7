"""The rows and runs that figures draw, and words for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.files import runs
from benchmarks.files.run_file import Run
from benchmarks.files.runs import Row
from benchmarks.files.workload import Workload, workload_of
from benchmarks.pages import published


@dataclass(frozen=True)
class Shown:
    """Rows and runs on GPUs; those on CPUs only where there are no others, and titles then say so.

    `models`: those that NVIDIA submitted, in that order and with or without a run, then others by name. A model's
    place gives its colour.
    """

    rows: list[Row]
    runs: list[Run]
    models: list[str]
    workloads: list[Workload]
    is_cpu: bool

    def title(self, text: str) -> str:
        """A figure's title."""
        return f"Measured on a CPU, which says nothing about a GPU. {text}" if self.is_cpu else text

    def runs_of(self, workload: Workload) -> list[Run]:
        """The runs of a workload, the newest first."""
        own = [run for run in self.runs if workload_of(run) == workload]
        return sorted(own, key=lambda run: (run.begin_utc, run.id), reverse=True)


def shown(found: runs.Found) -> Shown:
    """The rows and runs to draw."""
    every = [run for _, run in found.runs]
    on_gpus = [run for run in every if workload_of(run).gpu != "CPU"]
    rows = [row for row in found.rows if not on_gpus or row.workload.gpu != "CPU"]
    models = dict.fromkeys(own.model for own in published.PUBLISHED)
    models |= dict.fromkeys(sorted(row.workload.model for row in rows))
    workloads = sorted({workload_of(run) for run in on_gpus or every})
    return Shown(rows, on_gpus or every, list(models), workloads, bool(every) and not on_gpus)


def short(model: str) -> str:
    """GPT-3, without 175B, since most runs hold a share; a model of another name is itself."""
    own = published.of_model(model)
    return re.sub(r" \d+B\b", "", own.title) if own else model


def share(workload: Workload) -> str:
    """The preset and its part of the submission: bench: a GPU's share of 8 of 96 layers."""
    own = published.of_model(workload.model)
    about = own.presets.get(published.stem(workload.preset), "") if own else ""
    return ": ".join(filter(None, [preset(workload), about]))


def preset(workload: Workload) -> str:
    """The preset with its label."""
    return f"{workload.preset} {workload.label}".strip()


def main_rows(rows: list[Row], model: str) -> list[Row]:
    """Quiet rows of the model's workload whose graph is the best measured, or of its newest run; [] without any."""
    own = [row for row in rows if row.workload.model == model and not row.workload.busy]
    best = runs.best_measured(own) or sorted(own, key=lambda row: row.newest.run.begin_utc, reverse=True)
    return [row for row in own if whole(row) == whole(best[0])]


def whole(row: Row) -> Workload:
    """The workload without build and load: what one run measures."""
    return replace(row.workload, build="", busy=0)


def digits(value: float) -> str:
    """Three digits: 1,234, 188, 14.8, 3.00."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def named(variant: str, build: str) -> str:
    """Return the variant with its build, as in graph_layer_te (te)."""
    return f"{variant} ({build})" if build else variant


def footer(rows: Sequence[Row] = (), used: Sequence[Run] = ()) -> str:
    """Machines, runs, hosts, days and torch of the rows' runs, or of some runs."""
    used = used or list({point.run.id: point.run for row in rows for point in row.points}.values())
    torch = sorted({str(run.versions["torch"]) for run in used if run.versions.get("torch")})
    days = sorted({run.begin_utc[:10] for run in used})
    text = f"{', '.join(sorted({workload_of(run).machine for run in used}))}; {runs.counted(len(used), 'run')}"
    text += f" on {runs.counted(len({str(run.host.get('boot')) for run in used}), 'host')}; {days[0]}"
    text += f" to {days[-1]}" if len(days) > 1 else ""
    return text + (f"; torch {', '.join(torch)}" if torch else "")
