"""Child processes that end with their parent, locks, order, parity from sidecars, and what may be reused."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy
import pytest

from benchmarks import rounds
from common import record as records

# ------------------------------------------------------------------------------------------------
# Processes


def processes_with(mark):
    """Process ids, zombies left out, whose command line holds `mark`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if mark.encode() in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


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
    outcome = rounds.run_child(command, log=log, limit_s=20, environment=dict(os.environ))
    assert (outcome.exit_status, outcome.timed_out) == (7, False)
    assert "exit status 7" in outcome.describe()
    assert set(rounds.last_lines(log).split(" | ")) == {"one", "two"}


def test_a_signal_is_named(tmp_path):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    outcome = rounds.run_child(command, log=tmp_path / "log", limit_s=20, environment=dict(os.environ))
    assert "signal 9" in outcome.describe() and "host memory" in outcome.describe()


def test_a_command_that_is_not_there_is_an_exit_status(tmp_path):
    outcome = rounds.run_child(
        [str(tmp_path / "nothing")], log=tmp_path / "log", limit_s=20, environment=dict(os.environ)
    )
    assert outcome.exit_status == 127
    assert "cannot start" in rounds.last_lines(tmp_path / "log")


def test_a_child_is_killed_at_its_limit_with_all_it_started(tmp_path):
    mark = f"mark-{tmp_path}"
    log = tmp_path / "log"
    command = [sys.executable, "-c", FAMILY, mark]
    outcome = rounds.run_child(command, log=log, limit_s=1.0, environment=dict(os.environ))
    assert outcome.timed_out
    # All three had started, so that there was something to kill.
    assert log.read_text().count("ready") == 3
    assert processes_with(mark) == []
    assert outcome.seconds < 10


def test_what_a_child_leaves_running_ends_with_it(tmp_path):
    mark = f"mark-{tmp_path}"
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    outcome = rounds.run_child(
        [sys.executable, "-c", code, *sleeper], log=tmp_path / "log", limit_s=20, environment=dict(os.environ)
    )
    assert outcome.exit_status == 0
    assert processes_with(mark) == []


