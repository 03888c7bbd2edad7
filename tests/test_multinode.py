"""Several nodes, as two torchrun agents on the loopback that a small script starts: rendezvous, ranks, one record.

pytest tests/test_multinode.py
"""

import os

import pytest

from common import record as records
from tests import forked
from tests.harness import TWO_NODES, go, names, only, read
from tests.slurm_cluster import free_ports

pytest_plugins = ["tests.machines"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gpu")]

# Says who it is, then is gpt3.
WITNESS = """
import os, runpy, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NODE_RANK")
with open({folder!r} + "/" + os.environ["RANK"] + "." + str(os.getpid()), "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
"""


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """Arguments for benchmarks.run; OMP_NUM_THREADS as conftest has it."""
    path = tmp_path / "launcher"
    path.write_text(TWO_NODES)
    path.chmod(0o755)
    # What an outer torchrun or Slurm may have left.
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return ["--nnodes", "2", "--launch", str(path), "--rendezvous", f"127.0.0.1:{free_ports(1)[0]}"]


def test_two_agents_train_gpt3_together_and_leave_one_record_a_run(tmp_path, two_nodes, monkeypatch):
    out = tmp_path / "out"
    # sitecustomize is the first thing that each rank runs.
    (tmp_path / "site").mkdir()
    (tmp_path / "seen").mkdir()
    text = "import os\nif 'GROUP_RANK' in os.environ:\n" + WITNESS.format(folder=str(tmp_path / "seen"))
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "\n".join(line if number < 2 else f"    {line}" for number, line in enumerate(text.splitlines()))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert go(out, "graph", "--preset", "tiny", "--rounds", "1", *two_nodes, model="gpt3") == 0
    found = read(only(out))
    assert names(only(out)) == ["eager.r0", "eager.r1", "graph.r0", "graph.r1"]
    for record in found.values():
        assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise")
        assert record["env"]["world_size"] == 2
    assert found["graph.r1"]["rank_skew_ms"] is not None
    # Two ranks a run, each alone on its node, and rank 0 on node 0 in every run.
    seen = [path.read_text().split() for path in (tmp_path / "seen").iterdir() if path.name[0].isdigit()]
    port = two_nodes[-1].rpartition(":")[2]
    ranks = sorted({tuple(words) for words in seen})
    assert ranks == [(str(rank), "0", "2", str(rank), "127.0.0.1", port, str(rank)) for rank in (0, 1)]
    # One rank's losses differ from two ranks': they train on other batches and average.
    path = tmp_path / "one.json"
    flags = ["--preset", "tiny", "--parity", "--parity-steps", "6", "--record", str(path)]
    assert forked.run("gpt3.train", flags, os.environ, timeout_s=120).returncode == 0
    assert records.read(path)["numerics"]["loss"][5] != found["eager.r0"]["numerics"]["loss"][5]


def test_an_agent_that_fails_is_a_failed_record_with_its_reason(tmp_path, two_nodes, capsys):
    assert go(tmp_path / "out", "crash", "--rounds", "1", *two_nodes) == 1
    # The fake model says that it is alone, so that its eager record is refused too.
    session = only(tmp_path / "out")
    assert "exit status 1" in read(session)["crash.r0"]["message"]
    assert "the fake model crashes" in (session / "logs" / "crash.r0.log").read_text()
    assert read(session)["eager.r0"]["message"] == "world size 1, --nnodes 2 --ngpu 1 asks for 2"


def test_a_port_that_is_taken_is_named(tmp_path, two_nodes):
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        two_nodes[-1] = f"127.0.0.1:{taken.getsockname()[1]}"
        assert go(tmp_path / "out", "eager", "--rounds", "1", "--limit-s", "30", *two_nodes) == 1
    assert "in use" in (only(tmp_path / "out") / "logs" / "eager.r0.log").read_text()
