"""Figures: their data and titles are those of the rows, equal runs give equal bytes, and bad runs no traceback."""

import math
import re
from functools import lru_cache

import numpy
import pytest

pytest.importorskip("matplotlib")

from benchmarks import crossing, frame, plot
from benchmarks.figures import roofline, style, sweep
from benchmarks.pages import headlines, sweeps
from benchmarks.pages.roofline import ALONE, GAINS, errors, markdown, points
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Raised
from graph_worth.harness.judge import judged
from graph_worth.harness.pages import roofline as rule
from graph_worth.harness.standing import SLOWED
from tests.helpers.drawn_pages import assert_inside_and_apart, assert_reads_on_both_pages, texts, words
from tests.helpers.made_run import made_run, put_sweep, write

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
    return frame.load(ROOT / "results")


def page_of(root):
    found = published() if root == ROOT / "results" else frame.load(root)
    with style.applied():
        return roofline.draw(found)


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


def test_a_mark_stands_at_the_mean_kernel_of_eager_and_the_gain_of_its_graph(several):
    drawn = [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks(page_of(several), "point")]
    wanted = []
    for _, run in run_file.find(several)[0]:
        build = judged(run)[""]
        profile = build.build.variants["eager"].profile
        wanted.append((1e3 * profile.busy_ms / profile.kernels, build.ratio_of("graph_layer").ratio))
    assert sorted(drawn) == [pytest.approx(point) for point in sorted(wanted)] and len(drawn) == 4


def test_a_line_is_the_roof_of_a_host(several):
    page = page_of(several)
    drawn, labels = marks(page, "host"), page.figure.axes[0].texts
    assert [text.get_text() for text in labels] == [f"host {host_us} us" for host_us in roofline.HOSTS]
    for host_us, line, text in zip(roofline.HOSTS, drawn, labels, strict=True):
        corners = [*line.get_xydata(), text.get_position()]
        assert all(gain == pytest.approx(max(1.0, host_us / us)) for us, gain in corners)
        assert (host_us, 1.0) in map(tuple, corners)
        across, up = numpy.diff(line.axes.transData.transform(corners[:2]), axis=0)[0]
        assert math.tan(math.radians(text.get_rotation())) == pytest.approx(up / across) and up < 0


def test_marks_tell_hosts_gpus_and_ranks_apart():
    page, drawn = page_of(ROOT / "results"), points(published())
    lines = marks(page, "point")
    filled = sum(line.get_markerfacecolor() != "#ffffff" for line in lines)
    assert len(lines) == len(drawn) and 0 < filled == drawn["counts"].sum() < len(drawn)
    slow, compiled = drawn["standing"] == SLOWED, drawn["program"] != drawn["base"]
    big = sum(line.get_markersize() >= roofline.SEVERAL for line in lines)
    assert big == ((drawn["ranks"] > 1) & ~slow).sum() > 0
    assert f": {filled} filled, {slow.sum()} grey" in " ".join(words(page))
    # Slowed runs are small, hollow, of no workload, and below all others.
    looks = {(line.get_color(), line.get_markerfacecolor(), line.get_markersize()) for line in lines[: slow.sum()]}
    assert looks == {(style.PALE, "#ffffff", roofline.SLOW)}
    assert {line.get_color() for line in lines[slow.sum() :]} <= {*roofline.COLOURS}
    assert sum(line.get_marker() == style.COMPILED for line in lines) == compiled.sum() > (compiled & slow).sum()
    wanted = sorted(drawn["gpu"][~compiled].map(headlines.short).value_counts())
    assert sorted(sum(line.get_marker() == mark for line in lines) for mark in style.MARKS[:2]) == wanted
    assert all(axes.get_axisbelow() is True for axes in page.figure.axes)
    assert {"H100", "H200"} <= set(words(page)) and {"GPT-3 175B", "Muon", "nanoGPT"} <= set(words(page))