PARENT = """
import os, sys
from pathlib import Path
from benchmarks import rounds
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
with rounds.HostLoad(2):
    rounds.run_child(command, log=Path(sys.argv[3]), limit_s=600, environment=dict(os.environ))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_parent(tmp_path, number):
    mark, log = f"mark-{tmp_path}", tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAMILY, mark, str(log)],
        cwd=rounds.ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert until(lambda: log.exists() and log.read_text().count("ready") == 3)
        family = rounds.descendants(parent.pid)
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
    outcome = rounds.run_child(command, log=log, limit_s=25, environment=dict(os.environ))
    assert outcome.timed_out
    assert log.read_text().count("fake hang") == 2
    assert processes_with(mark) == []


def test_host_load_keeps_cores_busy_and_ends():
    with rounds.HostLoad(1) as load:
        pid = load.processes[0].pid
        time.sleep(0.6)
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[11])
        assert ticks / os.sysconf("SC_CLK_TCK") > 0.1
    assert not is_running(pid)


def test_a_folder_is_locked_until_the_lock_is_closed(tmp_path):
    with rounds.lock_folder(tmp_path), pytest.raises(rounds.FolderBusy, match=f"process {os.getpid()}"):
        rounds.lock_folder(tmp_path)
    rounds.lock_folder(tmp_path).close()


def test_rounds_are_abba():
    assert [rounds.order(["a", "b", "c"], number) for number in (1, 2, 3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


# ------------------------------------------------------------------------------------------------
# Parity


def sidecar(path, **changes):
    """Three tensors over four steps; the last tensor has two elements only, padded with NaN."""
    arrays = {
        "names": numpy.array(["a", "b", "c"]),
        "hashes": numpy.arange(12, dtype=numpy.uint64).reshape(4, 3) + numpy.uint64(2**63),
        "samples": numpy.array([[1, 2, 3, 4], [1e-9, 1, -2, 0], [5, -6, numpy.nan, numpy.nan]], dtype=numpy.float32),
        "loss": numpy.array([4.0, 3.0, 2.0, 1.0]),
        "grad_norm": numpy.ones(4),
    }
    for key, change in changes.items():
        arrays[key] = arrays[key].copy()
        change(arrays[key])
    numpy.savez_compressed(path, **arrays)
    return path


def compared(tmp_path, **changes):
    return rounds.compare_parity(sidecar(tmp_path / "a.npz", **changes), sidecar(tmp_path / "b.npz"))


def change(index, factor=None, add=None):
    def apply(array):
        array[index] = array[index] * factor if add is None else array[index] + array.dtype.type(add)

    return apply


def test_equal_sidecars_are_bitwise(tmp_path):
    assert compared(tmp_path) == rounds.Parity(True, 0.0, 0.0, None)


def test_the_first_step_and_the_first_tensor_that_differ_are_named(tmp_path):
    def later_tensor_first(hashes):
        hashes[1:, 2] += numpy.uint64(1)
        hashes[2:, 0] += numpy.uint64(1)

    parity = compared(tmp_path, hashes=later_tensor_first)
    assert not parity.bitwise
    assert parity.first_difference == {"step": 1, "tensor": "c"}


def test_a_loss_alone_that_differs_is_found(tmp_path):
    parity = compared(tmp_path, loss=change(3, 1.01))
    assert parity.first_difference == {"step": 3, "tensor": "loss"}
    assert parity.max_rel_diff == parity.loss_rel_diff == pytest.approx(0.01 / 1.01)
    assert compared(tmp_path, grad_norm=change(2, 0.5)).first_difference == {"step": 2, "tensor": "grad_norm"}
    both = compared(tmp_path, loss=change(0, 1.01), hashes=change((2, 1), add=1))
    assert both.first_difference == {"step": 0, "tensor": "loss"}


def test_samples_are_relative_to_their_tensors_largest(tmp_path):
    # 1e-9 becoming -1e-9 in a tensor of magnitude 2 is 1e-9, not 200 %.
    parity = compared(tmp_path, hashes=change((3, 1), add=1), samples=change((1, 0), -1.0))
    assert parity.max_rel_diff == pytest.approx(1e-9, rel=1e-3)
    assert parity.loss_rel_diff == 0.0
    assert compared(tmp_path, samples=change((2, 1), 1.5)).max_rel_diff == pytest.approx(3 / 9)


def test_a_value_that_became_nan_is_an_infinite_difference(tmp_path):
    assert compared(tmp_path, loss=change(1, float("nan"))).max_rel_diff == float("inf")
    assert compared(tmp_path, samples=change((0, 0), float("nan"))).max_rel_diff == float("inf")


def test_sidecars_that_cannot_be_compared_say_why(tmp_path):
    whole = sidecar(tmp_path / "whole.npz")
    with pytest.raises(ValueError, match=r"no parity sidecar gone\.npz"):
        rounds.compare_parity(tmp_path / "gone.npz", whole)
    (tmp_path / "half.npz").write_bytes(whole.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"half\.npz is not a whole"):
        rounds.compare_parity(tmp_path / "half.npz", whole)
    with pytest.raises(ValueError, match="different tensors: a, z"):
        compared(tmp_path, names=lambda names: names.__setitem__(0, "z"))
    arrays = dict(numpy.load(whole))
    arrays["loss"] = arrays["loss"][:3]
    numpy.savez(tmp_path / "short.npz", **arrays)
    with pytest.raises(ValueError, match="shape of loss"):
        rounds.compare_parity(tmp_path / "short.npz", whole)


def test_timed_losses_lie_within_the_eager_spread():
    eager = [[1.0, 2.0], [1.0, 2.0002]]
    assert rounds.timed_losses_fault([1.0, 2.0001], eager, 0.0) is None
    assert "allowed 0.0003" in rounds.timed_losses_fault([1.0, 2.002], eager, 0.0)
    # Bitwise equal eager runs leave rounding only, one eager run says nothing of its spread.
    assert rounds.timed_losses_fault([1.0, 2.0001], [[1.0, 2.0]] * 2, 0.0) is not None
    assert rounds.timed_losses_fault([1.0, 2.0001], [[1.0, 2.0]] * 2, 1e-4) is None
    assert rounds.timed_losses_fault([1.0, 2.0001], [[1.0, 2.0]], 0.0) is None
    assert rounds.timed_losses_fault([1.0, None], [[1.0, 2.0]] * 2, 0.0) is not None
    # Where atomics may reorder sums, equal eager runs are luck.
    assert rounds.timed_losses_fault([1.0, 2.018], [[1.0, 2.0]] * 2, 0.0, rounds.CUDA_FLOOR) is None
    assert rounds.timed_losses_fault([1.0, 2.022], [[1.0, 2.0]] * 2, 0.0, rounds.CUDA_FLOOR) is not None


def test_a_run_like_eager_is_rarely_taken_for_a_wrong_one():
    # Five eager runs and five of a variant that is the same, each off by its own rounding noise.
    random = numpy.random.default_rng(0)
    false = 0
    for _ in range(300):
        runs = (1 + 1e-5 * random.standard_normal((10, 1)) * numpy.linspace(0, 1, 20)).tolist()
        false += any(rounds.timed_losses_fault(run, runs[:5], 0.0) for run in runs[5:])
    assert false / 300 < 0.02


# ------------------------------------------------------------------------------------------------
# Resume

ENV = {"source_hash": "abc", "torch": "2.13.0", "transformer_engine": None, "cuda": "13.0", "driver": "580.1"}
GPUS = rounds.Gpus(("NVIDIA H200",), ("GPU-0",), "580.1")
REQUEST = {"config": {"layers": 8, "width": 64}, "flags": [], "steps": 0, "num_gpus": 1}


def published(variant="graph", number=1, boot="boot-1", **env):
    record = records.blank(model="m", preset="bench", variant=variant, round=number, status="pass", device="cuda")
    record["host_load"] = 4 if number else 0
    record["env"].update(ENV, gpu_name="NVIDIA H200", gpu_uuid="GPU-0", boot_id=boot)
    record["env"].update(env)
    record["extra"]["request"] = json.loads(json.dumps(REQUEST))
    return record


def difference(record, host_load=4):
    return rounds.difference(record, ENV, GPUS, REQUEST, host_load)


def test_an_equal_record_is_reused():
    assert difference(published()) is None
    assert difference(published(number=0)) is None
    # A CPU run knows no CUDA version and no driver.
    assert difference(published(gpu_uuid=None, cuda=None, driver=None)) is None


@pytest.mark.parametrize("key", ["source_hash", "torch", "transformer_engine", "cuda", "driver"])
def test_another_version_is_named(key):
    assert difference(published(**{key: "other"})).startswith(f"{key} was other")


def test_other_differences_are_named():
    assert "GPU-9" in difference(published(gpu_uuid="GPU-9"))
    assert difference(published(), host_load=0) == "host_load was 4, now 0"
    record = published()
    record["extra"]["request"]["config"]["layers"] = 4
    assert "layers=4 (now 8)" in difference(record)
    record = published()
    record["extra"]["request"]["flags"] = ["--width", "9"]
    assert difference(record).startswith("flags was")
    record["status"] = "timeout"
    assert "timeout" in difference(record)
    record = published()
    del record["extra"]["request"]
    assert "not written by" in difference(record)


def test_after_a_reboot_only_whole_rounds_stand():
    found = [published("eager", 0, "old"), published("graph", 0, "old")]
    found += [published("eager", 1, "old"), published("graph", 1, "old"), published("eager", 2, "old")]
    odd = rounds.stale(found, ["eager", "graph"], difference, "new")
    assert list(odd) == [("eager", 2)] and "booted" in odd["eager", 2]
    assert rounds.stale(found, ["eager", "graph"], difference, "old") == {}
    # A variant that round 0 ruled out is not missed.
    found[1]["status"] = "unsupported"
    del found[3]
    assert rounds.stale(found, ["eager", "graph"], difference, "new") == {}


def fake_nvidia_smi(folder, monkeypatch, listing):
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then printf "{listing}"; else echo 580.1; fi\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_found(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = r"GPU 0: NVIDIA H200 (UUID: GPU-0a)\nGPU 1: NVIDIA H200 (UUID: GPU-1b)\n"
    fake_nvidia_smi(tmp_path / "bin", monkeypatch, lines)
    gpus = rounds.find_gpus()
    assert gpus == rounds.Gpus(("NVIDIA H200",) * 2, ("GPU-0a", "GPU-1b"), "580.1")
    assert gpus.slug == "h200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert rounds.find_gpus().uuids == ("GPU-1b",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rounds.find_gpus() == rounds.Gpus()


def test_no_gpu_is_an_empty_answer(monkeypatch, tmp_path):
    fake_nvidia_smi(tmp_path / "bin", monkeypatch, "No devices found.")
    assert rounds.find_gpus().slug == "cpu"
    assert rounds.Gpus(("NVIDIA A100-SXM4-80GB",)).slug == "a100-sxm4-80gb"
    assert rounds.Gpus(("NVIDIA GeForce RTX 4090",)).slug == "rtx-4090"
