"""graph_worth/measuring/left_running.py: threads and processes that a command leaves."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from graph_worth.measuring import left_running

ORPHAN = "sleep 60 >/dev/null 2>&1 & echo $!"


@pytest.fixture
def patient(monkeypatch):
    """patient() is a context in which a thread or process that ends has a minute for it, on a busy machine too."""

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(left_running, "PATIENCE_S", 60.0)
            yield

    return context


def test_a_thread_that_stays_is_named_and_one_that_ends_is_not(patient):
    before, may_end = left_running.Before(), threading.Event()
    brief = threading.Thread(target=may_end.wait, args=(0.05,))
    brief.start()
    with patient():
        assert before.left() == ""
    thread = threading.Thread(target=may_end.wait, name="stays")
    thread.start()
    assert before.left() == "left 1 threads running: stays"
    may_end.set()
    thread.join()


def test_a_process_that_stays_is_named_until_it_ends(patient):
    before = left_running.Before()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert before.left() == f"left 1 processes running: sleep ({process.pid})"
        process.kill()
        with patient():
            assert before.left() == ""
    with subprocess.Popen(["sleep", "0.05"]), patient():
        assert before.left() == ""


def test_a_process_whose_parent_has_ended_counts():
    program = (
        "import subprocess, os, signal\n"
        "from graph_worth.measuring import left_running\n"
        "left_running.adopt_orphans()\n"
        "before = left_running.Before()\n"
        f"pid = int(subprocess.run(['sh', '-c', '{ORPHAN}'], capture_output=True, text=True).stdout)\n"
        "print(before.left())\n"
        "os.kill(pid, signal.SIGKILL)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout.startswith("left 1 processes running: sleep ("), answer


@pytest.mark.parametrize("helper", left_running.HELPERS)
def test_helpers_of_python_and_torch_do_not_count(helper):
    before = left_running.Before()
    with subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60)  # {helper}"]) as process:
        assert before.left() == ""
        process.kill()
    assert os.getpid() not in left_running.processes()
