"""The GPUs of this machine as nvidia-smi lists them. Nothing here imports torch."""

import os
import re
from dataclasses import dataclass

from graph_worth.machine.environment import driver_version, nvidia_smi


@dataclass(frozen=True)
class Gpus:
    """The GPUs that nvidia-smi lists: names, UUIDs (GPU-...) and the driver."""

    names: tuple = ()
    uuids: tuple = ()
    driver: str | None = None

    @property
    def slug(self) -> str:
        """The type in a folder's name: `NVIDIA H200` is `h200`, `NVIDIA H100 80GB HBM3` is `h100`, no GPU is `cpu`."""
        if not self.names:
            return "cpu"
        # The driver names size and kind of memory also where a type has memory of one size only.
        name = re.sub(r" \d+gb hbm\w+$", "", self.names[0].lower())
        words = re.findall(r"[^\W_]+", name)
        return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def find_gpus() -> Gpus:
    """Return the GPUs that nvidia-smi -L lists and CUDA_VISIBLE_DEVICES shows; none without the command or a driver."""
    listing = nvidia_smi("-L") or ""
    gpus = re.findall(r"^GPU (\d+): (.*?)(?: \(UUID: (.*?)\))?$", listing, re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        gpus = [gpu for gpu in gpus if any(part == gpu[0] or (gpu[2] and gpu[2].startswith(part)) for part in wanted)]
    if not gpus:
        return Gpus()
    return Gpus(tuple(name for _, name, _ in gpus), tuple(uuid for _, _, uuid in gpus), driver_version())
