"""The tables in the READMEs and the committed overview are what the committed records say."""

import csv
import io
import re

import pytest

from benchmarks import ROOT, frame, overview, overview_rows, readme, sessions, tables
from benchmarks.rows import summarise
from tests.table_records import make, opened, packed, put, session

AGAIN = "run make readme and look at the difference"


def block(words, body=""):
    return f"<!-- table: {words} -->\n{body}<!-- end -->\n"


@pytest.fixture
def root(tmp_path):
    put(tmp_path / "results" / "one", *session())
    return tmp_path


def rendered(root, words, body=""):
    (root / "README.md").write_text(f"before\n\n{block(words, body)}\nafter\n")
    return readme.render(root / "README.md", root)


# ------------------------------------------------------------------------------------------------
# What is committed


def test_no_table_in_a_readme_is_stale():
    assert [str(path.relative_to(ROOT)) for path in readme.stale()] == [], AGAIN


def test_tables_of_results_in_the_readmes_are_all_made_from_records():
    """A table typed by hand would look the same; those of the console output are indented."""
    for path in readme.files():
        outside = readme.BLOCK.sub("", path.read_text())
        assert not re.search(r"\| (variant \| rounds|speed-up|ratio|graph ms)\b", outside), path
    assert {"README.md", "gpt3/README.md"} <= {
        path.relative_to(ROOT).as_posix() for path in readme.files() if readme.BEGIN in path.read_text()
    }


def test_the_committed_overview_is_not_stale():
    blocks, faults, refused = overview_rows.read(ROOT / "results")
    assert blocks and not faults and not refused
    for path, text in overview.files_of(ROOT / "results", blocks, faults).items():
        assert path.read_text() == text, AGAIN


GROUPS = sorted({path.parent for path in sessions.find(ROOT / "results")})


