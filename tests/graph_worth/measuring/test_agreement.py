"""common/agreement in training by hand: a rank that fails ends all ranks, and the file of --record says why."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.once import once
from tests.helpers.rank_job import PHASES

ROOT = Path(__file__).resolve().parents[3]
STALL_S = 30
SAID = {
    "killed": ("failed", "died in"),
    "oom": ("oom", "out of memory: CUDA out of memory"),
    "refused": ("unsupported", "this GPU has no FP8"),
    "raised": ("failed", "RuntimeError: a bug of this rank"),
    "stalled": ("failed", "stalled in"),
}


def run_jobs(tmp_path_factory, name, jobs):
    """{job: (its answer, path of its result)}."""
    folder, answers = once(tmp_path_factory, name, lambda folder: _run(folder, jobs))
    return {job: (answer, folder / job / "graph.json") for job, answer in answers.items()}


def _run(folder, jobs):
    environment = os.environ | {"RANK_STALL_S": str(STALL_S), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.rank_job", str(folder), *jobs]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    return {job: json.loads((folder / f"{job}.json").read_text()) for job in jobs}


FEW = ("none:steps:0:2", "killed:steps:1:2", "oom:capture:1:4", "raised:profile:0:2")
ROOT_DIED, STALL = "killed:steps:0:2", "stalled:steps:2:4"
# Each kind of fault once, and each phase.
FAULTS = [f"{kind}:{phase}:1:2" for kind, phase in zip(SAID, itertools.cycle(PHASES), strict=False)]
ALONE = ["killed:build:1:2:alone", "killed:steps:1:4:alone"]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return run_jobs(tmp_path_factory, "few-ranks", FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return run_jobs(tmp_path_factory, "many-ranks", [ROOT_DIED, STALL, *FAULTS, *ALONE])


def check(job, answer, path):
    kind, _, failing, _, *_ = job.split(":")
    result = json.loads(path.read_text())
    status, words = SAID[kind]
    assert result["status"] == status, (result["message"], answer)
    assert words in result["message"]
    if failing != "0":
        assert result["message"].startswith(f"rank {failing}: ")
        said = (path.parent / "0.txt").read_text()
        assert f"rank {failing}: {words}" in said
    # What cannot run here is a row, not a failure; torchrun fails where one rank does.
    others = [status for rank, status in enumerate(answer["statuses"]) if kind != "killed" or rank != int(failing)]
    assert all((code == 0) == (status in ("oom", "unsupported")) for code in others), answer


@pytest.mark.slow
@pytest.mark.parametrize("job", FEW[1:])
def test_a_rank_that_fails_ends_all_ranks_and_is_named(job, few):
    check(job, *few[job])


@pytest.mark.slow
def test_rank_1_says_that_rank_0_died(many):
    """Rank 0 writes the file, so there is none."""
    answer, path = many[ROOT_DIED]
    assert not path.exists() and answer["statuses"] == [-9, 1]
    assert "python -m rank_job.train: rank 0: died in steps" in (path.parent / "1.txt").read_text()


@pytest.mark.slow
def test_a_stall_is_told_with_its_place(many):
    message = json.loads(many[STALL][1].read_text())["message"]
    assert message.startswith("rank 2: stalled in steps, step 3, at tests/helpers/rank_job.py:")


@pytest.mark.slow
def test_ranks_that_agree_pass_and_leave_one_result(few):
    answer, path = few["none:steps:0:2"]
    result = json.loads(path.read_text())
    assert result["status"] == "pass" and answer["statuses"] == [0, 0], result["message"]
    assert result["env"]["world_size"] == 2 and result["replays"] == result["steps"] == len(result["step_ms"]) == 20
    # The table is rank 0's alone.
    said = [(path.parent / f"{rank}.txt").read_text() for rank in range(2)]
    assert ["make bench MODEL=rank_job" in text for text in said] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("job", [*FAULTS, *ALONE])
def test_each_fault_is_named_and_ends_each_phase(job, many):
    check(job, *many[job])
