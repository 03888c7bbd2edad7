"""make measure: the verdict on a run, and a step from its file to a verdict on the CPU."""

import subprocess
import sys

import pytest

from benchmarks import ROOT, measure
from benchmarks.files import run_file
from tests.helpers.made_run import made_run

STEP = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(16, 64) for _ in range(3)]
    count = [0.0]
    def step(batch):
        optimizer.zero_grad()
        count[0] += 1
        loss = (model(batch.to(device)) - batch.to(device)).square().mean() * SCALE
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""


@pytest.mark.parametrize(
    ("ms", "status", "word"),
    [
        (8.0, measure.FASTER, "Faster"),
        (10.0, measure.SAME, "Same"),
        (12.5, measure.SLOWER, "Slower"),
        ([8.0, 12.0] * 4, measure.UNCLEAR, "Unclear"),
    ],
)
def test_the_verdict_follows_the_interval(ms, status, word):
    found, sentence = measure.verdict(made_run(ms={"graph_layer": ms}))
    assert found == status and sentence.startswith(word)


@pytest.mark.parametrize(
    ("given", "reason", "status"),
    [
        ("failed", "parity: its losses differ", measure.WRONG),
        ("numerics_failed", "loss is not finite", measure.WRONG),
        ("capture_failed", "Tensor.item at my_step.py:9 cannot be captured", measure.NO_CAPTURE),
        ("oom", "needs 9 GiB more", measure.NO_CAPTURE),
        ("unsupported", "several ranks are captured on GPUs alone", measure.NOT_MEASURED),
    ],
)
def test_a_verdict_without_a_graph_that_passes_says_why(given, reason, status):
    run = made_run(ms={"graph_layer": 8.0})
    own = run.builds[""].variants["graph_layer"]
    own.status, own.reason, own.blocks = given, reason, []
    found, sentence = measure.verdict(run)
    assert found == status and reason in sentence


def test_on_a_cpu_nothing_is_measured():
    found, sentence = measure.verdict(made_run(preset="tiny", gpus=(), device="cpu", ms={"graph_layer": 5.0}))
    assert found == measure.NOT_MEASURED and "there is no GPU" in sentence and "graph_layer" in sentence


@pytest.mark.parametrize(("issue", "words"), [(15.0, "may gain up to 1.50x"), (9.0, "has little to remove")])
def test_the_quick_answer_names_issue_busy_and_what_a_graph_can_gain(issue, words):
    run = made_run(issue=(issue, 10.0))
    del run.builds[""].variants["graph_layer"]
    found, sentence = measure.verdict(run)
    assert found == measure.NOT_MEASURED and words in sentence and f"issues a step in {issue:.2f}" in sentence


def measured(tmp_path, scale, *more):
    path = tmp_path / "my_step.py"
    path.write_text(STEP.replace("SCALE", scale))
    words = [sys.executable, "-m", "benchmarks.measure", "--step", f"{path}:build", "--out", str(tmp_path / "runs")]
    return subprocess.run([*words, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_sound_step_goes_from_its_file_to_a_run_file_and_a_verdict(tmp_path):
    done = measured(tmp_path, "1.0")
    assert done.returncode == measure.NOT_MEASURED, done.stdout + done.stderr
    assert "graph_step, graph_fwd_bwd" in done.stdout.splitlines()[-1]
    (path,) = (tmp_path / "runs").rglob("*.json")
    (build,) = run_file.read(path).builds.values()
    assert {build.variants[name].parity.result for name in ("graph_step", "graph_fwd_bwd")} == {"bitwise"}


@pytest.mark.slow
def test_a_number_that_a_replay_freezes_is_wrong_and_named(tmp_path):
    done = measured(tmp_path, "(1.0 + count[0] % 3)")
    assert done.returncode == measure.WRONG, done.stdout + done.stderr
    assert "host value" in done.stdout and f"{tmp_path / 'my_step.py'}:12" in done.stdout


@pytest.mark.parametrize(
    ("step", "words"),
    [("nowhere.py", "there is no file nowhere.py"), ("my_step.py:nothing", "has no function nothing(device)")],
)
def test_a_file_without_a_step_is_refused_in_one_line(tmp_path, monkeypatch, capsys, step, words):
    (tmp_path / "my_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    assert measure.main(["--step", step]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_a_variant_that_failed_otherwise_has_no_wrong_numbers():
    run = made_run(ms={"graph_layer": 8.0})
    own = run.builds[""].variants["graph_layer"]
    own.status, own.reason, own.blocks = "failed", "graphs launch 1.3 % of the kernels, at least 20 % are expected", []
    assert measure.verdict(run)[0] == measure.NO_CAPTURE


def test_a_variant_that_nobody_has_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "my_step.py").write_text(STEP)
    assert measure.main(["--step", str(tmp_path / "my_step.py"), "--variants", "nonsense"]) == 2
    said = capsys.readouterr()
    assert "takes some of eager, graph_step" in said.err and not said.out


def test_an_interpreter_without_torch_is_refused(tmp_path, capsys):
    (tmp_path / "my_step.py").write_text(STEP)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert measure.main(["--step", str(tmp_path / "my_step.py"), "--python", str(python)]) == 2
    assert capsys.readouterr().err.strip().endswith(f"--python {python} has no torch")
