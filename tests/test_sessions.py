"""Folders of sessions: names, packing killed at any moment, damaged archives, publishing and its checksums.

pytest tests/test_sessions.py
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks import ROOT, publish, sessions
from common import record as records

BOOT, GPU_UUID = "13f4-05aa", "GPU-C77b-1"


def put(session, number=1, variant="eager", **values):
    """A record in an open session."""
    record = records.blank(model="m", preset="tiny", variant=variant, round=number, status="pass", device="cpu")
    record.update(session=sessions.session_name(session), end_utc=f"2026-11-22T03:15:{number:02d}Z", **values)
    records.write(session / records.file_name(variant, number, record["attempt"]), record)


def begin(group, **meta):
    return sessions.create(group, BOOT, GPU_UUID, {"source": {"source_hash": "abc"}, **meta})


@pytest.fixture
def group(tmp_path):
    return tmp_path / "runs" / "h200x1" / "m-tiny"


@pytest.fixture
def session(group):
    """Open, with two records, a trace and what runs leave meanwhile."""
    path = begin(group)
    put(path, 1)
    put(path, 2)
    (path / "eager.r1.trace.json.gz").write_bytes(b"trace")
    (path / "logs").mkdir()
    (path / "logs" / "eager.r1.log").write_text("said")
    (path / ".partial").mkdir()
    (path / ".partial" / "half").write_text("")
    (path / ".lock").write_text("1\n")
    return path


@pytest.fixture
def packed(session):
    return sessions.pack(session, "complete")


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def contents(folder):
    """Path below it -> bytes of each file."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------
# Names


def test_a_session_is_named_by_its_begin_boot_and_gpu():
    when = datetime(2026, 11, 22, 3, 15, tzinfo=UTC)
    assert sessions.name_of(when, BOOT, GPU_UUID) == "20261122T031500Z-13f405-c77b"
    assert sessions.name_of(when, None, None) == "20261122T031500Z-000000-cpu0"
    assert sessions.name_of(when, "ab", "MIG-1") == "20261122T031500Z-ab0000-1000"
    for name in (sessions.name_of(when, BOOT, GPU_UUID), sessions.name_of(when, None, None)):
        assert sessions.NAME.fullmatch(name)


@pytest.mark.parametrize(
    ("flags", "load", "label"),
    [
        ([], 0, ""),
        (["--lstm", "wavefront"], 16, "lstm-wavefront-load16"),
        (["--host_load=3"], 0, "host-load-3"),
        (["--data", "/a/b/corpus.txt"], 0, "data-corpus.txt"),
        ([], 4, "load4"),
    ],
)
def test_a_label_says_the_flags(flags, load, label):
    assert sessions.label_of(flags, load) == label


def test_long_labels_are_cut_and_stay_apart():
    a, b = (sessions.label_of(["--words", "x" * 80 + end], 0) for end in "ab")
    assert a != b and len(a) <= 48 and a.startswith("words-xxx")


def test_two_sessions_that_begin_in_one_second_have_names_of_their_own(group, monkeypatch):
    when = datetime(2026, 11, 22, 3, 15, tzinfo=UTC)
    monkeypatch.setattr(sessions, "now", lambda: when)
    first, second = begin(group), begin(group)
    assert first.name == "20261122T031500Z-13f405-c77b.open" and second.name == "20261122T031501Z-13f405-c77b.open"
    assert sessions.read_meta(second)["begin_utc"] == "2026-11-22T03:15:01Z"
    # One that is packed or being packed has its name too.
    put(first)
    sessions.pack(first, "complete")
    (group / "20261122T031502Z-13f405-c77b.packing").mkdir()
    assert begin(group).name == "20261122T031503Z-13f405-c77b.open"


def test_records_are_found_in_order_of_runs(group):
    path = begin(group)
    for variant, number in (("graph", 10), ("graph", 2), ("eager", 1)):
        put(path, number, variant)
    put(path, 2, "graph", attempt=2)
    shutil.copy(path / "graph.r2.json", path / "graph.r2.t1.json")
    (path / "wer.json").write_text("{}")
    found = [file.name for file in sessions.record_files(path)]
    assert found == [
        *["eager.r1.json", "graph.r2.t1.json", "graph.r2.json", "graph.r2.a2.json", "graph.r10.json"],
    ]


# ------------------------------------------------------------------------------------------------
# Why one ends


