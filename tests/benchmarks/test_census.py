"""benchmarks/census.py: which workloads it asks for, and the one file that its runs come to."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import census
from graph_worth.folders import ROOT
from graph_worth.harness import judge
from graph_worth.harness.files import run_file
from graph_worth.harness.processes import launch
from tests.helpers.made_run import made_run

WORDS = [sys.executable, "-m", "benchmarks.census"]


def asked(*words):
    return census.requests(census.parse([*words, "--preset", "tiny"]), launch.describe_here())


def test_all_workloads_are_eager_and_one_graph_of_each_model_and_of_two_steps(tmp_path):
    wanted = asked("--out", str(tmp_path))
    names = {name for name, _, _ in wanted}
    assert {"gpt3", "llama2_lora", "llama31", "moe", "rnnt", "stable_diffusion", "muon", "nanogpt"} <= names
    for name, request, options in wanted:
        (build,) = request.builds
        *eagers, graph = build.variants
        assert eagers[0] == "eager" and {build.variants[eager]["kind"] for eager in eagers} == {"eager"}, name
        assert build.variants[graph]["kind"] == "graph" and build.variants[graph]["headline"], name
        assert (options.cycles, options.no_control, options.is_light) == (census.CYCLES, True, True)
    graphs = {name: list(request.builds[0].variants)[-1] for name, request, _ in wanted}
    assert graphs["gpt3"] != "graph_step" == graphs["muon"] == graphs["llama31"]
    assert len(asked("--model", "gpt3,rnnt")) == 2


@pytest.mark.slow
def test_a_census_is_one_file_that_names_what_it_left_out(tmp_path):
    """Two workloads have no time left; no run is kept beside the file."""
    models = "examples/minimal,tests.lying_model,llama31"
    words = ["--model", models, "--preset", "tiny", "--cycles", "2", "--minutes", "0.01", "--out", str(tmp_path)]
    done = subprocess.run([*WORDS, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (path for path in tmp_path.rglob("*.json*") if ".cache" not in path.parts)
    assert path.parent == tmp_path / "cpux1" / "census" and path.stat().st_mode & 0o777 == 0o444
    content = run_file.read_all(path)
    assert content.census and content.id == path.stem and set(content.left_out) == {"tests.lying_model", "llama31"}
    assert all("might pass 0.01 minutes" in reason for reason in content.left_out.values())
    (run,) = content.runs
    assert (run.model, run.parity, run.control, run.whole) == ("examples.minimal", "blocks", "", True)
    (judged,) = judge.judged(run).values()
    assert {name: verdict.status for name, verdict in judged.verdicts.items()} == {
        "eager": "pass",
        "graph_step": "pass",
    }
    assert judged.ratio_of("graph_step").cycles == 2
    assert "left out: llama31: might pass 0.01 minutes" in done.stdout and str(path) in done.stdout


@pytest.mark.slow
def test_a_census_without_a_run_fails_and_leaves_no_file(tmp_path):
    words = [*WORDS, "--model", "tests.lying_model", "--out", str(tmp_path), "--preset"]
    refused = subprocess.run([*words, "nope"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "no workload can be measured here: tests.lying_model: " in refused.stderr
    assert not list(tmp_path.rglob("*.json*"))


class Facts:
    """The facts of a run, which are removed with the census."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(("is_sound", "status"), [(True, 0), (False, 1)])
def test_a_graph_that_failed_fails_the_census_and_stays_in_its_file(tmp_path, capsys, is_sound, status):
    runs = [made_run(), made_run(id="20261125T101501Z-a7d396c2")]
    runs[1].builds[""].variants["graph_layer"].profile.graph_share = 0.5 if is_sound else 0.01
    base_gone = made_run(id="20261125T101502Z-a7d396c3")
    for variant in base_gone.builds[""].variants.values():
        variant.blocks.clear()
    done = [(Facts(tmp_path / str(number)), run) for number, run in enumerate([*runs, base_gone])]
    first = SimpleNamespace(group=tmp_path / "h200x1" / "gpt3-bench")
    assert census._sealed(None, first, done, {"moe": "oom: a\x1b[2J"}, 9.0) == status
    content = run_file.read_all(tmp_path / "h200x1" / "census" / f"{runs[0].id}.json")
    assert [run.id for run in content.runs] == [run.id for run in runs] and list(content.left_out) == ["moe"]
    assert all(facts.is_closed and not facts.path.exists() for facts, _ in done)
    printed = capsys.readouterr().out
    assert "left out: moe: oom: a" in printed and "\x1b" not in printed
    assert census._sealed(None, first, [(Facts(tmp_path / "4"), base_gone)], {}, 9.0) == 1
