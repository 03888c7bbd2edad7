"""common/environment, gpu_state and host_state: the record's env, samplers, cores. nvidia-smi and NVML are fakes."""

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

from common import environment, gpu_state, host_state, record, source

ROOT = Path(__file__).resolve().parent.parent


def wait_until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition was not met in time"
        time.sleep(0.01)


# --- describe_environment


def test_env_has_exactly_the_keys_of_the_record():
    env = environment.describe_environment("cpu", 2)
    assert list(env) == list(record.TEMPLATE["env"])
    assert env["world_size"] == 2 and env["num_gpus"] == 0 and env["gpu_name"] is None
    assert env["source_hash"] == source.source_hash() and env["run_hash"] is None
    assert (env["git_sha"], env["git_tree"], env["git_dirty"]) == source.git_state()
    assert re.fullmatch(r"[0-9a-f-]{36}", env["boot_id"])
    assert env["cpu"].endswith(f"{os.cpu_count()} cores")
    assert env["torch"]


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
        "import sys; from common.environment import describe_environment as d; d('cpu', 1); "
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
    assert list(env) == list(record.TEMPLATE["env"])
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
while read -r line; do echo "$line"; sleep 0.05; done < "{folder}/samples"
exec sleep 100
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(lines) puts a fake on PATH that prints them, 50 ms apart, and then waits."""

    def install(*lines):
        (tmp_path / "samples").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "nvidia-smi").write_text(FAKE_NVIDIA_SMI.format(folder=tmp_path))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return install


def test_sampler_between(nvidia_smi):
    folder = nvidia_smi(
        "1000, 100.5, 40, 0x0000000000000001",
        "1500, 300.0, 44, 0x0000000000000000",
        "[N/A], 400.0, 43, 0x0000000000000024",
        "a line of another kind",
        "1800, [N/A], [N/A], [N/A]",
    )
    sampler = gpu_state.GpuSampler("GPU-1")
    t0 = time.monotonic()
    sampler.start()
    wait_until(lambda: len(sampler.samples()) == 4)
    t1 = time.monotonic()
    assert sampler.between(t0, t1) == {
        "sm_mhz": 1500,
        "power_w": 300,
        "temperature_c": 44,
        "throttle": ["gpu_idle", "sw_power_cap", "sw_thermal_slowdown"],
    }
    times = [row[0] for row in sampler.samples()]
    assert t0 < times[0] < times[1] - 0.04 < times[2] - 0.08 < t1
    late = sampler.between(times[1], times[1])
    assert late == {"sm_mhz": 1500, "power_w": 300, "temperature_c": 44, "throttle": []}
    assert (folder / "call").read_text().split(" ", 1)[1].split() == [
        "--query-gpu=clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active",
        "--format=csv,noheader,nounits",
        "-lms",
        "250",
        "-i",
        "GPU-1",
    ]
    sampler.stop()
    assert sampler.between(t0, t1)["sm_mhz"] == 1500
    pid = int((folder / "call").read_text().split()[0])
    wait_until(lambda: not alive(pid))


def test_a_line_that_is_not_whole_is_no_sample(nvidia_smi):
    nvidia_smi("1980, 345.67, 45, 0x0000000000000004")
    sampler = gpu_state.GpuSampler(0)
    sampler.start()
    wait_until(sampler.samples)
    sampler.stop()
    line, unfinished = b"1.0, 1700, 1.0, 1, 0x0000000000000000\n", b"3.0, 1800, 1.0, 1, 0x00"
    os.write(sampler._file.fileno(), line * 100 + unfinished)
    assert len(sampler.samples()) == 101 and sampler.samples()[-1][:2] == (1.0, 1700)


def test_every_throttle_reason_has_nvmls_name(nvidia_smi):
    nvidia_smi("1000, 1, 1, 0x00000000000001FF")
    sampler = gpu_state.GpuSampler(0)
    sampler.start()
    wait_until(sampler.samples)
    sampler.stop()
    assert sampler.between(0, time.monotonic())["throttle"] == [
        "gpu_idle",
        "applications_clocks_setting",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "display_clock_setting",
    ]


def test_sampler_without_nvidia_smi_or_samples(nvidia_smi, monkeypatch, tmp_path):
    nothing = {"sm_mhz": None, "power_w": None, "temperature_c": None, "throttle": []}
    monkeypatch.setattr(gpu_state.shutil, "which", lambda name: None)
    sampler = gpu_state.GpuSampler(0)
    sampler.start()
    assert sampler.between(0, 1e9) == nothing
    sampler.stop()
    monkeypatch.undo()
    nvidia_smi()
    sampler.start()
    wait_until((tmp_path / "call").exists)
    assert sampler.between(0, 1e9) == nothing
    sampler.stop()


def test_sampler_ends_with_a_killed_parent(nvidia_smi):
    folder = nvidia_smi("1000, 1, 1, 0x0")
    code = (
        "import time; from common.gpu_state import GpuSampler; s = GpuSampler(0); s.start(); "
        "print(s._child.pid, flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    stamper = int(parent.stdout.readline())
    wait_until(lambda: (folder / "call").exists() and (folder / "call").read_text())
    child = int((folder / "call").read_text().split()[0])
    assert alive(stamper) and alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(stamper) and not alive(child))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- energy


class FakeNvml:
    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return {"handle": 12_345}[handle]

    def nvmlSystemGetDriverVersion(self):
        return "580.1"


@pytest.fixture
def no_cached_nvml():
    gpu_state.nvml_or_none.cache_clear()
    yield
    gpu_state.nvml_or_none.cache_clear()


def test_energy_is_in_joules(monkeypatch, no_cached_nvml):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert gpu_state.energy_joules("GPU-1") == 12.345
    assert gpu_state.energy_joules("GPU-2") is None
    assert gpu_state.energy_joules(None) is None
    assert gpu_state.driver_version() == "580.1"


def test_energy_without_nvml(monkeypatch, no_cached_nvml):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state.energy_joules("GPU-1") is None


# --- who else is on the GPU


class FakeGpu(FakeNvml):
    """A GPU with these processes (process id -> bytes) and so many bytes in use."""

    nvmlMemory_v2 = 2

    def __init__(self, processes, used_bytes):
        self.processes, self.used_bytes = processes, used_bytes

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes.items()]

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        # The first version counts what the driver reserves.
        return types.SimpleNamespace(used=self.used_bytes + (0 if version == 2 else 2**33))


MIB, GIB = 2**20, 2**30
UNSEEN = "a process that is not shown here"
# processes, bytes in use, own process ids -> what is told
OTHERS = [
    ({}, 4 * MIB, (), []),
    ({123: int(4.1 * GIB)}, int(4.2 * GIB), (), ["process 123, 4.1 GiB"]),
    ({123: 4 * GIB, 7: 512 * MIB}, 5 * GIB, (123,), ["process 7, 0.5 GiB"]),
    ({123: 4 * GIB}, 4 * GIB, (123, 9), []),
    ({}, 3 * GIB, (), [f"{UNSEEN}, 3.0 GiB"]),
    ({123: 2 * GIB}, 5 * GIB, (), ["process 123, 2.0 GiB", f"{UNSEEN}, 3.0 GiB"]),
]


@pytest.mark.parametrize("processes, used_bytes, own, told", [*OTHERS, ({123: None}, 5 * GIB, (), ["process 123"])])
def test_other_processes_by_nvml(monkeypatch, no_cached_nvml, processes, used_bytes, own, told):
    monkeypatch.setitem(sys.modules, "pynvml", FakeGpu(processes, used_bytes))
    assert gpu_state.other_processes("GPU-1", own) == told
    assert gpu_state.other_processes("GPU-2", own) == []
    assert gpu_state.other_processes(None, own) == []


@pytest.mark.parametrize("processes, used_bytes, own, told", OTHERS)
def test_other_processes_by_nvidia_smi(monkeypatch, tmp_path, no_cached_nvml, processes, used_bytes, own, told):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    listing = "".join(f"{pid}, {size // MIB}\n" for pid, size in processes.items())
    script = f"""#!/bin/sh
        [ "$4" = GPU-1 ] || exit 6
        case $1 in
            --query-compute-apps=pid,used_memory) printf '{listing}' ;;
            --query-gpu=memory.used) echo {used_bytes // MIB} ;;
        esac"""
    put_on_path(monkeypatch, tmp_path, script)
    assert gpu_state.other_processes("GPU-1", own) == told
    assert gpu_state.other_processes("GPU-2", own) == []


def test_other_processes_without_nvml_and_command(monkeypatch, no_cached_nvml):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    assert gpu_state.other_processes("GPU-1") == []


def put_on_path(monkeypatch, folder, script):
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# --- cores


@pytest.fixture
def two_nodes(monkeypatch, tmp_path):
    """Four GPUs: 1 and 2 on node 0, 3 on node 1, 4 without a node; node 0 has cores 0-3 and 8, node 1 4-7. A /sys."""
    for bus, node in {"0000:1b:00.0": 0, "0000:2c:00.0": 0, "0001:1b:00.0": 1, "0000:3d:00.0": -1}.items():
        folder = tmp_path / "bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in enumerate(("0-3,8\n", "4-7\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    script = """#!/bin/sh
        [ "$*" = "--query-gpu=uuid,pci.bus_id --format=csv,noheader,nounits" ] || exit 6
        echo GPU-1, 00000000:1B:00.0
        echo GPU-2, 00000000:2C:00.0
        echo GPU-3, 00000001:1B:00.0
        echo GPU-4, 00000000:3D:00.0"""
    put_on_path(monkeypatch, tmp_path, script)
    return tmp_path


@pytest.mark.parametrize(
    "uuids, allowed, told",
    [
        (["GPU-1"], range(9), ([0, 1, 2, 3, 8], 0)),
        (["GPU-1", "GPU-2"], range(9), ([0, 1, 2, 3, 8], 0)),
        (["GPU-3"], range(9), ([4, 5, 6, 7], 1)),
        (["GPU-1"], {1, 3, 5}, ([1, 3], 0)),
        (["GPU-1", "GPU-3"], range(1, 8), ([1, 2, 3, 4, 5, 6, 7], None)),
        (["GPU-1"], {5, 6}, ([5, 6], None)),
        (["GPU-4"], {5, 0}, ([0, 5], None)),
        (["GPU-1", "GPU-4"], range(9), (list(range(9)), None)),
        (["GPU-9"], range(9), (list(range(9)), None)),
        (["MIG-1"], range(9), (list(range(9)), None)),
    ],
)
def test_cores_are_those_of_the_gpus_node(two_nodes, monkeypatch, uuids, allowed, told):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    assert host_state.cores_of(uuids, two_nodes) == told


def test_cores_where_the_system_has_no_nodes(two_nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    (two_nodes / "devices/system/node/node1/cpulist").unlink()
    assert host_state.cores_of(["GPU-1"], two_nodes) == ([0, 1], 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    assert host_state.cores_of(["GPU-1", "GPU-3"], two_nodes) == ([0, 5], None)
    assert host_state.cores_of(["GPU-1"], tmp_path / "none") == ([0, 5], None)


def test_cores_without_a_gpu_ask_no_nvidia_smi(monkeypatch, tmp_path):
    put_on_path(monkeypatch, tmp_path, f"#!/bin/sh\ntouch {tmp_path}/asked")
    assert host_state.cores_of([]) == (sorted(os.sched_getaffinity(0)), None)
    assert not (tmp_path / "asked").exists()
    assert host_state.cores_of(["GPU-1"]) == (sorted(os.sched_getaffinity(0)), None)
    assert (tmp_path / "asked").exists()


def test_core_lists_of_the_kernel():
    assert host_state.core_numbers("0-2,5,7-8") == {0, 1, 2, 5, 7, 8}
    assert host_state.core_numbers("") == host_state.core_numbers(None) == set()


# --- HostActivity


def write_proc(folder, ticks, load):
    (folder / "stat").write_text(f"cpu  {ticks}\ncpu0 {ticks}\n")
    (folder / "loadavg").write_text(f"{load} 0.07 0.08 2/88 3852\n")


def test_host_activity_is_a_difference(tmp_path):
    write_proc(tmp_path, "1000 10 100 5000 50 5 5 30 7 0", 0.5)
    activity = host_state.HostActivity(tmp_path)
    activity.start()
    # user +100, nice +10, system +20, idle +40, iowait +10, irq +4, softirq +6, steal +10: 200; guest is part of user.
    write_proc(tmp_path, "1100 20 120 5040 60 9 11 40 99 0", 1.5)
    assert activity.stop() == {
        "steal_fraction": 0.05,
        "busy_fraction": 0.7,
        "load_1m_start": 0.5,
        "load_1m_end": 1.5,
        "num_cores": os.cpu_count(),
    }


def test_host_activity_without_proc_or_time(tmp_path):
    activity = host_state.HostActivity(tmp_path)
    activity.start()
    assert activity.stop()["steal_fraction"] is None and activity.stop()["load_1m_end"] is None
    write_proc(tmp_path, "1 1 1 1 1 1 1 1", 0.1)
    activity.start()
    assert activity.stop()["busy_fraction"] is None


def test_host_activity_on_this_machine():
    activity = host_state.HostActivity()
    activity.start()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    assert 0.1 < activity.stop()["busy_fraction"] <= 1
