"""How a training script is started: commands, mistakes, and what nodes must agree on. The launchers are small scripts.

pytest tests/test_launch.py
"""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks import ROOT, children, launch, run, sessions, supervisor
from tests.harness import TWO_NODES, go, only, processes_with, read, stop_at, until

pytest_plugins = ["tests.machines"]
pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def launcher(tmp_path):
    def make(text=TWO_NODES, name="launcher"):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    return make


def arguments(**values):
    given = {"nnodes": 1, "ngpu": 1, "launch": None, "rendezvous": None, "out": None, "host_load": 0, **values}
    return argparse.Namespace(**given)


# ------------------------------------------------------------------------------------------------
# Commands


def test_several_nodes_go_through_the_launcher():
    launched = launch.parse(arguments(nnodes=2, ngpu=4, launch="env 'A=two words'", rendezvous="n1:1234", out="x"))
    command = launched.command(["-m", "x"])
    assert command[:3] == ["env", "A=two words", sys.executable] and command[-2:] == ["-m", "x"]
    assert {"torch.distributed.run", "n1", "1234"} <= set(command) and launched.world_size == 8
    # One rank needs no torchrun.
    assert launch.parse(arguments()).command(["-m", "x"]) == [sys.executable, "-m", "x"]


@pytest.mark.parametrize(
    ("text", "endpoint"), [(None, None), ("n1", ("n1", 29500)), ("n1:5", ("n1", 5)), ("::1:5", ("::1", 5))]
)
def test_where_node_0_listens(text, endpoint):
    host, port = launch.parse(arguments(nnodes=2, launch="env", rendezvous=text, out="x")).rendezvous
    assert (host, port) == endpoint if endpoint else (host and port == launch.PORT)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"nnodes": 2}, "--nnodes 2 needs --launch"),
        ({"launch": " "}, "--launch is empty"),
        ({"launch": "'open"}, "--launch"),
        ({"launch": "no-such-command", "out": "x"}, "no command no-such-command"),
        ({"launch": "env"}, "--launch needs --out"),
        ({"nnodes": 2, "launch": "env", "out": "x", "host_load": 4}, "--host-load with --nnodes > 1"),
        ({"rendezvous": "n1"}, "--rendezvous is for several nodes"),
        ({"nnodes": 2, "launch": "env", "out": "x", "rendezvous": "n1:port"}, "not HOST or HOST:PORT"),
        ({"nnodes": 2, "launch": "env", "out": "x", "rendezvous": ":80"}, "not HOST or HOST:PORT"),
        ({"nnodes": 2, "launch": "env", "out": "x", "rendezvous": "n1:99999"}, "not HOST or HOST:PORT"),
    ],
)
def test_mistakes_name_the_flag(values, expected):
    with pytest.raises(ValueError, match=expected):
        launch.parse(arguments(**values))


def test_the_command_says_a_mistake_in_one_line(tmp_path, capsys):
    assert go(tmp_path / "out", "graph", "--nnodes", "2") == 2
    assert capsys.readouterr().err == (
        "python -m benchmarks.run: --nnodes 2 needs --launch, a command that starts another on every node\n"
    )


# ------------------------------------------------------------------------------------------------
# What the nodes answer


def ask(tmp_path, prefix, nnodes=2, **more):
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **more}
    asked = arguments(nnodes=nnodes, launch=prefix, out="x")
    return launch.ask_nodes(launch.parse(asked), tmp_path / "out", environment)


def test_every_node_answers_and_nothing_is_left(tmp_path, launcher):
    answers = ask(tmp_path, launcher())
    assert len(answers) == 2 and answers[0]["env"]["source_hash"] == answers[1]["env"]["source_hash"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # One node only; two that are both the first; none.
        ('#!/bin/bash\n"$@"\n', "reached 1 of 2 nodes .* missing: 1"),
        ('#!/bin/bash\n"$@"; "$@"\n', "reached 1 of 2 nodes .* PET_NODE_RANK"),
        ("#!/bin/bash\necho the cluster is closed; exit 3\n", "0 of 2 .*exit status 3.* the cluster is closed"),
        ('#!/bin/bash\nPET_NODE_RANK=first "$@"\n', "PET_NODE_RANK is 'first'"),
        # As ssh does.
        (TWO_NODES.replace('"$@"', 'env -u CUBLAS_WORKSPACE_CONFIG "$@"'), "does not pass the environment on"),
    ],
)
def test_a_launcher_that_does_not_do_its_part(tmp_path, launcher, monkeypatch, text, expected):
    monkeypatch.setattr(launch, "LATE_S", 0.3)
    with pytest.raises(launch.NodesDiffer, match=expected):
        ask(tmp_path, launcher(text))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        (("env", "source_hash"), "other", r"node 1 \(n1\): source_hash is other, on node 0 it is"),
        (("env", "torch"), "2.1", "torch is 2.1"),
        (("env", "driver"), "550", "driver is 550"),
        (("gpus", "names"), ["NVIDIA A100"] * 8, "its GPUs are NVIDIA A100"),
        (("gpus", "names"), ["NVIDIA H200"], "--ngpu 2: it shows 1"),
    ],
)
def test_nodes_that_differ_are_named(tmp_path, monkeypatch, where, value, expected):
    first = launch.describe_here() | {"name": "n0", "gpus": {"names": ["NVIDIA H200"] * 2, "uuids": []}}
    second = json.loads(json.dumps(first | {"name": "n1"}))
    second[where[0]][where[1]] = value

    def answer(command, **more):
        folder = more["log"].parent
        for rank, text in enumerate((first, second)):
            (folder / f"{rank}.json").write_text(json.dumps(text))
        return children.Outcome(0, False, 0.1)

    monkeypatch.setattr(children, "run_child", answer)
    launched = launch.Launch(nnodes=2, ngpu=2, prefix=("env",))
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    first["env"]["variables"].pop("CUBLAS_WORKSPACE_CONFIG", None)
    with pytest.raises(launch.NodesDiffer, match=expected):
        launch.ask_nodes(launched, tmp_path, environment)


