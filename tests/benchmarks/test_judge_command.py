"""make judge: what each rule says of a file, in the words of the pages."""

import pytest

from benchmarks import judge
from graph_worth.folders import ROOT
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Census, Raised
from tests.helpers.made_run import made_run, quiet, write


def printed(capsys, path):
    assert judge.main([str(path)]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_all_rules_of_a_quiet_run_are_named(tmp_path, capsys):
    run = quiet(made_run(ms={"graph_layer": 8.0}, issue=(9.0, 7.5), unsupported=("graph_x",)))
    lines = printed(capsys, write(run, tmp_path))
    assert lines == [
        "20261125T101500Z-a7d396c1: gpt3/bench on NVIDIA H200, host b",
        "standing: quiet",
        "base: eager, 10.00 ms: no other eager variant is faster",
        "alone in a process: step in blocks / step alone 1.00",
        "pace of the host: last half of the cycles / first half 1.00",
        "ceiling: 1.33x, the step / 7.50 ms in which the GPU works",
        "eager: pass",
        "graph_layer: pass, 1.250x (1.250 to 1.250), 93.8 % of its ceiling, 8 cycles; headline",
        "graph_x: unsupported (needs a GPU)",
        "not checked: eager, graph_layer (no audits, no control)",
    ]


def test_why_a_run_is_no_headline_has_the_words_of_its_row(tmp_path, capsys):
    run = quiet(made_run(cycles=3, ms={"graph_layer": 8.0}), alone_ms=8.0)
    lines = printed(capsys, write(run, tmp_path))
    reasons = "eager in blocks takes 1.25 times as long as alone"
    assert f"standing: aside ({reasons})" in lines
    (graph,) = [line for line in lines if line.startswith("graph_layer: ")]
    assert graph.endswith(f"3 cycles; no headline: {reasons}; 3 cycles, no full run")
    run.builds[""].cycles[0].others = 1
    (tmp_path / f"{run.id}.json").unlink()
    lines = printed(capsys, write(run, tmp_path))
    assert "standing: beside (beside 1 benchmark on other GPUs)" in lines


def test_a_census_has_a_part_for_each_run(tmp_path, capsys):
    runs = [made_run(cycles=4, parity="blocks", model=model) for model in ("gpt3", "rnnt")]
    runs[1].builds[""].variants["eager"].raised = Raised(kind="oom", reason="too large")
    path = tmp_path / "census.json"
    path.write_bytes(run_file.as_bytes(Census(schema=4, census=True, id="c", left_out={}, runs=runs)))
    lines = printed(capsys, path)
    assert sum(line.startswith("20261125T101500Z") for line in lines) == 2
    assert "alone in a process: not measured" in lines and "base: no eager variant passed" in lines


@pytest.mark.parametrize("content", [None, "{", '{"schema": 9}'])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys, content):
    if content:
        (tmp_path / "run.json").write_text(content)
    assert judge.main([str(tmp_path / "run.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m benchmarks.judge: ") and error.count("\n") == 1


@pytest.mark.slow
def test_every_published_file_is_judged(capsys):
    paths = [path for path in (ROOT / "results").glob("h*/*/*.json")]
    assert len(paths) > 70
    for path in paths:
        printed(capsys, path)
