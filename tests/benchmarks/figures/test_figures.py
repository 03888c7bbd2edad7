"""Figures: their data and titles are those of the rows, equal runs give equal bytes, and bad runs no traceback."""

import re
from functools import lru_cache

import pytest

pytest.importorskip("matplotlib")

from benchmarks import ROOT, plot, runs
from benchmarks.figures import front, style
from benchmarks.files import run_file
from benchmarks.files.facts import OWN_STEP, Raised
from benchmarks.judge import judged
from tests.helpers.drawn_pages import assert_inside_and_apart, assert_reads_on_both_pages, words
from tests.helpers.made_run import made_run, write

PAGE_STYLE = (ROOT / "benchmarks" / "pages" / "web" / "page.css").read_text()
WANDERING = [18.0, 19.0, 20.0, 21.0]


def put(root, number=0, model="gpt3", change=None, **more):
    """A made run of a model: eager, whose host is slower than the GPU, and a graph."""
    times = {"ms": {"eager": WANDERING, "graph_layer": 10.5}, "issue": (19.0, 10.0), **more}
    run = made_run(model=model, id=f"20261125T10150{number}Z-a7d396c{number}", **times)
    if change:
        change(run)
    return write(run, root / f"h200x1/{model}-{run.preset}")


def fail(run):
    run.builds[""].variants["graph_layer"].raised = Raised(kind="error", reason="it ended")


@lru_cache
def published():
    return runs.read(ROOT / "results").rows


def page_of(root, name):
    rows = published() if root == ROOT / "results" else runs.read(root).rows
    with style.applied():
        return front.FIGURES[name](rows)


def marks(page, gid):
    return [line for axes in page.figure.axes for line in axes.lines if line.get_gid() == gid]


@pytest.fixture
def several(tmp_path):
    """Three models, one of them new, one with contended cycles; the first on two hosts."""
    put(tmp_path, 0)
    put(tmp_path, 1, model="rnnt", ms={"eager": [10.2, 10.3], "graph_layer": 10.1}, issue=(4.0, 10.0), busy=8)
    put(tmp_path, 2, model="my_model", ms={"eager": WANDERING, "graph_layer": 14.0}, issue=(19.0, 13.5), boot="c")
    put(tmp_path, 3, ms={"eager": 30.0, "graph_layer": 10.6}, boot="d")
    return tmp_path


def test_a_mark_is_the_share_of_its_ceiling_that_a_graph_reached(several):
    page = page_of(several, "ceiling")
    drawn = [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks(page, "point")]
    wanted = []
    for path, run in run_file.find(several)[0]:
        own = judged(run)[""]
        for busy in (False, True) if "rnnt" in str(path) else (False,):
            step = own.ratio_of("graph_layer", busy).base_ms
            uncaptured_ms = own.busy_ms("eager")
            wanted.append((step / uncaptured_ms - 1, uncaptured_ms / own.ms("graph_layer", busy)))
    assert sorted(drawn) == [pytest.approx(each) for each in sorted(wanted)] and len(drawn) == 5
    assert [line.get_markerfacecolor() == "none" for line in marks(page, "point")].count(True) == 1
    assert {"GPT-3", "RNN-T", "my_model"} <= set(words(page))
    # RNN-T gains less than 5 %.
    assert (
        page.title
        == "No graph gains more than its ceiling, step / busy; of 3 that gain over 5 %, 2 come within 5 % of it"
    )
    assert [line.get_color() for line in marks(page, "point")].count(style.FAINT) == 2


def test_a_graph_above_its_ceiling_is_said(tmp_path):
    put(tmp_path, 0, ms={"eager": 20.0, "graph_layer": 9.0})
    assert page_of(tmp_path, "ceiling").title.startswith("1 of 1 graphs gain up to 11.1 % more than step / busy")


def test_hosts_has_a_mark_for_each_host(several):
    page = page_of(several, "hosts")
    rows = {row.workload.model: row for row in runs.best_measured(runs.read(several).rows)}
    shares = {each.ms / row.ms for row in rows.values() for each in row.hosts}
    bases = {each.base_ms / row.ms for row in rows.values() for each in row.hosts}
    assert {line.get_xdata()[0] for line in marks(page, "graph-host")} == shares and len(marks(page, "graph-host")) == 4
    assert {line.get_xdata()[0] for line in marks(page, "eager-host")} == bases
    assert page.title == "GPT-3 on 2 hosts: a step takes 10.50 to 10.60 ms with a graph, 19.47 to 30.00 ms without"


