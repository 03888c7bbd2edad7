"""When a run began and how long each of its phases took. `common.config`, a script's first import, imports this."""

import contextlib
import os
import time
from pathlib import Path

FIRST_LINE_S = time.monotonic()

# In the order of a run. What a run did not do is null, or missing where the schema's first records did not have it.
NAMES = ("start", "import", "build", "prepare", "warmup", "compile", "capture", "canary", "parity", "reset", "issue")
NAMES += ("settle", "window", "proof", "passes", "sections", "profile", "close")


class Phases:
    """Fills `seconds`, `begin_utc` and `end_utc` of a record.

    Wall seconds that sum to the process's own up to the end of the record. `start` ends where a script's first line
    ran, `import` where `measure.run` was called. `prepare` is what making a variant takes beside warm-up, compilation
    and capture; `passes` is what a model or --mllog adds after the window. ranks: an `Agreement`, or None.
    """

    def __init__(self, record: dict):
        self.record, self.seconds = record, record["seconds"]
        self.ranks = None
        # Of each open phase its name and the seconds of those within it.
        self._open: list[list] = []
        now_s, began_s = time.monotonic(), _process_start_s()
        if began_s is not None:
            self.seconds["start"] = round(FIRST_LINE_S - began_s, 3)
        self.seconds["import"] = round(now_s - FIRST_LINE_S, 3)
        record["begin_utc"] = utc(time.time() - now_s + (FIRST_LINE_S if began_s is None else began_s))

    @contextlib.contextmanager
    def phase(self, name: str, agree: bool = True):
        """Add the block's wall seconds to those of `name`, also where it fails; a phase within it counts for itself.

        agree: at the end of a phase that is within no other, all ranks must have passed it (common/agreement.py).
        """
        start_s = time.monotonic()
        self._open.append([name, 0.0])
        self._enter(name)
        try:
            yield
            if agree and self.ranks is not None and len(self._open) == 1:
                self.ranks.agree()
        finally:
            took_s = time.monotonic() - start_s
            self.add(name, took_s - self._open.pop()[1])
            if self._open:
                self._open[-1][1] += took_s
                self._enter(self._open[-1][0])

    def _enter(self, name):
        if self.ranks is not None:
            self.ranks.enter(name)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round((self.seconds.get(name) or 0.0) + seconds, 3)

    def end(self) -> None:
        self.record["end_utc"] = utc(time.time())
        known = {name: self.seconds[name] for name in NAMES if name in self.seconds}
        self.seconds.clear()
        self.seconds.update(known)


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
