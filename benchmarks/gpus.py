"""The GPUs of this machine as nvidia-smi lists them, and the CUDA version of torch. Nothing here imports torch."""

import importlib.util
import os
import re
import runpy
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpus:
    """The GPUs that nvidia-smi lists: names, UUIDs (GPU-...) and the driver, each None or empty without one."""

    names: tuple = ()
    uuids: tuple = ()
    driver: str | None = None

    @property
    def slug(self) -> str:
        """`NVIDIA H200` -> `h200`, `NVIDIA H100 80GB HBM3` -> `h100`; `cpu` without a GPU."""
        if not self.names:
            return "cpu"
        # Of a type with memory of one size alone the driver says the size and the kind of memory all the same.
        name = re.sub(r" \d+gb hbm\w+$", "", self.names[0].lower())
        words = re.findall(r"[^\W_]+", name)
        return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def find_gpus() -> Gpus:
    """Ask nvidia-smi -L; without the command, a driver or a GPU the answer is empty. CUDA_VISIBLE_DEVICES counts."""
    listing = _output(["nvidia-smi", "-L"])
    found = re.findall(r"^GPU (\d+): (.*?)(?: \(UUID: (.*?)\))?$", listing, re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        found = [gpu for gpu in found if any(part == gpu[0] or (gpu[2] and gpu[2].startswith(part)) for part in wanted)]
    if not found:
        return Gpus()
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split()
    return Gpus(tuple(name for _, name, _ in found), tuple(uuid for _, _, uuid in found), driver[0] if driver else None)


def _output(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cuda_version() -> str | None:
    """The CUDA version torch was built for, read from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path)).get("cuda") if path and path.exists() else None
