"""What a run ran on: versions, GPU, host, source; and what the machine did meanwhile.

`describe_environment` fills `env` of the record. `source_hash` says which code ran, with or without
git. `GpuSampler`, `energy_joules` and `HostActivity` observe the machine and never set anything: the
sampler is a child process, because a polling thread would take the GIL from the loop that is measured.
All of them answer None where the machine cannot tell. Times are `time.monotonic()` in seconds.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# ------------------------------------------------------------------------------------------------
# Versions, GPU and host

_VARIABLES = re.compile(r"(CUDA_|NCCL_|NVTE_|TORCH(?!ELASTIC_)|OMP_|CUBLAS|TRITON|PYTORCH_.*ALLOC)")
_SLURM = {
    "job_id": "SLURM_JOB_ID",
    "nodelist": "SLURM_JOB_NODELIST",
    "partition": "SLURM_JOB_PARTITION",
    "num_nodes": "SLURM_JOB_NUM_NODES",
    "num_tasks": "SLURM_NTASKS",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "restart_count": "SLURM_RESTART_COUNT",
}


def describe_environment(model, device, world_size) -> dict:
    """`env` of the record, with the keys of `record.TEMPLATE["env"]`.

    model: package of the model, as in `gpt3`. device: "cpu", "cuda" or "cuda:1", text or torch.device;
    torch is imported for a CUDA device only. num_gpus counts the GPUs this process can see. host is a
    hash of the machine's name, so that records can be published; slurm.nodelist is the scheduler's own
    text. variables are the environment variables that change what CUDA, NCCL, PyTorch, Transformer
    Engine or Triton do; torchrun's own bookkeeping (TORCHELASTIC_*) is left out.
    """
    git_sha, git_dirty = git_state(model)
    return {
        "gpu_name": None,
        "gpu_uuid": None,
        "num_gpus": 0,
        "world_size": world_size,
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "driver": None,
        "cuda": None,
        "cudnn": None,
        "nccl": None,
        **(_gpu(str(device)) if str(device).startswith("cuda") else {}),
        "torch": _version("torch"),
        "transformer_engine": _version("transformer_engine"),
        "dali": _dali_version(),
        "python": platform.python_version(),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "git_sha": git_sha,
        "git_dirty": git_dirty,
        "source_hash": source_hash(model),
        "slurm": {key: os.environ[name] for key, name in _SLURM.items() if name in os.environ}
        if "SLURM_JOB_ID" in os.environ
        else {},
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)},
    }


def _gpu(device):
    import torch

    index = torch.device(device).index
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    cudnn = torch.backends.cudnn.version()
    return {
        "gpu_name": properties.name,
        "gpu_uuid": _nvml_uuid(properties.uuid),
        "num_gpus": torch.cuda.device_count(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        # cuDNN 9 and later: major * 10000 + minor * 100 + patch.
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def _nvml_uuid(uuid):
    """torch prints a GPU's UUID bare, NVML and nvidia-smi take it as GPU-<uuid>."""
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _driver():
    nvml = _nvml()
    if nvml:
        return nvml.nvmlSystemGetDriverVersion()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def _version(distribution):
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _dali_version():
    # The distribution's name carries the CUDA major version: nvidia-dali-cuda120, nvidia-dali-cuda130.
    names = (distribution.metadata["Name"] or "" for distribution in metadata.distributions())
    dali = next((name for name in names if re.fullmatch(r"nvidia[-_]dali[-_]cuda\d+", name)), None)
    return dali and _version(dali)