def test_workloads_beyond_the_colours_share_one(tmp_path):
    for number in range(len(roofline.COLOURS) + 1):
        put(tmp_path, number, model=OWN_STEP, label=f"{'abcdefghijkl'[number]}-build", boot=f"{number}")
    page = page_of(tmp_path)
    colours = [line.get_color() for line in marks(page, "point")]
    assert set(colours) == set(roofline.COLOURS) and colours.count(roofline.COLOURS[-1]) == 2
    assert "others" in words(page) and "k" not in words(page)


def test_a_graph_of_another_program_is_not_drawn(tmp_path):
    """Compiled, its kernels are not those whose mean time stands on the axis."""
    put(tmp_path, 0, change=lambda run: setattr(run.builds[""].variants["graph_layer"].profile, "kernels", 7))
    put(tmp_path, 1, model="rnnt")
    assert [*points(frame.load(tmp_path))["model"]] == ["rnnt"]


def test_the_table_has_the_errors_of_the_roofline_by_the_source_of_the_hosts_time(tmp_path):
    """Eager issues 18 of 20 ms, the GPU works 10: predicted 1.80x in its own blocks, 1.60x by the other's 16 ms."""
    put(tmp_path, 0, ms={"eager": 20.0, "graph_layer": 10.0}, issue=(18.0, 10.0))
    put(tmp_path, 1, model="rnnt", ms={"eager": 16.0, "graph_layer": 10.0}, issue=(16.0, 10.0))
    drawn = points(frame.load(tmp_path)).set_index("model")
    assert drawn["predicted"].to_dict() == pytest.approx({"gpt3": 1.8, "rnnt": 1.6})
    cells = cells_of(markdown(frame.load(tmp_path), tmp_path))
    # 2.00 / 1.80 and 1.60 / 1.60; 2.00 / 1.60 and 1.60 / 1.80. No other host has these programs.
    assert cells["layers or another part, all runs"] == ["2: 5.6 %, 100 %, 11 %", "-", "2: 18.1 %, 50 %, 25 %", "-"]
    assert cells["whole step, all runs"] == cells["several GPUs, all runs"] == ["-"] * 4


def test_the_published_runs_keep_the_errors_that_watch_prints():
    drawn = points(published())
    found, one = errors(drawn), drawn["ranks"] == 1
    alone = found[ALONE][one & (drawn["kind"] == "graph") & (drawn["program_ratio"] > GAINS)].dropna()
    assert len(alone) >= 30 and alone.quantile(0.5) <= rule.HALF and alone.quantile(0.75) <= rule.MOST


@pytest.mark.parametrize(
    ("host_us", "across", "top", "wanted"),
    [
        (40, (4.0, 200.0), math.inf, [(4.0, 10.0), (40, 1.0), (200.0, 1.0)]),
        (40, (4.0, 200.0), 5.0, [(8.0, 5.0), (40, 1.0), (200.0, 1.0)]),
        # A host that is faster than any kernel, or slower, on the axis.
        (2, (4.0, 200.0), math.inf, [(4.0, 1.0), (200.0, 1.0)]),
        (400, (4.0, 200.0), math.inf, [(4.0, 100.0), (200.0, 2.0)]),
        (4000, (4.0, 200.0), 5.0, [(200.0, 20.0)]),
    ],
)
def test_the_corners_of_a_hosts_line(host_us, across, top, wanted):
    assert rule.line(host_us, across, top) == wanted


def test_ticks_stand_apart_and_on_the_axis():
    assert rule.ticks((1, 2, 5, 10, 20, 50, 100), (2.0, 60.0), 0.25) == [2, 5, 20, 50]


def cells_of(table):
    return {line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in table.splitlines()[2:]}


