"""Commands under a supervisor: their output and exit status, and that nothing they started is left."""

import os
import signal
import subprocess
import sys

import pytest

from graph_worth.folders import ROOT
from graph_worth.harness.processes import supervisor
from tests.helpers.processes import processes_with, until

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


def logged(command, log, limit_s=60):
    return supervisor.run_logged(command, log, limit_s, dict(os.environ))


def test_output_and_exit_status_of_a_command(tmp_path):
    log, command = tmp_path / "a.log", [sys.executable, "-c", "import sys; print('one', flush=True); sys.exit(7)"]
    assert logged(command, log) == 7 and log.read_text() == "one\n"
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert logged(killed, log) == 128 + signal.SIGKILL
    assert logged([str(tmp_path / "nothing")], log) == 127 and "cannot start" in log.read_text()


def test_a_command_is_ended_at_its_limit(tmp_path):
    mark = f"mark-{tmp_path}"
    assert logged([sys.executable, "-c", FAMILY, mark], tmp_path / "log", limit_s=0.5) is None
    assert not processes_with(mark)


def test_what_a_command_leaves_running_ends_with_it(tmp_path):
    mark = f"mark-{tmp_path}"
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    assert logged([sys.executable, "-c", code, *sleeper], tmp_path / "log") == 0
    assert not processes_with(mark)


# Ends a process that is not its own on SIGTERM, as srun ends tasks of other machines.
ENDS_FAR = """
import os, signal, sys, time
far, ready = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: (os.kill(int(far), signal.SIGKILL), sys.exit(0)))
open(ready, "w").close()
time.sleep(600)
"""
RUN_LOGGED = """
import os, sys
from pathlib import Path
from graph_worth.harness.processes import supervisor
supervisor.run_logged(sys.argv[2:], Path(sys.argv[1]), 600.0, dict(os.environ))
sys.exit(8)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None])
def test_a_launcher_is_asked_to_end_what_it_has_elsewhere(tmp_path, number):
    """Also where the supervisor between is killed (None)."""
    ready, log = tmp_path / "ready", tmp_path / "log"
    far = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    command = [sys.executable, "-c", ENDS_FAR, str(far.pid), str(ready)]
    process = subprocess.Popen([sys.executable, "-c", RUN_LOGGED, str(log), *command], cwd=ROOT)
    try:
        assert until(ready.exists) and far.poll() is None
        if number is not None:
            process.send_signal(number)
        else:
            family = supervisor.descendants(process.pid)
            (between,) = [pid for pid in processes_with("graph_worth.harness.processes.supervisor") if pid in family]
            os.kill(between, signal.SIGKILL)
        assert process.wait(60) == (8 if number is None else -number)
        assert until(lambda: far.poll() is not None), "the far process is left over"
        assert until(lambda: not processes_with(str(ready)))
    finally:
        far.kill()
        far.wait()
        for pid in processes_with(str(ready)):
            os.kill(pid, signal.SIGKILL)


# Starts a rank in a session of its own, as torchrun does.
TORCHRUN = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], start_new_session=True)
"""
RANK = """
import pathlib, sys, time
from graph_worth.config import end_with_supervisor
end_with_supervisor()
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_a_rank_ends_with_its_supervisor_that_is_killed(tmp_path):
    ready = tmp_path / "ready"
    ranks = [sys.executable, "-c", TORCHRUN, "-c", RANK, str(ready)]
    process = supervisor.start(ranks, asks=False, env=dict(os.environ))
    try:
        assert until(ready.exists)
        process.kill()
        process.wait()
        assert until(lambda: not processes_with(str(ready))), "a rank is left over"
    finally:
        for pid in processes_with(str(ready)):
            os.kill(pid, signal.SIGKILL)


def test_a_rank_that_starts_after_its_supervisor_was_killed_ends(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = os.environ | {"GRAPH_SUPERVISOR": str(gone.pid)}
    words = [sys.executable, "-c", RANK, str(tmp_path / "ready")]
    assert subprocess.run(words, cwd=ROOT, env=environment, timeout=240).returncode == 1
    assert not (tmp_path / "ready").exists()
