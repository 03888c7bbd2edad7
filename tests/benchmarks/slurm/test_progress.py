"""A job near its time limit: when it is queued again, under which id, and when it fails instead.

pytest tests/benchmarks/slurm/test_progress.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slurm import progress
from graph_worth.folders import ROOT
from graph_worth.harness.files import partial
from tests.helpers import made_run
from tests.helpers.processes import program

# ------------------------------------------------------------------------------------------------
# progress.py


def facts(path, *kinds):
    """Lines of a run that was begun."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(f"{json.dumps({'fact': kind})}\n" for kind in kinds)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def begun(out, name="a"):
    return out / "cpux1" / "m-tiny" / f"{name}{partial.SUFFIX}"


def judge(out, job="7"):
    return progress.judge(out, job)


def test_more_must_stand_than_at_the_start_and_at_each_requeue(out):
    facts(begun(out), "header", "parity")
    progress.begin(out, "7")
    assert not judge(out)[0], "what was there before the job is not its own"
    facts(begun(out), "parity", "cycle")
    assert judge(out) == (
        True,
        "0 runs and 3 facts of runs that were begun stand, more than before; back into the queue for the rest",
    )
    # The job starts again, and its first start stays the one that counts.
    progress.begin(out, "7")
    goes_on, why = judge(out)
    assert not goes_on and "no fewer did before (0 and 3)" in why and "TIME=" in why and why.count("\n") == 0
    facts(begun(out), "cycle")
    assert judge(out)[0]
    # Another job starts anew.
    assert judge(out, "8")[0]


def test_runs_of_several_nodes_are_counted_together_and_a_sealed_one_is_more(out):
    facts(begun(out), *["cycle"] * 5)
    progress.begin(out, "7")
    facts(begun(out, "on-another-node"), "parity")
    assert judge(out)[0]
    # Its facts go when a run is sealed.
    begun(out).unlink()
    made_run.write(made_run.made_run(gpus=()), begun(out).parent)
    assert judge(out) == (
        True,
        "1 runs and 1 facts of runs that were begun stand, more than before; back into the queue for the rest",
    )


def test_what_a_run_that_goes_on_measures_again_is_no_progress(out):
    progress.begin(out, "7")
    facts(begun(out), "header", "worker", "capture", "block", "seconds", "killed", "share")
    # Half a line, and what a compiler keeps.
    begun(out).write_text(begun(out).read_text() + '{"fact":"cyc')
    (out / ".cache").mkdir()
    (out / ".cache" / "kernel.json").write_text("{}")
    assert not judge(out)[0]
    facts(begun(out, "b"), "left_out")
    assert judge(out)[0]


# ------------------------------------------------------------------------------------------------
# bench.sbatch, with Python and Slurm's commands as shims

# Lays the facts of GIVE down and tells the batch script that the time is over, as Slurm does.
PYTHON = f"""#!/bin/bash
if [ "$2" = benchmarks.run ]; then
    trap 'exit 130' HUP
    mkdir -p "$(dirname "$TO")" && cat "$GIVE" >>"$TO"
    kill -USR1 $PPID
    while :; do /bin/sleep 0.05; done
fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def start(tmp_path):
    """Starts bench.sbatch with the facts that it finds at its end; (result, what scontrol was asked)."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {
        "python-shim": PYTHON,
        "scontrol": f'#!/bin/bash\necho "$*" >>{tmp_path}/scontrol\n',
        "sleep": "#!/bin/bash\n",
    }.items():
        program(bin / name, text)
    (tmp_path / "out").mkdir()

    def run(*kinds, **settings):
        (tmp_path / "give").unlink(missing_ok=True)
        facts(tmp_path / "give", *kinds)
        environment = {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "PYTHON": str(bin / "python-shim"),
            "RUNS": str(tmp_path / "out"),
            "TO": str(begun(tmp_path / "out")),
            "GIVE": str(tmp_path / "give"),
            **settings,
        }
        command = ["bash", Path("benchmarks", "slurm", "bench.sbatch"), "benchmarks.run", "a", "b", "--", "--x"]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        path = tmp_path / "scontrol"
        return result, path.read_text().splitlines() if path.exists() else []

    return run


@pytest.mark.slow
def test_a_job_that_comes_no_further_fails(start, tmp_path):
    assert start("parity")[1] == ["requeue 7"]
    result, asked = start("worker", "capture", SLURM_RESTART_COUNT="1")
    assert (result.returncode, asked) == (2, ["requeue 7"])
    assert "no fewer did before (0 and 1)" in result.stderr and result.stderr.count("\n") == 1
    assert (tmp_path / "out" / "logs" / "job-7.status").read_text() == "2\n"
    # Another job starts anew.
    assert start("parity", SLURM_JOB_ID="8")[1] == ["requeue 7", "requeue 8"]
    # A job does not come back for ever.
    result, asked = start("parity", "cycle", SLURM_JOB_ID="9", SLURM_RESTART_COUNT="20")
    assert (result.returncode, len(asked)) == (2, 2) and "MAX_REQUEUES" in result.stderr


@pytest.mark.parametrize(
    ("settings", "job"),
    # The last task of an array has the array's own id.
    [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1")],
)
def test_a_job_goes_back_under_its_own_id_and_a_task_of_an_array_alone(start, settings, job):
    result, asked = start("parity", "cycle", **settings)
    assert asked == [f"requeue {job}"], result.stderr
    assert "0 runs and 2 facts of runs that were begun stand, more than before; back into the queue" in result.stdout