@pytest.mark.parametrize("folder", GROUPS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_committed_tables_follow_from_their_records(folder):
    runs = frame.read(folder)
    found = runs.frame
    assert not runs.faults
    if found.empty:
        # A session that only left files.
        assert not (folder / "table.md").exists() and not (folder / "summary.csv").exists()
        return
    table = tables.folder_text(summarise(found), markdown=True)
    written = (folder / "table.md").read_text().splitlines()
    assert [line for line in table.splitlines() if line.startswith("|")] == [
        line for line in written if line.startswith("|")
    ]
    lines = list(csv.DictReader(io.StringIO((folder / "summary.csv").read_text())))
    assert len(lines) == len(found)


# ------------------------------------------------------------------------------------------------
# Blocks


def test_a_block_is_filled_and_the_rest_of_the_file_kept(root):
    text = rendered(root, "compare results/one gain")
    assert text.startswith("before\n\n<!-- table: compare results/one gain -->\n\n| variant |")
    assert text.endswith("|\n\n<!-- end -->\n\nafter\n")
    assert "| graph | 5 | 8.00 |" in text and "issue ms" not in text and "at most" not in text


def test_filling_twice_changes_nothing_and_old_rows_go(root):
    once = rendered(root, "compare results/one", body="| graph | 1.5x |\n")
    assert "1.5x" not in once and "at most 1.25x to gain" in once and "busy ms" in once
    (root / "README.md").write_text(once)
    assert readme.render(root / "README.md", root) == once and readme.stale(root) == []


def test_a_changed_record_makes_its_block_stale(root):
    (root / "README.md").write_text(rendered(root, "compare results/one gain"))
    assert readme.stale(root) == []
    put(root / "results" / "one", make("graph", 1, 7.0))
    assert readme.stale(root) == [root / "README.md"]
    ((path, text),) = readme.changed(root).items()
    path.write_text(text)
    assert readme.stale(root) == [] and readme.changed(root) == {}
    assert "| graph | 5 | 8.00 |" in (root / "README.md").read_text()


def test_blocks_of_a_models_readme_link_from_its_own_folder(root):
    put(root / "results" / "one", *session(model="gpt3"))
    (root / "fake").mkdir()
    path = root / "fake" / "README.md"
    path.write_text(block("front results bought"))
    assert "| [gpt3/bench](../results/one) graph, H200 |" in readme.render(path, root)
    assert readme.files(root) == [path]


def test_blocks_are_made_of_sessions_packed_and_open(root):
    packed(root / "results" / "two", session(model="other"))
    opened(root / "results" / "two", session(((9.0, 8.0),) * 2, model="other"), hour=5)
    text = rendered(root, "compare results/two gain")
    assert "faster on this host" in text and "| 1, 5 |" in text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("compare results/two gain", "no folder"),
        ("front other", "no folder"),
        ("front results/two", "no folder"),
        ("compare results gain", "holds several groups of sessions"),
        ("compare empty gain", "no records"),
        ("compare results/one gian", "no part 'gian', takes headline, gain, cost"),
        ("front results bougth", "no part 'bougth', takes law, decide, bought, minutes"),
        ("compare", "takes 'compare FOLDER"),
        ("comparison results/one", "takes 'compare FOLDER"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_named(root, words, what):
    put(root / "results" / "other", *session(preset="full"))
    (root / "empty").mkdir()
    with pytest.raises(readme.ReadmeError, match=what) as error:
        rendered(root, words)
    assert str(error.value).startswith(f"README.md: <!-- table: {words} -->: ") and str(root) not in str(error.value)


def test_no_table_is_made_from_unsound_records(root):
    record = make("graph", 4, 8.0)
    record["statistic_ms"] *= 2
    put(root / "results" / "one", record)
    for words in ("compare results/one", "front results"):
        with pytest.raises(readme.ReadmeError, match="does not follow from its steps"):
            rendered(root, words)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: compare results/one -->\n",
        "<!-- end -->\n",
        "<!-- table: compare results/one -->\n<!-- table: compare results/one -->\n<!-- end -->\n",
        "<!-- table: compare results/one --> <!-- end -->\n",
    ],
)
def test_markers_without_partner_are_refused(root, text):
    (root / "README.md").write_text(text)
    with pytest.raises(readme.ReadmeError, match="needs its own"):
        readme.changed(root)


def test_nothing_is_written_before_all_is_known_to_be_sound(root, monkeypatch, capsys):
    """Neither where a marker cannot be filled nor where a record is unsound: no overview beside old READMEs."""
    monkeypatch.setattr(overview.readme.changed, "__defaults__", (root,))
    results, stale = root / "results", block("compare results/one gian")
    (root / "README.md").write_text(stale)
    with pytest.raises(SystemExit, match="2"):
        overview.main([str(results), "--write", "--readme"])
    assert "no part 'gian'" in capsys.readouterr().err and not list(results.glob("overview*"))
    (root / "README.md").write_text(block("compare results/one gain"))
    record = make("graph", 1) | {"statistic_ms": 99.0}
    put(results / "one", record)
    for flags in (["--write"], ["--readme"], ["--write", "--readme"]):
        with pytest.raises(SystemExit, match="1"):
            overview.main([str(results), *flags])
        output = capsys.readouterr()
        assert "one/graph.r1.json: statistic_ms 99.0" in output.err and "nothing written" in output.err
    assert not list(results.glob("overview*")) and "| graph |" not in (root / "README.md").read_text()
    put(results / "one", make("graph", 1, 8.0))
    assert overview.main([str(results), "--write", "--readme"]) == 0
    assert len(list(results.glob("overview*"))) == 3 and "| graph |" in (root / "README.md").read_text()


def test_no_table_is_made_without_eager(root):
    for path in (root / "results" / "one").glob("eager.*"):
        path.unlink()
    for words in ("compare results/one", "front results"):
        with pytest.raises(readme.ReadmeError, match="none of 'eager'"):
            rendered(root, words)
