"""What a session of rounds is made of: child processes, host load, locks, order, parity and resume.

`benchmarks.run` puts these parts together. Nothing here imports torch or a model.

As a command it is the launcher that stands between the session and a training script:

    python -m benchmarks.rounds --child PARENT_PID -- COMMAND...

It adopts whatever the command starts (torchrun gives each worker a session of its own, which a signal
to a process group does not reach) and ends all of it when the command ends, when it is told to stop, or
when PARENT_PID is gone, even by kill -9. With --ask before the -- the command gets a SIGTERM and time to
end first: what it started on other machines, only it can reach.
"""

import ctypes
import fcntl
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import record as records

ROOT = Path(__file__).resolve().parent.parent

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERMINATE_S = 15.0
# Slurm's srun waits for KillWait (30 s unless a site sets it) and two seconds more.
ASK_S = 45.0

# What a variant cannot do in one run it cannot do in the next: its record stands as its row. failed and
# timeout have had their second try by then.
NOT_RUN_AGAIN = ("unsupported", "oom", "capture_failed", "numerics_failed", "failed", "timeout")

# ------------------------------------------------------------------------------------------------
# The launcher: one command, and nothing of it left afterwards


class _Stop(Exception):
    pass


def _launch(parent_pid: int, command: list[str], asks: bool) -> int:
    """Run command and return its exit status, 128 + n when signal n ended it. Everything it started ends with it."""
    signal.signal(signal.SIGTERM, _raise_stop)
    on_linux = sys.platform == "linux"
    prctl = ctypes.CDLL(None, use_errno=True).prctl if on_linux else None
    if prctl:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process, last_signal = None, signal.SIGTERM if asks else signal.SIGKILL
    try:
        # The parent may have gone before prctl could ask to be told.
        if os.getppid() != parent_pid:
            raise _Stop
        process = subprocess.Popen(
            command,
            start_new_session=True,
            # One thread only here, so nothing can hold a lock across the fork.
            preexec_fn=(lambda: prctl(PR_SET_PDEATHSIG, last_signal, 0, 0, 0)) if prctl else None,
        )
        status = _wait(process, parent_pid, on_linux)
    except _Stop:
        status = -signal.SIGTERM
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}")
        return 127
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if asks and process is not None:
            _ask_to_end(process)
        _end_descendants(process)
    return status if status >= 0 else 128 - status


def _raise_stop(signum, frame):
    raise _Stop


def _wait(process, parent_pid, is_told):
    while True:
        try:
            return process.wait(None if is_told else 1.0)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent_pid:
                raise _Stop from None


def _ask_to_end(process):
    process.terminate()
    try:
        process.wait(ASK_S)
    except subprocess.TimeoutExpired:
        print(f"still there {ASK_S:g} s after SIGTERM: {process.args[0]}", flush=True)


def _end_descendants(process):
    if not Path("/proc/self/stat").exists():
        if process is not None:
            _signal_group(process.pid, signal.SIGKILL)
        return
    deadline = time.monotonic() + TERMINATE_S / 2
    while time.monotonic() < deadline:
        _reap()
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)


def _reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def descendants(pid: int) -> list[int]:
    """Process ids of all children, grandchildren and so on of `pid`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The second field, the name in parentheses, may itself hold spaces and parentheses.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        queue += children.get(queue[0], [])
        found += children.get(queue.pop(0), [])
    return found


def _signal(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _signal_group(pid, number):
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


# ------------------------------------------------------------------------------------------------
# Children, as the session sees them


@dataclass(frozen=True)
class Outcome:
    """How a child ended: exit status (128 + n for signal n), whether it was killed at its limit, wall seconds."""

    exit_status: int
    timed_out: bool
    seconds: float

    def describe(self) -> str:
        if self.exit_status == 128 + signal.SIGKILL:
            return "killed by signal 9, perhaps out of host memory"
        if self.exit_status > 128:
            return f"killed by signal {self.exit_status - 128}"
        return f"exit status {self.exit_status}"


def run_child(command: list[str], *, log: Path, limit_s: float, environment: dict, is_remote: bool = False) -> Outcome:
    """Run command in the repository's root under the launcher, its output appended to `log`.

    After limit_s seconds the command and everything it started is killed. An exception here, Ctrl-C
    included, ends it too before it goes on. is_remote: the command starts others on other machines and
    ends them on SIGTERM.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "benchmarks.rounds", "--child", str(os.getpid()), "--", *command]
    if is_remote:
        launcher.insert(launcher.index("--"), "--ask")
    start = time.monotonic()
    with open(log, "ab") as file:
        process = subprocess.Popen(
            launcher,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
    timed_out = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TERMINATE_S + (ASK_S if is_remote else 0.0))
            except subprocess.TimeoutExpired:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
    return Outcome(process.returncode, timed_out, time.monotonic() - start)


