"""Evidence only grows: the content of a published file never changes and never goes. It may move."""

import hashlib
import os
import re
import subprocess

import pytest

from benchmarks import frame, publish
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import script
from graph_worth.harness.judge import PASS
from tests.helpers.made_run import made_run, write

# A run file, or a file of a session of the archive; what is made from them stands beside them and may change.
PUBLISHED = re.compile(r"^:\d+ \d+ \w+ (\w+) [^D]\w*\t(results/.*/\d{8}T\d{6}Z-[\w-]+(?:\.json|/.+))$", re.MULTILINE)


def lost(root):
    """Paths of files published in any commit whose content is in no file below results/ any more."""
    log = ["log", "--raw", "--no-abbrev", "--no-renames", "-m", "--format=", "HEAD", "--", "results"]
    text = subprocess.run(["git", "-C", str(root), *log], capture_output=True, text=True, check=True).stdout
    files = (path for path in (root / "results").rglob("*") if path.is_file())
    there = {
        hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() for data in (each.read_bytes() for each in files)
    }
    return sorted({path for blob, path in PUBLISHED.findall(text) if blob not in there})


def git(root, *arguments):
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, env=plain | who, text=True
    )
    return done.stdout.strip()


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "x")


def test_nothing_published_was_ever_changed_or_removed():
    if not (ROOT / ".git").exists() or git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the whole history")
    assert lost(ROOT) == []


@pytest.mark.parametrize("name", ["20261125T101500Z-a7d396c1.json", "20261122T031500Z-13f405-c77b/records.jsonl.xz"])
def test_what_is_published_may_move_and_neither_change_nor_go(tmp_path, name, monkeypatch):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    root = tmp_path / "repository"
    git(tmp_path, "init", "-q", str(root))
    if name.endswith(".json"):
        path = publish.publish(write(made_run(), tmp_path / "runs/h200x1/gpt3-bench"), root / "results")
    else:
        path = root / "results/h200x1/gpt3-bench" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"records")
    commit(root)
    moved = root / "results/archive" / name
    moved.parent.mkdir(parents=True)
    path.rename(moved)
    commit(root)
    assert lost(root) == []
    data = moved.read_bytes()
    moved.unlink()
    # Named by both places that it was at.
    assert len(lost(root)) == 2
    moved.write_bytes(data + b" ")
    assert len(lost(root)) == 2


def test_the_log_lists_what_no_published_run_has_measured():
    points = frame.load(ROOT / "results").points
    points = points[(points["status"] == PASS) & (points["gpu"] != "CPU")]
    measured = {model: set(rows["variant"]) for model, rows in points.groupby("model")}
    named = {}
    for model in script.models():
        named[model] = set(script.describe(model, [])["variants"]) - measured[model]
    labels = [label.split("-build")[0].replace("-", "_") for label in points[points["model"] == OWN_STEP]["label"]]
    named["examples/steps"] = {path.stem for path in (ROOT / "examples/steps").glob("*.py")} - {*labels}
    section = (ROOT / "docs/log.md").read_text(encoding="utf-8").split("## Has no published run\n")[1].split("\n## ")[0]
    listed = {name: set(words.split(", ")) for name, words in re.findall(r"^- (\S+): (.+)$", section, re.MULTILINE)}
    assert listed == {name: words for name, words in named.items() if words}
