"""How a training script is started: commands, mistakes, differences between nodes, and runs through a launcher.

The launchers are small scripts; two nodes are two torchrun agents on this machine.
"""

import argparse
import json
import re
import subprocess
import sys

import pytest

from graph_worth.folders import ROOT
from graph_worth.harness.processes import launch, supervisor
from tests.helpers.bench_process import bench, only_run, only_variants, only_verdicts
from tests.helpers.processes import TWO_NODES, free_ports, program


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """No GPU, and nothing that an outer torchrun or Slurm may have left."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NODE_RANK", launch.SOCKET_DIR):
        monkeypatch.delenv(name, raising=False)


def arguments(**values):
    given = {"nnodes": 1, "ngpu": 1, "out": None, "host_load": 0, **values}
    return argparse.Namespace(**dict.fromkeys(("launch", "rendezvous", "python")) | given)


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
    ("values", "expected"),
    [
        ({"nnodes": 2}, "--nnodes 2 needs --launch"),
        ({"launch": "'open"}, "--launch"),
        ({"launch": "no-such-command", "out": "x"}, "no command no-such-command"),
        ({"launch": "env"}, "--launch needs --out"),
        ({"nnodes": 2, "launch": "env", "out": "x", "host_load": 4}, "--host-load with --nnodes > 1"),
        ({"rendezvous": "n1"}, "--rendezvous is for several nodes"),
        ({"nnodes": 2, "launch": "env", "out": "x", "rendezvous": "n1"}, "not HOST:PORT"),
        ({"nnodes": 2, "launch": "env", "out": "x", "rendezvous": "n1:99999"}, "not HOST:PORT"),
    ],
)
def test_mistakes_name_the_flag(values, expected):
    with pytest.raises(ValueError, match=expected):
        launch.parse(arguments(**values))


# ------------------------------------------------------------------------------------------------
# The answers of the nodes


def ask(tmp_path, text):
    prefix = program(tmp_path / "launcher", text)
    return launch.machine(arguments(nnodes=2, launch=prefix, out=str(tmp_path / "out")))


def test_every_node_is_asked_and_nothing_is_left(tmp_path):
    seen = tmp_path / "seen"
    here = ask(tmp_path, TWO_NODES.replace('"$@"', f'bash -c \'echo "$0 $*" >>{seen}; exec "$0" "$@"\' "$@"'))
    assert here == launch.describe_here()
    assert seen.read_text().count("graph_worth.harness.processes.launch --answer") == 2
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
        (TWO_NODES.replace('"$@"', f'env -u {launch.SEEN} "$@"'), "does not pass the environment on"),
        # As a container does that mounts nothing.
        (TWO_NODES.replace('"$@"', f'env {launch.SEEN}=/none "$@"'), "node 0 .* does not see /none: GRAPH_SOCKET_DIR"),
    ],
)
def test_a_launcher_that_does_not_do_its_part(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(launch, "LATE_S", 0.3)
    with pytest.raises(launch.NodesDiffer, match=expected):
        ask(tmp_path, text)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "where", "value", "expected"),
    [
        (1, ("env", "source_hash"), "other", r"node 1 \(n1\): source_hash is other, on node 0 it is"),
        (1, ("gpus", "names"), ["NVIDIA A100"] * 8, "its GPUs are NVIDIA A100"),
        (1, ("gpus", "names"), ["NVIDIA H200"], "--ngpu 2: it shows 1"),
        # Rank 0 has to run where the command runs.
        (0, ("env", "boot_id"), "other", r"node 0 \(n0\): is another machine than this"),
        (1, ("env", "boot_id"), "other", None),
    ],
)
def test_nodes_that_differ_are_named(tmp_path, monkeypatch, rank, where, value, expected):
    first = launch.describe_here() | {"gpus": {"names": ["NVIDIA H200"] * 2, "uuids": []}, "seen": "/s", "sees": True}
    answers = [json.loads(json.dumps(first | {"name": name})) for name in ("n0", "n1")]
    answers[rank][where[0]][where[1]] = value

    def answer(command, log, limit_s, environment):
        for each, text in enumerate(answers):
            (log.parent / f"{each}.json").write_text(json.dumps(text))
        log.touch()
        return 0

    monkeypatch.setattr(supervisor, "run_logged", answer)
    asked = arguments(nnodes=2, ngpu=2, launch="env", out=str(tmp_path))
    if expected is None:
        launch.machine(asked)
        return
    with pytest.raises(launch.NodesDiffer, match=expected):
        launch.machine(asked)


# ------------------------------------------------------------------------------------------------
# benchmarks.run through a launcher


def two_nodes(tmp_path):
    prefix = program(tmp_path / "launcher", TWO_NODES)
    return ["--nnodes", "2", "--launch", prefix, "--rendezvous", f"127.0.0.1:{free_ports(1)[0]}"]


def test_a_folder_that_takes_no_socket_is_one_line(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    done = bench(tmp_path / "out", ["graph_step"], **{launch.SOCKET_DIR: str(long)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{launch.SOCKET_DIR}: no socket in {long}" in done.stderr and not list(long.iterdir())


@pytest.mark.slow
def test_a_launcher_of_one_node_measures_and_the_socket_lies_where_it_is_told(tmp_path):
    seen, sockets = tmp_path / "seen", tmp_path / "sockets"
    sockets.mkdir()
    prefix = program(tmp_path / "launcher", f'#!/bin/bash\necho "$*" >>{seen}\nexec "$@"\n')
    more = ["--cycles", 1, "--no-control", "--launch", prefix]
    done = bench(tmp_path / "out", ["graph_step"], *more, **{launch.SOCKET_DIR: str(sockets)})
    assert done.returncode == 0, done.stdout + done.stderr
    asked, *workers = seen.read_text().splitlines()
    assert "--answer" in asked and workers
    assert all(re.search(f"--worker {sockets}/worker-[^/]+/s$", line) for line in workers)
    assert not list(sockets.iterdir()) and only_variants(tmp_path / "out")["graph_step"].blocks


# Each rank runs it first, as sitecustomize, and says who it is.
WITNESS = """
import os
if "GROUP_RANK" in os.environ:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NODE_RANK")
    with open({folder!r} + "/" + os.environ["RANK"] + "." + str(os.getpid()), "w") as file:
        file.write(" ".join(os.environ[name] for name in names))
