"""Runs that are forked from a process with torch imported: as `python -m` runs them, and ended as others are."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks import ROOT, children, importer, runner, supervisor
from benchmarks.importer import Importer
from tests.harness import processes_with, until
from tests.test_children import is_running

# Tests' scripts need no torch.
LIGHT = ("json",)

SCRIPT = """
import atexit, os, sys, time
from {package}.part import text
atexit.register(print, "at exit")
if __name__ == "__main__":
    what = sys.argv[1]
    print(text, sys.argv[1:], os.environ.get("WORD"), sys.argv[0].endswith("train.py"), flush=True)
    if what == "fail":
        raise RuntimeError("no such thing")
    if what == "say":
        sys.exit("a line")
    if what == "status":
        sys.exit(7)
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "family":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
        print("ready", os.getpid(), flush=True)
        time.sleep(600)
    if what == "leave":
        if os.fork() == 0:
            os.setsid()
            print("left", os.getpid(), flush=True)
            time.sleep(600)
        time.sleep(0.2)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A script of its own folder, found by PYTHONPATH."""
    folder = tmp_path / "package_of_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("text = 'first'\n")
    (folder / "train.py").write_text(SCRIPT.format(package=folder.name))
    monkeypatch.setattr(importer, "ALWAYS", LIGHT)
    return folder


@pytest.fixture
def forks(package):
    environment = dict(os.environ) | {"PYTHONPATH": str(package.parent)}
    made = Importer(environment)
    yield made
    made.close()


def run(forks, package, log, *words, limit_s=30.0, **more):
    command = [sys.executable, "-m", f"{package.name}.train", *words]
    environment = forks.environment | more
    return children.run_child(command, log=log, limit_s=limit_s, environment=environment, importer=forks)


def pids(log, word):
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(word)]


def test_a_forked_run_is_what_python_m_runs(forks, package, tmp_path):
    outcome = run(forks, package, tmp_path / "logs" / "a.log", "plain", "--x", "1", WORD="mine")
    assert forks.fault is None and outcome.modules is not None
    assert (outcome.exit_status, outcome.timed_out) == (0, False)
    assert (tmp_path / "logs" / "a.log").read_text() == "first ['plain', '--x', '1'] mine True\nat exit\n"
    # Not what the importer, or another run, had of it.
    (package / "part.py").write_text("text = 'second, which is longer'\n")
    run(forks, package, tmp_path / "b.log", "plain")
    assert (tmp_path / "b.log").read_text() == "second, which is longer ['plain'] None True\nat exit\n"


@pytest.mark.parametrize("what, status, said", [("fail", 1, "no such thing"), ("say", 1, "a line"), ("status", 7, "")])
def test_exit_status_and_last_words(forks, package, tmp_path, what, status, said):
    outcome = run(forks, package, tmp_path / "log", what)
    assert outcome.exit_status == status
    assert said in (tmp_path / "log").read_text()


def test_a_signal_is_named(forks, package, tmp_path):
    assert "signal 9" in run(forks, package, tmp_path / "log", "die").describe()


def test_a_run_is_killed_at_its_limit_with_all_it_started(forks, package, tmp_path):
    log = tmp_path / "log"
    outcome = run(forks, package, log, "family", limit_s=1.5)
    assert outcome.timed_out
    found = pids(log, "ready")
    assert len(found) == 3 and not any(is_running(pid) for pid in found)
    # The next one runs.
    assert run(forks, package, tmp_path / "log2", "status").exit_status == 7


def test_what_a_run_leaves_running_ends_with_it(forks, package, tmp_path):
    log = tmp_path / "log"
    assert run(forks, package, log, "leave").exit_status == 0
    (pid,) = pids(log, "left")
    assert not is_running(pid)


PARENT = """
import os, sys
from pathlib import Path
from benchmarks import children, importer
importer.ALWAYS = ("json",)
forks = importer.Importer(dict(os.environ))
command = [sys.executable, "-m", sys.argv[1] + ".train", "family"]
children.run_child(command, log=Path(sys.argv[2]), limit_s=600, environment=dict(os.environ), importer=forks)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_parent(package, tmp_path, number):
    log = tmp_path / "log"
    environment = dict(os.environ) | {"PYTHONPATH": f"{package.parent}:{ROOT}"}
    words = [sys.executable, "-c", PARENT, package.name, str(log)]
    parent = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert until(lambda: log.exists() and log.read_text().count("ready") == 3)
        family = supervisor.descendants(parent.pid)
        # Importer, supervisor, three of the family.
        assert len(family) == 5
    finally:
        parent.send_signal(number)
        parent.wait()
    assert until(lambda: not any(is_running(pid) for pid in family))


