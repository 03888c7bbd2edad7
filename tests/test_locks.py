"""benchmarks/locks: one session on a GPU, presence of all, kill -9, stale files, other users."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import locks
from benchmarks.locks import GpuBusy, gpu_locks, others_here

ROOT = Path(__file__).resolve().parent.parent
GPUS = ("GPU-aaaa-1", "GPU-bbbb-2")

# Holds the GPUs of its command line, says so, and waits to be ended; its own child keeps descriptors open if it can.
HOLDER = """
import subprocess, sys, time
from benchmarks.locks import gpu_locks
with gpu_locks(sys.argv[1:], "gpt3/bench"):
    child = subprocess.Popen(["sleep", "100"], close_fds=False)
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPH_LOCK_DIR", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def hold():
    """hold(uuids...) is another process that holds them; (process, its child's id)."""
    holders, children = [], []

    def start(*uuids):
        command = [sys.executable, "-c", HOLDER, *uuids]
        holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        children.append(int(holder.stdout.readline()))
        return holder, children[-1]

    yield start
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_gpu_is_held_once(hold):
    holder, _ = hold(GPUS[0])
    with pytest.raises(GpuBusy, match=rf"^GPU-aaaa-1 is in use by gpt3/bench on GPU-aaaa, process {holder.pid}: wait"):
        gpu_locks(GPUS, "rnnt/bench").__enter__()
    assert issubclass(GpuBusy, RuntimeError)
    # What was taken before the refusal is free again, and the refused session is not listed.
    with gpu_locks(GPUS[1:], "rnnt/bench"):
        pass
    assert others_here() == [f"gpt3/bench on GPU-aaaa, process {holder.pid}"]
    holder.communicate()
    with gpu_locks(GPUS, "rnnt/bench"):
        assert others_here() == []


def test_a_refused_session_lets_the_first_gpu_go(hold):
    hold(GPUS[1])
    with pytest.raises(GpuBusy, match="GPU-bbbb-2 is in use"), gpu_locks(GPUS, "rnnt/bench"):
        pass
    with gpu_locks(GPUS[:1], "rnnt/bench"):
        pass


def test_one_process_cannot_hold_a_gpu_twice():
    owner = f"a on GPU-aaaa, GPU-bbbb, process {os.getpid()}"
    with gpu_locks(GPUS, "a"), pytest.raises(GpuBusy, match=f"in use by {owner}:"):
        gpu_locks(GPUS[1:], "b").__enter__()


def test_an_error_inside_lets_go(folder):
    with pytest.raises(KeyError), gpu_locks(GPUS, "a"):
        raise KeyError
    with gpu_locks(GPUS, "a"):
        pass
    # Lock files stay, without the name of a session that is over.
    assert {path.name: path.read_text() for path in folder.iterdir()} == {f"{uuid}.lock": "" for uuid in GPUS}


def test_kill_9_frees_the_gpu_though_its_child_lives(hold, folder):
    """Descriptors that a child inherits would hold the lock until the child ends."""
    holder, child = hold(GPUS[0])
    assert len(list(folder.glob("session-*"))) == 1
    holder.kill()
    holder.wait()
    assert Path(f"/proc/{child}").exists()
    assert others_here() == []
    assert list(folder.glob("session-*")) == []
    with gpu_locks(GPUS, "rnnt/bench"):
        pass


def test_sessions_on_the_cpu_see_each_other_and_are_never_refused(hold):
    first, _ = hold()
    second, _ = hold()
    expected = sorted(f"gpt3/bench on the CPU, process {holder.pid}" for holder in (first, second))
    with gpu_locks((), "rnnt/tiny"):
        assert others_here() == expected
    assert others_here() == expected
    second.communicate()
    assert others_here() == [f"gpt3/bench on the CPU, process {first.pid}"]


def test_own_sessions_are_not_others(folder):
    with gpu_locks((), "a"), gpu_locks(GPUS, "b"):
        assert others_here() == []
        assert len(list(folder.glob("session-*"))) == 2
    assert list(folder.glob("session-*")) == []


def test_two_that_look_at_one_time_do_not_see_a_stale_file(folder, monkeypatch):
    """Each holds a lock of its own while it looks."""
    locks.folder()
    (folder / "session-1-x").write_text("gone\n")
    looked = []
    unlink = Path.unlink

    def look_too(path, **more):
        if not looked:
            looked.append(None)
            looked[0] = others_here()
        unlink(path, missing_ok=True)

    monkeypatch.setattr(Path, "unlink", look_too)
    assert others_here() == [] and looked == [[]]


