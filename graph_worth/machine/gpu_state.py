"""The clock, power and throttle reasons of a GPU. They are observed, and nothing is ever set.

`GpuSampler` samples in a child process, because a polling thread would take the GIL from the loop that is measured.
All of this answers None where the machine cannot tell. Times are `time.monotonic()` in seconds.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

# Bits of clocks_event_reasons.active, by NVML. An idle GPU, and clocks that an application chose, are none of them.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}

# Runs in the child. Both it and nvidia-smi ask the kernel to be killed with their parent (PR_SET_PDEATHSIG is 1);
# the check of the parent's id closes the gap before that call.
_STAMPER = """
import ctypes, os, signal, subprocess, sys, time
prctl = ctypes.CDLL(None).prctl
prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit()
child = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, preexec_fn=lambda: prctl(1, signal.SIGKILL))
for line in child.stdout:
    os.write(1, b"%.6f, " % time.monotonic() + line)
"""


class Sample(NamedTuple):
    """A line of nvidia-smi: time.monotonic() in s, clock in MHz, power in W or None, bits of the throttle reasons."""

    time_s: float
    sm_mhz: float
    power_w: float | None
    reasons: int


class GpuSampler:
    """Samples SM clock, power and throttle reasons of one GPU every `interval_ms`.

    gpu: UUID or index, as `nvidia-smi -i` takes it. Without nvidia-smi it stays idle and answers None.
    start() has to be called on a thread that lives as long as the run, since the child ends with it.
    """

    def __init__(self, gpu, interval_ms=250):
        self.gpu = gpu
        self.interval_ms = interval_ms
        self._child = None
        self._file = None

    def start(self) -> None:
        """Start the child that samples."""
        assert self._child is None
        nvidia_smi = shutil.which("nvidia-smi")
        if nvidia_smi is None:
            return
        query = "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active"
        command = [nvidia_smi, query, "--format=csv,noheader,nounits"]
        command += ["-lms", str(self.interval_ms), "-i", str(self.gpu)]
        # The file has no name, so nothing is left behind; it is read by position, since the child's write position
        # is shared with it.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _STAMPER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the child. Samples taken so far stay readable."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def state(self, t0: float, t1: float) -> dict | None:
        """Medians "sm_mhz" and "power_w" over t0 <= time.monotonic() <= t1, and "throttle"; None without a sample."""
        samples = [sample for sample in self.samples() if t0 <= sample.time_s <= t1]
        if not samples:
            return None
        powers, bits = [sample.power_w for sample in samples if sample.power_w is not None], 0
        for sample in samples:
            bits |= sample.reasons
        return {
            "sm_mhz": statistics.median(sample.sm_mhz for sample in samples),
            "power_w": statistics.median(powers) if powers else None,
            "throttle": [name for bit, name in THROTTLE_REASONS.items() if bits & bit],
        }

    def samples(self) -> list[Sample]:
        """Each whole line that has a clock."""
        if self._file is None:
            return []
        descriptor = self._file.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        rows = [line.split(", ") for line in text.split("\n")[:-1]]
        return [_sample(row) for row in rows if len(row) == 4 and row[1].isdecimal()]


def _sample(row: list[str]) -> Sample:
    try:
        power = float(row[2])
    except ValueError:
        power = None  # a GPU that does not tell says [N/A]
    return Sample(float(row[0]), float(row[1]), power, int(row[3], 16) if row[3].startswith("0x") else 0)
