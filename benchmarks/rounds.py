"""What a session of rounds is made of: child processes, host load, order, GPUs.

`benchmarks.bench` puts these parts together. Nothing here imports torch or a model.

As a command it is the launcher that stands between the session and a training script:

    python -m benchmarks.rounds --child PARENT_PID -- COMMAND...

It adopts whatever the command starts (torchrun gives each worker a session of its own, which a signal
to a process group does not reach) and ends all of it when the command ends, when it is told to stop, or
when PARENT_PID is gone, even by kill -9. With --ask before the -- the command gets a SIGTERM and time to
end first: what it started on other machines, only it can reach.
"""

import ctypes
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import record as records

ROOT = Path(__file__).resolve().parent.parent

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERMINATE_S = 15.0
WATCH_S = 1.0
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


def run_child(
    command: list[str],
    *,
    log: Path,
    limit_s: float,
    environment: dict,
    is_remote: bool = False,
    watch: Callable[[], None] | None = None,
) -> Outcome:
    """Run command in the repository's root under the launcher, its output appended to `log`.

    After limit_s seconds the command and everything it started is killed. An exception here, Ctrl-C
    included, ends it too before it goes on. is_remote: the command starts others on other machines and
    ends them on SIGTERM. watch() is called every WATCH_S seconds while it runs.
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
        while not timed_out:
            left_s = max(0.0, start + limit_s - time.monotonic())
            try:
                process.wait(min(left_s, WATCH_S) if watch else left_s)
                break
            except subprocess.TimeoutExpired:
                timed_out = time.monotonic() >= start + limit_s
            if watch:
                watch()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TERMINATE_S + (ASK_S if is_remote else 0.0))
            except subprocess.TimeoutExpired:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
    return Outcome(process.returncode, timed_out, time.monotonic() - start)


def waiting_passively(environment: dict) -> dict:
    """`environment` for a run on the CPU: OpenMP threads without work sleep, unless it says already how they wait.

    By default they spin, which takes the cores from whatever else runs on the host. OMP_WAIT_POLICY is OpenMP's own
    variable; GOMP_SPINCOUNT (libgomp, in PyTorch's wheels) and KMP_BLOCKTIME (LLVM's and Intel's) say the same.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return environment
    return environment | {"OMP_WAIT_POLICY": "passive"}


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


def order(variants: list[str], round_index: int) -> list[str]:
    """ABBA: odd rounds in the given order, even rounds backwards, so that a drift falls on both sides."""
    return list(variants) if round_index % 2 else list(reversed(variants))


# ------------------------------------------------------------------------------------------------
# GPUs and versions


@dataclass(frozen=True)
class Gpus:
    """The GPUs that nvidia-smi lists: names, UUIDs (GPU-...) and the driver, each None or empty without one."""

    names: tuple = ()
    uuids: tuple = ()
    driver: str | None = None

    @property
    def slug(self) -> str:
        """`NVIDIA H200` -> `h200`, `NVIDIA H100 80GB HBM3` -> `h100`; `cpu` without a GPU."""
        if not self.names:
            return "cpu"
        # Of a type with memory of one size alone the driver says the size and the kind of memory all the same.
        name = re.sub(r" \d+gb hbm\w+$", "", self.names[0].lower())
        words = "".join(c if c.isalnum() else " " for c in name).split()
        return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def find_gpus() -> Gpus:
    """Ask nvidia-smi -L; without the command, a driver or a GPU the answer is empty. CUDA_VISIBLE_DEVICES counts."""
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
