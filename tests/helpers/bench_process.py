"""`make bench` of the made model as a process: run it, watch it, find its workers."""

import os
import subprocess
import sys
import time
from pathlib import Path

from graph_worth.folders import ROOT
from graph_worth.harness import judge
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Run, Variant
from tests.helpers.processes import processes_with

MODEL = "tests.lying_model"


def words(out, variants, *more, model=MODEL, flags=(), audits=False):
    """Without audits, which need another process, unless a test is about them."""
    chosen = ["--model", model, "--preset", "tiny", "--out", str(out), "--variants", ",".join(variants)]
    chosen += [] if audits else ["--no-audit"]
    return [sys.executable, "-m", "benchmarks.run", *chosen, *map(str, more), *(["--", *flags] if flags else [])]


def bench(out, variants, *more, model=MODEL, flags=(), audits=False, **environment):
    command = words(out, variants, *more, model=model, flags=flags, audits=audits)
    options = {"cwd": ROOT, "env": os.environ | environment, "capture_output": True, "text": True, "timeout": 500}
    return subprocess.run(command, **options)


def start(out, variants, *more, audits=False, **environment):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(
        words(out, variants, *more, audits=audits), cwd=ROOT, env=os.environ | environment, **options
    )


def only_run(out) -> Run:
    (path,) = Path(out).rglob("*.json")
    return run_file.read(path)


def only_variants(out) -> dict[str, Variant]:
    (build,) = only_run(out).builds.values()
    return build.variants


def only_verdicts(out) -> dict[str, judge.Verdict]:
    (found,) = judge.judged(only_run(out)).values()
    return found.verdicts


def wait_for(process, text, limit_s=240):
    """Read lines of a process until one has the text; return all."""
    until, seen = time.monotonic() + limit_s, ""
    while time.monotonic() < until:
        line = process.stdout.readline()
        seen += line
        if text in line or not line:
            break
    assert text in seen, seen
    return seen


def workers() -> dict[int, str]:
    """Process id -> path of the socket of each worker of the made model on this machine."""
    return {
        pid: command[command.index("--worker") + 1]
        for pid, command in processes_with(f"{MODEL}.train").items()
        if "--worker" in command and "graph_worth.harness.processes.supervisor" not in command
    }
