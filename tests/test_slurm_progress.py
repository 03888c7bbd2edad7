"""A job near its time limit: when it is queued again, under which id, and when it fails instead.

pytest tests/test_slurm_progress.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT, sessions
from benchmarks.slurm import progress
from common import record as records

NODE_A, NODE_B = "20261122T031500Z-aaaaaa-cpu0", "20261122T041500Z-bbbbbb-cpu0"

# ------------------------------------------------------------------------------------------------
# progress.py


def place(root, session=NODE_A):
    return root / "cpux1" / "m-tiny" / f"{session}.open"


def write(folder, number, status="pass", age_s=0.0, **extra):
    """A record in an open session, written at second 1000 less its age."""
    folder.mkdir(parents=True, exist_ok=True)
    record = records.blank(model="m", preset="tiny", variant="eager", round=number, status=status, device="cpu")
    record["extra"].update(extra)
    path = folder / records.file_name("eager", number)
    records.write(path, record)
    os.utime(path, (1000 - age_s, 1000 - age_s))


def close(folder, age_s=0.0):
    sessions.write_meta(folder, {"schema": 1, "session": sessions.session_name(folder)})
    packed = sessions.pack(folder, "complete")
    os.utime(packed / sessions.RECORDS, (1000 - age_s, 1000 - age_s))


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
    session = place(tmp_path / "out")
    write(session, 0, age_s=800)
    write(session, 1)
    assert judge(started) == (True, "2 records stand, 1 of them new; back into the queue for the rest")
    goes_on, why = judge(started)
    assert not goes_on and "2 records after this start and 2 at an earlier requeue" in why
    write(session, 2)
    assert judge(started)[0]
    # Fewer than ever before, after a requeue with more.
    (session / "eager.r2.json").unlink()
    assert not judge(started)[0]


def test_sessions_of_several_boots_and_kinds_are_counted_together(tmp_path, started):
    out = tmp_path / "out"
    write(place(out), 0, age_s=800)
    write(place(out), 1, age_s=800)
    assert not judge(started)[0], "nothing is new"
    # On another node a session of its own, with one record; and one of another kind, packed.
    write(place(out, NODE_B), 0)
    assert judge(started) == (True, "3 records stand, 1 of them new; back into the queue for the rest")
    other = out / "h200x1" / "m-bench" / f"{NODE_B}.open"
    write(other, 0)
    write(other, 1)
    close(other)
    assert judge(started) == (True, "5 records stand, 3 of them new; back into the queue for the rest")
    close(place(out), age_s=800)
    assert not judge(started)[0], "packing is no progress"


def test_what_a_resume_measures_again_is_no_progress(tmp_path, started):
    session = place(tmp_path / "out")
    write(session, 1, "failed")
    write(session, 2, "timeout")
    write(session, 8, superseded=True)
    write(session / ".partial", 3)
    write(session / "damaged", 4)
    (session / "eager.r5.json").write_text("{half")
    write(session, 6, age_s=800)
    goes_on, why = judge(started)
    assert not goes_on and "no run ended well" in why
    assert len(progress.standing(tmp_path / "out")) == 1
    write(session, 7, "oom")
    assert judge(started)[0]


def test_without_a_folder_nothing_stands(tmp_path):
    assert progress.standing(tmp_path / "nothing") == []


# ------------------------------------------------------------------------------------------------
# bench.sbatch, with Python and Slurm's commands as shims

# Lays the records of GIVE down and tells the batch script that the time is over, as Slurm does.
PYTHON = f"""#!/bin/bash
if [ "$2" = benchmarks.run ]; then
    trap 'exit 130' TERM
    mkdir -p "$OUT" && cp "$GIVE"/* "$OUT"
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
            "OUT": str(place(tmp_path / "out")),
            "GIVE": str(give),
            **settings,
        }
        command = ["bash", Path("benchmarks", "slurm", "bench.sbatch"), "benchmarks.run", "a", "b", "--", "--x"]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
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
