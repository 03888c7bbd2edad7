"""common/agreement and the record of several ranks: a rank that fails ends all of them, and the record says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import trust
from common import record as records
from common.agreement import Agreement, RankFault
from tests.rank_job import KINDS, PHASES

ROOT = Path(__file__).resolve().parent.parent
STALL_S = 20
SAID = {
    "killed": ("failed", "died in"),
    "oom": ("oom", "out of memory: CUDA out of memory"),
    "refused": ("unsupported", "this GPU has no FP8"),
    "raised": ("failed", "RuntimeError: a bug of this rank"),
    "stalled": ("failed", "stalled in"),
}


def run_jobs(folder, jobs):
    environment = os.environ | {"RANK_STALL_S": str(STALL_S), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.rank_job", str(folder), *jobs]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    return {job: (json.loads((folder / f"{job}.json").read_text()), folder / job / "graph.json") for job in jobs}


FEW = ("none:window:0:2", "killed:window:1:2", "oom:capture:1:4", "refused:build:1:2", "raised:profile:0:2")
ROOT_DIED, STALLS = "killed:window:0:2", ("stalled:window:2:4", "stalled:build:1:2")
FAULTS = [f"{kind}:{phase}:{n - 1}:{n}" for kind in KINDS if kind != "none" for phase in PHASES for n in (2, 4)]
ALONE = [f"killed:{phase}:1:{n}:alone" for phase in PHASES for n in (2, 4)]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("ranks"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("ranks"), dict.fromkeys([ROOT_DIED, *STALLS, *FAULTS, *ALONE]))


def check(job, answer, path):
    kind, _, failing, _, *_ = job.split(":")
    record = records.read(path)
    status, words = SAID[kind]
    assert (record["status"], answer["seconds"] < 60) == (status, True), (record["message"], answer)
    assert words in record["message"]
    if failing != "0":
        assert record["message"].startswith(f"rank {failing}: ")
        said = (path.parent / "0.txt").read_text()
        assert f"rank {failing}: {words}" in said
    # What cannot run here is a row, not a failure; torchrun fails where one rank does.
    others = [status for rank, status in enumerate(answer["statuses"]) if kind != "killed" or rank != int(failing)]
    assert all((code == 0) == (status in ("oom", "unsupported")) for code in others), answer


@pytest.mark.parametrize("job", FEW[1:])
def test_a_rank_that_fails_ends_all_ranks_and_the_record_names_it(job, few):
    check(job, *few[job])


@pytest.mark.slow
def test_rank_1_says_that_rank_0_died(many):
    """Which has no record, since rank 0 writes it."""
    answer, path = many[ROOT_DIED]
    assert not path.exists() and answer["statuses"] == [-9, 1]
    assert "python -m rank_job.train: rank 0: died in window" in (path.parent / "1.txt").read_text()


@pytest.mark.slow
def test_a_stall_is_told_with_its_place(many):
    message = records.read(many["stalled:window:2:4"][1])["message"]
    assert message.startswith("rank 2: stalled in window, step 3, at tests/rank_job.py:")
    message = records.read(many["stalled:build:1:2"][1])["message"]
    assert message.startswith("rank 1: stalled in build, at tests/rank_job.py:")


def test_every_rank_is_in_the_record(few):
    answer, path = few["none:window:0:2"]
    record = records.read(path)
    assert record["status"] == "pass" and answer["statuses"] == [0, 0], record["message"]
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    for rank in record["ranks"]:
        assert set(rank) == {
            "rank", "stage", "gpu_uuid", "busy_ms", "idle_fraction", "memory", "clocks", "statistic_ms", "num_replays",
            "state_hash",
        }  # fmt: skip
        assert rank["num_replays"] == len(record["steps"]["gpu_ms"]) and rank["memory"]["peak_allocated_bytes"] > 0
    assert record["statistic_ms"] == max(rank["statistic_ms"] for rank in record["ranks"])
    assert record["rank_skew_ms"] >= 0
    assert trust.contradiction(record) is None


@pytest.mark.slow
@pytest.mark.parametrize("job", [*FAULTS, *ALONE])
def test_any_fault_in_any_phase(job, many):
    check(job, *many[job])


def test_one_rank_agrees_with_itself_at_once():
    with Agreement(0, 1, None) as ranks:
        ranks.enter("build")
        ranks.agree()
        ranks.tell("failed", "nobody listens")
        assert ranks.fault_of_another(wait_s=10) is None


def test_a_fault_names_its_rank():
    fault = RankFault(3, "oom", "needs 2 GiB")
    assert (str(fault), fault.rank, fault.status) == ("rank 3: needs 2 GiB", 3, "oom")
