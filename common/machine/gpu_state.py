"""The clock of a GPU, and its driver. Both are observed, and nothing is ever set.

`GpuSampler` samples in a child process, because a polling thread would take the GIL from the loop that is measured.
All of this answers None where the machine cannot tell. Times are `time.monotonic()` in seconds.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile

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


class GpuSampler:
    """Samples the SM clock of one GPU every `interval_ms`.

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
        command = [nvidia_smi, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
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

    def sm_mhz(self, t0: float, t1: float) -> float | None:
        """Median clock over t0 <= time.monotonic() <= t1; None without a sample."""
        clocks = [mhz for time_s, mhz in self.samples() if t0 <= time_s <= t1]
        return statistics.median(clocks) if clocks else None

    def samples(self) -> list[tuple[float, float]]:
        """(time_s, sm_mhz) of each whole line that has a clock."""
        if self._file is None:
            return []
        descriptor = self._file.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        rows = [line.split(", ") for line in text.split("\n")[:-1]]
        return [(float(row[0]), float(row[1])) for row in rows if len(row) == 2 and row[1].isdecimal()]


def driver_version() -> str | None:
    """The NVIDIA driver's version, as in 580.65.06."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.split()), None)
