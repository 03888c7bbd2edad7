"""Random command lines: an answer or one line and exit status 2, never a traceback.

make test-slow tries 50 of each program and starts 20 real processes, make long tries 2,000 over all of them.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import os
import resource
import signal
import subprocess
import sys
from unittest import mock

import pytest

from benchmarks import compare, gate, judge, publish, submit, sweep
from graph_worth.folders import ROOT
from graph_worth.harness import ask, command, measure, report, run
from graph_worth.harness.processes import launch
from graph_worth.harness.script import models
from graph_worth.your_step import doctor, step_file
from tests.helpers import contracts
from tests.helpers.made_run import put
from tests.helpers.processes import until

hypothesis = pytest.importorskip("hypothesis")
st, given, settings = hypothesis.strategies, hypothesis.given, hypothesis.settings

LONG_PATH = "x" * 300
WORDS = ["", "-1", "0", "1", "2", "1e9", "nan", "inf", "all", "eager", "nope", "gpt3", "a,b", ",", "bench", "tiny"]
NAMES = ["results", "/dev/null", "/dev", "..", LONG_PATH, f"/tmp/{LONG_PATH}", "loop"]
ODD = ["a\nb", "\udcff", "$(id)", "`id`", "'; id"]
# No command line can hold a null.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(st.sampled_from([*WORDS, *NAMES, *ODD]), TEXTS)
FLAGS = {
    "run": ["model", "preset", "variants", "cycles", "minutes", "ngpu", "host-load", "out", "label", "limit-s"],
    "sweep": ["model", "step", "preset", "over", "variant", "values", "minutes", "out", "ngpu"],
    "submit": ["model", "preset", "nodes", "ngpu", "partition", "account", "time", "image", "sbatch", "over"],
    "compare": ["model"],
    "gate": ["against"],
    "publish": ["into"],
    "judge": ["out"],
    "measure": ["step", "python", "variants", "cycles", "minutes", "ngpu", "host-load", "out"],
    "report": ["out"],
    "doctor": ["step"],
}


# What makes a command line whole.
ENOUGH = {
    "run": ["--model", "rnnt"],
    "sweep": ["--model", "rnnt", "--over", "batch", "--values", "8"],
    "submit": ["--model", "rnnt"],
    "compare": ["root"],
    "gate": ["root", "--against", "root"],
    "publish": ["root/h200x1/gpt3-bench/20261125T101500Z-a7d396c0.json"],
    "judge": ["root/h200x1/gpt3-bench/20261125T101500Z-a7d396c0.json"],
    "measure": ["--step", "my_step.py:build"],
    "report": ["root/h200x1/gpt3-bench/20261125T101500Z-a7d396c0.json"],
    "doctor": ["my_step.py:build"],
}


def words_for(program):
    flag = st.sampled_from([f"--{name}" for name in FLAGS[program]])
    pair = st.tuples(flag, VALUES).map(list)
    joined = st.tuples(flag, VALUES).map(lambda both: ["=".join(both)])
    parts = st.lists(st.one_of(pair, joined, VALUES.map(lambda word: [word])), max_size=4)
    begin = st.sampled_from([[], *[ENOUGH[program]] * 3])
    return st.tuples(begin, parts).map(lambda both: list(itertools.chain(both[0], *both[1])))


def checked_run(argv):
    """All of make bench but the measuring."""
    args = run.parse(argv)

    def work():
        machine = launch.describe_here()
        for name in run.chosen_models(args.model):
            ask.ask_of(args, name, machine)
        return 0

    return command.exit_status("run", work, run.FAILURES)


def checked_sweep(argv):
    """All of make sweep but the measuring."""

    def refused(*_):
        raise command.Mistake("nothing is measured here")

    with mock.patch.object(run, "begun_run", refused):
        return sweep.main(argv)


def checked_measure(argv):
    """All of make measure but the doctor and the measuring."""
    args = measure.parse(argv)

    def work():
        measure.request(args)
        return 0

    return command.exit_status("measure", work, run.FAILURES)


def checked_doctor(argv):
    """All of the doctor but the diagnosis."""
    with mock.patch.object(doctor, "diagnose", lambda text, *_: step_file.split(text) and doctor.Diagnosis()):
        return doctor.main(argv)


PROGRAMS = {
    "measure": checked_measure,
    "report": report.main,
    "doctor": checked_doctor,
    "run": checked_run,
    "sweep": checked_sweep,
    "submit": lambda argv: submit.main(["--dry-run", *argv]),
    "compare": compare.main,
    "gate": gate.main,
    "judge": judge.main,
    "publish": publish.main,
}


def checked_script(model):
    """A training script until it would build something."""

    def check(argv):
        contracts.request(model, *argv)
        return 0

    return check


for model in models():
    PROGRAMS[model], ENOUGH[model] = checked_script(model), []
    fields = dataclasses.fields(importlib.import_module(f"{model}.config").Config)
    FLAGS[model] = [field.name.replace("_", "-") for field in fields] + ["preset", "variant", "steps", "record"]


def try_lines(program, folder, examples):
    put(folder / "root", 0)
    (folder / "loop").symlink_to("loop")
    (folder / "my_step.py").write_text("def build(device): ...")

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(words_for(program))
    def once(words):
        words = [word for word in words if word != "results"] if program == "publish" else words
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = PROGRAMS[program](words)
            except SystemExit as end:
                status = end.code
        assert status in (0, 1, 2, None), (words, status)
        assert "Traceback" not in err.getvalue()
        if status == 2:
            assert err.getvalue().strip(), words

    once()


@pytest.fixture(autouse=True)
def nothing_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "ROOT", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_random_command_line_is_answered(tmp_path, program):
    try_lines(program, tmp_path, 50)


@pytest.mark.long
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_two_thousand_random_command_lines_are_answered(tmp_path, program):
    try_lines(program, tmp_path, 400)


# ------------------------------------------------------------------------------------------------
# Real processes

# A process that neither prints nor ends for so long hangs.
HANGS_S = 300.0
MOST_BYTES = 12 * 2**30
STEP = """
import torch