def test_a_session_that_was_removed_before_it_was_locked_is_listed_again(folder, monkeypatch, hold):
    flock, seen = locks.fcntl.flock, []

    def late(handle, how):
        if not seen and how == locks.fcntl.LOCK_EX:
            seen.append(sorted(folder.glob("session-*")))
            seen[0][0].unlink()
        flock(handle, how)

    monkeypatch.setattr(locks.fcntl, "flock", late)
    with gpu_locks((), "a"):
        (path,) = folder.glob("session-*")
        assert [path] != seen[0] and path in locks.own


def test_files_are_open_to_all_users_whatever_the_umask(folder):
    before = os.umask(0o077)
    try:
        with gpu_locks(GPUS, "a"):
            modes = {path.name.partition("-")[0]: path.stat().st_mode & 0o7777 for path in folder.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"GPU": 0o666, "session": 0o666}
    assert folder.stat().st_mode & 0o7777 == 0o1777


def test_a_folder_that_was_there_keeps_its_mode(folder):
    folder.mkdir(mode=0o700)
    with gpu_locks(GPUS, "a"):
        pass
    assert folder.stat().st_mode & 0o7777 == 0o700


def test_the_folder_is_one_for_all_users_unless_told(monkeypatch, tmp_path):
    monkeypatch.delenv("GRAPH_LOCK_DIR")
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert locks.folder() == tmp_path / "tmp" / "graph-worth-locks"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")
def test_another_user_takes_and_sees_what_root_left(monkeypatch):
    """Also where Linux refuses O_CREAT for another's file in a folder such as /tmp (fs.protected_regular)."""
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        monkeypatch.setenv("GRAPH_LOCK_DIR", f"{open_to_all}/locks")
        for path in Path(open_to_all).parents:
            if path.stat().st_mode & 0o5 != 0o5:
                pytest.skip(f"{path} is closed to others")
        _root_and_nobody()


def _root_and_nobody():
    with gpu_locks(GPUS, "root's"):
        pass
    code = """
import os, sys
from benchmarks.locks import gpu_locks, others_here
os.setuid(65534)
with gpu_locks(["GPU-aaaa-1"], "nobody's"):
    print(others_here(), flush=True)
    sys.stdin.read()
"""
    with gpu_locks((), "root's"):
        command = [sys.executable, "-c", code]
        other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout.readline() == f'["root\'s on the CPU, process {os.getpid()}"]\n'
            with pytest.raises(GpuBusy, match="nobody's on GPU-aaaa"):
                gpu_locks(GPUS, "root's").__enter__()
        finally:
            other.communicate()
            assert other.returncode == 0


@pytest.mark.parametrize("where", ["/proc/locks-of-ours", "/dev/null/x", "/dev/null"])
def test_a_folder_that_cannot_be_is_named(monkeypatch, where):
    monkeypatch.setenv("GRAPH_LOCK_DIR", where)
    with pytest.raises(ValueError, match=f"GRAPH_LOCK_DIR: cannot write in {where}"), gpu_locks(GPUS, "a"):
        pass


def test_what_is_no_file_is_named(folder, monkeypatch):
    locks.folder()
    os.mkfifo(folder / "GPU-aaaa-1.lock")
    (folder / "GPU-bbbb-2.lock").symlink_to(folder / "elsewhere")
    monkeypatch.setattr(locks, "PAUSE_S", 0.0)
    for uuid in GPUS:
        with pytest.raises(ValueError, match=rf"GRAPH_LOCK_DIR: .*{uuid}.lock"), gpu_locks([uuid], "a"):
            pass
    assert not (folder / "elsewhere").exists()


def test_many_sessions_start_and_look_at_once(folder):
    """Nobody takes another's new file for a stale one, and at the end all is gone."""
    code = """
import sys
from benchmarks.locks import gpu_locks, others_here, folder
for index in range(100):
    with gpu_locks((), "s"):
        texts = others_here()
        assert len(texts) <= 2 and all(text.startswith("s on the CPU, process ") for text in texts), texts
        assert len(list(folder().glob("session-*"))) >= 1
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    deadline = time.monotonic() + 60
    assert [process.wait(deadline - time.monotonic()) for process in processes] == [0, 0, 0]
    assert list(folder.iterdir()) == []
