"""The command against a fake model: runs made once more, cores, probes, controls, and who else is here."""

import os
import subprocess
import sys

import pytest

from benchmarks import ROOT, compare, frame, locks, sessions
from common import host_state
from tests import forked
from tests.harness import (
    ON_GPU,
    change_meta,
    edited,
    go,
    names,
    newest,
    of,
    only,
    read,
    scale,
    stop_at,
    watched,
)

pytest_plugins = ["tests.machines"]
pytestmark = pytest.mark.usefixtures("no_gpu")
EAGER_GRAPH = of(["eager", "graph"], 2)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


# ------------------------------------------------------------------------------------------------
# Attempts: what did not settle


def unsettled(*which):
    """For `edited`: these runs did not settle; attempts differ a little, as runs do."""

    def edit(name, record):
        if record["round"]:
            record["conditions"]["settled"] = name not in which
            if ".a2" in name:
                scale(record, 1.001)

    return edit


BENCH = ("--preset", "bench", "--rounds", "2")


def test_what_did_not_settle_is_repeated_once_with_eager_beside_it(out, gpu, quick, monkeypatch, capsys):
    seen = edited(monkeypatch, unsettled("graph.r1", "shifted.r2", "shifted.r2.a2"))
    go(out, "graph,shifted", *BENCH, flags=ON_GPU)
    timed = [name for name in seen if ".r0" not in name]
    assert timed[:5] == ["eager.r1", "shifted.r1", "graph.r1", "eager.r1.a2", "graph.r1.a2"]
    assert timed[5:] == ["graph.r2", "shifted.r2", "eager.r2", "shifted.r2.a2", "eager.r2.a2"]
    found = read(only(out))
    assert [found[name]["attempt"] for name in ("graph.r1", "graph.r1.a2", "eager.r1.a2")] == [1, 2, 2]
    text = capsys.readouterr().out
    assert "not settled again, it stands" in text and text.count("not settled") >= 2
    # Both attempts are runs of the session, and equal attempts are pairs.
    runs = frame.read(out).frame
    assert set(runs[(runs["variant"] == "eager") & (runs["round"] == 1)]["attempt"]) == {1, 2}


def test_where_eager_did_not_settle_all_are_repeated(out, gpu, quick, monkeypatch):
    seen = edited(monkeypatch, unsettled("eager.r2"))
    assert go(out, "graph,compile", *BENCH, flags=ON_GPU) == 0
    assert [name for name in seen if ".a2" in name] == ["compile.r2.a2", "graph.r2.a2", "eager.r2.a2"]


@pytest.mark.parametrize("shares", [(0.96, 0.8), (0.78, 0.72)], ids=["steady host", "host that became slower"])
def test_a_step_that_waits_for_its_host_is_not_repeated(out, gpu, quick, monkeypatch, capsys, shares):
    unsettle = unsettled("eager.r1", "eager.r2", "graph.r2")

    def edit(name, record):
        unsettle(name, record)
        if record["round"]:
            # Shares of the step. In round 2 the GPU has hardly a gap: as RNN-T's did not settle, and then did.
            issue, busy = {"eager.r1": shares, "eager.r2": (1.1, 0.94)}.get(name, (0.1, 0.5))
            record["issue_ms"], record["busy_ms"] = (each * record["statistic_ms"] for each in (issue, busy))
            record["idle_fraction"] = 1 - busy

    seen = edited(monkeypatch, edit)
    assert go(out, "graph", *BENCH, flags=ON_GPU) == 0
    assert [name for name in seen if ".a2" in name] == ["graph.r2.a2", "eager.r2.a2"]
    assert capsys.readouterr().out.count("not settled, it waits for its host") == 1


def test_tiny_repeats_nothing(out, quick, monkeypatch):
    seen = edited(monkeypatch, unsettled("eager.r1", "graph.r1"))
    assert go(out, "graph") == 0
    assert not any(".a2" in name for name in seen)


def test_a_second_attempt_that_was_stopped_is_made_by_the_next_call(out, gpu, quick, monkeypatch):
    seen = edited(monkeypatch, unsettled("graph.r1"))
    stop_at(monkeypatch, "graph.r1.a2")
    assert go(out, "graph", *BENCH, flags=ON_GPU) == 130
    assert "eager.r1.a2" in names(only(out)) and "graph.r1.a2" not in names(only(out))
    assert go(out, "graph", *BENCH, flags=ON_GPU) == 0
    assert names(only(out)) == sorted([*of(["eager", "graph"], 2), "eager.r1.a2", "graph.r1.a2"])
    assert len(seen) == len(set(seen)), "a run was made twice"


# ------------------------------------------------------------------------------------------------
# Conditions: cores, probes, control, who else is here


def test_all_runs_of_a_session_have_the_same_cores(out, quick, monkeypatch):
    mine = sorted(os.sched_getaffinity(0))
    cores, seen = mine[:1], []
    monkeypatch.setattr(host_state, "cores_of", lambda uuids: (cores, 0))
    watched(monkeypatch, lambda name, words: seen.append(os.sched_getaffinity(0)))
    stop_at(monkeypatch, "graph.r1")
    assert go(out) == 130
    assert os.sched_getaffinity(0) == set(mine), "the command leaves the cores as they were"
    # Whatever is free later: the session keeps its own.
    cores = mine[-1:]
    assert go(out) == 0
    assert len(seen) == 7 and all(each == set(mine[:1]) for each in seen)
    assert sessions.read_meta(only(out))["cores"] == mine[:1]
    assert {record["conditions"]["numa_node"] for record in read(only(out)).values()} == {0}