def build(device):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    return step, [torch.randn(4, 8)], [model, optimizer]
"""
# Words in front of the drawn ones, and behind them: runs are small and lie in the test's folder.
TINY = {"run": (["--out", "runs"], ["--preset", "tiny"]), "sweep": (["--out", "runs"], ["--preset", "tiny"])}
TINY |= {"measure": (["--out", "runs"], []), "submit": (["--dry-run"], [])}
TINY |= {model: ([], ["--preset", "tiny"]) for model in models()}
MODULES = {"doctor": "graph_worth.your_step.doctor"} | {model: f"{model}.train" for model in models()}


def answer_of(program, words, folder):
    """(exit status, stdout, stderr) of a process; the status is None where it had begun and was stopped."""
    before, after = TINY.get(program, ([], []))
    line = [sys.executable, "-m", MODULES.get(program, f"benchmarks.{program}"), *before, *words, *after]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out, err = folder / "stdout", folder / "stderr"

    def limited():
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))

    with out.open("wb") as first, err.open("wb") as second:
        process = subprocess.Popen(
            line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=first, stderr=second, preexec_fn=limited
        )
        has_begun = False
        try:
            assert until(lambda: process.poll() is not None or out.stat().st_size > 0, HANGS_S), (line, err.read_text())
            has_begun = process.poll() is None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.send_signal(signal.SIGINT)
            status = process.wait(HANGS_S)
        finally:
            process.kill()
            process.wait()
    # Python's own end is not to be stopped in one line.
    return (
        None if has_begun and status in (130, -signal.SIGINT) else status,
        out.read_text(),
        err.read_text(errors="replace"),
    )


@pytest.mark.slow
def test_twenty_processes_begin_a_run_or_refuse_in_one_line(tmp_path):
    put(tmp_path / "root", 0)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "my_step.py").write_text(STEP)
    published = sorted((ROOT / "results").rglob("*"))
    drawn = st.sampled_from(sorted(PROGRAMS)).flatmap(lambda name: st.tuples(st.just(name), words_for(name)))
    seen = []

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(drawn)
    def once(pair):
        program, words = pair
        # No shell hands on a text with a NUL, and the tree's own results stay as they are.
        words = [word.replace("\0", "") for word in words if word != "results"]
        status, out, err = answer_of(program, words, tmp_path)
        seen.append(status)
        assert status in (0, 1, 2, 3, 4, 5, 6, 7, 8, None), (program, words, status, out, err)
        assert "Traceback" not in out + err, (program, words, out, err)
        if status == 2:
            # argparse writes its usage above the line.
            lines = [line for line in err.splitlines() if "error:" in line or line.startswith("python -m")]
            assert len(lines) == 1, (program, words, err)

    once()
    assert len(seen) >= 20
    assert sorted((ROOT / "results").rglob("*")) == published
