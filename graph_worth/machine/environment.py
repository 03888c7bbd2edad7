"""The environment of a run: versions, GPU and host. Imports torch for a CUDA device alone.

The code that ran is described by graph_worth/machine/source.py.
"""

import functools
import hashlib
import os
import platform
import re
import socket
import subprocess
from importlib import metadata

from graph_worth.machine.host_state import read_text
from graph_worth.text import without_folders

_OF_GPU = ("gpu_name", "gpu_uuid", "driver", "cuda", "cudnn", "nccl")
_VARIABLES = re.compile(r"(CUDA_|NCCL_|NVTE_|TORCH(?!ELASTIC_)|OMP_|GOMP_|KMP_|CUBLAS|TRITON|PYTORCH_.*ALLOC)")
# Absolute, alone, in a list, or behind a flag as -I; not the / of PCI or MIG names.
_SLURM = {
    "job_id": "SLURM_JOB_ID",
    "nodelist": "SLURM_JOB_NODELIST",
    "partition": "SLURM_JOB_PARTITION",
    "num_nodes": "SLURM_JOB_NUM_NODES",
    "num_tasks": "SLURM_NTASKS",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "restart_count": "SLURM_RESTART_COUNT",
}


def describe_environment(device, world_size) -> dict:
    """Describe machine and versions; values of the GPU are None on the CPU.

    num_gpus counts the GPUs this process can see. host is a hash of the machine's name, so that it can be published.
    variables are the environment variables that change what CUDA, NCCL, PyTorch, Transformer Engine or Triton do.
    """
    in_job = "SLURM_JOB_ID" in os.environ
    cpu = re.search(r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo") or "", re.MULTILINE)
    return dict.fromkeys(_OF_GPU) | {
        "num_gpus": 0,
        "world_size": world_size,
        "boot_id": read_text("/proc/sys/kernel/random/boot_id"),
        **(_gpu(str(device)) if str(device).startswith("cuda") else {}),
        "torch": _version("torch"),
        "transformer_engine": _version("transformer_engine"),
        "dali": _version("nvidia-dali-cuda130"),
        "python": platform.python_version(),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "cpu": f"{cpu.group(1).strip() if cpu else platform.machine()}, {os.cpu_count()} cores",
        "slurm": {key: os.environ[name] for key, name in _SLURM.items() if in_job and name in os.environ},
        # Of absolute paths the last name: a published file names no folder of a machine.
        "variables": {name: without_folders(os.environ[name]) for name in sorted(os.environ) if _VARIABLES.match(name)},
    }


def describe_host(device) -> dict:
    """Return what a run file says of a worker's host: boot, name (hashed), cpu, cores, GPUs and versions."""
    import torch

    env = describe_environment(device, 1)
    names = ("cudnn", "nccl", "transformer_engine", "dali", "python")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, **{name: env[name] for name in names}}
    return {
        "boot": env["boot_id"],
        "host": env["host"],
        "cpu": env["cpu"],
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [{"name": env["gpu_name"], "uuid": env["gpu_uuid"]}] if env["num_gpus"] else [],
        "driver": env["driver"],
        "versions": versions,
        "variables": env["variables"],
        "slurm": env["slurm"],
    }


def _gpu(device):
    import torch

    index = torch.device(device).index
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    cudnn = torch.backends.cudnn.version()
    return {
        "gpu_name": properties.name,
        "gpu_uuid": _nvml_uuid(properties.uuid),
        "num_gpus": torch.cuda.device_count(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        # cuDNN 9 and later: major * 10000 + minor * 100 + patch.
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def _nvml_uuid(uuid):
    """Return a GPU's UUID as NVML and nvidia-smi take it, GPU-<uuid>; torch prints it bare."""
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


@functools.cache
def _version(distribution):
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def nvidia_smi(*words: str) -> str | None:
    """The output of nvidia-smi; None where there is no such command, or it fails."""
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, as in 580.65.06."""
    answer = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or ""
    return next(iter(answer.split()), None)
