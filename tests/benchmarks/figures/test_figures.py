"""Figures: their data and titles are those of the rows, equal runs give equal bytes, and bad runs no traceback."""

import dataclasses

import pytest

pytest.importorskip("matplotlib")

from benchmarks import ROOT, plot
from benchmarks.figures import choice, front, style
from benchmarks.files import runs
from benchmarks.pages import readme
from tests.helpers.drawn_pages import assert_apart, assert_inside, assert_reads_on_both_pages, words
from tests.helpers.made_run import made_run, write

WANDERING = [18.0, 19.0, 20.0, 21.0]


def put(root, number=0, model="gpt3", change=None, **more):
    """A made run of a model: eager, whose host is slower than the GPU, and a graph."""
    times = {"ms": {"eager": WANDERING, "graph_layer": 10.5}, "issue": (19.0, 10.0), **more}
    run = made_run(model=model, id=f"20261125T10150{number}Z-a7d396c{number}", **times)
    if change:
        change(run)
    return write(run, root / f"h200x1/{model}-{run.preset}")


def shown(root):
    return choice.shown(runs.read(root))


def pages(root):
    """Name -> page, or why there is none."""
    found = {}
    with style.applied():
        for make in (front.law, front.why, front.models):
            try:
                found[make.__name__] = make(shown(root))
            except style.NotDrawn as reason:
                found[make.__name__] = str(reason)
    return found


def marks(page, gid):
    return [line for axes in page.figure.axes for line in axes.lines if line.get_gid() == gid]


@pytest.fixture
def several(tmp_path):
    """Three models, one of them new, with contended cycles."""
    put(tmp_path, 0)
    put(tmp_path, 1, model="rnnt", ms={"eager": [10.2, 10.3], "graph_layer": 10.1}, issue=(4.0, 10.0), busy=8)
    put(tmp_path, 2, model="my_model", ms={"eager": WANDERING, "graph_layer": 14.0}, issue=(19.0, 13.5), boot="c")
    return tmp_path


def test_a_mark_of_law_is_issue_by_busy_and_the_ratio_of_a_run(several):
    page, points = pages(several)["law"], readme.predictions(runs.read(several).rows)
    drawn = [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks(page, "point")]
    assert drawn == [(point.base_issue_ms / point.busy_ms, point.ratio.ratio) for _, point, _ in points]
    assert len(drawn) == 4, "rnnt also beside busy processes"
    assert [line.get_markerfacecolor() == "none" for line in marks(page, "point")].count(True) == 1
    near = sum(abs(off - 1) <= readme.WITHIN for *_, off in points)
    assert f"{near} of 4 lie within 5 %" in page.title
    legend = [text.get_text() for text in page.figure.axes[0].get_legend().get_texts()]
    assert legend == ["GPT-3", "RNN-T", "my_model"]


def test_why_has_the_four_times_of_the_best_measured_graph(several):
    bars = {row.workload.model: [value for _, value, _ in own] for row, own in front.bars_of(shown(several))}
    rows = {row.workload.model: row for row in runs.best_measured(runs.read(several).rows)}
    assert bars["gpt3"] == [19.0, 10.0, 10.0, rows["gpt3"].variant_ms] and list(bars) == ["gpt3", "rnnt", "my_model"]
    title = pages(several)["why"].title
    assert title == "GPT-3: the host needs 19.0 ms to issue a step that the GPU runs in 10.0; a graph takes 10.5"


def test_models_has_each_ratio_with_its_interval_and_says_what_was_not_measured(several):
    page = pages(several)["models"]
    best = runs.best_measured(runs.read(several).rows)
    for row in best:
        assert f"{choice.short(row.workload.model)} {row.ratio:.3f}x" in page.title
        assert f"{row.ratio:.3f}x, {row.low:.3f} to {row.high:.3f}, 1 host" in words(page)
    drawn = {(*line.get_xdata(),) for line in marks(page, "interval")}
    assert drawn == {(row.low, row.high) for row in best}
    assert words(page).count("graphs not measured yet") == 3 and "Stable Diffusion v2" in words(page)


def test_a_failed_graph_and_a_control_have_a_row(tmp_path):
    def change(run):
        variants = run.builds[""].variants
        first = [block for block in variants["eager"].blocks if not block.place]
        variants["control"] = dataclasses.replace(variants["eager"], blocks=first)
        variants["graph_layer"].status, variants["graph_layer"].reason = "failed", "losses differ"

    put(tmp_path, 0, change=change)
    put(tmp_path, 1, model="rnnt")
    page = pages(tmp_path)["models"]
    assert {"failed", "losses differ", "control"} <= set(words(page)) and "GPT-3" not in page.title


@pytest.mark.parametrize("root", ["made", "published"])
def test_texts_are_whole_and_apart_and_read_on_light_and_dark_pages(root, several, tmp_path):
    found = pages(several if root == "made" else ROOT / "results")
    for name, page in found.items():
        if not isinstance(page, str):
            assert_inside(page, name)
            assert_apart(page, name)
            with style.applied():
                style.save(page, tmp_path / "out", name, False)
            assert_reads_on_both_pages((tmp_path / "out" / f"{name}.svg").read_text())


def test_equal_runs_give_equal_bytes(several, tmp_path, capsys):
    for out in ("a", "b"):
        assert plot.main([str(several), "--out", str(tmp_path / out)]) == 0
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} for out in "ab")
    assert one == other
    assert one.keys() == {f"{name}.{kind}" for name in ("law", "why", "models") for kind in ("svg", "png")}


def test_a_cpu_is_drawn_alone_and_named(tmp_path):
    put(tmp_path, 0, gpus=(), device="cpu", preset="tiny", issue=None)
    found = pages(tmp_path)
    assert "CPU" in found["models"].title
    assert isinstance(found["law"], str) and isinstance(found["why"], str)
    put(tmp_path, 1)
    assert "CPU" not in pages(tmp_path)["models"].title


def test_what_cannot_be_drawn_is_a_line(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1 and "no run is in" in capsys.readouterr().err
    (tmp_path / "half.json").write_text('{"schema": 3')
    assert plot.main([str(tmp_path)]) == 1 and "no whole JSON" in capsys.readouterr().out
    put(tmp_path, 0, change=lambda run: run.builds[""].variants.pop("graph_layer"), issue=None)
    assert plot.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not drawn: models: no graph has a ratio" in out and "0 figures in" in out
    assert plot.main([str(tmp_path / "none")]) == 2


def test_a_name_cannot_break_a_file(tmp_path):
    put(tmp_path, 0, model="../x$a$")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    for path in (tmp_path / "out").glob("*.svg"):
        assert_reads_on_both_pages(path.read_text())