def test_a_session_whose_cores_are_gone_is_not_continued(out, quick, monkeypatch):
    stop_at(monkeypatch, "graph.r1")
    assert go(out) == 130
    change_meta(only(out), cores=[*sorted(os.sched_getaffinity(0)), 4000])
    assert go(out) == 0
    assert len(sessions.find(out)) == 2


def test_a_probe_stands_at_both_ends_of_a_session(out, quick, monkeypatch):
    """The probe itself, on the CPU, for a moment."""
    real = subprocess.run

    def shorter(command, **more):
        if "common.probe" in command:
            return forked.run("common.probe", ["--seconds", "0.01"], os.environ, more["timeout"])
        return real(command, **more)

    monkeypatch.setattr(subprocess, "run", shorter)
    assert go(out, "graph", "--rounds", "1", "--probe") == 0
    first, last = sessions.read_meta(only(out))["probes"]
    assert (first["at"], last["at"]) == ("begin", "end") and first["utc"] <= last["utc"]
    for each in (first, last):
        assert 0.01 < each["us_per_operator"] < 1e5 and each["us_per_launch"] is None and "fault" not in each
    asked = {record["conditions"]["us_per_operator"] for record in read(only(out)).values()}
    assert asked == {first["us_per_operator"]}


def test_on_a_gpu_the_host_is_probed_and_a_session_that_goes_on_is_not_probed_again(out, gpu, quick, monkeypatch):
    stop_at(monkeypatch, "graph.r1")
    assert go(out, "graph", *BENCH, flags=ON_GPU) == 130
    assert [probe["at"] for probe in sessions.read_meta(only(out))["probes"]] == ["begin"]
    assert go(out, "graph", *BENCH, flags=ON_GPU) == 0
    assert [probe["at"] for probe in sessions.read_meta(only(out))["probes"]] == ["begin", "end"]
    record = read(only(out))["graph.r2"]
    assert (record["conditions"]["us_per_operator"], record["conditions"]["us_per_launch"]) == (3.5, 2.0)


def test_a_probe_that_fails_is_said_and_the_session_goes_on(out, quick, monkeypatch, capsys):
    def failing(command, **more):
        if "common.probe" in command:
            raise subprocess.CalledProcessError(3, command)
        return real(command, **more)

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", failing)
    assert go(out, "graph", "--rounds", "1", "--probe") == 0
    assert capsys.readouterr().out.count("no probe of the host: ") == 2
    assert all("exit status 3" in probe["fault"] for probe in sessions.read_meta(only(out))["probes"])


def test_control_is_eager_once_more_and_no_base(out, gpu, quick, monkeypatch):
    def faster(name, record):
        # It may well be faster: it is what equal runs differ by.
        if name.startswith("control"):
            scale(record, 0.97)

    seen = edited(monkeypatch, faster)
    argv = ["--preset", "bench", "--rounds", "3", "--control"]
    assert go(out, "graph", *argv, flags=ON_GPU) == 0
    found = read(only(out))
    assert sorted(found) == sorted([*of(["eager", "graph"], 3), *of(["control"], 3, 1)])
    assert {seen.count(f"control.r{number}") for number in (1, 2, 3)} == {1} and "control.r0" not in seen
    record = found["control.r1"]
    assert (record["variant"], record["extra"]["kind"], record["status"]) == ("control", "control", "pass")
    assert record["capture"]["num_graphs"] == 0 and "--variant" in record["argv"]
    assert record["argv"][record["argv"].index("--variant") + 1] == "eager"
    rows = {row["variant"]: row for row in compare.summarise(frame.read(out).frame)}
    assert rows["graph"]["base"] == rows["control"]["base"] == "eager"
    assert rows["control"]["speedup"] == pytest.approx(1 / 0.97, rel=0.01)
    # Another request: without it, a session of its own.
    assert go(out, "graph", *argv[:-1], flags=ON_GPU) == 0
    assert len(sessions.find(out)) == 2


def test_a_gpu_that_somebody_measures_on_is_refused_by_name(out, gpu, quick, capsys):
    with locks.gpu_locks(["GPU-0"], "rnnt/bench"):
        assert go(out, "graph", flags=ON_GPU) == 1
    error = capsys.readouterr().err
    assert f"GPU-0 is in use by rnnt/bench on GPU-0, process {os.getpid()}" in error and error.count("\n") == 1
    assert not out.exists()
    assert go(out, "graph", "--rounds", "1", flags=ON_GPU) == 0


HOLDER = """
import sys
from benchmarks.locks import gpu_locks
with gpu_locks((), "rnnt/tiny"):
    print(flush=True)
    sys.stdin.read()
"""


def test_on_the_cpu_others_are_named_and_nobody_is_refused(out, quick, capsys):
    other = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        assert go(out, "graph", "--rounds", "1") == 0
    finally:
        other.communicate()
    text = f"rnnt/tiny on the CPU, process {other.pid}"
    assert f"beside   {text}" in capsys.readouterr().out
    assert [record["conditions"]["other_sessions"] for record in read(only(out)).values()] == [[text]] * 4
    assert go(out, "graph", "--rounds", "1") == 0
    assert read(newest(out))["graph.r1"]["conditions"]["other_sessions"] == []


def test_a_folder_of_locks_that_cannot_be_is_one_line(out, quick, monkeypatch, capsys):
    monkeypatch.setenv("GRAPH_LOCK_DIR", "/dev/null/x")
    assert go(out) == 2
    error = capsys.readouterr().err
    assert "GRAPH_LOCK_DIR" in error and error.count("\n") == 1 and not out.exists()
