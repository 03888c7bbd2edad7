"""make compare: tables of all runs below a folder, and files that are left out by name."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest

from benchmarks import compare, frame
from benchmarks.pages import tables
from graph_worth.folders import ROOT
from graph_worth.harness.files import run_file
from tests.helpers.made_run import FOLDER, made_run, put, write


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
        "Expected `object`, got `array`",
        "larger than 32 MiB, no run file is",
        "no regular file",
    ]
    assert "graph_layer" in out and len(frame.load(tmp_path).runs) == 1


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


def test_a_screen_has_no_line_of_more_than_a_hundred_characters(tmp_path):
    put(tmp_path, 0, busy=16, ms={"eager": [10.0, 200.0, 31.0], "graph_layer": 9.0}, unsupported=("graph_x",))
    results = frame.load(tmp_path)
    text = tables.screen(results, results.rows)
    assert max(map(len, text.splitlines())) <= tables.SCREEN
    assert "graph_x: unsupported (needs a GPU)" in text


def test_csv_has_every_row_unrounded(tmp_path):
    put(tmp_path, 0, ms={"eager": 10.0, "graph_layer": 7.0})
    rows = list(csv.DictReader(io.StringIO(tables.as_csv(frame.load(tmp_path).rows))))
    (graph,) = [row for row in rows if row["variant"] == "graph_layer"]
    assert float(graph["base_ms"]) / float(graph["ms"]) == pytest.approx(float(graph["gain"]), rel=1e-12)


@pytest.mark.slow
def test_two_hundred_runs_are_read_and_written_in_little_memory(tmp_path):
    for number in range(200):
        run = made_run(id=f"20261125T101500Z-{number:08x}", ms={"eager": 10.0 + number}, boot=str(number % 7))
        write(run, tmp_path / f"h200x1/model{number % 9}-bench")
    code = (
        "import sys; from benchmarks import compare; compare.main([sys.argv[1]])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 200 * 1024
