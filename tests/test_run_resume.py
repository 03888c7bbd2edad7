"""The command against a fake model: sessions that go on, those that do not, and those that --close packs."""

import os
import signal
from datetime import UTC, datetime, timedelta

import pytest

from benchmarks import frame, sessions
from common import environment
from common import record as records
from tests.harness import (
    MODEL,
    change_meta,
    command,
    go,
    main,
    names,
    newest,
    of,
    only,
    processes_with,
    read,
    stop_at,
    until,
    watched,
)

pytest_plugins = ["tests.machines"]
pytestmark = pytest.mark.usefixtures("no_gpu")
EAGER_GRAPH = of(["eager", "graph"], 2)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ------------------------------------------------------------------------------------------------
# Sessions that go on, and those that do not


def ages(session):
    return {path.name: path.stat().st_mtime_ns for path in session.glob("*.r*.json")}


def half_way(out, monkeypatch, *arguments, stop="graph.r2", flags=()):
    """An open session of eager and graph, stopped before a run; returns its folder."""
    stop_at(monkeypatch, stop)
    assert go(out, "graph", "--no-table", *arguments, flags=flags) == 130
    return newest(out)


def test_the_same_request_goes_on_where_it_was(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    assert sessions.is_open(session) and names(session) == of(["eager", "graph"], 1)
    before = {path.name: path.read_bytes() for path in session.glob("*.r*.json")}
    seen = watched(monkeypatch)
    # Rounds, minutes and limits may be others.
    assert go(out, "graph", "--rounds", "3", "--minutes", "60", "--limit-s", "100") == 0
    assert f"goes on with {sessions.session_name(session)}: 4 records are there" in capsys.readouterr().out
    assert seen == ["graph.r2", "eager.r2", "eager.r3", "graph.r3"]
    packed = only(out)
    assert packed == session.with_name(sessions.session_name(session))
    lines, fault = sessions.read_lines(packed / sessions.RECORDS)
    assert fault is None and {text.decode().rstrip("\n") for text in before.values()} <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["--steps", "70"], []),
        (["--host-load", "1"], []),
        (["--parity-steps", "9"], []),
        (["--control"], []),
        ([], ["--step-ms", "11"]),
        (["--variants", "graph,compile"], []),
        (["--label", "again"], []),
    ],
)
def test_another_request_begins_a_session_of_its_own(out, quick, monkeypatch, arguments, flags):
    session = half_way(out, monkeypatch, stop="graph.r1")
    before = ages(session)
    assert go(out, "graph", "--rounds", "1", *arguments, flags=flags) == 0
    assert ages(session) == before and sessions.is_open(session)
    other = next(path for path in sessions.find(out) if path != session)
    assert not sessions.is_open(other) and {"eager.r0", "eager.r1", "graph.r1"} <= set(names(other))
    # The first one is still there to go on with.
    assert go(out, "graph", "--rounds", "1") == 0
    assert len(sessions.find(out)) == 2 and not any(map(sessions.is_open, sessions.find(out)))


