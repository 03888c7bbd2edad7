"""Ranks of one run agree: all pass a phase, or all end, and the result says which rank failed and why.

A collective waits for all ranks, so a rank that fails leaves the others waiting in one. Beside the collectives, ranks
tell each other through torchrun's store, on a connection of their own, where they are and what went wrong:

    with Agreement(rank, world_size, on_fault) as ranks:
        ranks.enter("build"); ...; ranks.agree()      # all are through, or RankFault names the first that failed
        ranks.note_steps_of(variant)                  # progress within a phase
        ranks.tell("oom", "needs 2 GiB more")         # what this rank failed of

A thread of each rank tells every BEAT_S that the rank lives, and where its main thread stands. Rank 0 decides who is
dead (no sign of life for DEAD_S) or stalled (no progress for STALL_S while others wait, or no progress of any rank).
On a fault the main thread gets GRACE_S to end in order, as it does where it is not blocked in a collective; then
the thread calls on_fault (rank 0 writes its result there) and ends the process.

With one rank nothing of this exists: no thread, no store, and agree() returns at once.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

from graph_worth.folders import CODE

BEAT_S = 0.5
# Below a minute with what the grace adds. The variable is for tests, which do not wait so long.
STALL_S = float(os.environ.get("RANK_STALL_S", "45"))
GRACE_S = STALL_S * 2 / 15
# What others get for ending after the fault was written, so that torchrun does not stop rank 0 before it has.
LAST_S = STALL_S / 15
# Nothing that a run does keeps a thread of it from running for so long. torchrun notices a dead rank at once and stops
# the others: then those that live beat on, and less will do.
DEAD_S, DEAD_WHEN_STOPPED_S = 0.45 * STALL_S, 3.0
# Steps that are slow all along are no stall.
STALL_STEPS = 4
# A main thread that stands in one of these waits for other ranks, or for a GPU that does.
WAITING = ("distributed_c10d.py", f"{os.sep}parallel{os.sep}collectives.py")
WAITING_FUNCTIONS = ("synchronize", "barrier", "agree", "fault_of_another")


class RankFault(RuntimeError):
    """Another rank failed. rank: its number; status: of its result; the text names rank and reason."""

    def __init__(self, rank: int, status: str, message: str):
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.status = rank, status


class Agreement:
    """See the module. on_fault(RankFault): called by the thread before it ends the process, main thread blocked."""

    def __init__(self, rank: int, world_size: int, on_fault):
        self.rank, self.world_size, self._on_fault = rank, world_size, on_fault
        self._phase, self._count, self._agreed = "start", 0, 0
        self._slowest_s = 0.0
        self._told = False
        self._thread: threading.Thread | None = None

    def __enter__(self):
        if self.world_size > 1:
            self._store, self._own_store = _connect(), _connect()
            self._ended = threading.Event()
            main = threading.main_thread().ident
            assert main is not None, "a thread that runs has an identifier"
            self._main = main
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
        self._phase, self._count = phase, 0
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._own_store.set(f"phase/{self.rank}", phase)

    def note_steps_of(self, variant) -> None:
        """Each step that the variant has issued is progress."""
        if self._thread is None:
            return
        step = variant.step

        def noted(index):
            step(index)
            self._count += 1

        variant.step = noted

    def agree(self) -> None:
        """Wait until all ranks are through the phase. Raises RankFault where one failed, died or stalls."""
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
        last: dict[int, dict] = {}
        beats = 0
        try:
            while not self._ended.is_set():
                beats += 1
                self._beat(beats)
                fault = _read(self._store)
                if fault is None and self.rank == 0:
                    self._judge(last)
                stopped, _, _ = select.select([self._stop_read], [], [], BEAT_S)
                if stopped and signal.SIGTERM in self._stop_read.recv(64):
                    self._stopped()
                    return
                if fault is not None:
                    self._end(fault)
                    return
        except (RuntimeError, OSError) as error:
            # The store is gone, and with it torchrun or rank 0.
            if not self._ended.wait(GRACE_S):
                self._end(RankFault(0, "failed", f"the store of this run is gone ({str(error).splitlines()[0][:80]})"))

    def _beat(self, number):
        self._store.set(f"beat/{self.rank}", json.dumps([number, self._phase, self._count, *self._where()]))

    def _where(self):
        """Return whether the main thread waits for others, and the innermost line of this project that it is in."""
        frame = sys._current_frames().get(self._main)
        waits, place = False, ""
        while frame is not None:
            name = frame.f_code.co_filename
            waits = waits or name.endswith(WAITING) or frame.f_code.co_name in WAITING_FUNCTIONS
            is_ours = name.startswith(str(CODE)) and "site-packages" not in name
            if is_ours and not place and not name.endswith((*WAITING, __file__)):
                place = f"{os.path.relpath(name, CODE)}:{frame.f_lineno}"
            frame = frame.f_back
        return waits, place

    def _judge(self, last, dead_s=DEAD_S):
        """Post the fault of a rank that is dead or stalled. last: rank -> what is known of it."""
        now = time.monotonic()
        for rank in range(self.world_size):
            known = last.setdefault(rank, {"beat": None, "alive_s": now, "progress": None, "moved_s": now})
            if not self._store.check([f"beat/{rank}"]):
                continue
            beat, phase, count, waits, place = json.loads(self._store.get(f"beat/{rank}"))
            if beat != known["beat"]:
                known.update(beat=beat, alive_s=now, waits=waits, place=place)
            if (phase, count) != known["progress"]:
                if known["progress"] and known["progress"][0] == phase and known["progress"][1] > 0:
                    self._slowest_s = max(self._slowest_s, (now - known["moved_s"]) / (count - known["progress"][1]))
                known.update(progress=(phase, count), moved_s=now)
        ended = [rank for rank in last if self._store.check([f"ended/{rank}"])]
        for rank, known in last.items():
            if rank not in ended and now - known["alive_s"] > dead_s:
                phase = self._store.get(f"phase/{rank}").decode() if self._store.check([f"phase/{rank}"]) else "start"
                _post(self._store, rank, "failed", f"died in {phase}: no sign of life")
                return
        limit = max(STALL_S, STALL_STEPS * self._slowest_s)
        live = {rank: known for rank, known in last.items() if rank not in ended}
        moves = [
            now - known["moved_s"] <= limit or now - known["alive_s"] > DEAD_WHEN_STOPPED_S for known in live.values()
        ]
        if any(moves) or not live:
            # Somebody moves on, and nobody waits for ever; or is perhaps dead, which shows soon.
            return
        at_work = [rank for rank, known in live.items() if not known.get("waits")]
        if len(at_work) == len(live) and not any(known["progress"][1] for known in live.values()):
            # Nobody waits for another one and no steps are made, as in a long build.
            return
        # The one that is furthest behind; of equals one that does not wait.
        rank = min(live, key=lambda rank: (live[rank]["progress"][1], rank not in at_work, rank))
        known = live[rank]
        phase, count = known["progress"]
        step = f", step {count}" if count else ""
        place = f", at {known['place']}" if known.get("place") else ""
        others = "" if at_work else "; all ranks wait for each other"
        message = f"stalled in {phase}{step}{place}: no progress for {now - known['moved_s']:.0f} s{others}"
        _post(self._store, rank, "failed", message)

    def _stopped(self):
        """SIGTERM: torchrun stops the ranks that are left when one has failed, which the store says, or shows soon."""
        until, beats = time.monotonic() + 2 * DEAD_WHEN_STOPPED_S, 0
        seen: dict[int, dict] = {}
        while time.monotonic() < until and not self._ended.is_set() and _read(self._store) is None:
            beats -= 1
            self._beat(beats)
            self._judge(seen, DEAD_WHEN_STOPPED_S)
            time.sleep(BEAT_S)
        fault = _read(self._store)
        self._end(fault or RankFault(self.rank, "failed", "stopped by SIGTERM"), by_signal=fault is None)

    def _end(self, fault, by_signal=False):
        """The main thread's grace, then on_fault, then the end of the process; by SIGTERM where that is the fault."""
        if self._ended.wait(GRACE_S if self.rank == 0 else GRACE_S + LAST_S):
            return
        try:
            self._on_fault(fault)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if by_signal:
                # The signal module sets handlers in the main thread alone, which may be blocked.
                ctypes.CDLL(None).signal(signal.SIGTERM, 0)
                os.kill(os.getpid(), signal.SIGTERM)
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
