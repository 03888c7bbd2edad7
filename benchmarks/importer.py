"""A process that has imported what runs import, and forks each run of a round: `python -m gpt3.train` without the wait.

Of the 34 seconds of a timed run of gpt3 bench on an H200, 6 to 8 went into importing torch and Transformer Engine. What
is imported beforehand belongs to neither the repository nor the run: a run still is a process of its own, executes its
script as __main__ and imports the repository's modules itself. Nothing here touches CUDA, which does not survive a
fork; where something has, runs are started as they are elsewhere.

A round has an importer of its own. Runs that are forked from one have the same addresses and the same hashes of text,
and either may change how fast the host is: within a round they fall on all variants alike, and over rounds they differ,
so that the interval over rounds holds them.

    python -m benchmarks.importer PARENT_PID FD MODULE...      the process itself, which answers on a socket
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from benchmarks import ROOT, supervisor

# What a run of any model imports sooner or later.
ALWAYS = ("numpy", "torch", "torch.distributed", "torch.profiler", "torch._dynamo", "torch._inductor.config")
# What is imported beforehand once all runs of the session so far have needed it.
AT_TIMES = ("triton", "torch._inductor.compile_fx", "transformer_engine.pytorch")
READY_S = 120.0
# CUDA_ERROR_NOT_INITIALIZED of cuda.h: cuInit was not called in this process.
NOT_INITIALIZED = 3


class Importer:
    """Forks runs, with what it has imported.

    environment: of the runs; what one of them has besides is given to `start`. modules: those of AT_TIMES to import.
    fault: why no run can be forked, or None.
    """

    def __init__(self, environment: dict, modules=()):
        self.environment, self.modules = environment, modules
        self.process = self.fault = None

    def begin(self) -> None:
        """Start the process, once, and wait for its imports."""
        if self.process is not None:
            return
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "benchmarks.importer", str(os.getpid()), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                [*words, *ALWAYS, *self.modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._channel = Channel(ours)
        try:
            self.fault = self._channel.receive(READY_S)["fault"]
        except (OSError, ValueError) as error:
            self.fault = str(error)

    def start(self, command: list[str], environment: dict, log: Path):
        """A run as a `Forked`, or None where it cannot be forked. command: [interpreter, "-m", module, words...]."""
        assert command[:2] == [sys.executable, "-m"]
        request = {"module": command[2], "words": command[3:], "environment": environment, "log": str(log)}
        if self.fault is None:
            try:
                self._channel.send(request)
                return Forked(self._channel, self._channel.receive(READY_S)["pid"])
            except (OSError, ValueError) as error:
                self.fault = str(error)
        return None

    def close(self) -> None:
        if self.process is not None:
            self._channel.socket.close()
            self.process.kill()
            self.process.wait()


class Forked:
    """The supervisor of a forked run, with what `children.run_child` asks of a Popen.

    modules: those of AT_TIMES that the run had imported, once it has ended by itself.
    """

    def __init__(self, channel, pid: int):
        self._channel, self.pid = channel, pid
        self.returncode, self.modules = None, None

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                answer = self._channel.receive(timeout)
                self.returncode, self.modules = answer["status"], answer["modules"]
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked run", timeout) from None
            except (OSError, ValueError):
                # The importer is gone, and the run with it.
                self.returncode = -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Channel:
    """Lines of JSON over a socket. receive raises TimeoutError, and ValueError where the other side is gone."""

    def __init__(self, connected: socket.socket):
        self.socket, self._rest = connected, b""

    def send(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> dict:
        # A socket with a timeout of 0 does not wait, and says so by another error.
        self.socket.settimeout(None if timeout is None else max(timeout, 1e-3))
        while b"\n" not in self._rest:
            part = self.socket.recv(1 << 16)
            if not part:
                raise ValueError("the importer has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


# ------------------------------------------------------------------------------------------------
# The process


def serve(channel: Channel, modules: list[str]) -> None:
    """Import, say so, and fork a run for each request until the other side is gone."""
    gc.disable()
    fault = import_all(modules)
    gc.freeze()
    channel.send({"fault": fault})
    importer = os.getpid()
    while True:
        try:
            request = channel.receive()
        except (OSError, ValueError):
            return
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            channel.socket.close()
            _exit_with(functools.partial(_supervised, request, writer, importer))
        os.close(writer)
        channel.send({"pid": pid})
        _, status = os.waitpid(pid, 0)
        os.set_blocking(reader, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(reader, 4096)
        os.close(reader)
        channel.send({"status": os.waitstatus_to_exitcode(status), "modules": said.decode().split()})


def import_all(modules: list[str]) -> str | None:
    """Import them, and forget the repository's own modules. Why no run may be forked afterwards, or None."""
    own = {name for name in sys.modules if _is_own(sys.modules[name])}
    # For torch.cuda.is_available(), which Inductor calls as it is imported. A run has an environment of its own.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in modules:
        try:
            if name == "transformer_engine.pytorch":
                importlib.import_module("common.te_import").transformer_engine()
            else:
                importlib.import_module(name)
        except Exception as error:
            return f"{name}: {error}"
    for name in [name for name, module in sys.modules.items() if _is_own(module) and name not in own]:
        del sys.modules[name]
    if cuda_status() not in (None, NOT_INITIALIZED) or _is_bad_fork():
        return "an import has used CUDA"
    if threading.active_count() > 1:
        return "an import has started a thread"
    return None


def _is_own(module):
    file = getattr(module, "__file__", None)
    parts = Path(file).relative_to(ROOT).parts if file and Path(file).is_relative_to(ROOT) else ()
    return bool(parts) and not parts[0].startswith(".") and "site-packages" not in parts


def cuda_status() -> int | None:
    """What CUDA's driver answers, NOT_INITIALIZED where nothing has used it; None where it is not loaded.

    An open file of the GPU says less: to count GPUs, NVML opens some, and survives a fork.
    """
    if "/libcuda.so" not in Path("/proc/self/maps").read_text():
        return None
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))


def _is_bad_fork() -> bool:
    """Whether torch refuses CUDA to a child, as it does once it has counted GPUs by CUDA where NVML cannot."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _supervised(request, writer, importer) -> int:
    """The supervisor of one run: it forks the run, and ends what that leaves behind."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    return supervisor.supervise(importer, lambda: _Fork(lambda: _run(request, writer)), asks=False)


class _Fork:
    """A forked process with what `supervise` asks of a Popen."""

    def __init__(self, run):
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            supervisor.end_with_parent(parent, signal.SIGKILL)
            _exit_with(run)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run(request, writer) -> int:
    """What `python -m module words...` does."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    for name in [name for name, module in sys.modules.items() if name != "__main__" and _is_own(module)]:
        del sys.modules[name]
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.argv = [request["module"], *request["words"]]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        return 0
    finally:
        with contextlib.suppress(OSError):
            os.write(writer, " ".join(name for name in AT_TIMES if name in sys.modules).encode())


def _exit_with(work) -> None:
    """End this process as Python does after `work`, but for the destructors of libraries."""
    status = 1
    try:
        status = work()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


if __name__ == "__main__":
    supervisor.end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    serve(Channel(socket.socket(fileno=int(sys.argv[2]))), sys.argv[3:])
