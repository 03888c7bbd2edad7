"""Figures from records made by hand: labels, findings that follow the numbers, what is missing, equal bytes."""

import gzip
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import numpy
import pytest

from benchmarks import frame, overview_rows, plot
from benchmarks.figures import evidence, speed, steps, style
from benchmarks.figures import words as figure_words
from common import record as records
from tests.drawn_pages import assert_apart, assert_inside, texts, words
from tests.figure_records import POINTS, everything, failed, gpt3, make, put, session, sweep_file, trace_file
from tests.table_records import opened, packed, schema_1

ROOT = Path(__file__).parent.parent


def pages(root):
    """name -> page of every figure that can be drawn, and name -> why not."""
    drawn, missing = {}, {}
    collection = evidence.collect(root)
    with style.applied():
        for name, make_page in (*plot.readme_figures(collection), *plot.more_figures(collection)):
            try:
                drawn[name] = make_page()
            except evidence.Missing as error:
                missing[name] = str(error)
    return drawn, missing


def title_of(root, name="speedup"):
    return pages(root)[0][name].title


@pytest.fixture(scope="module")
def full_root(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("all"))


@pytest.fixture(scope="module")
def full(full_root):
    return pages(full_root)


# ------------------------------------------------------------------------------------------------
# All figures


def test_every_figure_of_a_full_root_is_drawn(full):
    drawn, missing = full
    assert {name.partition("-")[0] for name in drawn} == {
        "law",
        "why",
        "steady",
        "speedup",
        "step_time",
        "jitter",
        "timeline",
        "memory",
        "scope",
        "crossover",
        "scaling",
    }
    assert missing["timeline-h200x2-gpt3-bench"] == "no trace beside the records"
    assert "one number of GPUs" in missing["scaling-rnnt-full"]


def test_no_text_is_cut_or_says_nan(full):
    for name, page in full[0].items():
        assert_inside(page, name)
        for text in words(page):
            assert not re.search(r"\b(nan|none|inf)\b", text, re.IGNORECASE), (name, text)


def test_texts_do_not_overlap(full):
    for name, page in full[0].items():
        assert_apart(page, name)


def test_every_row_of_the_records_is_named(full):
    shown = words(full[0]["speedup"])
    for label in ("graph", "graph, 16 busy processes", "graph_te", "reduce_overhead", "eager_sync", "compile_graph"):
        assert label in shown
    for heading in ("GPT-3 bench", "Llama 2 LoRA bench", "Llama 3.1 bench", "RNN-T full", "Stable Diffusion full"):
        assert heading in shown
    assert any(re.fullmatch(r"1\.0\d\dx \[[01]\.\d+, 1\.\d+\] unclear on this host", text) for text in shown)
    rows = {"compile", "graph", "reduce_overhead", "graph_overlap"}
    assert {"eager", *rows} <= set(words(full[0]["step_time-h200x1-llama2_lora-bench"]))
    assert rows <= set(words(full[0]["memory"]))
    assert {"eager", "compile", "graph", "partial"} <= set(words(full[0]["timeline-h200x1-rnnt-full"]))


def test_rows_without_all_eagers_are_marked_and_stay_out_of_the_figure_over_models(tmp_path):
    changes = {"model": "rnnt", "preset": "full", "extra": {"eagers": ["eager", "eager_torch"]}}
    put(tmp_path / "h200x1" / "rnnt-full", *session({"graph": 1.58}, **changes))
    assert "graph, not all eagers run" in words(pages(tmp_path)[0]["speedup"])
    gpt3(tmp_path)
    shown = words(pages(tmp_path)[0]["speedup"])
    assert "graph" in shown and "graph, not all eagers run" not in shown


def test_what_did_not_run_stands_in_brick_with_its_reason(full):
    for name, text in (
        ("speedup", "graph_overlap: oom: CUDA out of memory"),
        ("speedup", "graph_te: unsupported: graph_te needs a GPU and Transformer Engine: make te"),
        ("step_time-h200x1-llama2_lora-bench", "oom: CUDA out of memory"),
        ("memory", "oom: CUDA out of memory"),
    ):
        [label] = [artist for artist in texts(full[0][name]) if artist.get_text() == text]
        assert label.get_color() == style.FAILURE


def test_footer_says_gpu_versions_commit_and_rounds(full):
    assert "NVIDIA H200 x1, torch 2.13.0, CUDA 13.0, driver 580.1, git 0123456789ab, 5 rounds x 100 steps" in words(
        full[0]["jitter-h200x1-rnnt-full"]
    )
    assert any(text.startswith("NVIDIA H200 x1, x2, x4, x8, torch") for text in words(full[0]["speedup"]))


