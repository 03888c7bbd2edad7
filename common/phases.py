"""When a run began and how long each of its phases took. `common.config`, a script's first import, imports this."""

import contextlib
import os
import time
from pathlib import Path

FIRST_LINE_S = time.monotonic()


class Phases:
    """Fills `seconds`, `begin_utc` and `end_utc` of a record.

    Wall seconds. `start` ends where a script's first line ran, `import` where `measure.run` was called.
    """

    def __init__(self, record: dict):
        self.record, self.seconds = record, record["seconds"]
        now_s, began_s = time.monotonic(), _process_start_s()
        if began_s is not None:
            self.seconds["start"] = round(FIRST_LINE_S - began_s, 3)
        self.seconds["import"] = round(now_s - FIRST_LINE_S, 3)
        record["begin_utc"] = utc(time.time() - now_s + (FIRST_LINE_S if began_s is None else began_s))

    @contextlib.contextmanager
    def phase(self, name: str):
        """Add the block's wall seconds to those of `name`, also where it fails."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round((self.seconds[name] or 0.0) + time.monotonic() - start_s, 3)

    def end(self) -> None:
        self.record["end_utc"] = utc(time.time())


def utc(seconds: float) -> str:
    """Seconds since 1970 as text: 2026-11-22T03:15:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _process_start_s():
    """When this process began, on the clock of time.monotonic(), to 0.01 s; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Field 22 of proc(5), counted from the one after the name: ticks since boot, time asleep included.
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        began_s = since_boot_s - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())
    except (OSError, IndexError, ValueError, AttributeError):
        return None
    return began_s if began_s <= FIRST_LINE_S else None