def test_hosts_of_the_archive_are_hollow():
    rows = front.shown_hosts(published())
    drawn = marks(page_of(ROOT / "results", "hosts"), "graph-host")
    hollow = sum(line.get_markerfacecolor() == "#ffffff" for line in drawn)
    assert hollow == sum(len(row.archived) for row in rows) > 0 and len(drawn) == sum(len(row.hosts) for row in rows)


@pytest.mark.parametrize("root", ["made", "published"])
def test_texts_are_whole_and_apart_and_read_on_light_and_dark_pages(root, several, tmp_path):
    for name in front.FIGURES:
        page = page_of(several if root == "made" else ROOT / "results", name)
        assert_inside_and_apart(page, name)
        with style.applied():
            assert_reads_on_both_pages(style.as_svg(page))


def test_equal_runs_give_equal_bytes(several, tmp_path):
    for out in ("a", "b"):
        assert plot.main([str(several), "--out", str(tmp_path / out)]) == 0
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} for out in "ab")
    assert one == other
    assert set(one) == {"ceiling.svg", "hosts.svg"}


def test_committed_figures_are_todays_and_on_a_page(tmp_path):
    folder = ROOT / "results" / "figures"
    assert plot.main([str(ROOT / "results"), "--out", str(tmp_path)]) == 0
    committed = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert committed == {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}, "make readme plots"
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")]
    shown = {
        (path.parent / link).resolve()
        for path in pages
        for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", path.read_text())
    }
    assert {folder / name for name in committed} <= shown


def test_a_failed_graph_is_in_no_figure(tmp_path):
    put(tmp_path, 0, change=fail)
    put(tmp_path, 1, model="rnnt")
    for name in front.FIGURES:
        text = " ".join(words(page_of(tmp_path, name)))
        assert "RNN-T" in text and "GPT-3" not in text


def test_a_users_step_and_each_moe_have_their_names(tmp_path):
    put(tmp_path, 0, model=OWN_STEP, label="nanogpt-build")
    put(tmp_path, 1, model="moe", preset="gpt_oss_fwd_bwd")
    put(tmp_path, 2, model="moe", preset="qwen3_share")
    for name in front.FIGURES:
        text = "\n".join(words(page_of(tmp_path, name)))
        assert "nanogpt" in text and "your_step" not in text
    assert {"GPT-OSS-20B", "Qwen3-30B-A3B", "nanogpt"} <= set(words(page_of(tmp_path, "ceiling")))


def test_colours_are_those_of_the_page_of_a_run():
    for kind, colour in style.KINDS.items():
        assert f"--{kind}: {colour};" in PAGE_STYLE and f"--{kind}: {style.DARK[colour]};" in PAGE_STYLE


def test_the_grid_lies_below_the_marks(several):
    for name in front.FIGURES:
        for axes in page_of(several, name).figure.axes:
            assert axes.get_axisbelow() is True


def test_runs_on_a_cpu_are_not_drawn(tmp_path, capsys):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "hosts.svg").write_text("of yesterday")
    put(tmp_path, 0, gpus=(), preset="tiny")
    assert plot.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not drawn: hosts: no graph on a GPU has a ratio" in out and "0 figures in" in out
    assert not list((tmp_path / "figures").iterdir())


def test_what_cannot_be_drawn_is_a_line(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1 and "no run is in" in capsys.readouterr().err
    (tmp_path / "half.json").write_text('{"schema": 4')
    assert plot.main([str(tmp_path)]) == 1 and "no whole JSON" in capsys.readouterr().out
    put(tmp_path, 0, issue=None)
    assert plot.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not drawn: ceiling: no graph on a GPU has a ratio and a busy time" in out and "1 figure in" in out
    assert plot.main([str(tmp_path / "none")]) == 2


def test_a_name_cannot_break_a_file(tmp_path):
    put(tmp_path, 0, model=OWN_STEP, label="../x$a$<b>")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    for name in front.FIGURES:
        text = (tmp_path / "out" / f"{name}.svg").read_text()
        assert_reads_on_both_pages(text)
        assert "../x$a$&lt;b&gt;" in text


def test_odd_numbers_and_long_names_are_drawn(tmp_path):
    put(tmp_path, 0, model=OWN_STEP, label="x" * 100, ms={"eager": 5e3, "graph_layer": 0.5}, issue=(1.0, 3.0))
    put(tmp_path, 1, model="y" * 100, ms={"eager": 0.5, "graph_layer": 5e3}, issue=(1.0, 0.4))
    put(tmp_path, 2, ms={"eager": 10.0, "graph_layer": 10.0}, issue=(1.0, 10.0))
    for name in front.FIGURES:
        assert_inside_and_apart(page_of(tmp_path, name), name)