def from_root(flags: list[str], described: list[dict]) -> list[str]:
    """`flags` with relative paths made absolute: a script runs in the repository's root, which is not always here."""
    if Path.cwd() == ROOT:
        return flags
    paths = {flag["flag"]: flag.get("words", ()) for flag in described if flag["type"] == "path"}
    out = []
    for previous, text in zip(["", *flags], flags, strict=False):
        name, equals, value = text.partition("=")
        if previous in paths and text and text not in paths[previous]:
            text = os.path.abspath(text)
        elif name in paths and value and value not in paths[name]:
            text = name + equals + os.path.abspath(value)
        out.append(text)
    return out


def last_lines(log: Path, num_lines: int = 3, limit: int = 400) -> str:
    """The end of a log as one line of text, for a record's message."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # Records of earlier attempts tell nothing that their files do not.
    lines = [line for line in lines if not line.startswith("{")]
    return " | ".join(lines[-num_lines:])[-limit:]


class HostLoad:
    """num_processes busy processes for as long as the `with` block lasts; they end with this process too."""

    # Looks at its parent now and then, so that it ends on every system and however the parent ended.
    BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"

    def __init__(self, num_processes: int):
        self.num_processes = num_processes
        self.processes = []

    def __enter__(self):
        try:
            for _ in range(self.num_processes):
                self.processes.append(subprocess.Popen([sys.executable, "-S", "-c", self.BUSY], start_new_session=True))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []


class FolderBusy(RuntimeError):
    """Another session holds the folder; the message names its process id."""


def lock_folder(out: Path):
    """Take the folder's lock; it lasts until the returned file is closed or the process ends. Raises FolderBusy."""
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / ".lock", "a+")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise FolderBusy(f"{out} is in use by another run, process {owner}") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def order(variants: list[str], round_index: int) -> list[str]:
    """ABBA: odd rounds in the given order, even rounds backwards, so that a drift falls on both sides."""
    return list(variants) if round_index % 2 else list(reversed(variants))


# ------------------------------------------------------------------------------------------------
# Parity: round 0 tensor by tensor, timed rounds by their losses


@dataclass(frozen=True)
class Parity:
    """Two runs compared: bitwise, the largest relative difference (of anything, of the losses), and where the first is.

    After an optimizer's first steps a weight of almost no gradient may differ by all of its value; whether
    two runs train alike is therefore judged by their losses.
    """

    bitwise: bool
    max_rel_diff: float
    loss_rel_diff: float
    first_difference: dict | None

    @property
    def name(self) -> str:
        return "bitwise" if self.bitwise else "differs"


def compare_parity(path: Path, base_path: Path) -> Parity:
    """Compare two parity sidecars (.npz with names [T], hashes [steps, T], samples [T, K], loss and grad_norm [steps]).

    The relative difference of losses and gradient norms is |a-b| / max(|a|, |b|); that of samples is
    relative to the tensor's largest sampled magnitude, so that noise around zero does not count as
    100 %. Raises ValueError when a sidecar is missing, damaged, or of other steps or tensors.
    """
    import numpy

    ours, base = _load_sidecar(path), _load_sidecar(base_path)
    names = [str(name) for name in base["names"]]
    if names != [str(name) for name in ours["names"]]:
        odd = sorted(set(names) ^ {str(name) for name in ours["names"]}) or ["their order"]
        raise ValueError(f"parity sidecars name different tensors: {', '.join(odd[:3])}")
    for key in ("hashes", "samples", "loss", "grad_norm"):
        if ours[key].shape != base[key].shape:
            raise ValueError(f"parity sidecars differ in the shape of {key}: {ours[key].shape} and {base[key].shape}")
    differing = ours["hashes"] != base["hashes"]
    unequal = {key: _unequal(ours[key], base[key]) for key in ("loss", "grad_norm")}
    steps = numpy.flatnonzero(differing.any(axis=1) | unequal["loss"] | unequal["grad_norm"])
    scale = numpy.fmax(_largest(ours["samples"]), _largest(base["samples"]))
    series = {key: _relative(ours[key], base[key], numpy.fmax(abs(ours[key]), abs(base[key]))) for key in unequal}
    largest = max(_relative(ours["samples"], base["samples"], scale[:, None]), *series.values())
    if not steps.size:
        return Parity(True, largest, series["loss"], None)
    step = int(steps[0])
    tensor = names[int(numpy.argmax(differing[step]))] if differing[step].any() else None
    if tensor is None:
        tensor = "loss" if unequal["loss"][step] else "grad_norm"
    return Parity(False, largest, series["loss"], {"step": step, "tensor": tensor})


