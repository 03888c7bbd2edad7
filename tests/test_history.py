"""Evidence only grows: over the whole history no record is lost and no session has changed."""

import json
import os
import shutil
import subprocess
import warnings

import pytest

from benchmarks import history, sessions
from common import record as records


def test_every_record_ever_committed_is_in_a_session_and_no_session_has_changed():
    missing = history.what_is_missing()
    if missing:
        # Said where pytest shows it, and what can be checked is.
        warnings.warn(f"{missing}: sessions are checked against results/{sessions.SUMS} alone", stacklevel=1)
    assert sessions.verify(history.ROOT / "results") == []
    if not missing:
        assert history.faults() == []


def git(root, *arguments):
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, env=plain | who)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "x")


@pytest.fixture
def repository(tmp_path):
    """A history in which two loose records were packed into a published session."""
    root = tmp_path / "repository"
    folder = root / "results" / "h200x1" / "m-bench"
    for variant in ("eager", "graph"):
        records.write(folder / f"{variant}.r1.json", records.blank(variant=variant, round=1, status="pass"))
    git(tmp_path, "init", "-q", str(root))
    commit(root)
    session = folder / "20261122T031500Z-13f405-c77b"
    session.mkdir()
    lines = [path.read_text() for path in sorted(folder.glob("*.json"))]
    (session / sessions.RECORDS).write_bytes(sessions.compress("".join(lines).encode()))
    sessions.write_meta(session, {"schema": 1, "session": session.name})
    for path in folder.glob("*.r1.json"):
        path.unlink()
    sessions.write_sums(root / "results", sessions.sums_of(session, root / "results"))
    commit(root)
    return root


def session_of(root):
    (session,) = sessions.find(root / "results")
    return session


def test_a_history_that_only_grew_has_no_fault(repository):
    assert history.what_is_missing(repository) is None
    assert history.faults(repository) == [] and sessions.verify(repository / "results") == []
    # Tables are made again.
    (session_of(repository).parent / "table.md").write_text("one")
    commit(repository)
    (session_of(repository).parent / "table.md").write_text("two")
    commit(repository)
    assert history.faults(repository) == []


def test_a_record_that_was_removed_or_overwritten_is_found(repository):
    path = repository / "results" / "h200x1" / "m-bench" / "graph.r2.json"
    for round_ms in (1.0, 2.0):
        records.write(path, records.blank(variant="graph", round=2, status="pass", statistic_ms=round_ms))
        commit(repository)
    path.unlink()
    commit(repository)
    found = history.faults(repository)
    assert len(found) == 2 and all("graph.r2.json" in line and line.endswith("in no session") for line in found)


def test_a_session_that_was_changed_or_removed_is_found(repository):
    session = session_of(repository)
    lines, _ = sessions.read_lines(session / sessions.RECORDS)
    changed = json.loads(lines[0]) | {"statistic_ms": 1.0}
    edited = "".join(f"{line}\n" for line in [json.dumps(changed), *lines[1:]])
    (session / sessions.RECORDS).write_bytes(sessions.compress(edited.encode()))
    (name,) = (line for line in history.faults(repository) if "changed since" in line)
    assert name.startswith(f"results/h200x1/m-bench/{session.name}/{sessions.RECORDS}")
    # Committed, with new checksums beside it, it is found all the same.
    sessions.write_sums(repository / "results", sessions.sums_of(session, repository / "results"))
    commit(repository)
    assert sessions.verify(repository / "results") == []
    found = history.faults(repository)
    assert any("changed since it was committed first" in line for line in found)
    assert any(line.startswith(f"{sessions.SUMS}: the line of") for line in found)
    shutil.rmtree(session)
    commit(repository)
    assert any(line.endswith("committed once, and gone") for line in history.faults(repository))


def test_a_shallow_clone_and_an_archive_say_so(repository, tmp_path):
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(tmp_path / "shallow"))
    assert history.what_is_missing(tmp_path / "shallow") == "a shallow clone"
    assert history.what_is_missing(tmp_path) == "no .git: an archive"
    # There the checksums speak.
    (session_of(tmp_path / "shallow") / sessions.META).write_text("{}")
    assert sessions.verify(tmp_path / "shallow" / "results") == [
        f"h200x1/m-bench/{session_of(repository).name}/session.json: changed since it was published"
    ]
