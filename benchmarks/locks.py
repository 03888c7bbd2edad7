"""Who measures here: a lock for each GPU, and a list of the sessions that run on this host.

    with gpu_locks(gpus.uuids, "gpt3/bench"):
        ...
        others_here()          the other sessions of this host, as text

All are files in one folder, locked by flock: the kernel lets a lock go when its process ends, by kill -9 too, and a
child does not inherit it (its descriptor is closed at exec). A GPU that somebody measures on is refused. On the CPU
nobody is: sessions are listed, so that a record can name who ran beside it.

The folder is GRAPH_LOCK_DIR of the environment, else one for all users in the system's folder for temporary files.
Containers that share a host see each other only where GRAPH_LOCK_DIR is a folder that they share.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
from pathlib import Path

from benchmarks.command import Mistake

FOLDER_NAME = "graph-worth-locks"
# Another user's new file can be opened as soon as its mode is set, microseconds after it is made.
OPEN_TRIES = 20
PAUSE_S = 0.05

# Presence files of this process.
own = set()


class GpuBusy(RuntimeError):
    """Another session measures on the GPU; the message names the GPU, that session and its process."""


def folder() -> Path:
    """Where the files lie; made on the first call, for all users. Raises Mistake that names GRAPH_LOCK_DIR."""
    path = Path(os.environ.get("GRAPH_LOCK_DIR") or Path(tempfile.gettempdir(), FOLDER_NAME))
    try:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            # As /tmp: all may write, nobody removes another's files. mkdir heeds the umask, chmod does not.
            path.chmod(0o1777)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise Mistake(f"GRAPH_LOCK_DIR: cannot write in {path} ({error.strerror})") from None
    return path


@contextlib.contextmanager
def gpu_locks(uuids, session: str):
    """Hold these GPUs, and be listed for others, as long as the block lasts.

    uuids: GPU-... of each GPU, empty on the CPU. session: what runs, as in gpt3/bench. Raises GpuBusy where another
    session holds one of the GPUs, Mistake where the folder cannot be written.
    """
    text = describe(uuids, session)
    with contextlib.ExitStack() as stack:
        for uuid in sorted(set(uuids)):
            stack.enter_context(_locked(uuid, text))
        stack.enter_context(_present(text))
        yield


def describe(uuids, session: str) -> str:
    """`gpt3/bench on GPU-c77b, process 123`."""
    where = ", ".join(uuid[:8] for uuid in uuids) or "the CPU"
    return f"{session} on {where}, process {os.getpid()}"


def others_here() -> list[str]:
    """The texts of other sessions that run on this host, sorted. Files whose process is gone are removed.

    Called by a process that holds `gpu_locks` itself, or none: a child of it would see its parent's session.
    """
    found = []
    for path in sorted(folder().glob("session-*")):
        if path in own:
            continue
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            # Shared, since two that look at one time must not take each other for its owner.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Another user's stays until the machine is booted.
            with contextlib.suppress(OSError):
                path.unlink()
        except BlockingIOError:
            found.append(_read(handle))
        finally:
            os.close(handle)
    return sorted(found)


@contextlib.contextmanager
def _locked(uuid, text):
    handle = _open(folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock")
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read(handle)
            raise GpuBusy(f"{uuid} is in use by {owner}: wait for it, or take another GPU") from None
        _write(handle, text)
        try:
            yield
        finally:
            os.ftruncate(handle, 0)
    finally:
        # The file stays: one that is removed while another process opens it would be locked by two.
        os.close(handle)


@contextlib.contextmanager
def _present(text):
    while True:
        path = folder() / f"session-{os.getpid()}-{secrets.token_hex(4)}"
        handle = _open(path)
        _write(handle, text)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            break
        # `others_here` of another process found it before it was locked, and removed it as stale.
        os.close(handle)
    own.add(path)
    try:
        yield
    finally:
        own.discard(path)
        path.unlink(missing_ok=True)
        os.close(handle)


def _open(path):
    """A descriptor of the file, which is made for all users where it does not exist. Raises Mistake."""
    for _ in range(OPEN_TRIES):
        try:
            # Without O_CREAT: in a folder such as /tmp Linux refuses it for a file of another user that exists
            # (fs.protected_regular).
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            except OSError as error:
                raise Mistake(f"GRAPH_LOCK_DIR: cannot make {path} ({error.strerror})") from None
            os.fchmod(handle, 0o666)
        except PermissionError:
            time.sleep(PAUSE_S)
            continue
        except OSError as error:
            raise Mistake(f"GRAPH_LOCK_DIR: cannot open {path} ({error.strerror})") from None
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        break
    raise Mistake(f"GRAPH_LOCK_DIR: {path} is no file that this user may write: remove it")


def _read(handle):
    return os.pread(handle, 1000, 0).decode(errors="replace").strip() or "a session that is starting"


def _write(handle, text):
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{text}\n".encode(), 0)