"""


@pytest.mark.slow
def test_two_agents_train_gpt3_together_and_make_one_run(tmp_path):
    for name in ("site", "seen"):
        (tmp_path / name).mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITNESS.format(folder=str(tmp_path / "seen")))
    nodes = two_nodes(tmp_path)
    more = {"model": "gpt3", "PYTHONPATH": str(tmp_path / "site")}
    done = bench(tmp_path / "out", ["graph_layer"], "--cycles", 1, "--no-control", *nodes, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "out").glob("cpux2/*/*.json")) and only_run(tmp_path / "out").ranks == 2
    verdict = only_verdicts(tmp_path / "out")["graph_layer"]
    assert (verdict.status, verdict.parity, verdict.after) == ("pass", "bitwise", "bitwise")
    assert len(only_variants(tmp_path / "out")["graph_layer"].blocks) == 1
    # Each node has one rank, and node 0 has rank 0.
    seen = [path.read_text().split() for path in (tmp_path / "seen").iterdir() if path.name[0].isdigit()]
    port = nodes[-1].rpartition(":")[2]
    ranks = sorted({tuple(words) for words in seen})
    assert ranks == [(str(rank), "0", "2", str(rank), "127.0.0.1", port, str(rank)) for rank in (0, 1)]


@pytest.mark.slow
def test_an_agent_that_fails_is_named(tmp_path):
    nodes = two_nodes(tmp_path)
    done = bench(tmp_path / "out", ["graph_step"], "--cycles", 1, *nodes, flags=["--die-rank", "1"])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"(eager|graph_step): failed \(.*\)", done.stdout), done.stdout


def test_the_command_imports_no_torch_and_no_pandas():
    code = "import sys; from graph_worth.harness import run; print({'torch', 'pandas'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"
