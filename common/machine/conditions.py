"""The machine that a worker ran on: boot, processor, GPUs, versions. It is observed, and nothing is ever set."""

import os
import platform

import torch

from common.machine.environment import describe_environment
from common.machine.host_pace import probe

PROBE_S = 0.4


def describe_host(device: torch.device) -> dict:
    """boot, name (hashed), cpu, cores, GPUs and versions.

    Args:
        device: of this process.
    """
    env = describe_environment(str(device), 1)
    gpus = [{"name": env["gpu_name"], "uuid": env["gpu_uuid"]}] if device.type == "cuda" else []
    return {
        "boot": env["boot_id"],
        "host": env["host"],
        "cpu": env["cpu"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "driver": env["driver"],
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": env["cudnn"],
            "nccl": env["nccl"],
            "transformer_engine": env["transformer_engine"],
            "dali": env["dali"],
            "python": platform.python_version(),
        },
        "variables": env["variables"],
        "slurm": env["slurm"],
    }


def pace_of_host() -> dict:
    """operator_us and launch_us: host time of one eager operator and of one bare launch (None on a CPU)."""
    found = probe(PROBE_S)
    return {"operator_us": found["us_per_operator"], "launch_us": found["us_per_launch"]}
