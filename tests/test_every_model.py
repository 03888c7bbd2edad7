"""Every model by the command that its users type, without a GPU: a variant is a row of the table, or has a reason.

These tests read the printed table and the exit status. `make test` measures the smallest model, and a census, which has
eager and a graph of each; the slow tests measure all variants, and several models at once.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import judge
from graph_worth.harness.files import run_file
from graph_worth.harness.script import first_graph
from tests.helpers.bench_process import MODEL as LYING_MODEL
from tests.helpers.bench_process import wait_for

MODELS = sorted(path.parent.name for path in ROOT.glob("[!.]*/train.py"))
EVERY = [*MODELS, "examples/minimal"]
CPU_ONLY = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# The name, milliseconds of the base and its own, the ratio, its interval, the parity, the step that pays it back.
ROW = re.compile(
    r"^(\w+)(?: \(base again\))? +(?:[\d.]+ +){1,2}(?:base|[\d.]+x)(?: +[\d.]+ to [\d.]+)?(?: +(\w\S*))?(?: +[\d,]+)?$"
)
REASON = re.compile(r"^(unsupported|oom|failed|timeout): ([\w, ]+) \((.+)\)$")
# Packages that a user may lack.
OPTIONAL = ("transformer_engine", "lightning", "pyarrow")


def command(out, model, *more):
    return [sys.executable, "-m", "benchmarks.run", "--model", model, "--out", str(out), *more]


def bench(out, model, *more, environment=CPU_ONLY):
    """(exit status, what was printed) of a run without a traceback, on the screen or in the worker's log."""
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command(out, model, *more), timeout=1200, **options)
    assert "Traceback" not in done.stdout, done.stdout
    for log in out.rglob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
    return done.returncode, done.stdout


def make(out, target, *values):
    """The finished `make TARGET`, by this interpreter, whose runs lie in `out`."""
    words = ["make", target, *values, f"OUT={out}", f"PYTHON={sys.executable}"]
    return subprocess.run(words, cwd=ROOT, env=CPU_ONLY, capture_output=True, text=True, timeout=1200)


def read(printed):
    """({variant of a row: its parity}, {variant: (status, reason)}) of printed tables."""
    lines = printed.splitlines()
    rows = {found[1]: found[2] or "" for found in map(ROW.match, lines) if found}
    reasons = [found.groups() for found in map(REASON.match, lines) if found]
    return rows, {name: (status, reason) for status, names, reason in reasons for name in names.split(", ")}


def described(model):
    name = f"{model.replace('/', '.')}.train"
    answer = subprocess.run([sys.executable, "-m", name, "--describe"], cwd=ROOT, capture_output=True, text=True)
    return json.loads(answer.stdout)


def require_table(printed, model, description, chosen):
    """Each chosen variant has a row with its parity, or a reason; eager and a graph have a row."""
    rows, reasons = read(printed)
    assert set(chosen) <= set(rows) | set(reasons), printed
    assert {status for status, _ in reasons.values()} <= {"unsupported", "oom"}, printed
    assert all(reason.strip() for _, reason in reasons.values())
    assert all(rows[name] == "bitwise" or float(rows[name]) < 0.1 for name in rows if name != "control"), printed
    assert "control" in rows and "eager" in rows, printed
    assert any(description["kinds"].get(name) == "graph" for name in rows), f"{model}: no graph was timed\n{printed}"


# ------------------------------------------------------------------------------------------------
# One model


def test_there_are_models():
    assert {"gpt3", "llama2_lora", "llama31", "moe", "rnnt", "stable_diffusion"} <= set(MODELS)


def test_eager_and_the_headline_graph(tmp_path):
    model = "examples/minimal"
    description = described(model)
    graph = first_graph(description)
    words = [f"MODEL={model}", f"VARIANTS=eager,{graph}", "PRESET=tiny", "CYCLES=1", "ARGS=--no-audit"]
    done = make(tmp_path, "bench", *words)
    assert done.returncode == 0 and not read(done.stdout)[1], done.stdout + done.stderr
    require_table(done.stdout, model, description, ["eager", graph])


