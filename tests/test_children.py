"""Child processes that end with their parent, whoever started them, and host load."""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import ROOT, children, supervisor
from tests.harness import processes_with, until

# ------------------------------------------------------------------------------------------------
# Processes

# A child with a grandchild in a session of its own, as torchrun's workers are.
FAMILY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
print("ready", sys.argv[1], flush=True)
time.sleep(600)
"""


def test_output_and_exit_status_of_a_child(tmp_path):
    log = tmp_path / "logs" / "a.log"
    command = [sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"]
    outcome = children.run_child(command, log=log, limit_s=20, environment=dict(os.environ))
    assert (outcome.exit_status, outcome.timed_out) == (7, False)
    assert "exit status 7" in outcome.describe()
    assert set(children.last_lines(log).split(" | ")) == {"one", "two"}
    log.write_text("python -m gpt3.train: --tp 2 needs 2 ranks\n=====\nerror_file: <N/A>\ntraceback: see there\n")
    assert children.last_lines(log) == "python -m gpt3.train: --tp 2 needs 2 ranks"


def test_a_signal_is_named(tmp_path):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    outcome = children.run_child(command, log=tmp_path / "log", limit_s=20, environment=dict(os.environ))
    assert "signal 9" in outcome.describe() and "host memory" in outcome.describe()


def test_a_command_that_is_not_there_is_an_exit_status(tmp_path):
    outcome = children.run_child(
        [str(tmp_path / "nothing")], log=tmp_path / "log", limit_s=20, environment=dict(os.environ)
    )
    assert outcome.exit_status == 127
    assert "cannot start" in children.last_lines(tmp_path / "log")


def test_a_child_is_killed_at_its_limit_with_all_it_started(tmp_path):
    mark = f"mark-{tmp_path}"
    log = tmp_path / "log"
    command = [sys.executable, "-c", FAMILY, mark]
    outcome = children.run_child(command, log=log, limit_s=1.0, environment=dict(os.environ))
    assert outcome.timed_out
    # All three had started, so that there was something to kill.
    assert log.read_text().count("ready") == 3
    assert processes_with(mark) == []
    assert outcome.seconds < 10


def test_what_a_child_leaves_running_ends_with_it(tmp_path):
    mark = f"mark-{tmp_path}"
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    outcome = children.run_child(
        [sys.executable, "-c", code, *sleeper], log=tmp_path / "log", limit_s=20, environment=dict(os.environ)
    )
    assert outcome.exit_status == 0
    assert processes_with(mark) == []


PARENT = """
import os, sys
from pathlib import Path
from benchmarks import children
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
with children.HostLoad(2):
    children.run_child(command, log=Path(sys.argv[3]), limit_s=600, environment=dict(os.environ))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_parent(tmp_path, number):
    mark, log = f"mark-{tmp_path}", tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAMILY, mark, str(log)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert until(lambda: log.exists() and log.read_text().count("ready") == 3)
        family = supervisor.descendants(parent.pid)
        # Launcher, three of the family, two busy ones.
        assert len(family) == 6
    finally:
        parent.send_signal(number)
        parent.wait()
    assert until(lambda: processes_with(mark) == [])
    assert until(lambda: not any(is_running(pid) for pid in family))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_torchrun_and_its_workers_end_at_the_limit(tmp_path):
    mark = str(tmp_path / "record.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.fake_model.train", "--variant", "hang", "--record", mark]
    log = tmp_path / "log"
    outcome = children.run_child(command, log=log, limit_s=25, environment=dict(os.environ))
    assert outcome.timed_out
    assert log.read_text().count("fake hang") == 2
    assert processes_with(mark) == []


def test_host_load_keeps_cores_busy_and_ends():
    with children.HostLoad(1) as load:
        pid = load.processes[0].pid
        time.sleep(0.6)
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[11])
        assert ticks / os.sysconf("SC_CLK_TCK") > 0.1
    assert not is_running(pid)
