"""The state of the host: /proc, /sys, available memory. It is observed, and nothing is ever set."""

from pathlib import Path


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