def test_a_program_that_takes_another_time_a_kernel_on_all_hosts_is_predicted_by_them(tmp_path):
    """On both hosts gpt3 is issued in twice the time of rnnt, and on the second one in twice that of the first."""
    names = {"names": ("eager", "graph_step")}
    for number, (model, host, ms) in enumerate(
        [("gpt3", "a", 20.0), ("rnnt", "a", 10.0), ("gpt3", "b", 40.0), ("rnnt", "b", 20.0)]
    ):
        put(tmp_path, number, model=model, boot=host, ms={"eager": ms, "graph_step": 5.0}, issue=(ms, 5.0), **names)
    table = markdown(frame.load(tmp_path), tmp_path / "page.md")
    # From the other workload alone: half and twice.
    assert cells_of(table)["whole step, all runs"] == [
        "4: 0.0 %, 100 %, 0 %",
        "-",
        "4: 75.0 %, 0 %, 100 %",
        "4: 0.0 %, 100 %, 0 %",
    ]
    missed = [line for line in table.splitlines() if line.startswith("- ")]
    assert len(missed) == 4 and all("and so do other hosts" in line for line in missed)
    assert "4.00x: missed by 100 % by other workloads" in missed[0] and "(h200x1/gpt3-bench/" in missed[0]


def test_a_graph_of_compiled_code_is_held_to_the_compiled_program(tmp_path):
    """Its gain over `compile`, by that program's kernels: 12 us of the host's by 6 us of the GPU's."""

    def compiled(run):
        for name, is_graph in (("compile", False), ("graph_step_compiled", True)):
            variant = run.builds[""].variants[name]
            variant.kind, variant.capture.graphs, variant.capture.promised_graphs = "compile", int(is_graph), None

    more = {
        "names": ("eager", "compile", "graph_step_compiled"),
        "ms": {"eager": 20.0, "compile": 12.0, "graph_step_compiled": 6.0},
    }
    put(tmp_path, 0, change=compiled, issue=(12.0, 6.0), **more)
    (point,) = points(frame.load(tmp_path)).itertuples()
    assert (point.variant, point.program) == ("graph_step_compiled", "compile")
    assert point.program_ratio == pytest.approx(2.0) and point.ratio == pytest.approx(20 / 6)


def test_letters_can_be_read_at_the_width_of_a_telephone():
    """At 380 px no letters but the footer's are smaller than 8 px."""
    page = page_of(ROOT / "results")
    px = 380 / (96 * page.WIDTH)
    main = [text for text in texts(page) if "graphs in" not in text.get_text()]
    assert min(text.get_fontsize() * 96 / 72 * px for text in main) > 8 and page.WIDTH * 96 < 600


@pytest.mark.parametrize("root", ["made", "published"])
def test_texts_are_whole_and_apart_and_read_on_light_and_dark_pages(root, several, tmp_path):
    page = page_of(several if root == "made" else ROOT / "results")
    assert_inside_and_apart(page, "roofline")
    with style.applied():
        assert_reads_on_both_pages(style.as_svg(page))


def test_a_sweep_is_a_curve_and_an_earlier_one_goes(tmp_path):
    put_sweep(tmp_path)
    put_sweep(tmp_path, host_ms=60.0, boot="c", number=1, oom=(1024,))
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "sweep-of-yesterday.svg").write_text("")
    assert plot.main([str(tmp_path)]) == 0
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    name = "sweep-h200-llama2_lora-slice-over-sequence-graph_layer"
    assert drawn == {"roofline", name}
    results = frame.load(tmp_path)
    with style.applied():
        page = sweep.figures(results)[name](results)
        assert_inside_and_apart(page, name)
        assert_reads_on_both_pages(style.as_svg(page))
    (swept,) = sweeps.of(results)
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks(page, "point")]
    wanted = swept.timed[["value", "ratio"]].astype(float)
    assert sorted(points) == [pytest.approx(point) for point in sorted(wanted.itertuples(index=False))]
    assert len(points) == len(marks(page, "interval")) == 7 and len(marks(page, "curve")) == 2
    assert marks(page, "least")[0].get_ydata()[0] == crossing.LEAST_GAIN
    kernels = swept.timed.groupby("value")["kernel_us"].median()
    assert {f"{value}\n{us:.0f}" for value, us in kernels.items()} <= {*words(page)}
    note = " ".join(words(page))
    assert all(text in note for text in swept.sentences)
    assert "At 512 tokens (67 us a kernel) and above, a gain of 5 % is not certain" in swept.sentences[0]


