"""README's three figures: what is drawn of sessions made by hand, and colours that read on light and dark pages."""

import pytest

from benchmarks.figures import evidence, front, style
from tests.drawn_pages import assert_apart, assert_inside, assert_reads_on_both_pages
from tests.figure_records import both, everything, make, put
from tests.table_records import packed

MODELS = ("gpt3", "rnnt", "stable_diffusion")
LACKING = {"extra": {"eagers": ["eager", "eager_torch"]}}


def page_of(draw, root):
    with style.applied():
        return draw(evidence.collect(root).blocks)


def marks(page):
    """(gid, x, y) of every point."""
    lines = page.figure.axes[0].lines
    return [(line.get_gid(), *line.get_xydata()[0]) for line in lines if line.get_gid() and "-" in line.get_gid()]


def legend(page):
    """Texts of the figure's one legend."""
    found, *others = [*page.figure.legends, *(axes.get_legend() for axes in page.figure.axes if axes.get_legend())]
    assert not others
    return [text.get_text() for text in found.get_texts()]


def words(page):
    return [text.get_text() for axes in page.figure.axes for text in axes.texts]


# ------------------------------------------------------------------------------------------------
# The law


@pytest.fixture
def root(tmp_path):
    put(tmp_path / "gpt3-bench", *both(26.0, 10.4, 25.0, 10.0, rounds=(1, 2, 3, 4, 5), predicted=(25.2, 10.5)))
    put(tmp_path / "gpt3-bench-load16", *both(30.0, 10.4, 25.0, 10.0, host_load=16))
    put(tmp_path / "rnnt-full", *both(12.0, 10.0, 8.5, 10.0, model="rnnt", preset="full"))
    put(tmp_path / "rnnt-bench", *both(10.1, 10.0, 4.0, 10.0, model="rnnt"))
    return tmp_path


def test_the_law_has_a_point_a_session_at_x_and_gain(root):
    page = page_of(front.law, root)
    found = sorted(marks(page))
    assert [gid for gid, _, _ in found] == [
        "filled-gpt3-bench",
        "hollow-gpt3-bench",
        "hollow-rnnt-bench",
        "hollow-rnnt-full",
    ]
    assert [x for _, x, _ in found] == pytest.approx([2.5, 2.5, 0.4, 0.85])
    assert [y for _, _, y in found] == pytest.approx([2.5, 30 / 10.4, 1.01, 1.2], rel=0.01)
    axes = page.figure.axes[0]
    line = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    low, high = axes.get_xlim()
    assert line.get_xydata().tolist() == [[low, 1.0], [1.0, 1.0], [high, high]]
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_the_law_says_how_often_it_holds_and_names_what_is_off(root):
    page = page_of(front.law, root)
    assert page.title == "2 of 4 sessions gain max(1, issue / busy) within 10 %, 2 more, 0 less"
    assert set(words(page)) == {"full", "bench, 16 busy processes"}
    assert legend(page) == ["GPT-3", "RNN-T"]
    notes = " ".join(text.get_text() for text in page.figure.texts)
    assert "Diamond: beside busy host processes" in notes
    assert "Dash: the queue model's gain; 1 of 1 lie within 10 % of it or of max(1, x)" in notes


def test_the_law_says_which_sessions_did_not_run_all_eagers(root):
    put(root / "rnnt-bench-x", *both(10.1, 10.0, 4.0, 10.0, model="rnnt", **LACKING))
    put(root / "stable_diffusion-bench", *both(26.0, 10.0, 25.0, 10.0, model="stable_diffusion", **LACKING))
    assert legend(page_of(front.law, root)) == [
        "GPT-3",
        "RNN-T (1 of 3 not all eagers run)",
        "Stable Diffusion (not all eagers run)",
    ]


def test_gpu_types_have_marks_of_their_own(root):
    put(root / "h100-bench", *both(12.0, 10.0, 8.5, 10.0, env={"gpu_name": "NVIDIA H100"}))
    page = page_of(front.law, root)
    assert legend(page) == ["GPT-3", "RNN-T", "NVIDIA H200", "NVIDIA H100"]
    markers = {str(line.get_marker()) for line in page.figure.axes[0].lines if line.get_gid()}
    assert markers == {"o", "s", "D"}