def test_a_census_has_eager_and_a_graph_of_each_workload(tmp_path):
    done = make(tmp_path, "census", "PRESET=tiny", "CYCLES=1", "MINUTES=60")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("census/*.json")
    runs = run_file.read_all(path).runs
    workloads = {run.label if run.model == OWN_STEP else run.model for run in runs}
    assert workloads == {*MODELS, "muon-build", "nanogpt-build"}, done.stdout
    for run in runs:
        for judged in judge.judged(run).values():
            statuses = {name: verdict.status for name, verdict in judged.verdicts.items()}
            assert len(statuses) >= 2 and set(statuses.values()) == {"pass"}, (run.model, statuses)
            assert all(judged.blocks(name) for name in statuses), run.model


@pytest.mark.slow
@pytest.mark.parametrize("model", EVERY)
def test_all_variants(model, tmp_path):
    description = described(model)
    status, printed = bench(tmp_path, model, "--variants", "all", "--cycles", "1")
    assert status == 0, printed
    require_table(printed, model, description, description["variants"])


# ------------------------------------------------------------------------------------------------
# What cannot run


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory):
    """The environment of a machine that has none of the optional packages."""
    folder = tmp_path_factory.mktemp("absent")
    for name in OPTIONAL:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('no module named {name}')\n")
    return CPU_ONLY | {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_without_an_optional_package(without_packages, tmp_path):
    more = ("--variants", "graph_step,graph_step_lightning", "--cycles", "1", "--no-control")
    status, printed = bench(tmp_path, "stable_diffusion", *more, environment=without_packages)
    rows, reasons = read(printed)
    assert status == 0 and len(rows) == 2, printed
    ((name, (status, reason)),) = reasons.items()
    assert (name, status) == ("graph_step_lightning", "unsupported"), printed
    assert "graph_step_lightning needs lightning" in reason


@pytest.mark.slow
def test_a_build_that_cannot_read_its_data_says_why_for_each_variant(without_packages, tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    more = ("--", "--data", str(tmp_path / "rows.parquet"))
    status, printed = bench(tmp_path / "runs", "llama2_lora", *more, environment=without_packages)
    rows, reasons = read(printed)
    assert status == 1 and "nothing was timed" in printed and not rows, printed
    assert set(reasons) == set(described("llama2_lora")["headline"]), printed
    assert all("needs pyarrow to be read" in reasons[name][1] for name in ("eager", "graph_step")), printed


@pytest.mark.slow
def test_a_build_that_runs_out_of_memory(tmp_path):
    """Its base has a name of its own, and the other build is measured."""
    names = "graph_step,graph_too_large"
    status, printed = bench(tmp_path, LYING_MODEL, "--preset", "tiny", "--variants", names)
    rows, reasons = read(printed)
    assert status == 0, printed
    assert set(rows) == {"eager", "graph_step", "control"}, printed
    assert set(reasons) == {"eager_too_large", "graph_too_large"}, printed
    assert all(status == "oom" and "out of memory" in reason for status, reason in reasons.values()), printed


# ------------------------------------------------------------------------------------------------
# All models


def require_tables(printed, models):
    """Each model's table, and then one of all."""
    for model in models:
        assert re.search(rf"/{model}-tiny/\S+\.json", printed), f"{model}: no file\n{printed}"
    (_, suite) = re.split(r"^workload +variant .*$", printed, maxsplit=1, flags=re.MULTILINE)
    assert {line.split("/")[0] for line in suite.split("\n") if "/tiny" in line} == set(models), suite


@pytest.mark.long
def test_all_models(tmp_path):
    # Each by itself is measured whole above, and some at once below.
    status, printed = bench(tmp_path, "all", "--cycles", "1", "--no-audit")
    assert status == 0, printed
    assert printed.count("base again") >= len(MODELS) and "refused" not in printed
    require_tables(printed, MODELS)


@pytest.mark.slow
def test_several_models_go_on_after_ctrl_c(tmp_path):
    few, more = ["gpt3", "rnnt"], ("--cycles", "1", "--no-audit")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    first = subprocess.Popen(command(tmp_path, ",".join(few), *more), cwd=ROOT, env=CPU_ONLY, **options)
    wait_for(first, f"{few[1]}/tiny ")
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=240)
    assert first.returncode == 130 and "the same command goes on" in said and "Traceback" not in said, said

    status, printed = bench(tmp_path, ",".join(few), *more)
    assert status == 0, printed
    assert re.findall(r"^(\w+)/tiny +was measured before: ", printed, re.MULTILINE) == few[:1], printed
    require_tables(printed, few)
