"""The open session that a call of `make bench` adds records to: begun or gone on with, and packed at its end."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks import frame, sessions
from benchmarks.command import shown
from benchmarks.request import Request
from common import host_state
from common import record as records


class OpenSession:
    """Folder, session.json and the records that stand.

    out: the folder, after `pack` that of the packed session. partial: what runs write while they run. records:
    (variant, round, attempt) -> record.
    """

    def __init__(self, request: Request, path: Path, meta: dict):
        self.request, self.out, self.meta = request, path, meta
        self.partial = path / ".partial"
        self.records: dict[tuple[str, int, int], dict] = {}
        found, faults = sessions.read_records(path)
        for fault in faults:
            self._set_aside(fault)
        self.records = {key_of(record): record for _, record in found}
        for key, record in list(self.records.items()):
            if record["status"] in ("failed", "timeout"):
                print(f"{frame.short_name(record)} is run anew: its status is {record['status']}")
                self.supersede(key)
        if self.records:
            print(f"goes on with {self.meta['session']}: {len(self.records)} records are there")
        self.partial.mkdir(exist_ok=True)
        kept = [self.sidecar(base) for base in request.bases if (base, 0, 1) in self.records]
        for left in set(self.partial.iterdir()).difference(kept):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _set_aside(self, fault):
        """A record that cannot be read stays in the session, and its run is made again."""
        path = Path(fault.partition(": ")[0])
        folder = self.out / "damaged"
        folder.mkdir(exist_ok=True)
        shutil.move(path, folder / f"{path.name}.{len(list(folder.iterdir()))}")
        print(f"set aside in damaged/: {fault.replace(f'{self.out}{os.sep}', '')}")

    def sidecar(self, variant: str, name: str = "r0") -> Path:
        """Where a run of round 0 leaves its state for the comparison of parity."""
        return self.partial / f"{variant}.{name}.parity.npz"

    def of(self, variant: str) -> list[dict]:
        """Records of a variant by round and attempt."""
        return [record for (name, _, _), record in sorted(self.records.items()) if name == variant]

    def supersede(self, key: tuple[str, int, int]) -> None:
        """A failed try stands in the session under a name of its own, and its run is made once more."""
        record = self.records.pop(key)
        path = self.out / records.file_name(*key)
        tries = len(list(self.out.glob(f"{path.stem}.t*.json")))
        record["extra"]["superseded"] = True
        records.write(path.with_name(f"{path.stem}.t{tries + 1}.json"), record)
        path.unlink(missing_ok=True)

    def keep(self, record: dict) -> None:
        """Move a record out of .partial, whole; its trace goes with it. The folder's own path stays out of it."""
        name = name_of(record)
        for path in self.partial.glob(f"{name}.*trace.json.gz"):
            path.replace(self.out / path.name)
        for here, word in ((str(self.out), "OUT"), (str(self.request.root), "ROOT")):
            record["message"] = record["message"].replace(here, word)
            record["argv"] = [text.replace(here, word) for text in record["argv"]]
            variables = record["env"]["variables"]
            record["env"]["variables"] = {key: value.replace(here, word) for key, value in variables.items()}
        records.write(self.out / f"{name}.json", record)
        self.records[key_of(record)] = record
        (self.partial / f"{name}.json").unlink(missing_ok=True)

    def note(self, **values) -> None:
        """Write values into session.json."""
        self.meta |= values
        sessions.write_meta(self.out, self.meta)

    def pack(self) -> None:
        """All rounds are there."""
        self.note(rounds=self.request.rounds)
        self.out = sessions.pack(self.out, "complete")


@contextlib.contextmanager
def opened(request: Request) -> Iterator[OpenSession]:
    """The open session of a request, or a new one, locked; this process and its children keep to the session's cores.

    First those that nothing can continue are closed. Raises sessions.Busy where another process works in it.
    """
    close_ended(request)
    mine = [(path, meta) for path, meta in sessions.open_sessions(request.group) if request.goes_on_with(meta)]
    path, meta = mine[-1] if mine else _begin(request)
    affinity = os.sched_getaffinity(0)
    lock = sessions.lock(path)
    try:
        session = OpenSession(request, path, meta)
        if not request.launch.prefix:
            os.sched_setaffinity(0, meta["cores"])
        yield session
    finally:
        lock.close()
        os.sched_setaffinity(0, affinity)


def _begin(request):
    cores, numa_node = host_state.cores_of([uuid for uuids in request.uuids for uuid in uuids])
    meta = {
        "request": request.data,
        "nodes": request.place,
        "source": request.source,
        "versions": request.versions,
        "label": request.group.name.removeprefix(f"{request.model}-{request.preset}").lstrip("-"),
        "cores": cores,
        "numa_node": numa_node,
        "closed": None,
        "probes": [],
    }
    first = request.uuids[0][0] if request.uuids[0] else None
    path = sessions.create(request.group, request.env["boot_id"], first, meta)
    return path, sessions.read_meta(path)


def close_ended(request: Request) -> None:
    """Pack what is open on this boot and GPU and can never go on: source or versions have changed, or a day is over.

    Removed is what a call that was killed while it packed has left of an open one.
    """
    for path in sessions.left_over(request.root):
        if request.is_here(sessions.read_meta(path.with_name(sessions.session_name(path)))):
            close(path, "it is packed already")
    for path, meta in sessions.open_sessions(request.root):
        if request.is_here(meta):
            why = sessions.why_ended(meta, request.source["source_hash"])
            if why or meta.get("versions") != request.versions:
                close(path, why or "versions have changed since")


def close(path: Path, why: str) -> Path | None:
    """Pack an open session as it stands and say so; None, in words, where another process works in it."""
    try:
        with sessions.lock(path):
            number = len(sessions.record_files(path))
            if number:
                target = sessions.pack(path, why)
                print(f"closed {shown(target)}: {why}; {number} records")
                return target
            shutil.rmtree(path)
            print(f"removed {shown(path)}: {why}; it has no record")
    except (sessions.Busy, sessions.Damaged, sessions.Refused) as error:
        print(f"not closed: {error}")
    return None


def key_of(record: dict) -> tuple[str, int, int]:
    return record["variant"], record["round"], record["attempt"]


def name_of(record: dict) -> str:
    """graph.r1, or graph.r1.a2 of a second attempt."""
    return Path(records.file_name(*key_of(record))).stem