def test_nodes_that_differ_end_the_command_with_1(tmp_path, launcher, monkeypatch, capsys):
    monkeypatch.setattr(launch, "LATE_S", 0.3)
    one = launcher('#!/bin/bash\n"$@"\n')
    assert go(tmp_path / "out", "graph", "--nnodes", "2", "--launch", one) == 1
    said = capsys.readouterr().err
    assert "reached 1 of 2 nodes" in said and said.count("\n") == 1
    assert sessions.find(tmp_path / "out") == []


# ------------------------------------------------------------------------------------------------
# Sessions through a launcher


def test_a_launcher_of_one_node_measures(tmp_path, launcher):
    seen = tmp_path / "seen"
    prefix = launcher(f'#!/bin/bash\necho "$*" >>{seen}\nexec "$@"\n')
    assert go(tmp_path / "out", "graph", "--rounds", "1", "--launch", prefix) == 0
    # The question and five runs, eager's second among them.
    assert len(seen.read_text().splitlines()) == 6
    assert read(only(tmp_path / "out"))["graph.r1"]["status"] == "pass"


def test_ranks_that_were_not_asked_for_fail_the_record(tmp_path, monkeypatch):
    def alone(launched, script):
        return [sys.executable, *script]

    monkeypatch.setattr(launch.Launch, "command", alone)
    assert go(tmp_path / "out", "eager", "--rounds", "1", "--ngpu", "2") == 1
    record = read(only(tmp_path / "out"))["eager.r0"]
    assert record["status"] == "failed"
    assert record["message"] == "world size 1, --nnodes 1 --ngpu 2 asks for 2"


def two_nodes(monkeypatch, *hosts):
    """A launcher of two nodes by these names, each of one boot; their runs are this process's own."""
    here = launch.describe_here()
    answers = [
        here | {"name": host, "env": here["env"] | {"host": host, "boot_id": f"{rank}{host}"}}
        for rank, host in enumerate(hosts)
    ]
    monkeypatch.setattr(launch, "ask_nodes", lambda *_: answers)
    monkeypatch.setattr(launch.Launch, "command", lambda launched, script: [sys.executable, *script])
    return ["--nnodes", "2", "--launch", "env"]


def test_a_session_of_several_nodes_is_of_all_of_them(tmp_path, quick, monkeypatch):
    """Another second node, or the nodes in another order, is another session; it has the first node's name."""
    out = tmp_path / "out"
    more = [*two_nodes(monkeypatch, "a", "b"), "--rounds", "1"]
    # The fake says that it is alone, so that all fail: what counts here is which session they are in.
    stop_at(monkeypatch, "graph.r0")
    assert go(out, "graph", *more) == 130
    session = only(out)
    assert session.parent.parent.name == "cpux2" and "-0a" in session.name
    assert [node["boot_id"] for node in sessions.read_meta(session)["nodes"]] == ["0a", "1b"]
    assert sessions.read_meta(session)["request"]["num_nodes"] == 2
    for hosts in (("a", "c"), ("b", "a")):
        two_nodes(monkeypatch, *hosts)
        assert go(out, "graph", *more) == 1
    assert len(sessions.find(out)) == 3 and session.is_dir()
    two_nodes(monkeypatch, "a", "b")
    assert go(out, "graph", *more) == 1
    assert len(sessions.find(out)) == 3 and not session.exists()


# Ends a process that is not its own on SIGTERM, as srun ends tasks of other machines.
ENDS_FAR = """
import os, signal, sys, time
far, ready = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: (os.kill(int(far), signal.SIGKILL), sys.exit(0)))
open(ready, "w").close()
time.sleep(600)
"""
RUN_CHILD = """
import os, sys
from pathlib import Path
from benchmarks import children
log, limit_s, *command = sys.argv[1:]
out = children.run_child(
    command, log=Path(log), limit_s=float(limit_s), environment=dict(os.environ), is_remote=True
)
sys.exit(9 if out.timed_out else 8)
"""


@pytest.mark.parametrize(
    ("how", "status"), [("limit", 9), ("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL), ("kill between", 8)]
)
def test_a_launcher_is_asked_to_end_what_it_has_elsewhere(tmp_path, how, status):
    ready, log = tmp_path / "ready", tmp_path / "log"
    far = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    command = [sys.executable, "-c", ENDS_FAR, str(far.pid), str(ready)]
    limit_s = "3" if how == "limit" else "600"
    process = subprocess.Popen([sys.executable, "-c", RUN_CHILD, str(log), limit_s, *command], cwd=ROOT)
    try:
        assert until(ready.exists, 20) and far.poll() is None
        if how in ("terminate", "kill"):
            process.send_signal(-status)
        if how == "kill between":
            family = supervisor.descendants(process.pid)
            (between,) = [pid for pid in processes_with("benchmarks.supervisor") if pid in family]
            os.kill(between, signal.SIGKILL)
        assert process.wait(30) == status
        assert until(lambda: far.poll() is not None), "the far process is left over"
        assert until(lambda: not processes_with(str(ready)))
    finally:
        far.kill()
        far.wait()
        for pid in processes_with(str(ready)):
            os.kill(pid, signal.SIGKILL)


def test_the_launching_part_needs_no_torch():
    code = "import sys; from benchmarks import launch, run; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
    assert "--nnodes" in subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--help"], cwd=ROOT, capture_output=True, text=True
    ).stdout and callable(run.main)
