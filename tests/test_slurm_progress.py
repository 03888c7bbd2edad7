"""A job near its time limit: when it is queued again, under which id, and when it fails instead.

pytest tests/test_slurm_progress.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rounds
from benchmarks.slurm import progress
from common import record as records

# ------------------------------------------------------------------------------------------------
# progress.py


def write(folder, number, status="pass", age_s=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    record = records.blank(model="m", preset="tiny", variant="eager", round=number, status=status, device="cpu")
    path = folder / records.file_name("eager", number)
    records.write(path, record)
    os.utime(path, (1000 - age_s, 1000 - age_s))


@pytest.fixture
def started(tmp_path):
    """A start at second 500; records are written at second 1000 less their age."""
    (tmp_path / "out" / "logs").mkdir(parents=True)
    path = tmp_path / "started"
    path.touch()
    os.utime(path, (500, 500))
    return path


def judge(started):
    return progress.judge(started.parent / "out", "7", started)


def test_new_records_are_progress_and_must_be_more_each_time(tmp_path, started):
    out = tmp_path / "out"
    write(out, 0, age_s=800)
    write(out, 1)
    assert judge(started) == (True, "2 records stand, 1 of them new; back into the queue for the rest")
    # On other nodes the first two are set aside, and as many are new.
    goes_on, why = judge(started)
    assert not goes_on and "2 records after this start and 2 at an earlier requeue" in why
    write(out, 2)
    assert judge(started)[0]
    # Fewer than ever before, after a requeue with more.
    (out / "eager.r2.json").unlink()
    assert not judge(started)[0]


def test_what_a_resume_measures_again_is_no_progress(tmp_path, started):
    out = tmp_path / "out"
    write(out, 1, "failed")
    write(out, 2, "timeout")
    write(out / ".partial", 3)
    write(out / ".stale" / "x", 4)
    (out / "eager.r5.json").write_text("{half")
    write(out, 6, age_s=800)
    goes_on, why = judge(started)
    assert not goes_on and "no run ended well" in why
    assert progress.standing(out) == [out / "eager.r6.json"]
    write(out, 7, "oom")
    assert judge(started)[0]


# ------------------------------------------------------------------------------------------------
# bench.sbatch, with Python and Slurm's commands as shims

# Lays the records of GIVE down and tells the batch script that the time is over, as Slurm does.
PYTHON = f"""#!/bin/bash
if [ "$2" = benchmarks.run ]; then
    trap 'exit 130' TERM
    cp "$GIVE"/* "$OUT"
    kill -USR1 $PPID
    while :; do /bin/sleep 0.05; done
fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def start(tmp_path):
    """Starts bench.sbatch with the records that it finds at its end; (result, what scontrol was asked)."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {
        "python-shim": PYTHON,
        "scontrol": f'#!/bin/bash\necho "$*" >>{tmp_path}/scontrol\n',
        "sleep": "#!/bin/bash\n",
    }.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    (tmp_path / "out").mkdir()

    def run(numbers, status="pass", **settings):
        give = tmp_path / "give"
        for number in numbers:
            write(give, number, status)
        environment = {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "PYTHON": str(bin / "python-shim"),
            "RECORDS": str(tmp_path / "out"),
            "OUT": str(tmp_path / "out"),
            "GIVE": str(give),
            **settings,
        }
        command = ["bash", Path("benchmarks", "slurm", "bench.sbatch"), "benchmarks.run", "a", "b", "--", "--x"]
        result = subprocess.run(
            command, cwd=rounds.ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        path = tmp_path / "scontrol"
        return result, path.read_text().splitlines() if path.exists() else []

    return run


def test_a_job_goes_back_under_its_own_id(start):
    result, asked = start([0, 1])
    assert asked == ["requeue 7"], result.stderr
    assert "2 records stand, 2 of them new; back into the queue" in result.stdout


def test_a_task_of_an_array_goes_back_alone(start):
    # The last task has the array's own id.
    result, asked = start([0], SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1")
    assert asked == ["requeue 7_1"], result.stderr


def test_a_job_that_measures_anew_each_time_fails(start, tmp_path):
    assert start([0, 1])[1] == ["requeue 7"]
    result, asked = start([0, 1], SLURM_RESTART_COUNT="1")
    assert (result.returncode, asked) == (2, ["requeue 7"])
    assert "2 records after this start and 2 at an earlier requeue" in result.stderr and result.stderr.count("\n") == 1
    assert (tmp_path / "out" / "logs" / "job-7.status").read_text() == "2\n"
    # Another job starts anew.
    assert start([0, 1], SLURM_JOB_ID="8")[1] == ["requeue 7", "requeue 8"]
    assert not list((tmp_path / "out" / "logs").glob(".started*"))


def test_a_job_that_only_fails_is_not_queued_again(start):
    result, asked = start([0], "failed")
    assert (result.returncode, asked) == (2, []) and "no run ended well" in result.stderr


@pytest.mark.parametrize(("settings", "limit"), [({}, 20), ({"MAX_REQUEUES": "3"}, 3)])
def test_a_job_is_not_queued_again_for_ever(start, settings, limit):
    assert start([0], SLURM_RESTART_COUNT=str(limit - 1), **settings)[1] == ["requeue 7"]
    result, asked = start([0, 1], SLURM_RESTART_COUNT=str(limit), **settings)
    assert (result.returncode, asked) == (2, ["requeue 7"]) and "MAX_REQUEUES" in result.stderr
