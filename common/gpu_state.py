"""What a GPU does: clocks, power, energy, and who else computes on it. It is observed, and nothing is ever set.

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
# Clocks, power and energy

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
        """`clocks` of the record over t0 <= time.monotonic() <= t1: medians, highest temperature, reasons seen."""
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


_HEX = functools.partial(int, base=16)


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


def energy_joules(device_uuid) -> float | None:
    """The GPU's total energy counter in joules since the driver was loaded; None without nvidia-ml-py or the counter.

    device_uuid: NVML's, as `env.gpu_uuid` holds it. Two readings bracket a window; NVML counts millijoules.
    """
    nvml = nvml_or_none()
    if nvml is None or device_uuid is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device_uuid)
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except nvml.NVMLError:
        return None


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


# ------------------------------------------------------------------------------------------------
# Who else is there

# The driver's own share of an idle GPU stays far below; a process with a CUDA context of its own does not.
UNSEEN_BYTES = 2**30


def other_processes(gpu_uuid: str | None, own_pids=()) -> list[str]:
    """A text for each compute process on this GPU that is not ours, as in "process 123, 4.1 GiB"; empty without a GPU.

    gpu_uuid: NVML's, as `env.gpu_uuid` holds it. own_pids: processes to leave out, which works only where NVML counts
    processes as we do: in a container it tells the host's numbers, or no processes at all. Therefore ask while no
    process of ours is on the GPU, right before and after a run; then whatever is listed is somebody else's. Memory in
    use that no listed process has, from UNSEEN_BYTES up, is that of a process that NVML does not show here.
    """
    if not gpu_uuid:
        return []
    listed, used_bytes = _processes(gpu_uuid)
    out = [_process_text(f"process {pid}", size) for pid, size in listed if pid not in own_pids]
    # Where a process does not tell what it holds (MIG, WSL), nothing can be said of the rest.
    if used_bytes is not None and all(size is not None for _, size in listed):
        unseen = used_bytes - sum(size for _, size in listed)
        if unseen >= UNSEEN_BYTES:
            out.append(_process_text("a process that is not shown here", unseen))
    return out


def _process_text(who, num_bytes):
    return who if num_bytes is None else f"{who}, {num_bytes / 2**30:.1f} GiB"


def _processes(gpu_uuid):
    """([(process id, bytes or None)], bytes in use on the GPU or None), by NVML, else by nvidia-smi."""
    nvml = nvml_or_none()
    if nvml is None:
        return _processes_by_command(gpu_uuid)
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return [], None
    try:
        # The first version of this structure counts what the driver reserves as in use.
        used_bytes = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used
    except (nvml.NVMLError, AttributeError):
        used_bytes = None
    return [(process.pid, process.usedGpuMemory) for process in listed], used_bytes


def _processes_by_command(gpu_uuid):
    listing = ask_nvidia_smi("--query-compute-apps=pid,used_memory", "-i", gpu_uuid)
    used = ask_nvidia_smi("--query-gpu=memory.used", "-i", gpu_uuid)
    rows = [line.split(", ") for line in listing]
    listed = [(int(row[0]), _mebibytes(row[1])) for row in rows if len(row) == 2 and row[0].isdigit()]
    return listed, _mebibytes(used[0]) if used else None


def _mebibytes(text):
    number = _number(text)
    return None if number is None else int(number) * 2**20
