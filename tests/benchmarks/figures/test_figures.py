"""Figures: their data and titles are those of the rows, equal runs give equal bytes, and bad runs no traceback."""

import dataclasses

import pytest

pytest.importorskip("matplotlib")

from benchmarks import ROOT, plot
from benchmarks.figures import choice, front, of_model, style
from benchmarks.files import runs
from benchmarks.pages import readme
from tests.helpers.drawn_pages import assert_inside_and_apart, assert_reads_on_both_pages, words
from tests.helpers.made_run import made_run, write

WANDERING = [18.0, 19.0, 20.0, 21.0]
BUSY = {"timeline_us": [[0, 2000], [10_000, 16_000]], "timeline_step_us": 20_000}


def put(root, number=0, model="gpt3", change=None, **more):
    """A made run of a model: eager, whose host is slower than the GPU, a graph and GiB."""
    times = {"ms": {"eager": WANDERING, "graph_layer": 10.5}, "issue": (19.0, 10.0), **more}
    run = made_run(model=model, id=f"20261125T10150{number}Z-a7d396c{number}", **times)
    build = run.builds[""]
    build.flops_per_step = 5e12
    for own in build.variants.values():
        for block in own.blocks:
            block.reserved_bytes = 40 * 2**30
    if change:
        change(run)
    return write(run, root / f"h200x1/{model}-{run.preset}")


def with_timelines(run):
    variants = run.builds[""].variants
    variants["eager"].profile |= BUSY
    variants["graph_layer"].profile |= {"timeline_us": [[0, 9900]], "timeline_step_us": 10_000}


def shown(root):
    return choice.shown(runs.read(root))


def pages(root):
    """Name -> page, or why there is none."""
    found = {}
    with style.applied():
        for name, make, arguments in plot.figures(runs.read(root)):
            try:
                found[name] = make(*arguments)
            except style.NotDrawn as reason:
                found[name] = str(reason)
    return found


def marks(page, gid):
    return [line for axes in page.figure.axes for line in axes.lines if line.get_gid() == gid]


@pytest.fixture
def several(tmp_path):
    """Three models, one of them new, with contended cycles, and timelines in one run."""
    put(tmp_path, 0, change=with_timelines)
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
    assert words(page).count("graphs not measured yet") == 4 and "Stable Diffusion v2" in words(page)


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


def test_blocks_are_those_of_the_run_with_most_cycles(tmp_path):
    put(tmp_path, 0, cycles=12, busy=4)
    put(tmp_path, 1, cycles=8)
    page = pages(tmp_path)["blocks-gpt3-bench"]
    [line] = marks(page, "line-eager")
    assert list(line.get_ydata())[:4] == [18.0, 18.0, 19.0, 19.0] and len(line.get_xdata()) == 48
    assert list(line.get_xdata())[:2] == [0.5 / 3, 2.5 / 3]
    assert sum(patch.get_gid() == "busy" for patch in page.figure.axes[0].patches) == 12
    assert page.title.endswith(
        "a block takes 18.00 to 20.00 ms a step with eager, 10.50 to 10.50 ms a step with graph_layer"
    )


def test_a_timeline_says_in_which_share_the_gpu_idles(several):
    found = pages(several)
    title = found["timeline-gpt3-bench"].title
    assert title.endswith("the GPU idles 60 % of 20.0 ms with eager, 1 % of 10.0 ms with graph_layer")
    assert "no run has a timeline" in found["timeline-rnnt-bench"]


@pytest.mark.parametrize(
    "change",
    [{"timeline_us": wrong} for wrong in ("x", [], [[3]], [[3, 1]], [["a", None]], [[0, float("nan")]], [[0, 30_000]])]
    + [{"timeline_step_us": wrong} for wrong in (0, None)],
)
def test_a_timeline_that_is_none_is_not_drawn(change):
    assert of_model.line_of(BUSY) and of_model.line_of(BUSY | change) is None


def test_throughput_is_flop_by_time_against_memory(tmp_path):
    put(tmp_path, 0, model="llama2_lora")
    page = pages(tmp_path)["throughput-llama2_lora"]
    [eager, graph] = [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks(page, "point")]
    assert graph == (40.0, pytest.approx(5e12 / 10.5 / 1e9)) and eager[1] == pytest.approx(256.8, abs=0.1)
    assert (
        page.title == "Llama 2 LoRA, bench: graph_layer reaches 476 TFLOP/s, eager 257; NVIDIA published 778 on 8 GPUs"
    )
    assert [line.get_ydata()[0] for line in marks(page, "published")] == [778.0]


@pytest.mark.parametrize("root", ["made", "published"])
def test_texts_are_whole_and_apart_and_read_on_light_and_dark_pages(root, several, tmp_path):
    found = pages(several if root == "made" else ROOT / "results")
    for name, page in found.items():
        if not isinstance(page, str):
            assert_inside_and_apart(page, name)
            with style.applied():
                style.save(page, tmp_path / "out", name, False)
            assert_reads_on_both_pages((tmp_path / "out" / f"{name}.svg").read_text())


def test_equal_runs_give_equal_bytes_and_readme_draws_three(several, tmp_path, capsys):
    for out in ("a", "b"):
        assert plot.main([str(several), "--out", str(tmp_path / out)]) == 0
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} for out in "ab")
    assert one == other and len(one) == 2 * 7
    assert plot.main([str(several), "--readme"]) == 0
    names = {path.name for path in (several / "figures").iterdir()}
    assert names == {f"{name}.{kind}" for name in ("law", "why", "models") for kind in ("svg", "png")}


def test_a_cpu_is_drawn_alone_and_named(tmp_path):
    put(tmp_path, 0, gpus=(), device="cpu", preset="tiny", issue=None)
    found = pages(tmp_path)
    assert all("CPU" in found[name].title for name in ("models", "blocks-gpt3-tiny"))
    assert isinstance(found["law"], str) and isinstance(found["why"], str)
    put(tmp_path, 1)
    assert "CPU" not in pages(tmp_path)["models"].title and "blocks-gpt3-tiny" not in pages(tmp_path)


def test_what_cannot_be_drawn_is_a_line(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1 and "no run is in" in capsys.readouterr().err
    (tmp_path / "half.json").write_text('{"schema": 3')
    assert plot.main([str(tmp_path)]) == 1 and "no whole JSON" in capsys.readouterr().out
    put(tmp_path, 0, change=lambda run: run.builds[""].variants.pop("graph_layer"), issue=None)
    assert plot.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not drawn: models: no graph has a ratio" in out and "1 figure in" in out
    assert plot.main([str(tmp_path / "none")]) == 2


def test_a_name_cannot_lead_to_another_folder_nor_break_a_file(tmp_path):
    put(tmp_path, 0, model="my_model", label="../x$a$")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "blocks-my_model-bench-.._x_a_.svg").is_file()
    assert_reads_on_both_pages((tmp_path / "out" / "blocks-my_model-bench-.._x_a_.svg").read_text())