def test_variants_of_one_figure_look_different():
    names = [*style.LOOKS, "graph_a", "graph_b", "eager_x", "compile_y"]
    looks = [style.look(name, names) for name in names]
    assert len({look[0] for look in looks}) == len(looks)
    assert len({look[2] for look in looks}) == len(looks)
    assert style.look("eager")[0] == "#8c8c8c" and style.look("graph")[0] == "#1b6ca8"
    assert style.look("compile")[0] == "#d9a441" and style.FAILURE == "#b5402f"


def test_files_are_equal_byte_by_byte(tmp_path):
    root = tmp_path / "results"
    gpt3(root)
    assert plot.main([str(root), "--out", str(tmp_path / "a")]) == 0
    code = (
        "import sys; from benchmarks import plot\n"
        "assert 'matplotlib' not in sys.modules, 'for --help'\n"
        f"assert plot.main([{str(root)!r}, '--out', {str(tmp_path / 'b')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    # Another process with other hashes and another taste.
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.facecolor: black\n")
    environment = {**os.environ, "PYTHONHASHSEED": "1", "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*g"))
    assert [str(name) for name in names[:3]] == [
        "law.svg",
        "more/jitter-h200x1-gpt3-bench.png",
        "more/jitter-h200x1-gpt3-bench.svg",
    ]
    assert len(names) == 3 + 2 * 5
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_readme_shows_what_the_records_say(tmp_path, capsys):
    assert plot.main([str(ROOT / "results"), "--readme", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "law.svg",
        "steady.svg",
        "throughput-llama2_lora.svg",
        "why.svg",
    ]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    assert "<dc:date>" not in (tmp_path / "law.svg").read_text()
    assert "4 files" in capsys.readouterr().out
    assert_same_drawings(ROOT / "results" / "figures", tmp_path)


@pytest.mark.slow
def test_all_figures_of_the_published_records_are_drawn(tmp_path, capsys):
    assert plot.main([str(ROOT / "results"), "--out", str(tmp_path)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert f"{len(files)} files" in capsys.readouterr().out
    assert max(path.stat().st_size for path in files) < 500_000


def assert_same_drawings(committed, fresh):
    """By name and, in each SVG, by its words: bytes may differ where the fonts or the version of matplotlib do."""
    names = [sorted(path.name for path in folder.glob("*.svg")) for folder in (committed, fresh)]
    assert names[0] == names[1], STALE
    for name in names[0]:
        assert words_of_svg(committed / name) == words_of_svg(fresh / name), f"{name}: {STALE}"


STALE = "results/figures are not those of results: make readme"


def words_of_svg(path):
    # Lines may break elsewhere with other fonts.
    texts = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(word for text in texts for word in "".join(text.itertext()).split())


def test_drawings_of_other_numbers_are_stale(tmp_path):
    for name, graph in (("old", 1.05), ("new", 1.06)):
        gpt3(tmp_path / name, graph)
        assert plot.main([str(tmp_path / name), "--out", str(tmp_path / f"{name}-figures")]) == 0
    assert_same_drawings(tmp_path / "old-figures", tmp_path / "old-figures")
    with pytest.raises(AssertionError, match="make readme"):
        assert_same_drawings(tmp_path / "old-figures", tmp_path / "new-figures")


def test_a_figure_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    seen = []
    page = style.Page("title", "note", "footer", 1.0)
    files = [tmp_path / "a.svg", tmp_path / "a.png"]
    for path in files:
        path.write_text("from before")
    replace = os.replace

    def watched(source, target):
        assert target.read_text() == "from before", "nothing is written in place"
        seen.append((Path(source).read_bytes(), target))
        replace(source, target)

    monkeypatch.setattr(records.os, "replace", watched)
    with style.applied():
        assert style.save(page, tmp_path, "a") == files
    assert [target for _, target in seen] == files
    assert seen[0][0].endswith(b"</svg>\n") and seen[1][0].startswith(b"\x89PNG")
    monkeypatch.setattr(records.os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with style.applied(), pytest.raises(OSError):
        style.save(page, tmp_path, "a")
    assert sorted(tmp_path.iterdir()) == sorted(files), "no half-written file is left"
    assert oct(files[0].stat().st_mode)[-3:] == "644"


def test_a_reader_that_goes_away_and_ctrl_c_are_no_traceback(tmp_path, monkeypatch, capsys):
    put(tmp_path / "gpt3-bench", make())
    command = [sys.executable, "-m", "benchmarks.plot", str(tmp_path)]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as closed:
        answer = subprocess.run(command, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert answer.stderr == "" and answer.returncode == -signal.SIGPIPE
    assert list((tmp_path / "figures" / "more").glob("step_time*.svg"))
    monkeypatch.setattr(plot, "draw_all", mock.Mock(side_effect=KeyboardInterrupt))
    assert plot.main([str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\npython -m benchmarks.plot: stopped; figures that are there are whole\n"


@pytest.mark.slow
def test_tables_and_figures_of_200_records_take_15_seconds(tmp_path):
    num = 0
    for model in ("gpt3", "rnnt", "llama31", "llama2_lora", "stable_diffusion"):
        found = session({"graph": 1.02, "partial": 1.01, "graph_te": 1.0}, num_rounds=10, model=model)
        put(tmp_path / "h200x1" / f"{model}-bench", *found)
        num += len(found)
    assert num == 200
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in ("compare", "plot"):
        command = [sys.executable, "-m", f"benchmarks.{command}", str(tmp_path)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, so that neighbours do not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15


# ------------------------------------------------------------------------------------------------
# Findings


@pytest.mark.parametrize(
    ("speedup", "noise", "num_rounds", "expected"),
    [
        (1.05, 0.002, 5, "GPT-3 bench: graph gains 5.0 % on this host"),
        (0.95, 0.002, 5, "GPT-3 bench: graph loses 5.0 % on this host"),
        (1.6, 0.002, 5, "GPT-3 bench: graph is 1.60x as fast on this host"),
        (0.5, 0.002, 5, "GPT-3 bench: graph takes 2.00x as long on this host"),
        (1.01, 0.02, 5, "GPT-3 bench: graph is unclear"),
        (1.0, 0.0005, 5, "GPT-3 bench: graph is the same within 0.5 % on this host"),
        (1.008, 0.0025, 5, "GPT-3 bench: graph is faster on this host, by how much is not settled"),
        (1.05, 0.0, 1, "GPT-3 bench: graph has no verdict (one round)"),
        (1.05, 0.0, 2, "GPT-3 bench: graph has no verdict (two pairs)"),
        (1.05, 0.002, 4, "GPT-3 bench: graph has no verdict (fewer than 5 pairs on a host)"),
    ],
)
def test_title_claims_what_the_interval_bears(tmp_path, speedup, noise, num_rounds, expected):
    gpt3(tmp_path, speedup, noise=noise, num_rounds=num_rounds)
    assert title_of(tmp_path) == expected


def test_title_over_models_counts_verdicts(full, tmp_path):
    expected = "Graphs are faster for 4 of 5 (most RNN-T full, 1.58x), slower for 1 (Llama 3.1 bench, 0.98x); "
    expected += "each on one host alone"
    assert full[0]["speedup"].title == expected
    for model, speedup, noise in (("gpt3", 0.9, 0.001), ("rnnt", 1.01, 0.03), ("llama31", 1.0, 0.001)):
        put(tmp_path / f"{model}-bench", *session({"graph": speedup}, noise, model=model))
    expected = (
        "Graphs are slower for 1 of 3 (GPT-3 bench, 0.90x), the same for 1, unclear for 1; each on one host alone"
    )
    assert title_of(tmp_path) == expected
    put(tmp_path / "rnnt-full", *session({"graph": 1.2}, num_rounds=3, model="rnnt", preset="full"))
    assert title_of(tmp_path).endswith(", unclear for 1, without a verdict for 1; 3 of them on one host alone")


def test_a_plain_verdict_is_not_called_one_of_a_host(tmp_path):
    for host in "abc":
        found = session({"graph": 1.05})
        packed(tmp_path / "gpt3-bench", found, boot=host * 6, gpu=host * 4)
    assert title_of(tmp_path) == "GPT-3 bench: graph gains 5.0 %"
    shown = words(pages(tmp_path)[0]["speedup"])
    assert any(re.fullmatch(r"1\.05\dx \[1\.0\d+, 1\.0\d+\]", text) for text in shown)


def test_sessions_are_drawn_from_a_root_a_group_and_one_of_them(tmp_path):
    group = tmp_path / "h200x1" / "gpt3-bench"
    one = packed(group, session({"graph": 1.05}))
    two = opened(group, session({"graph": 1.5}, num_rounds=2), hour=5)
    trace_file(one, "eager", 20.0)
    titles = [title_of(place) for place in (tmp_path, group, one, two)]
    assert titles[:3] == ["GPT-3 bench: graph gains 5.0 % on this host"] * 3
    assert titles[3] == "GPT-3 bench: graph has no verdict (two pairs)"
    for place in (group, one):
        assert any("idles 16 % of a profiled eager step" in page.title for page in pages(place)[0].values())


def test_what_does_not_pool_is_not_drawn_and_all_commits_are_named(tmp_path):
    group = tmp_path / "gpt3-bench"
    old = packed(group, schema_1(session({"graph": 2.0}, step_ms=30.0, env={"git_sha": "a" * 40})), day=20)
    trace_file(old, "eager", 20.0)
    for hour, sha in ((3, "b" * 40), (5, "c" * 40)):
        found = session({"graph": 1.05}, env={"git_sha": sha})
        packed(group, found, hour=hour, boot=f"{hour}" * 6, gpu=f"{hour}" * 4)
    drawn, _ = pages(tmp_path)
    [block] = evidence.collect(tmp_path).blocks
    assert len(block.first.of("eager")) == 10 and block.first.num_rounds == 10
    assert drawn["jitter-gpt3-bench"].title.startswith("GPT-3 bench, p95 of a step beyond its median: eager 0.4 %")
    footer = "git bbbbbbbbbbbb and cccccccccccc, 10 rounds x 100 steps"
    assert any(text.endswith(footer) for text in words(drawn["step_time-gpt3-bench"]))
    many = [{"torch": None, "cuda": None, "driver": None, "git_sha": letter * 40} for letter in "abcde"]
    assert figure_words.versions(many[:4])[0].endswith(" and dddddddddddd")
    assert figure_words.versions(many) == ["git 5 commits"]
    # Only the old one left a trace: better than none, and said.
    text = " ".join(words(drawn["timeline-gpt3-bench"]))
    assert "Traced in an older session" in text
    trace_file(block.first.frame["path"].iloc[0], "eager", 100.0)
    page = pages(tmp_path)[0]["timeline-gpt3-bench"]
    assert "50 % of a profiled eager step" in page.title and "older session" not in " ".join(words(page))


def test_titles_name_the_base_where_that_is_not_eager(tmp_path):
    found = session({"graph": 1.5, "eager_sync": 1.2})
    for record in found:
        if record["variant"] == "eager_sync":
            record.update(issue_ms=9.0)
    folder = put(tmp_path / "gpt3-bench", *found)
    for variant in ("eager", "eager_sync", "graph"):
        trace_file(folder, variant, {"eager": 5.0, "eager_sync": 20.0, "graph": 2.0}[variant])
    drawn, _ = pages(tmp_path)
    assert "eager_sync is bound by the host, busy 6.7 ms and issued in 9.0 ms" in drawn["step_time-gpt3-bench"].title
    assert ": eager_sync 0.4 %, graph" in drawn["jitter-gpt3-bench"].title
    assert "idles 16 % of an eager_sync step and 1.9 % of graph's" in drawn["timeline-gpt3-bench"].title
    assert drawn["memory"].title.endswith("reserves 3.0 GiB more than eager_sync (+15 %)")
    assert "eager_sync reserves 20.0 GiB" in words(drawn["memory"])


def test_title_speaks_of_graph_and_not_of_the_best_variant(tmp_path):
    put(tmp_path, *session({"graph": 1.01, "graph_te": 1.2}))
    assert pages(tmp_path)[0]["speedup"].title.endswith(": graph gains 1.0 % on this host")


def test_load_is_a_row_of_its_own_and_in_the_title(tmp_path):
    gpt3(tmp_path, 1.009)
    folder = tmp_path / "h200x1" / "gpt3-bench-load16"
    put(folder, *session({"graph": 1.1}, noise=0.2, host_load=16))
    assert title_of(tmp_path).endswith("; beside 16 busy processes the gain is unclear")
    put(folder, *session({"graph": 1.1}, noise=0.001, host_load=16))
    assert title_of(tmp_path).endswith("; beside 16 busy processes it gains 10 % on this host")
    assert title_of(folder) == "GPT-3 bench beside 16 busy processes: graph gains 10 % on this host"


def test_variants_without_a_look_of_their_own_get_one_dot_each(tmp_path):
    names = [f"graph_{letter}" for letter in "abcd"]
    put(tmp_path / "h200x1" / "gpt3-bench", *session(dict.fromkeys(names, 1.2)))
    axes = pages(tmp_path)[0]["speedup"].figure.axes[0]
    dots = {line.get_gid(): line for line in axes.get_lines() if line.get_gid() is not None}
    assert sorted(dots) == [f"filled-{name}" for name in names]
    assert len({str(line.get_marker()) for line in dots.values()}) == 4
    assert all(line.get_linestyle() == "None" and len(line.get_xdata()) == 1 for line in dots.values())
    assert len(axes.get_lines()) == 8


def test_hollow_dot_where_nothing_is_significant(tmp_path):
    def dots(root):
        page = pages(root)[0]["speedup"]
        return {
            line.get_gid(): line.get_markerfacecolor()
            for line in page.figure.axes[0].get_lines()
            if line.get_gid() is not None
        }

    gpt3(tmp_path / "clear", 1.05)
    gpt3(tmp_path / "unclear", 1.01, noise=0.02)
    gpt3(tmp_path / "one", 1.05, num_rounds=1)
    assert dots(tmp_path / "clear") == {"filled-graph": "#1b6ca8"}
    assert dots(tmp_path / "unclear") == {"hollow-graph": "white"}
    assert dots(tmp_path / "one") == {"hollow-graph": "white"}


def test_step_time_says_what_binds(tmp_path):
    put(tmp_path / "host", *session({"graph": 1.5}))
    put(tmp_path / "gpu", *[dict(record, issue_ms=2.0) for record in session({"graph": 1.5})])
    put(tmp_path / "both", *[dict(record, issue_ms=7.0) for record in session({"graph": 1.5})])
    put(tmp_path / "unknown", *[dict(record, issue_ms=None, busy_ms=None) for record in session({"graph": 1.5})])
    drawn, _ = pages(tmp_path)
    assert "eager is bound by the host, busy 8.0 ms and issued in 9.0 ms" in drawn["step_time-host"].title
    assert "eager is bound by the GPU, busy 8.0 ms and issued in 2.0 ms" in drawn["step_time-gpu"].title
    assert "eager is bound by host and GPU in turn, busy 8.0 ms and issued in 7.0 ms" in drawn["step_time-both"].title
    assert drawn["step_time-unknown"].title.endswith(": a step of eager takes 10 ms")


def test_timeline_title_follows_the_traces(tmp_path):
    folder = gpt3(tmp_path)
    title = title_of(tmp_path, "timeline-h200x1-gpt3-bench")
    assert title == "GPT-3 bench: profiled, the GPU idles 16 % of an eager step and 1.9 % of graph's"
    assert {"7.2 ms, 16 % idle", "timed: 10.0 ms"} <= set(words(pages(tmp_path)[0]["timeline-h200x1-gpt3-bench"]))
    trace_file(folder, "eager", 100.0)
    assert "50 % of an eager step" in title_of(tmp_path, "timeline-h200x1-gpt3-bench")


def test_jitter_is_relative_to_the_median_of_its_kind_of_batch(tmp_path):
    record = make(step_ms=15.0, num_steps=10)
    record["steps"].update(gpu_ms=[10.0, 20.0] * 9 + [12.0, 22.0], batch=[0, 1] * 10)
    table = frame.of([])
    values = steps.relative_steps(evidence.Evidence(tmp_path, table, table, [record], []), "eager")
    assert values == [1.0] * 18 + [1.1, 1.2]


def test_break_even_stands_in_the_overview(tmp_path):
    gpt3(tmp_path, 1.25, noise=0.001)
    # 1 s of warm-up, as eager has, and 0.5 s of capture, 2 ms a step.
    [row] = overview_rows.rows_of(overview_rows.read(tmp_path)[0])
    assert row["break_even_steps"] == pytest.approx(250, rel=1e-3)


def test_a_longer_step_never_pays_off():
    eager = {"step_ms": 10.0, "warmup_s": 3.0}
    setup = {"compile_cold_s": 1.0, "capture_s": 0.5, "warmup_s": 2.0}
    assert overview_rows.break_even_steps({"speedup": 1.25} | setup, eager) == pytest.approx(750)
    assert overview_rows.break_even_steps({"speedup": 1.0} | setup, eager) is None
    assert overview_rows.break_even_steps({"speedup": 0.9} | setup, eager) is None


@pytest.mark.parametrize(
    ("compile_s", "capture_s", "warmup_s", "eager_s", "expected"),
    [
        (40.0, 0.5, 2.5, 2.0, 41.0),
        (0.0, 0.5, 3.67, 3.87, 0.5),
        (None, 0.5, 2.0, None, 2.5),
        (0.0, 0.0, 1.0, 1.0, 0.0),
        (None, None, None, 1.0, None),
    ],
)
def test_set_up_is_what_eager_does_not_have(compile_s, capture_s, warmup_s, eager_s, expected):
    row = {"compile_cold_s": compile_s, "capture_s": capture_s, "warmup_s": warmup_s}
    assert overview_rows.setup_s(row, {"warmup_s": eager_s}) == (None if expected is None else pytest.approx(expected))


def test_memory_is_what_a_graph_adds_over_eager(tmp_path):
    gpt3(tmp_path)
    page = pages(tmp_path)[0]["memory"]
    assert page.title == "GPT-3 bench: graph reserves 3.0 GiB more than eager (+15 %)"
    [bar] = page.figure.axes[0].patches
    assert (bar.get_x(), bar.get_width()) == (0, pytest.approx(3))
    assert "+3.0 GiB, pools 3.00" in words(page)
    found = session({"graph": 2.0})
    for record in found:
        record["memory"]["peak_reserved_bytes"] = 2**35 if record["variant"] == "eager" else 2**34
    put(tmp_path / "less" / "gpt3-bench", *found)
    page = pages(tmp_path / "less")[0]["memory"]
    assert page.title == "GPT-3 bench: graph reserves 16.0 GiB less than eager (-50 %)"
    low, high = page.figure.axes[0].get_xlim()
    assert low < -16 and high > 0


def test_scope_goes_from_nothing_to_most_in_a_replay(full):
    shown = words(full[0]["scope-h200x1-stable_diffusion-full"])
    names = [text for text in shown if text in ("eager", "eager_sync", "partial", "graph")]
    assert names == ["eager", "eager_sync", "partial", "graph"]
    assert "full iteration; 1 replay a step" in shown


def test_a_host_with_other_work_is_not_called_quiet(tmp_path):
    for name, load in (("quiet", 1.5), ("busy", 4.5)):
        put(tmp_path / name, *session({"graph": 1.1}, extra={"host": {"load_1m_start": load}}))
    hosts = {block.first.path.name: block.first.host for block in evidence.collect(tmp_path).blocks}
    assert hosts == {"quiet": "quiet host", "busy": "host with a load of 4.5"}


def test_bars_begin_at_zero(full):
    for name, page in full[0].items():
        if name.startswith(("step_time", "why", "scope")):
            assert all(axes.get_xlim()[0] == 0 for axes in page.figure.axes)


def test_a_wide_interval_does_not_crush_the_others():
    row = {"verdict": "faster", "speedup": 1.009, "speedup_low": 1.006, "speedup_high": 1.012}
    wide = {"verdict": "unclear", "speedup": 1.1, "speedup_low": 0.3, "speedup_high": 4.0}
    low, high = speed.limits([row, wide])
    assert low > 0.9 and 1.1 < high < 1.25
    alone = speed.limits([{**row, "speedup_low": 1.002}])
    assert alone[0] < 1 / speed.SAME and alone[1] > 1.012


@pytest.mark.parametrize(("low", "high"), [(0.99, 1.02), (0.9, 1.3), (0.5, 2.1), (0.05, 40.0), (0.9999, 1.0001)])
def test_an_axis_of_ratios_has_a_few_round_ticks_and_1_among_them(low, high):
    page = style.Page("title", "note", "footer", 2.0)
    axes = page.axes(1, 0, 6, 1.5)
    style.ratio_axis(axes, "x", low, high)
    page.figure.canvas.draw()
    shown = [text.get_text() for text in axes.get_xticklabels()]
    inside = [text for text in shown if low <= float(text.removesuffix("x")) <= high]
    assert 1 <= len(inside) <= 12 and "1x" in inside
    assert axes.get_xlim() == (low, high)


def test_idle_time_is_drawn_as_idle(tmp_path):
    shares = steps.busy_shares([(0.0, 1.0), (0.5, 1.5), (3.0, 3.5)], 4.0, 4)
    assert list(shares) == pytest.approx([1.0, 0.5, 0.0, 0.5])
    # 100 us of work and 20 us without, far narrower than a pixel of the whole step.
    folder = gpt3(tmp_path)
    trace_file(folder, "graph", 0.0, num=20_000)
    trace_file(folder, "eager", 20.0, num=20_000)
    page = pages(tmp_path)[0]["timeline-h200x1-gpt3-bench"]
    filled = []
    for patch in page.figure.axes[0].patches:
        values, _, base = patch.get_data()
        filled.append(float(numpy.median(abs(values - base))) / 0.3)
    assert filled == pytest.approx([100 / 120, 1.0], rel=0.01), "eager above graph"


def test_many_streams_share_four_rows():
    work = [{"stream": n, "start_us": 1e3 * n, "duration_us": 100.0 * (9 - n)} for n in range(9)]
    lanes = steps.by_stream(work)
    assert [len(lane) for lane in lanes] == [1, 1, 1, 6]
    assert lanes[0] == [(0.0, 0.9)] and lanes[3][0] == pytest.approx((3.0, 3.6))
    assert len(steps.by_stream(work[:4])) == 4


# ------------------------------------------------------------------------------------------------
# Sweeps and several GPUs


def test_crossover_is_marked_between_its_points(full, tmp_path):
    page = full[0]["crossover-h200x1-sweep-gpt3-batch"]
    unclear = "(6 is unclear, 1.004x +-0.8 %)"
    assert page.title == f"GPT-3 bench: graphs stop paying between batch 4 and 6 on NVIDIA H200 {unclear}"
    shown = words(page)
    assert {"crossover between 4 and 6", "oom", "2.00", "0.33"} <= set(shown)
    [mark] = [line for line in page.figure.axes[0].get_lines() if line.get_linestyle() == "--"]
    assert mark.get_xdata()[0] == pytest.approx(math.sqrt(24))
    sweep_file(tmp_path, POINTS[:3], None, "")
    page = pages(tmp_path)[0][f"crossover-{tmp_path.name}"]
    assert page.title == "GPT-3 bench: graphs still pay at batch 4 on NVIDIA H200, the largest measured"
    assert not [text for text in words(page) if "crossover" in text]


def test_scaling_has_one_point_for_each_number_of_gpus(full):
    page = full[0]["scaling-gpt3-bench"]
    assert page.title.startswith("GPT-3 bench, graph: on 1 GPU it gains 0.9 % on this host, on 8 GPUs it gains 9.0 %")
    [curve] = [line for line in page.figure.axes[0].get_lines() if len(line.get_xdata()) == 4]
    assert list(curve.get_ydata()) == pytest.approx([1.009, 1.02, 1.05, 1.09], rel=1e-3)


def test_scaling_needs_a_variant_on_two_numbers_of_gpus(tmp_path):
    put(tmp_path / "x1" / "gpt3-bench", *session({"graph": 1.1}))
    put(tmp_path / "x2" / "gpt3-bench", *session({"partial": 1.1}, env={"world_size": 2, "num_gpus": 2}))
    assert pages(tmp_path)[1]["scaling-gpt3-bench"] == "no variant has a speed-up on more than one number of GPUs"


# ------------------------------------------------------------------------------------------------
# What is missing or wrong


def test_without_eager_there_is_no_speed_up(tmp_path):
    put(tmp_path, *[record for record in session({"graph": 1.1}) if record["variant"] != "eager"])
    drawn, missing = pages(tmp_path)
    assert missing["speedup"] == "no variant has a timed round beside eager's"
    assert missing["memory"] == "no graphed variant with reserved memory beside eager's"
    for name in ("law", "why", "steady"):
        assert missing[name] == "no graph beside its base with issue and busy time"
    assert [name for name in drawn if name.startswith("step_time")]


def test_only_failures_and_rounds_of_parity(tmp_path):
    put(
        tmp_path,
        make("eager", 0),
        failed("graph", "capture_failed", "stream is capturing"),
    )
    drawn, missing = pages(tmp_path)
    assert not drawn and len(missing) == 11


def test_a_variant_that_fails_in_one_round_keeps_its_bar(tmp_path):
    found = session({"graph": 1.1})
    found[3].update(status="failed", message="killed", statistic_ms=None)
    found[3]["steps"].update(gpu_ms=[], batch=[])
    put(tmp_path, *found)
    drawn, _ = pages(tmp_path)
    [name] = [name for name in drawn if name.startswith("step_time")]
    assert "failed in a round" in words(drawn[name])
    assert any(text.startswith("graph: failed: killed") for text in words(drawn["speedup"]))


def test_a_message_may_hold_anything(tmp_path):
    message = "\x1b[31mcost $5 and <b> & $\\frac{$\n\nunits: \u00b5s " + "long " * 60
    put(tmp_path, *session({"graph": 1.1}), failed("partial", "failed", message))
    assert plot.main([str(tmp_path)]) == 0
    text = (tmp_path / "figures" / "more" / "speedup.svg").read_text()
    ElementTree.fromstring(text)
    assert "cost $5 and &lt;b&gt; &amp; $\\frac{$ units" in text


def test_huge_and_tiny_numbers_fit(tmp_path):
    put(tmp_path / "huge", *session({"graph": 80.0, "partial": 0.01}, step_ms=2.5e6))
    put(tmp_path / "tiny", *session({"graph": 1.0001}, step_ms=0.004))
    drawn, _ = pages(tmp_path)
    assert len(drawn) >= 7
    for name, page in drawn.items():
        assert_inside(page, name)


def test_bad_files_are_named_and_the_rest_is_drawn(tmp_path, capsys):
    folder = gpt3(tmp_path)
    (folder / "graph.r9.json").write_text('{"schema": 1, "model"')
    (folder / "eager.r9.json").write_text('{"schema": 7}')
    (folder / "notes.json").write_text("[]")
    (folder / "graph.r1.trace.json.gz").write_bytes(b"\x1f\x8b broken")
    assert plot.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "drawn without it: " in err and "graph.r9.json: not a whole JSON document" in err
    assert "eager.r9.json: schema 7, this code reads schema 1 and 2" in err
    assert "notes.json: not the name of a record" in err
    assert "idles 16 % of a profiled eager step" in out
    (folder / "eager.r1.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    plot.main([str(tmp_path)])
    assert "eager.r1.trace.json.gz: a trace without any kernel" in capsys.readouterr().out


def test_a_mixed_folder_is_refused_by_name_and_the_rest_is_drawn(tmp_path, capsys):
    gpt3(tmp_path)
    found = session({"graph": 1.1})
    found[-1]["env"]["gpu_name"] = "NVIDIA H100"
    put(tmp_path / "mixed", *found)
    assert plot.main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "mixed: a table cannot mix GPU types" in captured.err
    assert (tmp_path / "figures" / "more" / "speedup.svg").is_file()


def test_cpu_records_are_never_drawn(tmp_path, capsys):
    env = {"gpu_name": None, "gpu_uuid": None}
    put(tmp_path / "cpux1" / "gpt3-tiny", *session({"graph": 1.3}, device="cpu", preset="tiny", env=env))
    assert plot.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not drawn: 1 folder of CPU records" in out and "files" not in out
    assert not (tmp_path / "figures").exists()


def test_a_root_that_holds_nothing(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"python -m benchmarks.plot: no records in {tmp_path}\n"
    with pytest.raises(SystemExit) as exit_:
        plot.main([str(tmp_path / "absent")])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"python -m benchmarks.plot: no folder {tmp_path}/absent\n"


def test_out_that_cannot_be_a_folder_is_one_line(tmp_path, capsys):
    gpt3(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        plot.main([str(tmp_path), "--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_without_matplotlib_the_command_that_installs_it_is_named(tmp_path):
    gpt3(tmp_path)
    code = f"import sys; sys.modules['matplotlib'] = None\nfrom benchmarks import plot\nplot.main([{str(tmp_path)!r}])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr == "python -m benchmarks.plot: no matplotlib here, figures need it: ./setup.sh plots\n"


def test_figures_of_an_earlier_call_are_named(tmp_path, capsys):
    folder = put(tmp_path / "gpt3-bench", make())
    (folder / "figures").mkdir()
    (folder / "figures" / "speedup.svg").write_text("<svg/>")
    plot.main([str(folder)])
    out = capsys.readouterr().out
    assert f"from an earlier call: {folder}/figures/speedup.svg" in out
    assert out.count("from an earlier call") == 1


def test_folders_are_never_paired(tmp_path):
    gpt3(tmp_path, 1.05)
    put(tmp_path / "h200x1" / "gpt3-bench-late", *session({"graph": 1.1}, step_ms=30.0))
    collection = evidence.collect(tmp_path)
    assert [(block.key, block.name) for block in collection.blocks] == [
        ("h200x1-gpt3-bench", "GPT-3 bench"),
        ("h200x1-gpt3-bench-late", "GPT-3 bench (late)"),
    ]
    ratios = [block.first.row("graph")["speedup"] for block in collection.blocks]
    assert ratios == pytest.approx([1.05, 1.1], rel=1e-3)
    shutil.rmtree(tmp_path / "h200x1" / "gpt3-bench")
    assert [block.name for block in evidence.collect(tmp_path).blocks] == ["GPT-3 bench (late)"]
