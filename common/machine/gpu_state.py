"""The state of a GPU: clocks, power, temperature; and its driver. It is observed, and nothing is ever set.

`GpuSampler` samples in a child process, because a polling thread would take the GIL from the loop that is measured.
All of this answers None, or an empty list, where the machine cannot tell. Times are `time.monotonic()` in seconds.
"""

import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

# ------------------------------------------------------------------------------------------------
# Clocks and power

# Bits of NVML's nvmlClocksEventReason* (nvml.h), by nvidia-smi's names.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
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


class GpuSampler:
    """Samples SM clock, power, temperature and throttle reasons of one GPU every `interval_ms`.

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
        query = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
        command = [nvidia_smi, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
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

    def between(self, t0, t1) -> dict:
        """Clocks over t0 <= time.monotonic() <= t1: medians, highest temperature, reasons seen."""
        rows = [row for row in self.samples() if t0 <= row[0] <= t1]
        sm_mhz, power_w, temperature_c, reasons = (
            [row[column] for row in rows if row[column] is not None] for column in (1, 2, 3, 4)
        )
        seen = functools.reduce(int.__or__, reasons, 0)
        return {
            "sm_mhz": statistics.median(sm_mhz) if sm_mhz else None,
            "power_w": statistics.median(power_w) if power_w else None,
            "temperature_c": max(temperature_c, default=None),
            "throttle": [name for bit, name in THROTTLE_REASONS.items() if seen & bit],
        }

    def samples(self):
        """(time_s, sm_mhz, power_w, temperature_c, reason bits) of each whole line."""
        if self._file is None:
            return []
        descriptor = self._file.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        rows = [line.split(", ") for line in text.split("\n")[:-1]]
        return [
            (float(row[0]), *map(_number, row[1:4]), _number(row[4], functools.partial(int, base=16)))
            for row in rows
            if len(row) == 5
        ]


def _number(text, convert=float):
    try:
        return convert(text)
    except ValueError:  # nvidia-smi's [N/A]
        return None


def ask_nvidia_smi(query: str, *options: str) -> list[str]:
    """The lines that nvidia-smi answers to a --query of it, fields separated by ", "; none where it cannot."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


@functools.cache
def nvml_or_none():
    """nvidia-ml-py's module, initialised, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver_version() -> str | None:
    """The NVIDIA driver's version, as in 580.65.06."""
    nvml = nvml_or_none()
    if nvml:
        return nvml.nvmlSystemGetDriverVersion()
    return next(iter(ask_nvidia_smi("--query-gpu=driver_version")), None)