def _cpu_model():
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _read(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------
# Which source ran


def source_hash(model, root=ROOT) -> str:
    """First 16 hex digits of a SHA-256 over path and content of every *.py in common/ and the model's folder.

    model: a package, `gpt3` or dotted (`tests.fake_model` is the folder tests/fake_model). root: the
    repository. Independent of git and of the order in which the file system lists. Raises ValueError
    when the model has no folder.
    """
    folders = _source_folders(model)
    if not (root / folders[1]).is_dir():
        raise ValueError(f"no folder {folders[1]} for model {model!r}")
    paths = {path.relative_to(root).as_posix(): path for name in folders for path in (root / name).rglob("*.py")}
    return _hash_files({name: path.read_bytes() for name, path in paths.items()})


def source_hash_of_commit(model, sha, root=ROOT) -> str | None:
    """`source_hash` of the files as they are in commit `sha`.

    None without git, without that commit, or when the commit does not hold the model.
    """
    folders = _source_folders(model)
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{sha}^{{commit}}")
    listing = commit and _git(root, "ls-tree", "-r", "-z", commit.decode().strip(), "--", *folders)
    if not listing:
        return None
    blobs = {}
    for entry in listing.decode().rstrip("\0").split("\0"):
        attributes, _, name = entry.partition("\t")
        if name.endswith(".py"):
            blobs[name] = attributes.split()[2]
    if not any(name.startswith(f"{folders[1]}/") for name in blobs):
        return None
    answer = _git(root, "cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in blobs.values()).encode())
    if answer is None:
        return None
    files, start = {}, 0
    for name in blobs:
        header_end = answer.index(b"\n", start)
        header = answer[start:header_end].split()
        if header[1] != b"blob":
            return None
        start = header_end + 1
        files[name] = answer[start : start + int(header[2])]
        start += int(header[2]) + 1
    return _hash_files(files)


def git_state(model, root=ROOT) -> tuple[str | None, bool | None]:
    """(sha of HEAD, whether what may have run differs from it).

    Dirty means a changed tracked file anywhere, or an untracked *.py in common/ or the model's folder.
    Where git cannot tell, as in a copy without .git, SOURCE_SHA and SOURCE_DIRTY (0 or 1) of the
    environment are taken, else None.
    """
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD") if (root / ".git").exists() else None
    if sha is None:
        dirty = os.environ.get("SOURCE_DIRTY", "").lower()
        return os.environ.get("SOURCE_SHA") or None, dirty not in ("0", "false") if dirty else None
    changed = _git(root, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    # Without --exclude-standard: an ignored module can be imported like any other.
    untracked = _git(root, "ls-files", "--others", "-z", "--", *_source_folders(model))
    if changed is None or untracked is None:
        return sha.decode().strip(), None
    modules = [name for name in untracked.split(b"\0") if name.endswith(b".py")]
    return sha.decode().strip(), bool(changed or modules)


def _source_folders(model):
    return "common", model.replace(".", "/")


def _hash_files(files):
    """files: path relative to the root -> content. Lengths are hashed too, so that no two trees run together."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()[:16]


def _git(root, *arguments, stdin=b""):
    """git's output as bytes, or None where git or the repository has no answer."""
    # A git hook exports GIT_DIR and GIT_INDEX_FILE, which would redirect these calls.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, input=stdin, capture_output=True, check=True, env=variables).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


# ------------------------------------------------------------------------------------------------
# GPU clocks, power and energy

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
        rows = [row for row in self._samples(0) if t0 <= row[0] <= t1]
        columns = [[row[column] for row in rows if row[column] is not None] for column in (1, 2, 3, 4)]
        seen = functools.reduce(int.__or__, columns[3], 0)
        return {
            "sm_mhz": statistics.median(columns[0]) if columns[0] else None,
            "power_w": statistics.median(columns[1]) if columns[1] else None,
            "temperature_c": max(columns[2]) if columns[2] else None,
            "throttle": [name for bit, name in THROTTLE_REASONS.items() if seen & bit],
        }

    def latest_sm_mhz(self) -> float | None:
        """SM clock of the newest sample, to see whether it has settled."""
        if self._file is None:
            return None
        rows = self._samples(max(0, os.fstat(self._file.fileno()).st_size - 512))
        return rows[-1][1] if rows else None

    def _samples(self, start_bytes):
        """(time_s, sm_mhz, power_w, temperature_c, reason bits) of each whole line after `start_bytes`."""
        if self._file is None:
            return []
        descriptor = self._file.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size - start_bytes, start_bytes).decode(errors="replace")
        lines = text.split("\n")[1 if start_bytes else 0 : -1]
        rows = [line.split(", ") for line in lines]
        return [(float(row[0]), *map(_number, row[1:4]), _bits(row[4])) for row in rows if len(row) == 5]


def _number(text):
    try:
        return float(text)
    except ValueError:  # nvidia-smi's [N/A]
        return None


def _bits(text):
    try:
        return int(text, 16)
    except ValueError:
        return None


def available_host_bytes() -> int | None:
    """MemAvailable of /proc/meminfo: what a new process can have without swapping. None where that is missing."""
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def energy_joules(device_uuid) -> float | None:
    """The GPU's total energy counter in joules since the driver was loaded; None without nvidia-ml-py or the counter.

    device_uuid: NVML's, as `env.gpu_uuid` holds it. Two readings bracket a window; NVML counts millijoules.
    """
    nvml = _nvml()
    if nvml is None or device_uuid is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device_uuid)
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except nvml.NVMLError:
        return None


@functools.cache
def _nvml():
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


# ------------------------------------------------------------------------------------------------
# What else the host did


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
        text = _read(self.proc / "stat")
        return text and [int(field) for field in text.split("\n", 1)[0].split()[1:9]]

    def _read_load(self):
        text = _read(self.proc / "loadavg")
        return float(text.split()[0]) if text else None
