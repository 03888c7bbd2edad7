"""What the host does, and which of its cores belong to a GPU. It is observed, and nothing is ever set."""

import os
import sys
from pathlib import Path

from common.gpu_state import ask_nvidia_smi


def read_text(path) -> str | None:
    """The text of a file of /proc or /sys without blanks around it, or None."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def available_host_bytes() -> int | None:
    """MemAvailable of /proc/meminfo: what a new process can have without swapping. None where that is missing."""
    for line in (read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


class HostActivity:
    """How busy the whole host was between start() and stop(), read from /proc at both ends only."""

    def __init__(self, proc="/proc"):
        self.proc = Path(proc)

    def start(self) -> None:
        self._ticks, self._load = self._read_ticks(), self._read_load()

    def stop(self) -> dict:
        """steal_fraction and busy_fraction of all cores' time, 1-minute load at both ends, num_cores.

        steal is time the hypervisor gave to others. Values are None without /proc, or when start() was so
        recent that no tick has passed.
        """
        ticks = self._read_ticks()
        steal = busy = None
        if ticks and self._ticks:
            user, nice, system, idle, iowait, irq, softirq, stolen = (
                b - a for a, b in zip(self._ticks, ticks, strict=True)
            )
            total = user + nice + system + idle + iowait + irq + softirq + stolen
            if total > 0:
                steal, busy = stolen / total, (user + nice + system + irq + softirq) / total
        return {
            "steal_fraction": steal,
            "busy_fraction": busy,
            "load_1m_start": self._load,
            "load_1m_end": self._read_load(),
            "num_cores": os.cpu_count(),
        }

    def _read_ticks(self):
        # proc(5): user nice system idle iowait irq softirq steal; guest time that follows is part of user.
        text = read_text(self.proc / "stat")
        return text and [int(field) for field in text.split("\n", 1)[0].split()[1:9]]

    def _read_load(self):
        text = read_text(self.proc / "loadavg")
        return float(text.split()[0]) if text else None


# ------------------------------------------------------------------------------------------------
# Cores


def cores_of(gpu_uuids, sys_folder="/sys") -> tuple[list[int], int | None]:
    """(cores that this process may use and that lie on the GPUs' NUMA nodes, the node).

    gpu_uuids: as nvidia-smi tells them; empty without a GPU, and then nvidia-smi is not asked. Several GPUs of
    different nodes: the cores of all these nodes, and None as the node. Where a GPU has no node, the system has no list
    of its cores, or none of them may be used: all cores that may be used, and None.
    """
    # Only Linux tells which cores a process may use.
    allowed = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    nodes = _nodes_of(gpu_uuids, Path(sys_folder)) if gpu_uuids else set()
    lists = [core_numbers(read_text(Path(sys_folder) / f"devices/system/node/node{node}/cpulist")) for node in nodes]
    cores = [core for core in allowed if any(core in listed for listed in lists)]
    if not cores or not all(lists):
        return allowed, None
    return cores, nodes.pop() if len(nodes) == 1 else None


def _nodes_of(gpu_uuids, sys_folder):
    """NUMA nodes of these GPUs; empty where one of them is unknown or has none."""
    listing = ask_nvidia_smi("--query-gpu=uuid,pci.bus_id")
    buses = dict(line.split(", ") for line in listing if line.count(", ") == 1)
    nodes = set()
    for uuid in gpu_uuids:
        # nvidia-smi writes the domain with eight digits, the kernel with four: 00000000:1B:00.0 is 0000:1b:00.0.
        domain, _, rest = buses.get(uuid, "").strip().lower().partition(":")
        node = read_text(sys_folder / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node") or ""
        if not node.isdigit():
            return set()
        nodes.add(int(node))
    return nodes


def core_numbers(text):
    """The kernel's list format: 0-3,8,10-11."""
    cores = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return cores