def test_an_importer_that_dies_takes_its_run_and_no_other(forks, package, tmp_path):
    log, outcomes = tmp_path / "log", []
    thread = threading.Thread(target=lambda: outcomes.append(run(forks, package, log, "family")))
    thread.start()
    assert until(lambda: log.exists() and log.read_text().count("ready") == 3)
    forks.process.kill()
    thread.join(20)
    assert outcomes[0].exit_status != 0 and not outcomes[0].timed_out
    assert until(lambda: not any(is_running(pid) for pid in pids(log, "ready")))
    after = run(forks, package, tmp_path / "log2", "status")
    assert (after.exit_status, after.modules) == (7, None)


def test_a_module_that_is_missing_forks_nothing(package, tmp_path):
    forks = Importer(dict(os.environ) | {"PYTHONPATH": str(package.parent)}, ("no_such_module",))
    try:
        outcome = run(forks, package, tmp_path / "log", "status")
        assert "no_such_module" in forks.fault
        assert (outcome.exit_status, outcome.modules) == (7, None)
    finally:
        forks.close()


# What of CUDA's driver is asked: 0 is CUDA_SUCCESS.
DRIVER = """
static int initialised;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { return initialised ? 0 : 3; }
"""


@pytest.mark.parametrize(
    "text, fault",
    [
        ("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)", "used CUDA"),
        (
            "import sys; sys.modules['torch'] = type(sys)('torch'); from types import SimpleNamespace as S;"
            "sys.modules['torch'].cuda = S(_is_in_bad_fork=lambda: True)",
            "used CUDA",
        ),
        ("import threading, time; threading.Thread(target=time.sleep, args=(30,), daemon=True).start()", "a thread"),
    ],
)
def test_what_does_not_survive_a_fork_is_seen(tmp_path, text, fault):
    (tmp_path / "driver.c").write_text(DRIVER)
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    (tmp_path / "loader.py").write_text("import ctypes; ctypes.CDLL('libcuda.so.1')")
    (tmp_path / "user.py").write_text(text)
    code = "from benchmarks import importer; print(importer.import_all(['json']), importer.import_all(['loader']));"
    code += "print(importer.import_all(['user']))"
    environment = dict(os.environ) | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "LD_LIBRARY_PATH": str(tmp_path)}
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines()[0] == "None None" and fault in said.splitlines()[1]


def test_modules_of_the_repository_are_forgotten():
    code = "import sys; from benchmarks import importer; print(importer.import_all(['common.phases', 'decimal']),"
    code += "'common.phases' in sys.modules, 'decimal' in sys.modules, 'benchmarks.importer' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["None", "False", "True", "True"]


def test_what_imports_transformer_engine_can_be_imported_again():
    """In a run that is forked: what registers operators in torch cannot."""
    code = "import sys, common.te_import; print([name for name in sys.modules if name.startswith('common')])"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['common', 'common.te_import']"


def test_a_channel_says_when_nothing_came_and_when_nobody_is_there():
    ours, theirs = socket.socketpair()
    channel = importer.Channel(ours)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(0.1)
    assert time.monotonic() - start < 5
    theirs.sendall(b'{"a": 1}\n{"a"')
    assert channel.receive(1) == {"a": 1}
    theirs.sendall(b": 2}\n")
    assert channel.receive(0.0) == {"a": 2}
    theirs.close()
    with pytest.raises(ValueError, match="has ended"):
        channel.receive(1)
    assert processes_with("benchmarks.importer no such") == []


def test_a_round_forks_from_what_all_runs_before_it_had_imported(tmp_path, monkeypatch):
    """Nothing more after a fault: what is imported beforehand may be the reason."""
    made = []

    class Forks(importer.Importer):
        def __init__(self, environment, modules):
            super().__init__(environment, modules)
            made.append((self, list(modules)))

    monkeypatch.setattr(runner, "Importer", Forks)
    request = SimpleNamespace(launch=SimpleNamespace(world_size=1, prefix=()), model="gpt3")
    runs = runner.Runner(SimpleNamespace(request=request), print)
    assert runs._importer_of(0, {}) is runs._importer_of(0, {})
    runs._imported(("triton", "torch._inductor.compile_fx"))
    runs._imported(("triton",))
    assert runs._importer_of(1, {}) is not made[0][0]
    made[-1][0].fault = "an import has used CUDA"
    runs._importer_of(2, {})
    runs._imported(("triton",))
    runs._importer_of(3, {})
    assert [modules for _, modules in made] == [[], ["triton"], [], []]
    runs.close()
    request.launch.world_size = 2
    assert runs._importer_of(4, {}) is None
    request.launch.world_size, request.model = 1, "tests.fake_model"
    assert runs._importer_of(4, {}) is None
