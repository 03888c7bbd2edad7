"""README.md, the models' READMEs and results/overview.*: tables as the runs say, links that lead somewhere."""

import re
from pathlib import Path

import pytest

from benchmarks import ROOT, overview, runs
from benchmarks.files import run_file
from benchmarks.pages import published, readme, run_table, tables
from tests.helpers.made_run import made_run, put, write

README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("[!.]*/*.md"),
        *ROOT.glob("results/archive/*.md"),
        *ROOT.glob("*/*/*.md"),
    )
    if "runs" not in path.relative_to(ROOT).parts
)


@pytest.fixture(scope="module")
def found():
    return runs.read(ROOT / "results")


def test_pages_and_tables_are_what_the_runs_say(found):
    """make readme makes them so."""
    assert found.faults == [] and overview.wanted(found) == {}


def test_a_page_that_the_runs_contradict_is_written_and_named(tmp_path, monkeypatch, capsys):
    page = tmp_path / "overview.md"
    monkeypatch.setattr(overview, "wanted", lambda found: {page: "as the runs say\n"})
    assert overview.main([]) == 0 and capsys.readouterr().out == f"wrote {page}\n"
    assert page.read_text() == "as the runs say\n"


def test_the_front_page_is_short():
    written = re.sub(r"<!-- table.*?<!-- end -->", "", README, flags=re.DOTALL)
    # Tables may grow with what is measured.
    assert len(README.splitlines()) <= 130 and len(written.split()) <= 1200


def headings(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    names = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", name).strip().lower().replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), link


def test_every_figure_on_the_front_page_has_words():
    figures = re.findall(r"!\[(.+?)\]\((.+?)\)", README, re.DOTALL)
    assert figures and all(len(words.split()) > 4 and (ROOT / path).is_file() for words, path in figures)


def test_the_sample_of_a_table_is_that_of_the_run_it_names():
    (sample,) = re.findall(r"ended like this.*:\n\n((?:    .*\n)+)", README)
    *shown, last = (line.strip() for line in sample.splitlines())
    name = re.fullmatch(r"runs/(h200x1/gpt3-bench/\w+-\w+\.json)  \(\d+ s\)", last)[1]
    printed = run_table.report(run_file.read(ROOT / "results" / name)).splitlines()
    assert set(shown) <= set(printed)


# ------------------------------------------------------------------------------------------------
# Tables of made runs


def table(kind, root, argument=""):
    return readme._TABLES[kind](runs.read(root).rows, root / "README.md", argument)


def test_each_model_has_one_row_and_submissions_without_a_run_say_so(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 8.0})
    put(tmp_path, 1, model="mine", ms={"graph_layer": 5.0})
    lines = table("models", tmp_path).splitlines()[2:]
    assert len(lines) == len(published.published()) + 1
    assert "| 8.00 | 10.00 | 1.250x (1.250 to 1.250) |" in lines[0]
    assert lines[-1].startswith("| [mine, bench](h200x1/gpt3-bench)") and "2.000x" in lines[-1]
    assert sum("not measured in blocks yet" in line for line in lines) == len(published.published()) - 1


@pytest.mark.parametrize(("busy", "line"), [(8.0, 0), (9.0, 1), (9.9, 2)])
def test_what_to_do_follows_from_step_and_busy(tmp_path, busy, line):
    put(tmp_path, 0, issue=(5.0, busy))
    lines = table("decide", tmp_path).splitlines()[2:]
    assert [("gpt3/bench" in each) for each in lines] == [index == line for index in range(3)]


def test_beside_nvidia_stands_the_same_mechanism_alone(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 8.0})
    assert table("nvidia", tmp_path).count("not measured yet") == len(published.published())
    put(tmp_path, 9, ms={"graph_layer_te": 8.0}, names=("eager", "graph_layer_te"))
    line = table("nvidia", tmp_path).splitlines()[2]
    assert "graph_layer_te: 1.250x" in line and "a GPU's share of 8 of 96 layers" in line


def test_a_capture_that_failed_is_not_called_unmeasured(tmp_path):
    run = made_run(names=("eager", "graph_layer_te"))
    own = run.builds[""].variants
    own["graph_layer_te"].parity[0].hashes, own["graph_layer_te"].parity[0].losses = ["other"], [2.0]
    write(run, tmp_path / "h200x1/gpt3-bench")
    assert "graph_layer_te: failed" in table("nvidia", tmp_path)


def test_the_ceiling_counts_what_reached_it(tmp_path):
    """Two graphs that could gain 1.5x, of which one does, and one that could gain less and does."""
    later = {"begin_utc": "2026-12-01T00:00:00Z"}
    put(tmp_path, 0, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 8.1}, **later)
    put(tmp_path, 1, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 10.0}, boot="c", **later)
    put(tmp_path, 2, issue=(5.0, 9.9), model="other", boot="d", **later)
    put(tmp_path, 3, issue=(12.0, 8.0), ms={"eager": 12.0, "graph_layer": 10.0}, boot="e")
    text = table("ceiling", tmp_path)
    assert text.startswith("In runs on 4 hosts, none of 4 graphs gained over 0.0 % more")
    assert "1 of 2 graphs that could gain over 5 % and 1 of 1 graphs that could gain less reached it" in text
    lines = readme.misses(runs.read(tmp_path).rows)
    assert len(lines) == 2 and "80.0 % of 1.500x; its kernels take +0.0 %" in lines[0]
    assert "its GPU waits for 20.0 % of the step" in lines[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [("<!-- table: ceiling -->\n", "needs its own"), ("<!-- table: nope -->\n<!-- end -->\n", "no table 'nope'")],
)
def test_a_wrong_marker_is_named(tmp_path, text, said):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(readme.ReadmeError, match=said):
        readme.changed([], tmp_path)


def test_without_any_run_the_tables_say_so(tmp_path):
    for kind in readme._TABLES:
        assert "measured" in readme._TABLES[kind]([], Path(tmp_path / "README.md"), "gpt3")


def test_the_overview_hides_nothing(tmp_path):
    put(tmp_path, 0, ms={"graph_layer": 8.0}, unsupported=("graph_x",))
    (tmp_path / "h200x1/gpt3-bench/bad.json").write_text("{")
    text = overview.page_of(runs.read(tmp_path), tmp_path / "overview.md")
    assert "graph_x: unsupported (needs a GPU)" in text and "bad.json: no whole JSON" in text
    assert all(line.count("|") <= len(tables.WIDE) + 3 for line in text.splitlines())
