"""benchmarks/slurm/bench.sbatch and node.sh: how they start runs, with a recording srun and interpreter."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from graph_worth.folders import ROOT
from tests.helpers.processes import program
from tests.helpers.slurm_shims import shims

SCRIPTS = ROOT / "benchmarks" / "slurm"
# What benchmarks.run is called with, and where its worker's socket would be.
PYTHON_SHIM = """#!/bin/bash
[ "$2" = benchmarks.slurm.progress ] || printf "%s\\n" "$@" >"$LOG/python"
[ -z "${GRAPH_SOCKET_DIR:-}" ] || stat -c "%n %a" "$GRAPH_SOCKET_DIR" >"$LOG/sockets"
"""


@pytest.fixture
def batch(tmp_path, monkeypatch):
    """Runs bench.sbatch as one task of a job; returns (result, words that reach Python, srun's calls)."""
    shim = shims(tmp_path / "bin", monkeypatch, "srun", "scontrol")
    python = program(shim.folder / "python-shim", PYTHON_SHIM)

    def run(*words, **settings):
        environment = {
            "PATH": os.environ["PATH"],
            "LOG": str(shim.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "PYTHON": python,
            "RUNS": f"{tmp_path}/out-{{}}",
            **settings,
        }
        result = subprocess.run(
            ["bash", SCRIPTS / "bench.sbatch", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        path = shim.folder / "python"
        return result, path.read_text().splitlines() if path.exists() else [], [c for c, _ in shim.calls("srun")]

    return run


WORDS = ["benchmarks.run", "a", "b", "--", "--model", "{}", "--out", "x/{}", "--", "--text", "two words"]


def test_one_node_without_image_needs_no_srun(batch, tmp_path):
    result, words, sruns = batch(*WORDS, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="1", NGPU="4")
    assert result.returncode == 0, result.stderr
    assert " ".join(words[:-1]) == "-m benchmarks.run --ngpu 4 --model b --out x/b -- --text"
    assert words[-1] == "two words"
    assert sruns == []
    assert (tmp_path / "out-b" / "logs" / "job-5.status").read_text() == "0\n"


def test_several_nodes_go_through_srun(batch):
    _, words, sruns = batch(*WORDS, SLURM_JOB_NUM_NODES="2", MASTER_ADDR="n1", MASTER_PORT="1234")
    launch = shlex.split(words[words.index("--launch") + 1])
    assert words[2:4] == ["--nnodes", "2"] and words[words.index("--rendezvous") + 1] == "n1:1234"
    assert launch[0] == "srun" and launch[-1] == "benchmarks/slurm/node.sh" and "--ntasks-per-node=1" in launch
    assert "--kill-on-bad-exit=1" in launch and not any("container" in word for word in launch)
    assert sruns == []


def test_an_image_is_had_once_and_used_by_name(batch, tmp_path):
    result, words, sruns = batch(*WORDS, IMAGE="some#image", MOUNTS="/data:/data:ro", GRAPH_SOCKET_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    made, first, removed, last = sruns
    assert "--container-image=some#image" in first and "--container-name=bench-7" in first and first[-1] == "true"
    launch = shlex.split(words[words.index("--launch") + 1])
    assert "--container-name=bench-7" in launch and not any("container-image" in word for word in launch)
    # The socket of this node is seen inside, and its folder is there on every node while the job lasts.
    sockets, mode = (tmp_path / "bin" / "sockets").read_text().split()
    assert sockets.startswith(f"{tmp_path}/bench-") and mode == "700"
    assert f"--container-mounts={ROOT}:{ROOT},{sockets}:{sockets},/data:/data:ro" in launch
    assert made[-3:] == ["mkdir", "-p", sockets] and removed[-3:] == ["rm", "-rf", sockets]
    # Of one node too, and the container goes when the job does.
    assert words[2:4] == ["--nnodes", "1"] and "--rendezvous" not in words
    assert "enroot remove" in " ".join(last)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: is not set"),
        ({"RUNS": ""}, "RUNS: is not set"),
        ({"PYTHON": "/no/python"}, "no interpreter /no/python"),
        ({"SLURM_ARRAY_TASK_ID": "2"}, "no item for array task 2: there are 2"),
    ],
)
def test_settings_that_are_missing_are_named(batch, change, expected):
    result, words, _ = batch(*WORDS, **change)
    assert result.returncode != 0 and expected in result.stderr and words == []


def test_a_folder_for_sockets_that_cannot_be_is_named(batch):
    result, words, _ = batch(*WORDS, IMAGE="some#image", GRAPH_SOCKET_DIR="/no/folder")
    assert result.returncode == 2 and "GRAPH_SOCKET_DIR: cannot write there" in result.stderr and words == []


def test_a_failing_command_is_the_jobs_status(batch, tmp_path):
    (tmp_path / "bin" / "python-shim").write_text('#!/bin/bash\n[ "$2" = benchmarks.slurm.progress ] || exit 7\n')
    result, _, _ = batch(*WORDS)
    assert result.returncode == 7 and (tmp_path / "out-a" / "logs" / "job-7.status").read_text() == "7\n"


def test_node_sh_sets_the_rank_and_takes_another_interpreter(tmp_path):
    node = [SCRIPTS / "node.sh", sys.executable, "-c", "import os; print(os.environ['PET_NODE_RANK'], os.getcwd())"]
    environment = {"PATH": os.environ["PATH"], "SLURM_NODEID": "3"}
    answer = subprocess.run(node, env=environment, cwd="/", capture_output=True, text=True)
    assert answer.stdout == f"3 {ROOT}\n"
    answer = subprocess.run(node, env={**environment, "NODE_PYTHON": "echo"}, capture_output=True, text=True)
    assert answer.stdout.startswith("-c import os")
    answer = subprocess.run(node, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert answer.returncode != 0 and "SLURM_NODEID" in answer.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck on PATH")
def test_scripts_pass_shellcheck():
    paths = [*SCRIPTS.glob("*.sbatch"), *SCRIPTS.glob("*.sh"), ROOT / ".ci" / "run", ROOT / "setup.sh"]
    answer = subprocess.run(["shellcheck", *paths], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout
