"""The gate: two sets of runs, and the variants that have changed between them."""

import pytest

from benchmarks import gate
from graph_worth.harness.files.facts import Raised
from tests.helpers.made_run import FOLDER, made_run, put, write


@pytest.fixture
def sides(tmp_path):
    put(tmp_path / "old", 0, ms={"eager": [10.0, 10.1], "graph_layer": 8.0})
    return tmp_path / "old", tmp_path / "new"


def judged(capsys, old, new):
    status = gate.main([str(new), "--against", str(old)])
    return status, capsys.readouterr()


def test_equal_runs_hold(sides, capsys):
    old, new = sides
    put(new, 1, ms={"eager": [10.1, 10.0], "graph_layer": 8.0})
    status, said = judged(capsys, old, new)
    assert status == 0 and said.out.startswith("same     gpt3/bench graph_layer")


@pytest.mark.parametrize(("ms", "sign"), [(7.0, "+14"), (9.0, "-11")])
def test_a_change_fails_up_and_down(sides, capsys, ms, sign):
    old, new = sides
    put(new, 1, ms={"eager": [10.0, 10.1], "graph_layer": ms})
    status, said = judged(capsys, old, new)
    assert status == 1 and f"now: {sign}" in said.out and "on few hosts" in said.out


def test_a_change_within_the_intervals_is_chance(sides, capsys):
    old, new = sides
    put(new, 1, ms={"eager": [10.0, 13.0, 9.0, 12.0], "graph_layer": 8.6})
    assert judged(capsys, old, new)[0] == 0


def test_a_variant_that_no_longer_passes_is_a_change(sides, capsys):
    old, new = sides
    run = made_run(id="20261125T101501Z-a7d396c1")
    own = run.builds[""].variants["graph_layer"]
    own.raised = Raised(kind="error", reason="it broke")
    write(run, new / FOLDER)
    status, said = judged(capsys, old, new)
    assert status == 1 and "pass before, failed now (it broke)" in said.out


def test_runs_without_a_common_variant_cannot_be_compared(sides, capsys):
    old, new = sides
    put(new, 1, preset="full")
    status, said = judged(capsys, old, new)
    assert status == 2 and "no timed variant in common" in said.err