def test_a_quantity_cannot_lead_a_figure_out_of_its_folder(tmp_path):
    def led_out(runs):
        for run in runs:
            run.over, run.label = "../../x", f"../../x-{run.value}"

    put_sweep(tmp_path, change=led_out)
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "a" / "b")]) == 0
    name = "sweep-h200-llama2_lora-slice-over-..-..-x-graph_layer"
    assert {path.stem for path in tmp_path.rglob("*.svg")} == {"roofline", name}


def test_a_sweep_of_one_host_has_its_crossing_as_title(tmp_path):
    put_sweep(tmp_path)
    results = frame.load(tmp_path)
    (make,) = sweep.figures(results).values()
    (swept,) = sweeps.of(results)
    with style.applied():
        assert make(results).title == f"Llama 2 70B LoRA: {swept.sentences[0]}"


def test_equal_runs_give_equal_bytes(several, tmp_path):
    for out in ("a", "b"):
        assert plot.main([str(several), "--out", str(tmp_path / out)]) == 0
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} for out in "ab")
    assert one == other
    assert set(one) == {"roofline.svg"}


@pytest.mark.slow
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
    text = " ".join(words(page_of(tmp_path)))
    assert "RNN-T" in text and "GPT-3" not in text


def test_steps_of_users_and_models_without_a_submission_have_their_names(tmp_path):
    put(tmp_path, 0, model=OWN_STEP, label="nanogpt-build")
    put(tmp_path, 1, model=OWN_STEP, label="mine-build", boot="c")
    put(tmp_path, 2, model="my_model", boot="d")
    assert {"nanoGPT", "mine", "my_model"} <= set(words(page_of(tmp_path)))


def test_runs_on_a_cpu_are_not_drawn(tmp_path, capsys):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "roofline.svg").write_text("of yesterday")
    put(tmp_path, 0, gpus=(), preset="tiny")
    assert plot.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not drawn: roofline: no graph on a GPU has a gain and a profile" in out and "0 figures in" in out
    assert not list((tmp_path / "figures").iterdir())


def test_what_cannot_be_drawn_is_a_line(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1 and "no run is in" in capsys.readouterr().err
    (tmp_path / "half.json").write_text('{"schema": 4')
    assert plot.main([str(tmp_path)]) == 1 and "no whole JSON" in capsys.readouterr().out
    put(tmp_path, 0, issue=None)
    # Without a busy time it has no place on the axis.
    assert plot.main([str(tmp_path)]) == 1 and "not drawn: roofline" in capsys.readouterr().out
    assert plot.main([str(tmp_path / "none")]) == 2


def test_a_name_cannot_break_a_file(tmp_path):
    put(tmp_path, 0, model=OWN_STEP, label="../x$a$<b>")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "roofline.svg").read_text()
    assert_reads_on_both_pages(text)
    assert "../x$a$&lt;b&gt;" in text


def test_odd_numbers_and_long_names_are_drawn(tmp_path):
    put(tmp_path, 0, model=OWN_STEP, label="x" * 100, ms={"eager": 5e3, "graph_layer": 0.5}, issue=(1.0, 0.5))
    put(tmp_path, 1, model="y" * 100, ms={"eager": 0.5, "graph_layer": 5e3}, issue=(1.0, 0.4))
    put(tmp_path, 2, ms={"eager": 10.0, "graph_layer": 10.0}, issue=(1.0, 10.0))
    assert_inside_and_apart(page_of(tmp_path), "roofline")
