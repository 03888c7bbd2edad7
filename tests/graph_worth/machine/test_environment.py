"""Tests of graph_worth/machine/environment.py and gpu_state.py: versions, variables, clocks. nvidia-smi is a fake."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from graph_worth.machine import environment, gpu_state, source
from tests.helpers.processes import is_running, program, until

ROOT = Path(__file__).resolve().parents[3]


# --- describe_environment


def test_env_on_the_cpu():
    env = environment.describe_environment("cpu", 2)
    assert env["world_size"] == 2 and env["num_gpus"] == 0 and env["gpu_name"] is None
    found = source.describe_source()
    assert found["source_hash"] == source.source_hash()
    assert (found["git_sha"], found["git_tree"], found["git_dirty"]) == source.git_state()
    assert re.fullmatch(r"[0-9a-f-]{36}", env["boot_id"])
    assert env["cpu"].endswith(f"{os.cpu_count()} cores")
    assert env["torch"]
    host = environment.describe_host("cpu")
    assert host["gpus"] == [] and host["boot"] == env["boot_id"] and host["versions"]["torch"].startswith(env["torch"])


def test_env_does_not_tell_the_machines_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-node-17")
    env = environment.describe_environment("cpu", 1)
    assert re.fullmatch(r"[0-9a-f]{12}", env["host"])
    assert "secret-node-17" not in str(env)
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-node-18")
    assert environment.describe_environment("cpu", 1)["host"] != env["host"]


def test_env_keeps_the_variables_that_matter(monkeypatch):
    wanted = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "x",
        "NVTE_FLASH_ATTN": "1",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "TORCHINDUCTOR_FREEZING": "1",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TRITON_CACHE_DIR": "c",
    }
    unwanted = {"PATH": os.environ["PATH"], "MY_CUDA_": "1", "API_TOKEN": "t", "TORCHELASTIC_RUN_ID": "7"}
    monkeypatch.setattr(os, "environ", wanted | unwanted)
    assert environment.describe_environment("cpu", 1)["variables"] == wanted


@pytest.mark.parametrize(
    "value, shown",
    [
        *(
            ("/home/me/cache/", "cache"),
            ("/a/b:/c/d", "b:d"),
            ("x=/home/me/x.conf,y", "x=x.conf,y"),
            ("~/a/b", "b"),
        ),
        *(("-O2 -I/home/me/include", "-O2 -Iinclude"), ("MIG-GPU-1/0/0", "MIG-GPU-1/0/0"), ("", ""), ("c/d", "c/d")),
    ],
)
@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "CUDA_HOME", "NCCL_CONF_FILE", "TRITON_PTXAS_PATH"])
def test_no_variable_names_a_folder_of_the_machine(monkeypatch, name, value, shown):
    monkeypatch.setenv(name, value)
    assert environment.describe_environment("cpu", 1)["variables"][name] == shown


def test_slurm_is_described_inside_a_job_only(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert environment.describe_environment("cpu", 1)["slurm"] == {}
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    slurm = environment.describe_environment("cpu", 1)["slurm"]
    assert slurm["job_id"] == "42" and slurm["nodelist"] == "n[1-2]" and slurm["num_tasks"] == "8"


def test_torch_is_not_imported_on_the_cpu():
    code = (
        "import sys; from graph_worth.machine.environment import describe_environment as d; d('cpu', 1); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_gpu_fields(monkeypatch):
    import torch

    properties = types.SimpleNamespace(name="NVIDIA H200", uuid="1b2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {3: properties}[index])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(environment, "driver_version", lambda: "580.1")
    env = environment.describe_environment(torch.device("cuda:3"), 1)
    seen = {key: env[key] for key in ("gpu_name", "gpu_uuid", "num_gpus", "driver", "cuda", "cudnn", "nccl")}
    assert seen == {
        "gpu_name": "NVIDIA H200",
        "gpu_uuid": "GPU-1b2c",
        "num_gpus": 4,
        "driver": "580.1",
        "cuda": "13.0",
        "cudnn": "9.19.0",
        "nccl": "2.28.9",
    }


# --- GpuSampler

FAKE_NVIDIA_SMI = """#!/bin/sh
echo "$$ $*" > "{folder}/call"
exec tail -n +1 -s 0.05 -f "{folder}/samples"
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(line) puts a fake on PATH that prints it, and each line that is later added to the file samples."""

    def install(line):
        (tmp_path / "samples").write_text(f"{line}\n")
        program(tmp_path / "nvidia-smi", FAKE_NVIDIA_SMI.format(folder=tmp_path))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return install


def test_the_sampler_tells_the_median_clock_of_a_while(nvidia_smi, monkeypatch):
    folder = nvidia_smi("1000, 200.5, 0x0000000000000001")
    sampler = gpu_state.GpuSampler("GPU-1")
    t0 = time.monotonic()
    sampler.start()
    seen_s = []
    more = ("1500, 700.0, 0x0000000000000004\n", "[N/A], 1.0, 0x0\na line\n1800, [N/A], 0x0000000000000020\n", "")
    for count, lines in enumerate(more, 1):
        assert until(lambda count=count: len(sampler.samples()) == count)
        seen_s.append(time.monotonic())
        with open(folder / "samples", "a") as file:
            file.write(lines)
    t1 = seen_s[-1]
    times = [sample.time_s for sample in sampler.samples()]
    assert t0 < times[0] < seen_s[0] < times[1] < seen_s[1] < times[2] < t1
    assert sampler.state(times[0], times[1])["sm_mhz"] == 1250 and sampler.state(t1, t1 + 1) is None
    assert sampler.state(t0, t1) == {"sm_mhz": 1500, "power_w": 450.25, "throttle": ["power cap", "software thermal"]}
    called, *command = (folder / "call").read_text().split()
    assert command[0] == "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active"
    assert command[1:] == ["--format=csv,noheader,nounits", "-lms", "250", "-i", "GPU-1"]
    sampler.stop()
    assert until(lambda: not is_running(int(called)))
    # A line that is not whole is no sample.
    os.write(sampler._file.fileno(), b"3.0, 18")
    assert sampler.state(t0, t1)["sm_mhz"] == 1500 and len(sampler.samples()) == 3
    monkeypatch.setattr(gpu_state.shutil, "which", lambda name: None)
    without = gpu_state.GpuSampler(0)
    without.start()
    assert without.state(0, 1e9) is None
    without.stop()


def test_sampler_ends_with_a_killed_parent(nvidia_smi):
    folder = nvidia_smi("1000")
    code = (
        "import time; from graph_worth.machine.gpu_state import GpuSampler; s = GpuSampler(0); s.start(); "
        "print(s._child.pid, flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    stamper = int(parent.stdout.readline())
    assert until(lambda: (folder / "call").exists() and (folder / "call").read_text())
    child = int((folder / "call").read_text().split()[0])
    assert is_running(stamper) and is_running(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not is_running(stamper) and not is_running(child))


def test_the_drivers_version(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.driver_version() is None
    program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 580.1\necho 580.1\n")
    assert environment.driver_version() == "580.1"
