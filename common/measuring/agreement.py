"""Ranks of one run agree: all pass a phase, or all end, and the result says which rank failed and why.

A collective waits for all ranks, so a rank that fails leaves the others waiting in one. Beside the collectives, ranks
tell each other through torchrun's store, on a connection of their own, where they are and what went wrong:

    with Agreement(rank, world_size, on_fault) as ranks:
        ranks.enter("build"); ...; ranks.agree()      # all are through, or RankFault names the first that failed
        ranks.tell("oom", "needs 2 GiB more")         # what this rank failed of

A thread of each rank tells every BEAT_S that the rank lives. Rank 0 decides who is dead: no sign of life for DEAD_S. On
a fault the main thread gets GRACE_S to end in order, as it does where it is not blocked in a collective; then the
thread calls on_fault (rank 0 writes its result there) and ends the process. A rank that lives and stalls ends by the
time limit of the process group.

With one rank nothing of this exists: no thread, no store, and agree() returns at once.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

BEAT_S = 0.5
GRACE_S = 6.0
# What others get for ending after the fault was written, so that torchrun does not stop rank 0 before it has.
LAST_S = 3.0
# Nothing that a run does keeps a thread of it from running for so long. torchrun notices a dead rank at once and stops
# the others: then those that live beat on, and less will do.
DEAD_S, DEAD_WHEN_STOPPED_S = 20.0, 3.0


class RankFault(RuntimeError):
    """Another rank failed. rank: its number; status: of its result; the text names rank and reason."""

    def __init__(self, rank: int, status: str, message: str):
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.status = rank, status


class Agreement:
    """See the module. on_fault(RankFault): called by the thread before it ends the process, main thread blocked."""

    def __init__(self, rank: int, world_size: int, on_fault):
        self.rank, self.world_size, self._on_fault = rank, world_size, on_fault
        self._agreed, self._told = 0, False
        self._thread: threading.Thread | None = None

    def __enter__(self):
        if self.world_size > 1:
            self._store, self._own_store = _connect(), _connect()
            self._ended = threading.Event()
            self._stop_read, self._stop_write = socket.socketpair()
            self._stop_write.setblocking(False)
            # Python runs handlers in the main thread alone, which may be blocked; the thread reads of the signal here.
            self._old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
            self._old_fd = signal.set_wakeup_fd(self._stop_write.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_forget_signals)
            self._thread = threading.Thread(target=self._watch, name="agreement", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            # Ended in order: this rank is not dead to those that are still about to end.
            self._own_store.set(f"ended/{self.rank}", "1")
            # torchrun stops rank 0 when this one exits with a failure; it writes its result first.
            until = time.monotonic() + GRACE_S + LAST_S
            while self._told and time.monotonic() < until and not self._own_store.check(["ended/0"]):
                time.sleep(0.05)
        self._ended.set()
        self._thread.join(timeout=5)
        signal.set_wakeup_fd(self._old_fd)
        signal.signal(signal.SIGTERM, self._old_handler)
        self._stop_read.close()
        self._stop_write.close()

    # --- what a run says

    def enter(self, phase: str) -> None:
        """This rank begins `phase`. Told at once: a rank may die before its next beat."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._own_store.set(f"phase/{self.rank}", phase)

    def agree(self) -> None:
        """Wait until all ranks are through the phase. Raises RankFault where one failed or died."""
        if self._thread is None:
            return
        number, self._agreed = self._agreed, self._agreed + 1
        arrived, pause_s = self._own_store.add(f"arrived/{number}", 1), 1e-3
        while arrived < self.world_size:
            self._raise_fault()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            arrived = self._own_store.add(f"arrived/{number}", 0)
        self._raise_fault()

    def tell(self, status: str, message: str) -> None:
        """A status other than pass: others end. The first fault of all stands."""
        if self._thread is None or self._told or status == "pass":
            return
        self._told = True
        with contextlib.suppress(RuntimeError):
            _post(self._own_store, self.rank, status, message)

    def fault_of_another(self, wait_s: float = 0.0) -> RankFault | None:
        """Return the first fault, where it is another rank's.

        wait_s: seconds to wait for one, as after a broken connection: until a rank that was killed is known to be dead.
        """
        if self._thread is None:
            return None
        until = time.monotonic() + wait_s
        while True:
            fault = _read(self._own_store)
            if fault is not None or time.monotonic() >= until:
                return fault if fault is not None and fault.rank != self.rank else None
            time.sleep(0.1)

    def _raise_fault(self):
        fault = self.fault_of_another()
        if fault is not None:
            raise fault

    # --- the thread

    def _watch(self):
        seen: dict[int, tuple[bytes | None, float]] = {}
        try:
            for beat in itertools.count():
                self._store.set(f"beat/{self.rank}", str(beat))
                fault = _read(self._store)
                if fault is None and self.rank == 0:
                    self._post_dead(seen, DEAD_S)
                stopped, _, _ = select.select([self._stop_read], [], [], BEAT_S)
                if self._ended.is_set():
                    return
                if stopped and signal.SIGTERM in self._stop_read.recv(64):
                    self._stopped(beat)
                    return
                if fault is not None:
                    self._end(fault)
                    return
        except (RuntimeError, OSError) as error:
            # The store is gone, and with it torchrun or rank 0.
            if not self._ended.wait(GRACE_S):
                self._end(RankFault(0, "failed", f"the store of this run is gone ({str(error).splitlines()[0][:80]})"))

    def _post_dead(self, seen, dead_s):
        """Post the fault of a rank that gives no sign of life. seen: rank -> its last beat, and when it was new."""
        now = time.monotonic()
        for rank in range(self.world_size):
            beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else None
            last, since_s = seen.setdefault(rank, (beat, now))
            if beat != last:
                seen[rank] = beat, now
            elif now - since_s > dead_s and not self._store.check([f"ended/{rank}"]):
                phase = self._store.get(f"phase/{rank}").decode() if self._store.check([f"phase/{rank}"]) else "start"
                _post(self._store, rank, "failed", f"died in {phase}: no sign of life")
                return

    def _stopped(self, beat):
        """SIGTERM: torchrun stops the ranks that are left when one has failed, which the store says, or shows soon."""
        until = time.monotonic() + 2 * DEAD_WHEN_STOPPED_S
        seen: dict[int, tuple[bytes | None, float]] = {}
        while time.monotonic() < until and not self._ended.is_set() and _read(self._store) is None:
            beat += 1
            self._store.set(f"beat/{self.rank}", str(beat))
            self._post_dead(seen, DEAD_WHEN_STOPPED_S)
            time.sleep(BEAT_S)
        self._end(_read(self._store) or RankFault(self.rank, "failed", "stopped by SIGTERM"))

    def _end(self, fault):
        """The main thread's grace, then on_fault, then the end of the process."""
        if self._ended.wait(GRACE_S if self.rank == 0 else GRACE_S + LAST_S):
            return
        try:
            self._on_fault(fault)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if fault.status in ("oom", "unsupported") else 1)


def _forget_signals():
    """A forked child, such as a data worker, ends by SIGTERM as any process, and tells this one nothing."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _connect():
    from torch import distributed as dist

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )
    # Several rounds of torchrun may share a store.
    return dist.PrefixStore(f"agreement/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _post(store, rank, status, message):
    if store.add("faults", 1) == 1:
        store.set("fault", json.dumps([rank, status, message]))


def _read(store):
    return RankFault(*json.loads(store.get("fault"))) if store.check(["fault"]) else None