def _load_sidecar(path):
    import zipfile

    import numpy

    try:
        with numpy.load(path) as file:
            return {key: file[key] for key in ("names", "hashes", "samples", "loss", "grad_norm")}
    except FileNotFoundError:
        raise ValueError(f"the run wrote no parity sidecar {path.name}") from None
    except (KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} is not a whole parity sidecar ({error})") from None


def _unequal(a, b):
    import numpy

    return ~((a == b) | (numpy.isnan(a) & numpy.isnan(b)))


def _largest(samples):
    import numpy

    return numpy.nan_to_num(abs(samples.astype(numpy.float64)), nan=0.0, posinf=numpy.inf).max(axis=1, initial=0.0)


def _relative(a, b, scale):
    """Largest |a-b| / scale; equal values (NaN too, which pads) count as 0 and a value that is not finite as inf."""
    import numpy

    unequal = _unequal(a, b)
    if not unequal.any():
        return 0.0
    with numpy.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = abs(a.astype(numpy.float64) - b.astype(numpy.float64)) / scale
    ratio = numpy.where(numpy.isfinite(ratio), ratio, numpy.inf)
    return float(ratio[unequal].max())


# Timed rounds take the fastest kernels, which may sum in any order. The distance between two eager runs
# is itself one random draw, and a third run like them is farther from both in one session of three:
# hence the factor, and the nearest eager run as the partner. On a GPU a few eager runs may show no spread
# at all: the 26 timed runs under results/h200x1 (GPT-3, four variants that are bitwise equal in round 0)
# agree in pairs bit for bit for some steps (median 3), until atomic sums are reordered, and part by up to
# 7e-3 relative within 50 steps. A replay of stale inputs or weights is off by far more than the floor.
SPREAD_FACTOR = 3.0
ONE_EAGER_RUN_TOLERANCE = 1e-2
CUDA_FLOOR = 1e-2
TIMED_LOSSES = "timed losses differ from eager"


def timed_losses_fault(losses, eager_losses: list, loss_rel_diff: float | None, floor: float = 0.0) -> str | None:
    """Why the losses of a timed run are not those of eager, in words, or None.

    losses: [steps]; eager_losses: one such list for each timed eager run so far. Allowed, relative to the
    nearest eager run: SPREAD_FACTOR times the largest distance between eager runs (1e-2 while there is
    only one; at least `floor`), twice the losses' difference in round 0, and 1e-6.
    """
    import itertools

    if not eager_losses or not losses:
        return None
    if len(eager_losses) == 1:
        spread = ONE_EAGER_RUN_TOLERANCE
    else:
        spread = SPREAD_FACTOR * max(loss_distance(a, b) for a, b in itertools.combinations(eager_losses, 2))
    allowed = max(spread, floor) + 2 * (loss_rel_diff or 0.0) + 1e-6
    distance = min(loss_distance(losses, eager) for eager in eager_losses)
    if distance <= allowed:
        return None
    return f"{TIMED_LOSSES} by {distance:.2g} relative, allowed {allowed:.2g}"


def loss_distance(a: list, b: list) -> float:
    """Largest relative difference over the steps that both runs have; infinite when a loss is missing in one."""
    if any((x is None) != (y is None) for x, y in zip(a, b, strict=False)):
        return float("inf")
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and x != y]
    return max((abs(x - y) / max(abs(x), abs(y)) for x, y in pairs), default=0.0)


# ------------------------------------------------------------------------------------------------
# Resume