def test_names_of_many_sessions_overlap_neither_points_nor_each_other(tmp_path):
    for number in range(14):
        model = MODELS[number % 3]
        x = 0.8 + 0.01 * number
        records = both(13.0 + 0.02 * number, 10.0, 10 * x, 10.0, model=model, preset=f"preset{number}")
        put(tmp_path / f"{model}-preset{number}", *records)
    page = page_of(front.law, tmp_path)
    page.figure.canvas.draw()
    axes = page.figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().startswith("preset")]
    assert len(boxes) >= 4
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        for _, x, y in marks(page):
            px, py = axes.transData.transform((x, y))
            assert not (box.x0 < px < box.x1 and box.y0 < py < box.y1)
        assert axes.bbox.x0 - 1 <= box.x0 and box.x1 <= axes.bbox.x1 + 1


# ------------------------------------------------------------------------------------------------
# Why


def bars(page):
    """(gid, ms) of every bar that is no band."""
    return [(bar.get_gid(), bar.get_width()) for axes in page.figure.axes for bar in axes.patches if bar.get_gid()]


def test_why_shows_issue_and_busy_time_of_eager_and_graph(tmp_path):
    put(tmp_path / "gpt3-bench", *both(100.0, 99.0, 60.0, 98.0, rounds=(1, 2, 3)))
    put(tmp_path / "gpt3-bench-overlap", *both(50.0, 49.0, 60.0, 48.0))
    for folder, changes in (("x1", {}), ("x2", {"env": {"world_size": 2, "num_gpus": 2}})):
        records = both(80.0, 40.0, 79.0, 38.0, model="stable_diffusion", **LACKING | changes)
        put(tmp_path / folder / "stable_diffusion-bench", *records)
    page = page_of(front.why, tmp_path)
    assert page.title == "Eager leaves the GPU idle for 51 % of GPT-3's step and 76 % of Stable Diffusion's"
    assert bars(page) == [
        ("gpt3-eager", 60.0),
        ("gpt3-eager", 49.0),
        ("gpt3-graph", 1.0),
        ("gpt3-graph", 98.0),
        ("stable_diffusion-eager", 79.0),
        ("stable_diffusion-eager", 19.0),
        ("stable_diffusion-graph", 1.0),
        ("stable_diffusion-graph", 38.0),
    ]
    headings = [text.get_text() for text in page.figure.texts]
    assert {"GPT-3, 1 session", "Stable Diffusion (not all eagers run), 1 session"} <= set(headings)
    assert {"eager: a step takes 100.0 ms", "graph: a step takes 40.0 ms"} <= set(words(page))


def test_why_is_of_the_median_session_and_of_one_workload_where_there_is_one(tmp_path):
    for hour, issue in enumerate((50.0, 60.0, 90.0)):
        packed(tmp_path / "gpt3-bench", both(100.0, 99.0, issue, 98.0), hour=hour, boot=f"{hour}" * 6)
    page = page_of(front.why, tmp_path)
    assert page.title == "Eager leaves the GPU idle for 51 % of GPT-3's step"
    assert bars(page)[0] == ("gpt3-eager", 60.0)
    assert "GPT-3, 3 sessions" in [text.get_text() for text in page.figure.texts]


# ------------------------------------------------------------------------------------------------
# Steady


def test_steady_has_two_dots_a_session_in_its_hosts_colour(tmp_path):
    for hour, (eager, graph, boot) in enumerate(((20.0, 10.0, "a"), (30.0, 10.1, "b"), (25.0, 10.2, "a"))):
        packed(tmp_path / "gpt3-bench", both(eager, graph, 9.0, 8.0), hour=hour, boot=boot * 6)
    # Of other code than the newest: in the figure, not in its title.
    old = both(90.0, 10.0, 9.0, 8.0, env={"run_hash": "older", "source_hash": "older"})
    packed(tmp_path / "gpt3-bench", old, day=20, boot="c" * 6)
    page = page_of(front.steady, tmp_path)
    assert page.title == "From session to session eager's step differs by up to 1.50x, a graph's by up to 1.02x"
    found = sorted(marks(page))
    assert [gid for gid, _, _ in found] == ["eager-gpt3-bench"] * 4 + ["graph-gpt3-bench"] * 4
    assert [x for _, x, _ in found] == pytest.approx([2.0, 2.5, 3.0, 9.0, 1.0, 1.0, 1.01, 1.02], rel=1e-3)
    assert legend(page) == ["eager", "graph", "aaaaaa", "bbbbbb", "cccccc"]
    lines = [line for line in page.figure.axes[0].lines if line.get_gid()]
    assert len({line.get_color() for line in lines}) == 3
    assert [line.get_markerfacecolor() for line in lines].count("none") == 2


