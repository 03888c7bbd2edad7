"""The table of real programs, eager, graphed and compiled, from the newest file of benchmarks/epochs.py on each GPU."""

import contextlib
import math
import statistics
from pathlib import Path

from benchmarks.frame import Results
from benchmarks.pages import tables
from benchmarks.pages.markdown import in_markdown
from graph_worth.harness import program_epochs
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Epochs
from graph_worth.harness.judge import PASS
from graph_worth.harness.pages.cells import cell, counted, percent, span, with_span
from graph_worth.harness.standing import SLOWED

FORMS = {"eager": "eager", "graphed": "graphed", "compile": "compiled"}
EXPLANATION = (
    "[Whole programs](../examples/programs) with a loader, a log every 10 steps and a checkpoint. *s* is an epoch of "
    "{steps} steps, with warm-up, captures or compiling. *ms* is a step after the 30th. Ranges are over processes; a "
    "number without a range is from one.{compiler} *busy* is the time in which the GPU works in a graphed step, and "
    "*measure* the graph_step of [measure](your_step.md). Eager's pace differs between hosts and processes, and so do "
    "the gains. The programs train in bf16, Muon in fp32."
)
COMPILER = " The compiler's cache was empty in the first one."


def markdown(results: Results, page: Path, argument: str = "") -> str:
    """A paragraph and a table for each GPU."""
    newest: dict[str, tuple[Path, Epochs]] = {}
    for path in sorted(results.root.glob(f"*/{run_file.EPOCHS}/*.json")):
        # `run_file.find` names damaged files.
        with contextlib.suppress(run_file.Damaged):
            content = run_file.read_all(path)
            if isinstance(content, Epochs) and content.runs:
                newest[path.parent.parent.name] = path, content
    if not newest:
        return "No whole program has been measured on a GPU yet."
    return "\n\n".join(_of_gpu(results, content, path, page) for path, content in newest.values())


def _of_gpu(results, content, path, page):
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items() if version)
    source = tables.linked_file(content.host.gpus[0].name if content.host.gpus else "CPU", path, page)
    programs = list(dict.fromkeys(run.program for run in content.runs))
    forms = [form for form in FORMS if any(run.form == form for run in content.runs)]
    most = {form: max(program_epochs.apart(content, program, form) for program in programs) for form in forms}
    texts = {form: "(not comparable)" if most[form] == math.inf else percent(most[form], 2) for form in forms}
    losses = ", ".join(f"{FORMS[form]} {texts[form]}" for form in forms)
    beside = f" Beside {counted(content.others, 'benchmark')} on other GPUs." * bool(content.others)
    lines = [[in_markdown(text) for text in _cells(results, content, program, forms)] for program in programs]
    columns = [
        "Program",
        *(f"{FORMS[form]} {unit}" for unit in ("s", "ms") for form in forms),
        "Gain, and graphed ms beside",
    ]
    compiler = COMPILER if "compile" in forms else ""
    parts = [
        EXPLANATION.format(steps=content.runs[0].steps, compiler=compiler),
        f"{source}, {in_markdown(versions)}.{beside}",
    ]
    parts.append(f"Losses differ from those of the first eager epoch by at most: {in_markdown(losses)}.")
    return f"{' '.join(parts)}\n\n{tables.markdown(columns, lines)}"


def _cells(results, content, program, forms):
    epoch_s, step_ms = (
        {form: program_epochs.numbers(content, program, form, name) for form in forms}
        for name in ("epoch_s", "step_ms")
    )
    failures = {run.form: f"failed: {run.raised[:60]}" for run in content.runs if run.program == program and run.raised}
    seconds = [
        span(min(epoch_s[form], default=None), max(epoch_s[form], default=None), ".1f") or failures.get(form, "")
        for form in forms
    ]
    ms = {form: statistics.median(times) for form, times in step_ms.items() if times}
    steps = [with_span(ms[form], min(step_ms[form]), max(step_ms[form])) if form in ms else "" for form in forms]
    texts = []
    if "eager" in ms and "graphed" in ms:
        texts.append(f"{ms['eager'] / ms['graphed']:.2f}x")
        busy = program_epochs.numbers(content, program, "graphed", "busy_ms")
        step = next(run.step for run in content.runs if run.program == program)
        name, measured_ms, gain = _measured(results, content, step)
        known = ({"busy": statistics.median(busy)} if busy else {}) | ({name: measured_ms} if name else {})
        texts += [f"{name} {cell(value)} ({100 * (ms['graphed'] / value - 1):+.1f} %)" for name, value in known.items()]
        texts[-1] += gain
    return [program, *seconds, *steps, ", ".join(texts)]


def _measured(results, content, step):
    """Return a name, ms and words on the gain of graph_step by `measure`, here or in its newest run elsewhere."""
    points = results.points
    gpu = content.host.gpus[0].name if content.host.gpus else "CPU"
    wanted = {"variant": "graph_step", "label": step, "gpu": gpu, "status": PASS, "busy_processes": 0}
    points = points[(points[list(wanted)] == list(wanted.values())).all(axis=1)].sort_values("begin_utc")
    here = points[points["host"] == content.host.boot]
    rows = here if len(here) else points
    name = "measure" if len(here) else "measure on another host"
    if rows.empty:
        return "", 0.0, ""
    ms, ratio, standing = rows[["ms", "ratio", "standing"]].iloc[-1]
    return name, ms, f" and {ratio:.2f}x{' (eager slowed)' * (standing == SLOWED)}"