def test_a_session_ends_with_its_source_and_after_a_day(session):
    meta = sessions.read_meta(session)
    begun = datetime.strptime(meta["begin_utc"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert sessions.why_ended(meta, "abc") is None
    assert sessions.why_ended(meta, "abc", begun + timedelta(hours=24)) is None
    assert sessions.why_ended(meta, "abc", begun + timedelta(hours=24, seconds=1)) == "it began more than 24 hours ago"
    assert sessions.why_ended(meta, "other") == "the source has changed since"


def test_a_session_is_locked_until_the_lock_is_closed(session):
    with sessions.lock(session), pytest.raises(sessions.Busy, match=f"process {os.getpid()}"):
        sessions.lock(session)
    sessions.lock(session).close()


def test_a_session_that_was_packed_meanwhile_is_not_locked(session, monkeypatch):
    real = sessions.fcntl.flock

    def late(file, how):
        shutil.rmtree(session)
        real(file, how)

    monkeypatch.setattr(sessions.fcntl, "flock", late)
    with pytest.raises(sessions.Busy, match="was closed by another run"):
        sessions.lock(session)
    with pytest.raises(FileNotFoundError):
        sessions.lock(session)
    assert not session.exists()


# ------------------------------------------------------------------------------------------------
# Packing


def test_a_packed_session_holds_every_record_as_it_was_written(session):
    texts = [(session / f"eager.r{number}.json").read_text() for number in (1, 2)]
    packed = sessions.pack(session, "complete")
    assert not session.exists() and packed.name == sessions.session_name(session)
    assert set(contents(packed)) == {
        *["records.jsonl.xz", "session.json", "eager.r1.trace.json.gz", "logs/eager.r1.log"],
    }
    assert lzma.decompress((packed / "records.jsonl.xz").read_bytes()).decode() == "".join(texts)
    meta = sessions.read_meta(packed)
    assert (meta["closed"], meta["num_records"], meta["end_utc"]) == ("complete", 2, "2026-11-22T03:15:02Z")
    found, faults = sessions.read_records(packed)
    assert faults == [] and [where for where, _ in found] == [f"{packed}/records.jsonl.xz:{line}" for line in (1, 2)]
    pandas = pytest.importorskip("pandas")
    assert list(pandas.read_json(packed / "records.jsonl.xz", lines=True)["round"]) == [1, 2]


def test_the_same_records_are_the_same_bytes():
    assert sessions.compress(b"a line\n" * 100) == sessions.compress(b"a line\n" * 100)


def test_what_is_no_record_is_not_packed(session):
    before = contents(session)
    (session / "eager.r2.json").write_text((session / "eager.r2.json").read_text()[:200])
    with pytest.raises(sessions.Damaged, match=r"eager\.r2\.json: not a whole JSON document"):
        sessions.pack(session, "complete")
    assert set(contents(session)) == set(before) and list(session.parent.iterdir()) == [session]
    (session / "eager.r2.json").write_text("[]")
    with pytest.raises(sessions.Damaged, match=r"eager\.r2\.json: not a record, no JSON object"):
        sessions.pack(session, "complete")
    (session / "eager.r2.json").write_text("{}\n{}\n")
    with pytest.raises(sessions.Damaged, match=r"eager\.r2\.json: more than one line"):
        sessions.pack(session, "complete")


# Packs the session of its command line and is killed where a function of the module is reached.
KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks import sessions
where, path = sys.argv[1:]
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if where == "compress":
    sessions.compress = kill
elif where == "sync":
    sessions.sync = kill
elif where == "rename":
    Path.rename = kill
elif where == "remove":
    sessions.shutil.rmtree = kill
elif where == "half removed":
    def half(path):
        for name in ("eager.r1.json", "session.json"):
            Path(path, name).unlink()
        kill()
    sessions.shutil.rmtree = half
sessions.pack(Path(path), "complete")
"""


@pytest.mark.parametrize("where", ["compress", "sync", "rename", "remove", "half removed"])
def test_packing_that_is_killed_leaves_a_whole_session_and_goes_on(session, where):
    before = contents(session)
    process = subprocess.run([sys.executable, "-c", KILLED, where, session], cwd=ROOT, capture_output=True)
    assert process.returncode == -9, process.stderr
    root, target = session.parent, session.with_name(sessions.session_name(session))
    (found,) = sessions.find(root)
    assert len(sessions.read_records(found)[0]) == 2
    if where in ("compress", "sync", "rename"):
        assert found == session and contents(session) == before
        assert sessions.left_over(root) == []
    else:
        assert found == target and sessions.read_meta(target)["closed"] == "complete"
        assert sessions.left_over(root) == [session]
    assert sessions.pack(session, "once more") == target
    assert list(root.iterdir()) == [target] and len(sessions.read_records(target)[0]) == 2
    assert (target / "eager.r1.trace.json.gz").read_bytes() == b"trace"


def test_an_open_session_with_other_records_than_the_packed_one_is_kept(session):
    shutil.copytree(session, session.parent / "copy")
    packed = sessions.pack(session, "complete")
    shutil.move(session.parent / "copy", session)
    put(session, 3)
    with pytest.raises(sessions.Refused, match=r"holds other records than .*\.open"):
        sessions.pack(session, "complete")
    assert session.is_dir() and len(sessions.read_records(packed)[0]) == 2


def test_a_session_json_that_is_none_is_named(session):
    (session / "session.json").write_text('{"schema": 9}')
    with pytest.raises(sessions.Damaged, match=r"session\.json: not a session of schema 1"):
        sessions.read_meta(session)
    (session / "session.json").unlink()
    with pytest.raises(sessions.Damaged, match=r"no session\.json"):
        sessions.read_meta(session)
    # It is still found, and nobody goes on with it.
    assert sessions.find(session.parent) == [session] and sessions.open_sessions(session.parent) == []


# ------------------------------------------------------------------------------------------------
# Damaged archives


def test_of_a_truncated_archive_whole_records_are_left_and_the_rest_is_said(group):
    path = begin(group)
    for number in range(1, 60):
        put(path, number, message=os.urandom(2000).hex())
    packed = sessions.pack(path, "complete")
    data = (packed / "records.jsonl.xz").read_bytes()
    (packed / "records.jsonl.xz").write_bytes(data[: len(data) // 2])
    found, (fault,) = sessions.read_records(packed)
    assert 0 < len(found) < 59 and [record["round"] for _, record in found] == sorted(
        record["round"] for _, record in found
    )
    assert fault.startswith(f"{packed}/records.jsonl.xz: not a whole archive (it ends in the middle)")
    assert fault.endswith(f"{len(found)} records are left of it")


@pytest.mark.parametrize("data", [b"", b"no archive at all", lzma.compress(b'{"schema": 2}\n{"half')])
def test_what_is_no_archive_is_named(packed, data):
    (packed / "records.jsonl.xz").write_bytes(data)
    found, faults = sessions.read_records(packed)
    assert found == [] and "records.jsonl.xz" in faults[0]


def test_a_line_that_is_no_record_is_named_and_the_others_are_read(packed):
    lines, _ = sessions.read_lines(packed / "records.jsonl.xz")
    lines.insert(1, '{"schema": 7}')
    (packed / "records.jsonl.xz").write_bytes(sessions.compress("".join(f"{line}\n" for line in lines).encode()))
    found, faults = sessions.read_records(packed)
    assert len(found) == 2 and faults == [f"{packed}/records.jsonl.xz:2: schema 7, this code reads schema 1 and 2"]


def test_an_edit_by_hand_is_named(packed):
    lines, _ = sessions.read_lines(packed / "records.jsonl.xz")
    lines[0] = json.dumps(json.loads(lines[0]) | {"statistic_ms": 1.0})
    (packed / "records.jsonl.xz").write_bytes(sessions.compress("".join(f"{line}\n" for line in lines).encode()))
    found, (fault,) = sessions.read_records(packed)
    assert len(found) == 1 and fault.endswith("xz:1: its digest is not that of its content: edited by hand?")


# ------------------------------------------------------------------------------------------------
# Publishing


def test_publish_copies_a_packed_session_unchanged_without_its_logs(packed, results):
    before = contents(packed)
    target = sessions.publish(packed, results)
    assert target == results / "h200x1" / "m-tiny" / packed.name
    assert contents(packed) == before
    assert contents(target) == {name: data for name, data in before.items() if not name.startswith("logs/")}
    assert set(sessions.listed(results)) == {f"h200x1/m-tiny/{packed.name}/{name}" for name in contents(target)}
    assert sessions.verify(results) == [] and not list(results.rglob("*.packing"))
    # Once more is nothing, and a second one joins it.
    assert sessions.publish(packed, results) == target
    other = begin(packed.parent)
    put(other, 1)
    sessions.publish(sessions.pack(other, "complete"), results)
    assert sessions.verify(results) == [] and len(sessions.find(results)) == 2


def test_publish_refuses_an_open_session_and_what_is_none(session, results, tmp_path):
    with pytest.raises(sessions.Refused, match="not a packed session; make bench CLOSE=1 closes"):
        sessions.publish(session, results)
    with pytest.raises(sessions.Refused, match="not a packed session"):
        sessions.publish(session.parent, results)
    with pytest.raises(sessions.Refused, match="no such folder"):
        sessions.publish(session.with_name("20261122T031500Z-13f405-c77b"), results)
    assert not results.exists()


def test_publish_refuses_a_damaged_session(packed, results):
    path = packed / "records.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(sessions.Refused, match="not a whole archive"):
        sessions.publish(packed, results)
    path.write_bytes(sessions.compress(b""))
    with pytest.raises(sessions.Refused, match="no records"):
        sessions.publish(packed, results)
    (packed / "session.json").unlink()
    with pytest.raises(sessions.Damaged, match=r"no session\.json"):
        sessions.publish(packed, results)
    assert not results.exists()


def test_publish_refuses_another_session_of_the_same_name(packed, results):
    target = sessions.publish(packed, results)
    before = contents(results)
    (packed / "eager.r1.trace.json.gz").write_bytes(b"another")
    with pytest.raises(sessions.Refused, match="another session of this name is published; nothing is copied"):
        sessions.publish(packed, results)
    assert contents(results) == before and target.is_dir()


def test_a_copy_that_was_killed_is_made_anew(packed, results, monkeypatch):
    real = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sessions.publish(packed, results)
    assert sessions.find(results) == [] and sessions.verify(results) == []
    assert Path.rename is real
    sessions.publish(packed, results)
    assert sessions.verify(results) == [] and not list(results.rglob("*.packing"))


def test_verify_names_what_is_missing_changed_and_not_listed(packed, results):
    target = sessions.publish(packed, results)
    name = f"h200x1/m-tiny/{packed.name}"
    (target / "eager.r1.trace.json.gz").unlink()
    (target / "session.json").write_text((target / "session.json").read_text() + " ")
    (target / "more.json").write_text("{}")
    (results / "h200x1" / "m-tiny" / "table.md").write_text("generated, of no session")
    assert sessions.verify(results) == [
        f"{name}/eager.r1.trace.json.gz: missing",
        f"{name}/session.json: changed since it was published",
        f"{name}/more.json: not in sessions.sha256",
    ]
    shutil.rmtree(target)
    assert len(sessions.verify(results)) == 3


# ------------------------------------------------------------------------------------------------
# The command


def go(*arguments):
    try:
        return publish.main([str(word) for word in arguments])
    except SystemExit as stop:
        return stop.code


def test_the_command_publishes_verifies_and_lists(session, results, capsys):
    assert go("list", session.parents[2]) == 0
    assert capsys.readouterr().out == f"h200x1/m-tiny/{session.name}  2 records  open\n"
    assert go("publish", session, "--into", results) == 1
    error = capsys.readouterr().err
    assert error.startswith("python -m benchmarks.publish: ") and error.count("\n") == 1
    packed = sessions.pack(session, "as it stands")
    assert go("publish", packed, "--into", results) == 0
    assert f"{results}/h200x1/m-tiny/{packed.name}\n" in capsys.readouterr().out
    assert (results / "h200x1" / "m-tiny" / "table.md").exists()
    assert go("verify", results) == 0
    assert capsys.readouterr().out == "1 sessions, 0 faults\n"
    (results / "h200x1" / "m-tiny" / packed.name / "session.json").unlink()
    assert go("verify", results) == 1
    assert "session.json: missing\n1 sessions, 1 faults\n" in capsys.readouterr().out
    assert go("list", packed.parents[2]) == 0
    assert capsys.readouterr().out == f"h200x1/m-tiny/{packed.name}  2 records  as it stands\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["verify", "--into=--"], 2),
        (["publish", "--into=--", "x"], 2),
        (["publish"], 2),
        (["list", "/no/such/folder"], 1),
        (["verify", "/no/such/folder"], 1),
    ],
)
def test_mistakes_are_one_line(arguments, status, capsys):
    assert go(*arguments) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("python -m benchmarks.publish"), error


def test_the_committed_results_are_as_they_were_published():
    root = ROOT / "results"
    if not (root / sessions.SUMS).exists():
        pytest.skip("no sessions are published here")
    assert sessions.verify(root) == []