@dataclass(frozen=True)
class Gpus:
    """The GPUs that nvidia-smi lists: names, UUIDs (GPU-...) and the driver, each None or empty without one."""

    names: tuple = ()
    uuids: tuple = ()
    driver: str | None = None

    @property
    def slug(self) -> str:
        """`NVIDIA H200` -> `h200`; `cpu` without a GPU."""
        if not self.names:
            return "cpu"
        words = "".join(c if c.isalnum() else " " for c in self.names[0].lower()).split()
        return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def find_gpus() -> Gpus:
    """Ask nvidia-smi -L; without the command, a driver or a GPU the answer is empty. CUDA_VISIBLE_DEVICES counts."""
    import re

    listing = _output(["nvidia-smi", "-L"])
    found = re.findall(r"^GPU (\d+): (.*?)(?: \(UUID: (.*?)\))?$", listing, re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        found = [gpu for gpu in found if any(part == gpu[0] or (gpu[2] and gpu[2].startswith(part)) for part in wanted)]
    if not found:
        return Gpus()
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split()
    return Gpus(tuple(name for _, name, _ in found), tuple(uuid for _, _, uuid in found), driver[0] if driver else None)


def _output(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cuda_version() -> str | None:
    """The CUDA version torch was built for, read from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path)).get("cuda") if path and path.exists() else None


def difference(record: dict, fresh: dict, gpus: Gpus, request: dict, host_load: int) -> str | None:
    """In words, the first thing in which a published record is not what this session would measure, or None.

    fresh: the `env` of this machine and source now. request: what this session asks of the script (the
    preset's configuration, flags, steps, number of GPUs), which `run` keeps in each record's `extra`.
    The boot is not looked at: see `stale`.
    """
    if record["status"] in ("failed", "timeout"):
        return f"its status is {record['status']}"
    asked = record["extra"].get("request")
    if not isinstance(asked, dict):
        return "it was not written by benchmarks.run"
    # Records of one node have no such key.
    for key, value in {"nodes": None, **request}.items():
        if asked.get(key) != value:
            return f"{key} was {_changes(asked.get(key), value)}"
    # Round 0 is never under load.
    if record["host_load"] != (host_load if record["round"] else 0):
        return f"host_load was {record['host_load']}, now {host_load}"
    for key in ("source_hash", "torch", "transformer_engine", "cuda", "driver"):
        was, now = record["env"][key], fresh[key]
        # A CPU run knows neither CUDA nor driver.
        if was != now and not (key in ("cuda", "driver") and None in (was, now)):
            return f"{key} was {was}, now {now}"
    if record["env"]["gpu_uuid"] and record["env"]["gpu_uuid"] not in gpus.uuids:
        return f"it ran on {record['env']['gpu_name']} {record['env']['gpu_uuid']}, which is not here"
    return None


def _changes(was, now):
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [key for key in sorted(set(was) | set(now)) if was.get(key) != now.get(key)]
        return ", ".join(f"{key}={was.get(key)} (now {now.get(key)})" for key in keys)
    return f"{was!r}, now {now!r}"


def stale(published: list[dict], variants: list[str], describe_difference, boot_id: str | None) -> dict:
    """Which published records cannot stand beside this session's: {(variant, round): the difference in words}.

    A timed record from before a reboot stands only if its round is whole: pairs need one boot.
    """
    out = {}
    for record in published:
        fault = describe_difference(record)
        if fault:
            out[record["variant"], record["round"]] = fault
    left = [record for record in published if (record["variant"], record["round"]) not in out]
    settled = {record["variant"] for record in left if record["round"] == 0 and record["status"] in NOT_RUN_AGAIN}
    for record in left:
        number = record["round"]
        if number == 0 or record["env"]["boot_id"] == boot_id:
            continue
        beside = {
            other["variant"]
            for other in left
            if other["round"] == number and other["env"]["boot_id"] == record["env"]["boot_id"]
        }
        if not beside >= set(variants) - settled:
            out[record["variant"], number] = "the machine was booted since, and its round is not whole"
    return out


def blank_record(*, model, preset, variant, round_index, device, env, status, message) -> dict:
    """The record of a child that left none behind."""
    record = records.blank(
        model=model, preset=preset, variant=variant, round=round_index, device=device, status=status, message=message
    )
    record["env"].update({key: value for key, value in env.items() if key in record["env"]})
    return record


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:split], argv[split + 1 :]
    asks = own[2:] == ["--ask"]
    if own[:1] != ["--child"] or not own[1:2] or not own[1].isdigit() or not (asks or len(own) == 2) or not command:
        usage = "python -m benchmarks.rounds --child PARENT_PID [--ask] -- COMMAND..."
        print(f"usage: {usage} (the launcher)", file=sys.stderr)
        return 2
    return _launch(int(own[1]), command, asks)


if __name__ == "__main__":
    sys.exit(main())
