"""Figures of sweeps: what is believed of sweep.json, and what is refused."""

import json
import math

import pytest

from benchmarks import plot
from tests.figure_records import POINTS, put, session, sweep_file
from tests.test_plot import pages, words


def test_sweeps_without_a_speed_up_or_broken_are_said(tmp_path, capsys):
    sweep_file(tmp_path / "cpu", POINTS, None, "", env={"device": "cpu"})
    sweep_file(tmp_path / "empty", [], None, "no point")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "sweep.json").write_text('{"schema": 1, "model')
    sweep_file(tmp_path / "new", [], None, "", schema=2)
    put(tmp_path / "cpu" / "batch-1", *session({"graph": 1.1}))
    assert plot.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "not drawn: crossover of cpu: CPU: no speed-up is measured here" in out
    assert "not drawn: crossover of empty: no point was measured" in out
    assert "half/sweep.json: " in err and "new/sweep.json: not a sweep of schema 1" in err
    assert "not drawn: speedup: " in out, "points of a sweep belong to its own figure"


def test_what_a_sweep_says_of_its_points_is_computed_again(tmp_path):
    points = [(*one[:3], "slower", one[4]) for one in POINTS[:4]] + [(8, 0.999, 0.003, "faster", "pass")]
    sweep_file(tmp_path, points, {"low": 1, "high": 2}, "graphs always pay")
    [page] = [page for name, page in pages(tmp_path)[0].items() if name.startswith("crossover")]
    assert "stop paying between batch 4 and 6" in page.title and "crossover between 4 and 6" in words(page)
    marks = [line for line in page.figure.axes[0].get_lines() if line.get_marker() == "o"]
    assert [line.get_markerfacecolor() for line in marks] == ["#1b6ca8"] * 3 + ["white"] * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"points": None}, "points is None, not a list"),
        ({"points": ["a"]}, "point 0 is 'a', not an object"),
        ({"value": "4"}, "point 1: value is '4', not a whole number"),
        ({"value": True}, "point 1: value is True"),
        ({"value": 1}, "value 1 stands there twice"),
        ({"speedup": "1.3"}, "value 2: speedup is '1.3', not a number"),
        ({"speedup": -1.3}, "value 2: speedup is -1.3"),
        ({"speedup": math.nan}, "value 2: speedup is nan"),
        ({"low": 1.4, "high": 1.2}, "is not the middle of its interval [1.4, 1.2]"),
        ({"low": -0.1}, "value 2: low is -0.1"),
        ({"low": 0.99}, "is not the middle of its interval [0.99, "),
        ({"low": None}, "with low None"),
        ({"speedup": None}, "speedup None with low"),
        ({"issue_ms": [1]}, "issue_ms is [1]"),
        ({"busy_ms": -1.0}, "busy_ms is -1.0"),
        ({"status": 5}, "status is 5, not text"),
        ({"rounds": "4"}, "rounds is '4', not a count"),
        ({"env": 5}, "env is 5, not an object"),
        ({"env": {"git_sha": 5}}, "env.git_sha is 5, not text"),
        ({"over": ["batch"]}, "over is ['batch'], not text"),
        ({"model": {}}, "model is {}, not text"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused_by_name(tmp_path, capsys, changes, named):
    sweep_file(tmp_path / "good", POINTS, None, "")
    sweep_file(tmp_path / "bad", POINTS, None, "")
    path = tmp_path / "bad" / "sweep.json"
    sweep = json.loads(path.read_text())
    for key, value in changes.items():
        (sweep if key in sweep else sweep["points"][1])[key] = value
    path.write_text(json.dumps(sweep))
    assert plot.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"python -m benchmarks.plot: refused: {path}: ") and named in err and err.count("\n") == 1
    assert "crossover-good" in out and "crossover-bad" not in out