def test_a_model_without_a_name_of_its_own_is_drawn(tmp_path):
    put(tmp_path / "fake-bench", *both(20.0, 10.0, 9.0, 8.0, model="fake"))
    assert legend(page_of(front.law, tmp_path)) == ["fake"]
    assert "fake" in [text.get_text() for text in page_of(front.steady, tmp_path).figure.texts]


def test_steady_of_one_session_and_of_very_many_hosts(tmp_path):
    packed(tmp_path / "gpt3-bench", both(20.0, 10.0, 9.0, 8.0))
    page = page_of(front.steady, tmp_path)
    assert page.title == "No workload has two sessions of equal code: how much their steps differ is not known yet"
    for hour in range(12):
        packed(tmp_path / "rnnt-bench", both(20.0, 10.0, 9.0, 8.0, model="rnnt"), hour=hour, boot=f"{hour:06}")
    page = page_of(front.steady, tmp_path)
    assert legend(page)[-1] == "3 more hosts"
    assert_inside(page, "steady")
    assert_apart(page, "steady")


def test_steady_leaves_out_folders_with_one_session_where_others_have_more(tmp_path):
    put(tmp_path / "one" / "llama31-bench", *both(20.0, 10.0, 9.0, 8.0, model="llama31"))
    put(
        tmp_path / "two" / "llama31-bench",
        *both(20.0, 10.0, 9.0, 8.0, model="llama31", env={"gpu_name": "NVIDIA H100"}),
    )
    shown = page_of(front.steady, tmp_path).figure
    names = [label.get_text() for axes in shown.axes for label in axes.get_yticklabels()]
    assert sorted(names) == ["bench", "bench, H200"] and "Left out" not in str(words_of(shown))
    # A session beside busy processes is one more of its folder.
    put(tmp_path / "gpt3-bench", *both(26.0, 10.4, 25.0, 10.0))
    put(tmp_path / "gpt3-bench-load16", *both(30.0, 10.4, 25.0, 10.0, host_load=16))
    shown = page_of(front.steady, tmp_path).figure
    names = [label.get_text() for axes in shown.axes for label in axes.get_yticklabels()]
    assert names == ["bench", "bench, 16 busy processes"]
    assert "Left out: 2 folders with one session." in words_of(shown)


def words_of(figure):
    return " ".join(text.get_text() for text in figure.texts)


# ------------------------------------------------------------------------------------------------
# All three


@pytest.mark.parametrize("draw", [front.law, front.why, front.steady])
def test_nothing_to_draw_is_missing(tmp_path, draw):
    put(tmp_path / "gpt3-bench", make("eager", 1, 10.0))
    with pytest.raises(evidence.Missing, match="no graph beside its base"):
        page_of(draw, tmp_path)


def test_why_needs_one_of_its_workloads(tmp_path):
    put(tmp_path / "rnnt-bench", *both(10.1, 10.0, 4.0, 10.0, model="rnnt"))
    with pytest.raises(evidence.Missing, match="no session of GPT-3 or Stable Diffusion bench on one GPU"):
        page_of(front.why, tmp_path)


@pytest.mark.parametrize("draw", [front.law, front.why, front.steady])
def test_a_dark_page_has_colours_of_its_own(tmp_path, draw):
    page = page_of(draw, everything(tmp_path / "all"))
    with style.applied():
        [path] = style.save(page, tmp_path, "figure", has_png=False)
    assert_reads_on_both_pages(path.read_text())
