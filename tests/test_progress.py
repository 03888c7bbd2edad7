"""What people see of a run: seconds by phase in a line, and why it keeps them waiting, once and only where it does."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import children, progress
from common import announce
from common import record as records
from tests.harness import ON_GPU, go, watched

pytest_plugins = ["tests.machines"]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture
def caches(tmp_path):
    """The environment of a run: caches that are not there yet, and the file where it announces."""
    return {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        announce.VARIABLE: str(tmp_path / "wait"),
    }


def compile_one(folder, number):
    """A kernel appears in a cache; time stamps of files are coarse, so it is set."""
    folder.mkdir(exist_ok=True)
    (folder / str(number)).mkdir()
    os.utime(folder, ns=(number, number))


def test_kernels_that_take_long_to_compile_are_one_line(tmp_path, clock, caches):
    said = []
    watch = progress.Watch("eager", caches, said.append)
    for second in range(20):
        clock.s = float(second)
        compile_one(tmp_path / "triton", second + 1)
        watch.look()
        assert bool(said) == (second >= progress.WAIT_S)
    (line,) = said
    assert "eager compiles Triton kernels, once" in line and str(tmp_path / "triton") in line


def test_kernels_that_are_there_or_come_at_once_are_no_line(tmp_path, clock, caches):
    said = []
    for number in range(1, 5):
        compile_one(tmp_path / "triton", number)
    watch = progress.Watch("eager", caches, said.append)
    compile_one(tmp_path / "inductor", 1)
    for second in range(60):
        clock.s = float(second)
        if second == 30:
            compile_one(tmp_path / "triton", 5)
        watch.look()
    assert said == []


def test_what_a_run_announces_is_said_if_it_lasts(tmp_path, clock, caches):
    said = []
    watch = progress.Watch("graph", caches, said.append)
    # Twice for a moment, then for long, and once more: each is a wait of its own and said once.
    for texts in (["warms up"] * 3, [""], ["warms up"] * 3, ["compiles x.cu"] * 7, [""], ["compiles x.cu"] * 7):
        for text in texts:
            (tmp_path / "wait").write_text(text)
            watch.look()
            clock.s += 1
    assert [line.split() for line in said] == [["graph", "compiles", "x.cu"]]


def test_announced_text_stands_while_the_block_runs(tmp_path, monkeypatch):
    path = tmp_path / "wait"
    with announce.announced("nobody asked"):
        assert not path.exists()
    monkeypatch.setenv(announce.VARIABLE, str(path))
    with announce.announced("outer"):
        with announce.announced("inner"):
            assert path.read_text() == "inner"
        assert path.read_text() == "outer"
    assert path.read_text() == ""
    with pytest.raises(KeyError), announce.announced("fails"):
        raise KeyError
    assert path.read_text() == ""
    monkeypatch.setenv("RANK", "1")
    with announce.announced("another rank"):
        assert path.read_text() == ""
    monkeypatch.delenv("RANK")
    monkeypatch.setenv(announce.VARIABLE, str(tmp_path / "no" / "folder"))
    with announce.announced("nowhere"):
        pass


def test_a_watch_sees_a_running_child(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "WATCH_S", 0.02)
    seen = []
    command = [sys.executable, "-S", "-c", "import time; time.sleep(0.5)"]
    outcome = children.run_child(
        command, log=tmp_path / "log", limit_s=30, environment=dict(os.environ), watch=lambda: seen.append(1)
    )
    assert outcome.exit_status == 0 and not outcome.timed_out and len(seen) > 3
    command[-1] = "import time; time.sleep(60)"
    outcome = children.run_child(
        command, log=tmp_path / "log", limit_s=0.5, environment=dict(os.environ), watch=lambda: None
    )
    assert outcome.timed_out and 0.5 <= outcome.seconds < 10


def test_phases_are_one_line_in_their_order_with_what_is_left():
    record = records.blank(model="m", preset="tiny", variant="eager", round=1, device="cpu")
    assert progress.phases(record, 3.0) == ""
    record["seconds"].update({"import": 3.31, "start": 0.01, "window": 5.04, "a new phase": 0.5, "capture": 0.0})
    assert progress.phases(record, 10.0) == "s: import 3.3, window 5.0, a new phase 0.5, other 1.1"
    assert progress.phases(record, None) == "s: import 3.3, window 5.0, a new phase 0.5"


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_prints_phases_below_each_run(tmp_path, verbose, no_gpu, quick, monkeypatch, capsys):
    def after(name, path):
        record = records.read(path)
        record["seconds"].update({"build": 0.25, "window": 1.5})
        records.write(path, record)

    watched(monkeypatch, after=after)
    assert go(tmp_path, "graph", "--rounds", "1", *(["--verbose"] if verbose else [])) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = [index for index, line in enumerate(lines) if line.startswith(("parity ", "round "))]
    assert len(runs) == 4
    assert all(("build 0.2, window 1.5" in lines[index + 1]) == verbose for index in runs)


def test_a_session_says_what_its_run_waits_for(tmp_path, no_gpu, quick, monkeypatch, capsys):
    monkeypatch.setattr(progress, "WAIT_S", 0.0)
    original = children.run_child

    def child(command, *, environment, watch, **more):
        with open(environment[announce.VARIABLE], "w") as file:
            file.write("compiles something")
        watch()
        return original(command, environment=environment, watch=watch, **more)

    monkeypatch.setattr(children, "run_child", child)
    assert go(tmp_path, "graph", "--rounds", "1") == 0
    assert capsys.readouterr().out.count("eager compiles something") == 3
    assert not list(tmp_path.rglob("*.wait"))


# ------------------------------------------------------------------------------------------------
# Threads of a run on the CPU


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "1"}])
def test_threads_of_a_run_on_the_cpu_wait_passively_unless_told_otherwise(tmp_path, own, no_gpu, quick, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert environments(tmp_path, monkeypatch) == [own or {"OMP_WAIT_POLICY": "passive"}] * 4


def test_threads_of_a_run_on_a_gpu_wait_as_they_do(tmp_path, no_gpu, gpu, quick, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environments(tmp_path, monkeypatch, *ON_GPU) == [{}] * 4


def environments(tmp_path, monkeypatch, *flags):
    """How OpenMP waits in each run: what the record says of it, which is what the run had."""
    seen, original = [], children.run_child
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

    def child(command, *, environment, **more):
        outcome = original(command, environment=environment, **more)
        record = records.read(command[command.index("--record") + 1])
        recorded = {name: value for name, value in record["env"]["variables"].items() if name in names}
        assert recorded == {name: environment[name] for name in names if name in environment}
        if not command[command.index("--record") + 1].endswith("control.json"):
            seen.append(recorded)
        return outcome

    monkeypatch.setattr(children, "run_child", child)
    assert go(tmp_path, "graph", "--rounds", "1", flags=flags) == 0
    return seen


def test_the_variable_is_one_that_torchs_openmp_reads():
    """libgomp and LLVM's OpenMP show, when they are asked to, for how long threads spin."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment = children.waiting_passively(base | {"OMP_DISPLAY_ENV": "verbose"})
    command = [sys.executable, "-c", "import torch"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    spins = re.findall(r"(?:GOMP_SPINCOUNT|KMP_BLOCKTIME) ?= ?'(\d+)", answer.stderr)
    assert spins and set(spins) == {"0"}
