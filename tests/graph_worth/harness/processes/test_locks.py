"""Locks of GPUs: one benchmark on a GPU, others are listed, and kill -9 frees it."""

import os
import subprocess
import sys
import uuid

import pytest

from graph_worth.folders import ROOT
from graph_worth.harness.processes.locks import GpuBusy, gpu_locks, num_others
from tests.helpers.processes import is_running

# Holds the GPUs of its command line and waits to be ended. Its child keeps open files if it can.
HOLDER = """
import subprocess, sys
from graph_worth.harness.processes.locks import gpu_locks
with gpu_locks(sys.argv[1:], "gpt3/bench"):
    child = subprocess.Popen(["sleep", "100"], close_fds=False)
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
"""


@pytest.fixture
def gpus():
    """Two GPUs that no other test has."""
    return tuple(f"GPU-{uuid.uuid4()}" for _ in range(2))


@pytest.fixture
def holder(gpus):
    command = [sys.executable, "-c", HOLDER, gpus[0]]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.child = int(process.stdout.readline())
    yield process
    if is_running(process.child):
        os.kill(process.child, 9)
    process.kill()
    process.communicate()


def test_a_gpu_is_held_once_and_other_gpus_list_its_holder(gpus, holder):
    owner = f"gpt3/bench on {gpus[0]}, process {holder.pid}"
    with pytest.raises(GpuBusy, match=f"^{gpus[0]} is in use by {owner}: wait"), gpu_locks(gpus, "rnnt/bench"):
        pass
    # The refused benchmark lets the other GPU go.
    with gpu_locks(gpus[1:], "rnnt/bench") as others:
        assert owner in others and not any(gpus[1] in other for other in others)
        before = num_others()
    holder.communicate()
    # Other tests may hold GPUs, too.
    assert before >= 1 and num_others() <= before
    with gpu_locks(gpus, "rnnt/bench") as others:
        assert owner not in others


def test_kill_9_frees_the_gpu_though_its_child_lives(gpus, holder):
    holder.kill()
    holder.wait()
    assert is_running(holder.child)
    with gpu_locks(gpus, "rnnt/bench"):
        pass


def test_an_error_inside_lets_go_and_one_process_cannot_hold_a_gpu_twice(gpus):
    with pytest.raises(KeyError), gpu_locks(gpus, "a"):
        with pytest.raises(GpuBusy, match=f"{gpus[1]} is in use by a on"), gpu_locks(gpus[1:], "b"):
            pass
        raise KeyError
    with gpu_locks(gpus, "a"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")
def test_another_user_is_refused(gpus):
    code = "import os, sys; from graph_worth.harness.processes.locks import gpu_locks\nos.setuid(65534)\n"
    code += "with gpu_locks(sys.argv[1:], 'b'): pass"
    with gpu_locks(gpus, "a"):
        done = subprocess.run([sys.executable, "-c", code, gpus[0]], cwd=ROOT, capture_output=True, text=True)
    assert f"{gpus[0]} is in use by a on" in done.stderr