def test_a_changed_source_closes_the_session_in_words(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    monkeypatch.setattr(environment, "source_hash", lambda: "another source")
    assert go(out) == 0
    assert "closed " in (text := capsys.readouterr().out) and "the source has changed since; 4 records" in text
    closed = session.with_name(sessions.session_name(session))
    assert sessions.read_meta(closed)["closed"] == "the source has changed since" and not session.exists()
    assert names(closed) == of(["eager", "graph"], 1) and names(newest(out)) == EAGER_GRAPH
    assert newest(out) != closed


def test_after_a_day_a_session_is_closed_and_one_begun(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    begin = datetime.now(UTC) - timedelta(hours=23, minutes=59)
    change_meta(session, begin_utc=sessions.utc_text(begin))
    stop_at(monkeypatch, "graph.r2")
    assert go(out) == 130
    assert "goes on with" in capsys.readouterr().out
    change_meta(session, begin_utc=sessions.utc_text(begin - timedelta(minutes=2)))
    assert go(out) == 0
    assert "it began more than 24 hours ago; 4 records" in capsys.readouterr().out
    assert [sessions.read_meta(path)["closed"] for path in sessions.find(out)] == [
        "it began more than 24 hours ago",
        "complete",
    ]


def test_a_session_of_another_boot_or_gpu_stays_open_and_is_not_continued(out, quick, monkeypatch):
    session = half_way(out, monkeypatch)
    here = sessions.read_meta(session)["nodes"][0]
    for there in (here | {"boot_id": "another"}, here | {"gpu_uuids": ["GPU-9"]}, here | {"host": "other"}):
        change_meta(session, nodes=[there])
        before = ages(session)
        assert go(out) == 0
        assert ages(session) == before and sessions.is_open(session)
    # Old, and of another source: nothing of this boot may close it all the same.
    change_meta(session, begin_utc="2026-01-01T00:00:00Z", source={"source_hash": "x"})
    assert go(out) == 0
    assert ages(session) == before and len(sessions.find(out)) == 5


def test_other_versions_end_a_session(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    change_meta(session, versions=sessions.read_meta(session)["versions"] | {"torch": "1.0"})
    assert go(out) == 0
    assert "versions have changed since; 4 records" in capsys.readouterr().out
    assert len(sessions.find(out)) == 2


def test_an_open_session_without_a_record_is_removed_when_it_ends(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch, stop="eager.r0")
    monkeypatch.setattr(environment, "source_hash", lambda: "another source")
    assert go(out) == 0
    assert "removed " in capsys.readouterr().out and not session.exists()
    assert len(sessions.find(out)) == 1


def test_a_failed_run_is_made_anew_when_the_session_goes_on(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    record = records.read(session / "graph.r1.json")
    record.update(status="timeout", message="killed")
    records.write(session / "graph.r1.json", record)
    assert go(out) == 0
    assert "graph r1 is run anew: its status is timeout" in capsys.readouterr().out
    found = read(only(out))
    assert found["graph.r1"]["status"] == "pass"
    assert (found["graph.r1.t1"]["status"], found["graph.r1.t1"]["message"]) == ("timeout", "killed")


def test_without_eagers_sidecar_its_round_0_is_run_again(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch, stop="graph.r0")
    (session / ".partial" / "eager.r0.parity.npz").unlink()
    assert go(out) == 0
    assert "eager round 0 is run anew: the others need its parity sidecar" in capsys.readouterr().out
    assert names(only(out)) == sorted([*EAGER_GRAPH, "eager.r0.t1"])
    assert read(only(out))["graph.r0"]["numerics"]["parity"] == "bitwise"


def test_half_a_record_is_set_aside_and_its_run_made_again(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    half = (session / "graph.r1.json").read_text()[:500]
    (session / "graph.r1.json").write_text(half)
    assert go(out) == 0
    assert "set aside in damaged/: graph.r1.json: not a whole JSON document" in capsys.readouterr().out
    packed = only(out)
    assert names(packed) == EAGER_GRAPH
    (aside,) = (packed / "damaged").iterdir()
    assert aside.name == "graph.r1.json.0" and aside.read_text() == half


def test_what_contradicts_itself_stays_and_is_named(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    record = records.read(session / "graph.r1.json")
    record["statistic_ms"] *= 0.5
    records.write(session / "graph.r1.json", record)
    assert go(out) == 1
    text = capsys.readouterr().out
    assert "not sound: 1 left out (" in text and "does not follow from its steps" in text
    # It stays in its session, and no row is made of it.
    assert names(only(out)) == EAGER_GRAPH
    assert len(frame.read(only(out)).frame) == 5


def test_two_calls_of_one_request_do_not_meet(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    with sessions.lock(session):
        assert go(out) == 1
    error = capsys.readouterr().err
    assert f"in use by another run, process {os.getpid()}" in error and error.count("\n") == 1
    assert names(session) == of(["eager", "graph"], 1)


def test_packing_that_was_killed_before_the_rename_goes_on(out, quick, monkeypatch):
    session = half_way(out, monkeypatch)

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sessions.Path, "rename", killed)
        assert go(out) == 130
    assert session.is_dir() and len(names(session)) == 6 and only(out) == session
    assert session.with_name(f"{sessions.session_name(session)}{sessions.PACKING}").is_dir()
    seen = watched(monkeypatch)
    assert go(out) == 0
    assert seen == [] and names(only(out)) == EAGER_GRAPH and not list(out.rglob("*.open"))
    assert not list(out.rglob(f"*{sessions.PACKING}"))


def test_packing_that_was_killed_after_the_rename_is_cleaned_up(out, quick, monkeypatch):
    session = half_way(out, monkeypatch)

    def killed(path, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sessions.shutil, "rmtree", killed)
        assert go(out) == 130
    packed = session.with_name(sessions.session_name(session))
    assert session.is_dir() and only(out) == packed and names(packed) == EAGER_GRAPH
    # Readers see it once, and the next call removes what is left of it.
    assert len(frame.read(out).frame) == 6
    assert go(out, "compile", "--rounds", "1") == 0
    assert not session.exists() and names(packed) == EAGER_GRAPH


# A sweep, which calls the command, is ended by SIGTERM in test_sweep.
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_session_leaves_records_and_no_process(out, number, quick):
    process = command("--model", MODEL, "--variants", "graph,hang", "--rounds", "1", "--out", out)
    assert until(lambda: list(out.rglob("hang.r0.log")), 20)
    assert until(lambda: len(processes_with(f"{out}")) >= 4)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert until(lambda: processes_with(str(out)) == [])
    session = only(out)
    assert sessions.is_open(session) and names(session) == ["eager.r0", "graph.r0"]
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "the same command goes on" in stderr and "Traceback" not in stderr
    before = ages(session)
    # The run under way is lost and nothing else: the same request goes on.
    assert go(out, "graph,hang", "--rounds", "1", "--limit-s", "0.5") == 1
    assert names(only(out)) == ["eager.r0", "eager.r1", "graph.r0", "graph.r1", "hang.r0", "hang.r0.t1"]
    lines, _ = sessions.read_lines(only(out) / sessions.RECORDS)
    assert len(before) == 2 and len(lines) == 6


def test_a_disk_that_is_full_is_one_line_and_loses_one_run(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    real, full = records.write, []

    def write(path, record):
        if path.name == "graph.r2.json" and path.parent == session and not full:
            full.append(path)
            raise OSError(28, "No space left on device", str(path))
        real(path, record)

    monkeypatch.setattr(records, "write", write)
    assert go(out) == 2
    error = capsys.readouterr().err
    assert error == f"python -m benchmarks.run: {session}/graph.r2.json: No space left on device\n"
    assert names(session) == of(["eager", "graph"], 1)
    assert go(out) == 0
    assert names(only(out)) == EAGER_GRAPH


# ------------------------------------------------------------------------------------------------
# --close


def test_close_packs_the_open_session_of_this_kind_as_it_stands(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    half_way(out, monkeypatch, "--label", "other")
    other = only(out / "cpux1" / f"{MODEL}-tiny-other")
    capsys.readouterr()
    assert main(["--model", MODEL, "--out", out, "--close"]) == 0
    text = capsys.readouterr().out
    packed = session.with_name(sessions.session_name(session))
    assert text == f"closed {packed}: as it stands; 4 records\n"
    assert not session.exists() and names(packed) == of(["eager", "graph"], 1)
    assert sessions.read_meta(packed)["closed"] == "as it stands"
    assert sessions.is_open(other) and other.is_dir()
    assert "| graph |" in (packed.parent / "table.md").read_text()
    # What is closed is not gone on with.
    assert go(out) == 0
    assert len(sessions.find(packed.parent)) == 2 and names(packed) == of(["eager", "graph"], 1)


def test_close_by_name_closes_one_of_another_boot(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    change_meta(session, nodes=[{"boot_id": "another", "host": "there", "gpu_uuids": []}])
    assert main(["--model", MODEL, "--out", out, "--close"]) == 2
    error = capsys.readouterr().err
    assert "--close: no such open session; open: " in error and session.name in error and error.count("\n") == 1
    assert main(["--out", out, "--close", "--session", "20260101T000000Z-000000-cpu0"]) == 2
    assert main(["--out", out, "--close", "--session", sessions.session_name(session)]) == 0
    assert names(only(out)) == of(["eager", "graph"], 1) and not sessions.is_open(only(out))
    assert main(["--out", out, "--close", "--session", sessions.session_name(session)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--close: no such open session")


def test_close_takes_the_path_of_an_open_session_too(out, quick, monkeypatch):
    session = half_way(out, monkeypatch)
    assert main(["--out", out, "--close", "--session", session]) == 0
    assert not sessions.is_open(only(out))


def test_close_leaves_a_session_in_use_and_a_damaged_one(out, quick, monkeypatch, capsys):
    session = half_way(out, monkeypatch)
    with sessions.lock(session):
        assert main(["--model", MODEL, "--out", out, "--close"]) == 1
    assert "not closed: " in (text := capsys.readouterr().out) and "in use by another run" in text
    (session / "graph.r1.json").write_text("{half")
    assert main(["--model", MODEL, "--out", out, "--close"]) == 1
    assert "graph.r1.json: not a whole JSON document" in capsys.readouterr().out
    assert session.is_dir() and not session.with_name(sessions.session_name(session)).exists()
