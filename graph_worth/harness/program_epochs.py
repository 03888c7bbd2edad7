"""Compares the losses of programs' epochs (`facts.Epochs`) with eager's, with a line for each. Pure functions."""

import math

from graph_worth.harness.files.facts import Epoch, Epochs
from graph_worth.harness.pages.cells import milliseconds, percent

# Relative difference from eager's losses. Programs train in bf16, and the compiler draws dropout otherwise than eager.
MOST_APART = {"eager": 0.01, "graphed": 0.01, "compile": 0.05}


def of(content: Epochs, program: str, form: str) -> list[Epoch]:
    """Return the epochs of a form of a program that came to their end."""
    return [run for run in content.runs if (run.program, run.form, run.raised) == (program, form, "")]


def numbers(content: Epochs, program: str, form: str, name: str) -> list[float]:
    """Return a number of each of these epochs that has it: epoch_s, step_ms or busy_ms."""
    return [value for run in of(content, program, form) if (value := getattr(run, name)) is not None]


def apart(content: Epochs, program: str, form: str) -> float:
    """Return the largest relative difference of a form's losses, of all rounds, from those of eager's first epoch."""
    reference = next((run.losses for run in of(content, program, "eager")), [])
    most = 0.0
    for run in of(content, program, form):
        for loss, wanted in zip(run.losses, reference, strict=False):
            most = max(most, abs(loss / wanted - 1) if loss is not None and wanted else math.inf)
        if not reference or len(run.losses) != len(reference):
            return math.inf
    return most


def faults(content: Epochs) -> list[str]:
    """Return a line for each form of a program whose losses are not eager's, or which replayed nothing on a GPU."""
    lines = []
    for program, form in dict.fromkeys((run.program, run.form) for run in content.runs):
        most = apart(content, program, form)
        if most > MOST_APART[form]:
            differ = "cannot be compared with" if most == math.inf else f"differ by {percent(most, 1)} from"
            lines.append(f"{program} {form}: its losses {differ} eager's")
        if form == "graphed" and content.host.gpus and not all(run.replays for run in of(content, program, form)):
            lines.append(f"{program} graphed: nothing was replayed")
    return lines


def line_of(run: Epoch) -> str:
    """Return what an epoch took, in a line."""
    name = f"{run.program} {run.form} {run.round + 1}"
    if run.raised or run.epoch_s is None:
        return f"{name}: failed ({run.raised})"
    replays = f", {run.replays} replays" if run.replays else ""
    busy = f" (busy {milliseconds(run.busy_ms)})" if run.busy_ms else ""
    return f"{name}: epoch {run.epoch_s:.1f} s, {milliseconds(run.step_ms)} ms a step{busy}{replays}"
