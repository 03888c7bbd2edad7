"""What people see of a session while it runs: durations, seconds by phase, and why a run keeps them waiting."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from common import announce
from common.host_state import read_text

# A wait of fewer seconds needs no line.
WAIT_S = 4.0
# Where kernels go once they are compiled; a folder there for each of them.
CACHES = {"Triton kernels": "TRITON_CACHE_DIR", "torch.compile's kernels": "TORCHINDUCTOR_CACHE_DIR"}


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def phases(record: dict, total_s: float | None) -> str:
    """`seconds` of a record in its own order, in one line; what takes less than 0.05 s is left out.

    total_s: of the whole process, None where it is not known; what no phase accounts for is `other`. Empty for a record
    that knows no phase.
    """
    known = {name: value for name, value in record["seconds"].items() if value is not None}
    if not known:
        return ""
    if total_s is not None:
        known["other"] = total_s - sum(known.values())
    return "s: " + ", ".join(f"{name} {value:.1f}" for name, value in known.items() if value >= 0.05)


class Watch:
    """Says once what keeps a run for more than WAIT_S seconds: kernels being compiled, or what it announces itself.

    environment: of the run; common.announce.VARIABLE in it names a file that the run may write, and CACHES' variables
    the folders where compiled kernels appear. say(text): prints. Kernels that are there already are not compiled, so
    that a later run says nothing.
    """

    def __init__(self, name: str, environment: dict, say: Callable[[str], None]):
        self.name, self.say = name, say
        self.announced = Path(environment[announce.VARIABLE])
        self.caches = {what: Path(environment[variable]) for what, variable in CACHES.items()}
        self.changed_ns = {what: _changed_ns(path) for what, path in self.caches.items()}
        self.since_s: dict[str, float] = {}
        self.said: set[str] = set()

    def look(self) -> None:
        """Called every second or so while the run goes on; costs a few microseconds."""
        now = time.monotonic()
        for what, path in self.caches.items():
            changed = _changed_ns(path)
            if changed != self.changed_ns[what]:
                self.changed_ns[what] = changed
                # The first to appear began before; the next ones show that there are more to come.
                self._waits(f"compiles {what}, once: later runs take them from {path}", now)
        announced = read_text(self.announced)
        for text in [text for text in self.since_s if not text.startswith("compiles ") and text != announced]:
            del self.since_s[text]
        if announced:
            self._waits(announced, now)

    def _waits(self, text, now):
        if now - self.since_s.setdefault(text, now) >= WAIT_S and text not in self.said:
            self.said.add(text)
            self.say(f"          {self.name} {text}")


def _changed_ns(path):
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
