"""results/corrections.toml: what it takes out of headlines, its mistakes, and the page that is made of it."""

import pytest

from benchmarks import corrections, frame, overview
from graph_worth.folders import ROOT
from tests.helpers.made_run import FOLDER, made_run, put, with_slowing_variable, write

# The boots that corrections named in headlines when the rule was written.
BOOTS = ["58c7d6", "871fa6", "a6d3b1", "da8284", "e8ac02", "4d9d7c", "fba8db", "c50aef"]
# On these hosts only some runs are wrong.
RUNS = ["20261125T033521Z-34f08c0e", "20261127T101138Z-73a094ea", "20261127T101346Z-73a09455"]
CELLS = 'file = "f"\nsays = "s"\ncorrect = "c"\n'


@pytest.fixture(scope="module")
def published():
    return frame.load(ROOT / "results")


def entry(kind="disturbed", names='boots = ["bbbbbb"]', why='why = "tests ran"'):
    return f'[[published]]\nkind = "{kind}"\n{names}\n{why}\n{CELLS}'


def loaded(root, text, **changes):
    """A run on the host bbbbbb1 beside a file of corrections."""
    put(root, 0, boot="bbbbbb1", **changes)
    (root / "corrections.toml").write_text(text)
    return frame.load(root)


def test_the_page_is_made_of_the_file():
    """make readme makes it so."""
    known = corrections.read(ROOT / "results")
    assert overview.corrections_page(known) == (ROOT / "results" / "corrections.md").read_text()
    assert known.is_of_root and len(known.published) >= 18 and len(known.pages) >= 4


def test_no_run_that_is_named_is_in_a_headline(published):
    points = published.points[published.points["host"].str[:6].isin(BOOTS) | published.points["run"].isin(RUNS)]
    assert {*points["host"].str[:6]} == {*BOOTS, "34f08c", "73a094"}
    assert not points["standing"].isin(["quiet", "unknown"]).any()
    assert published.faults == []


@pytest.mark.parametrize("names", ['boots = ["bbbbbb"]', 'runs = ["20261125T101500Z-a7d396c0"]'])
def test_a_run_is_named_by_its_id_or_its_host(tmp_path, names):
    results = loaded(tmp_path, entry(names=names))
    assert {*results.points["standing"]} == {"beside"} and results.faults == []
    assert {*results.points["standing_reason"]} == {"beside other work: tests ran"}


def test_a_note_takes_nothing_out(tmp_path):
    results = loaded(tmp_path, entry("note", why=""))
    assert {*results.points["standing"]} == {"unknown"} and results.faults == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (entry() + entry(names='boots = ["cccccc"]'), "corrections.toml: cccccc names no run"),
        (entry("note", 'runs = ["20261125T101500Z-a7d396c7"]', ""), "a7d396c7 names no run"),
        (entry() + entry("unclean"), "20261125T101500Z-a7d396c0 is disturbed and unclean; the first counts"),
        (entry("slow"), "kind 'slow', there are disturbed, unclean, superseded, note"),
        (entry(names=""), "disturbed without a why, or without runs and boots"),
        (entry(why=""), "disturbed without a why"),
        (entry(names='boots = ["b"]'), "less than 6 characters"),
        (entry().replace("why", "reason"), "unknown field `reason`"),
        ("[[published]", "corrections.toml:"),
        ("\x00", "corrections.toml:"),
        ("[notes]\n", "corrections.toml: notes: there are published and slowed and pages"),
        ("published = 3\n", "entry 1 of published: Expected `object`"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_the_rest_stands(tmp_path, text, said):
    results = loaded(tmp_path, text)
    assert len(results.faults) == 1 and said in results.faults[0] and "\n" not in results.faults[0]
    assert len(results.records()) == 2


def test_one_entry_that_cannot_be_read_leaves_the_next(tmp_path):
    results = loaded(tmp_path, entry("slow") + entry())
    assert len(results.faults) == 1 and {*results.points["standing"]} == {"beside"}


@pytest.mark.parametrize(
    ("spares", "variables", "kind"),
    [("[]", {"A": "1"}, "slowed"), ('["gpt3/bench"]', {"A": "1"}, "unknown"), ("[]", {}, "unknown")],
)
def test_a_variable_that_slows_eager_takes_runs_out_of_headlines(tmp_path, spares, variables, kind):
    run = with_slowing_variable(made_run(ms={"graph_layer": 5.0}, issue=(9.9, 5.0)), tmp_path, spares)
    run.host.variables = variables
    write(run, tmp_path / FOLDER)
    results = frame.load(tmp_path)
    assert {*results.points["standing"]} == {kind} and results.faults == []
    assert ("no headline: A slowed eager" in results.records()[1].note) == (kind == "slowed")


def test_folders_without_a_file_take_that_of_this_repository(tmp_path):
    put(tmp_path, 0, boot="da8284aa")
    results = frame.load(tmp_path)
    assert {*results.points["standing"]} == {"beside"} and results.faults == []
