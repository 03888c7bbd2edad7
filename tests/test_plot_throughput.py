"""The figure of TFLOP/s against reserved memory: its marks and names, its finding, and that it waits for records."""

import os

import pytest

from benchmarks import frame, plot, readme
from benchmarks.figures import evidence, style, throughput
from benchmarks.published import RATES, rate_of
from tests.drawn_pages import assert_apart, assert_inside, assert_reads_on_both_pages, words
from tests.figure_records import lora, make, put, rates, session

[RATE] = RATES


def page_of(root):
    with style.applied():
        return throughput.throughput(evidence.collect(root).blocks, RATE)


def marks(axes):
    """(variant, GiB, TFLOP/s, whether it is hollow) of each mark."""
    lines = [line for line in axes.lines if (line.get_gid() or "").startswith("point-")]
    return [
        (line.get_gid().removeprefix("point-"), *line.get_xydata()[0], line.get_markerfacecolor() == "none")
        for line in lines
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    lora(root)
    bench = {"eager": (1000.0, 134), "graph": (1015.0, 135), "eager_te": (778.0, 118), "graph_te": (863.0, 121)}
    rates(root / "h200x1" / "llama2_lora-bench", bench, preset="bench", items=1024)
    rates(root / "h200x1" / "llama2_lora-bench-load16", bench, preset="bench", items=1024, host_load=16)
    return root


def test_a_mark_a_variant_at_useful_tflops_and_peak_reserved_memory(root):
    page = page_of(root)
    bench, full = page.figure.axes
    expected = [("eager", 134, 1000.0, True), ("graph", 135, 1015.0, False)]
    expected += [("eager_te", 118, 778.0, True), ("graph_te", 121, 863.0, False)]
    assert sorted(marks(bench)) == sorted(
        (name, gib, pytest.approx(rate), hollow) for name, gib, rate, hollow in expected
    )
    assert len(marks(full)) == 8 and ("graph", 76.0, pytest.approx(716.0), False) in marks(full)
    for axes in (bench, full):
        [line] = [line for line in axes.lines if line.get_gid() == "published"]
        assert set(line.get_ydata()) == {778.0}
    assert bench.get_xlim() == full.get_xlim() and bench.get_ylim() == full.get_ylim()


def test_its_words_and_colours(root, tmp_path):
    page = page_of(root)
    assert page.title == ("Llama 2 LoRA on one H200, useful TFLOP/s: bench 1,015 (graph), full 904 (graph); NVIDIA 778")
    shown = words(page)
    assert {"1,024 tokens a step", "8,192 tokens a step", "memory-gib-115", "H100, 75 layers"} <= set(shown)
    [legend] = page.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["eager", "eager_te", "graph", "graph_te"]
    assert "NVIDIA's 778 (MLPerf v4.1, 8 H200, eager, 8192 tokens a GPU)" in " ".join(shown)
    assert_inside(page, "throughput")
    assert_apart(page, "throughput")
    with style.applied():
        [path] = style.save(page, tmp_path, "figure", has_png=False)
    assert_reads_on_both_pages(path.read_text())


def test_a_folder_with_other_settings_alone_says_so_in_the_title(tmp_path):
    rates(tmp_path / "llama2_lora-full-memory-gib-115", {"eager": (827.0, 114), "graph": (826.0, 115)})
    assert "full 826 (graph, memory-gib-115)" in page_of(tmp_path).title


def test_presets_below_each_other_where_a_row_is_full(tmp_path):
    for number, preset in enumerate(("slice", "bench", "full", "mlperf"), 1):
        rates(tmp_path / f"llama2_lora-{preset}", {"eager": (800.0, 100 + number)}, preset=preset, items=1024 * number)
    page = page_of(tmp_path)
    assert len({axes.get_position().y0 for axes in page.figure.axes}) == 2
    assert_inside(page, "throughput")
    assert_apart(page, "throughput")


def test_without_such_records_there_is_no_figure(tmp_path, capsys):
    """Neither of another model, nor beside busy processes, nor where FLOP or memory is not known."""
    put(tmp_path / "gpt3-bench", *session({"graph": 1.05}, flops_per_step=1e12))
    rates(tmp_path / "llama2_lora-bench-load16", {"eager": (900.0, 100)}, preset="bench", host_load=16)
    put(tmp_path / "llama2_lora-full", make(model="llama2_lora", preset="full"))
    with pytest.raises(evidence.Missing, match="no run of Llama 2 LoRA on a quiet GPU"):
        page_of(tmp_path)
    assert plot.main([str(tmp_path), "--readme"]) == 0
    assert "not drawn: throughput of llama2_lora: no run" in capsys.readouterr().out
    assert not (tmp_path / "figures" / "throughput-llama2_lora.svg").exists()


def test_compiled_variants_and_runs_that_came_to_nothing_are_no_marks(tmp_path):
    variants = {"eager": (900.0, 100), "compile": (990.0, 90)}
    folder = rates(tmp_path / "llama2_lora-full", variants)
    put(folder, make("graph", 0, model="llama2_lora", preset="full", status="oom", flops_per_step=1e12))
    found = evidence.rates(frame.read(tmp_path).frame, "llama2_lora")
    assert [row["variant"] for row in found] == ["eager"] and found[0]["tflops"] == pytest.approx(900)
    # One of its timed runs computed something else: the row stands on those that did not, and its status says so.
    rates(folder, {"one_graph": (950.0, 100)})
    failed = make(
        "one_graph", 4, 2.5, model="llama2_lora", preset="full", status="numerics_failed", flops_per_step=1e12
    )
    put(folder, failed)
    found = evidence.rates(frame.read(tmp_path).frame, "llama2_lora")
    assert [row["variant"] for row in found] == ["eager"]
    assert evidence.rates(frame.read(tmp_path).frame, "gpt3") == []


def test_the_models_readme_shows_what_was_measured_and_the_figure_once_it_is_there(root, tmp_path):
    """The marker stands in the README before there are records."""
    (tmp_path / "llama2_lora").mkdir()
    page = tmp_path / "llama2_lora" / "README.md"
    page.write_text("<!-- table: model results llama2_lora -->\n<!-- end -->\n")
    put(tmp_path / "results" / "gpt3-bench", *session({"graph": 1.05}))
    assert "\nNothing has been measured on a GPU yet: " in readme.render(page, tmp_path)
    os.symlink(root / "h200x1", tmp_path / "results" / "h200x1")
    lora(tmp_path / "results" / "more")
    text = readme.render(page, tmp_path)
    assert "**NVIDIA H200**" in text and "**NVIDIA H100 80GB HBM3**" in text and "gpt3" not in text
    figure = "(../results/figures/throughput-llama2_lora.svg)"
    assert (
        text.count(figure) == 1
        and "| [llama2_lora/full-l75](../results/more/h100x1/llama2_lora-full) | graph |" in text
    )
    page.write_text("<!-- table: model results gpt3 -->\n<!-- end -->\n")
    text = readme.render(page, tmp_path)
    assert "| [gpt3/bench](../results/gpt3-bench) | graph |" in text and "throughput" not in text
    assert rate_of("gpt3") is None


def test_ratios_against_some_of_the_eagers_stay_out_of_a_models_readme(tmp_path):
    put(tmp_path / "results" / "a", *session({"graph": 1.05}, extra={"eagers": ["eager", "eager_torch"]}))
    page = tmp_path / "README.md"
    page.write_text("<!-- table: model results gpt3 -->\n<!-- end -->\n")
    assert "Nothing has been measured on a GPU against all eagers yet" in readme.render(page, tmp_path)
