"""Rows over runs and hosts, and the tables of them."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import ROOT, compare, gate
from benchmarks.files import run_file, runs
from benchmarks.pages import tables
from common.training.memory_fit import fewer_layers
from tests.helpers.made_run import FOLDER, made_run, put, write


def row_of(root, variant="graph_layer", busy=0):
    found = runs.read(root)
    assert not found.faults
    (row,) = [row for row in found.rows if row.variant == variant and row.workload.busy == busy]
    return row


def test_the_ratio_is_the_quotient_of_the_printed_times(tmp_path):
    put(tmp_path, 0, ms={"eager": [10.0, 12.0], "graph_layer": [8.0, 8.1]}, boot="a")
    put(tmp_path, 1, ms={"eager": 15.0, "graph_layer": 8.3}, boot="b")
    row = row_of(tmp_path)
    assert row.base_ms / row.variant_ms == pytest.approx(row.ratio, rel=1e-12)
    assert row.cycles == 16 and row.hosts == 2


def test_a_host_with_many_runs_counts_once(tmp_path):
    for number in range(3):
        put(tmp_path, number, ms={"graph_layer": 5.0}, boot="a")
    put(tmp_path, 3, ms={"graph_layer": 10.0}, boot="b")
    row = row_of(tmp_path)
    assert row.ratio == pytest.approx(2**0.5)
    assert (row.lowest, row.highest) == pytest.approx((1.0, 2.0))


def test_two_hosts_have_a_range_and_three_an_interval(tmp_path):
    for number, ms in enumerate((5.0, 5.2)):
        put(tmp_path, number, ms={"graph_layer": ms}, boot=str(number))
    two = row_of(tmp_path)
    assert two.low is None and two.word == "" and tables.interval(two).startswith("runs 1.923 to 2.000")
    put(tmp_path, 2, ms={"graph_layer": 5.1}, boot="2")
    three = row_of(tmp_path)
    assert three.low < three.lowest and three.high > three.highest and three.word == "faster"


def test_contended_cycles_are_a_row_of_their_own(tmp_path):
    put(tmp_path, 0, busy=16, ms={"eager": [10.0, 20.0], "graph_layer": 8.0})
    assert row_of(tmp_path).ratio == pytest.approx(1.25)
    beside = row_of(tmp_path, busy=16)
    assert beside.ratio == pytest.approx(2.5) and beside.workload.name == "gpt3/bench load16"


def test_equal_programs_are_called_the_same(tmp_path):
    put(tmp_path, 0)
    assert row_of(tmp_path).word == "same" and "same" in row_of(tmp_path).note


def test_an_eager_that_wanders_is_named_beside_its_graph(tmp_path):
    put(tmp_path, 0, ms={"eager": [10.0, 13.0], "graph_layer": 9.0})
    assert "eager 10.00 to 13.00 ms" in row_of(tmp_path).note


def test_what_was_predicted_takes_issue_of_the_base_and_busy_of_the_graph(tmp_path):
    put(tmp_path, 0, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 8.1})
    (point,) = row_of(tmp_path).points
    assert point.predicted_gain == pytest.approx(1.5) and "+0.10 ms off its busy" in point.why_missed


# ------------------------------------------------------------------------------------------------
# Bad input


def test_a_run_that_is_there_twice_counts_once(tmp_path):
    put(tmp_path, 0)
    write(made_run(id="20261125T101500Z-a7d396c0"), tmp_path / "copy" / FOLDER)
    assert row_of(tmp_path).cycles == 8


def test_two_runs_of_one_id_are_left_out_by_name(tmp_path):
    put(tmp_path, 0)
    put(tmp_path, 1)
    write(made_run(id="20261125T101500Z-a7d396c0", cycles=9), tmp_path / "other" / FOLDER)
    found = runs.read(tmp_path)
    assert len(found.runs) == 1 and len(found.faults) == 1 and "have one id" in found.faults[0]


def test_a_file_that_is_no_run_is_one_line_and_the_rest_is_shown(tmp_path, capsys):
    target = put(tmp_path, 0)
    (tmp_path / FOLDER / "bad.json").write_text("[" * 200_000)
    (tmp_path / "link.json").symlink_to(target)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "large.json").write_text(
        json.dumps(json.loads(target.read_text()) | {"more": "x" * run_file.MAX_BYTES})
    )
    assert compare.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert [re.sub(".*: ", "", line) for line in lines] == [
        "no whole JSON",
        "larger than 8 MiB, no run file is",
        "no regular file",
    ]
    assert "graph_layer" in out and len(runs.read(tmp_path).runs) == 1


def test_a_folder_that_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    put(tmp_path, 0)
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    # Tests may run as root, who can read any folder.
    monkeypatch.setattr(os, "scandir", refuse)
    assert compare.main([str(tmp_path)]) == 1
    assert "closed: Permission denied" in capsys.readouterr().out


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert compare.main([str(tmp_path)]) == 2
    assert compare.main([str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "no run is there" in said[0] and "no such folder" in said[1]


def test_a_run_of_eager_alone_has_rows_without_a_ratio(tmp_path, capsys):
    run = made_run()
    del run.builds[""].variants["graph_layer"]
    write(run, tmp_path / FOLDER)
    assert compare.main([str(tmp_path)]) == 0
    assert "base" in capsys.readouterr().out


def test_a_run_with_fewer_layers_than_asked_is_a_workload_of_its_own(tmp_path):
    own = SimpleNamespace(layers=6)
    for number, notes in enumerate(([], [fewer_layers(own, SimpleNamespace(layers=8), 76)])):
        run = made_run(id=f"20261125T10150{number}Z-a7d396c{number}")
        run.builds[""].notes = notes
        write(run, tmp_path / FOLDER)
    rows = runs.read(tmp_path).rows
    assert {row.workload.name for row in rows} == {"gpt3/bench", "gpt3/bench-l6"}
    assert all(len(row.points) == 1 for row in rows)
    (best,) = runs.best_measured(rows)
    assert best.workload.preset == "bench"


def test_a_step_of_a_user_is_no_model(tmp_path):
    write(made_run(model=run_file.OWN_STEP, label="mine"), tmp_path / FOLDER)
    rows = runs.read(tmp_path).rows
    assert any(row.ratio for row in rows) and not runs.best_measured(rows)


# ------------------------------------------------------------------------------------------------
# Tables


def test_a_screen_has_no_line_of_more_than_a_hundred_characters(tmp_path):
    put(tmp_path, 0, busy=16, ms={"eager": [10.0, 200.0, 31.0], "graph_layer": 9.0}, unsupported=("graph_x",))
    text = tables.screen(runs.read(tmp_path).rows)
    assert max(map(len, text.splitlines())) <= tables.SCREEN
    assert "graph_x: unsupported (needs a GPU)" in text


def test_csv_has_every_row_unrounded(tmp_path):
    put(tmp_path, 0, ms={"eager": 10.0, "graph_layer": 7.0})
    rows = list(csv.DictReader(io.StringIO(tables.as_csv(runs.read(tmp_path).rows))))
    (graph,) = [row for row in rows if row["variant"] == "graph_layer"]
    assert float(graph["base_ms"]) / float(graph["ms"]) == pytest.approx(float(graph["ratio"]), rel=1e-12)


@pytest.mark.slow
def test_two_hundred_runs_are_read_and_written_in_seconds(tmp_path):
    for number in range(200):
        run = made_run(id=f"20261125T101500Z-{number:08x}", ms={"eager": 10.0 + number}, boot=str(number % 7))
        write(run, tmp_path / f"h200x1/model{number % 9}-bench")
    code = (
        "import sys, time; from benchmarks import compare; compare.main([sys.argv[1], '--wide'])\n"
        "print(time.process_time())\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    # Processor time, whatever else runs: 1 s.
    seconds, peak_kib = done.stdout.split()[-2:]
    assert float(seconds) < 10 and int(peak_kib) < 200 * 1024


# ------------------------------------------------------------------------------------------------
# The gate


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
    own.status, own.reason, own.blocks = "failed", "parity: differs", []
    write(run, new / FOLDER)
    status, said = judged(capsys, old, new)
    assert status == 1 and "pass before, failed now (parity: differs)" in said.out


def test_runs_without_a_common_variant_cannot_be_compared(sides, capsys):
    old, new = sides
    put(new, 1, preset="full")
    status, said = judged(capsys, old, new)
    assert status == 2 and "no timed variant in common" in said.err
