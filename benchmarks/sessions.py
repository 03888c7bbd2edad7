"""Sessions: folders that only grow.

A session is what `make bench` measured of one request on one boot of one host (several nodes: all of theirs) with one
source. Below the output root, which is runs/ unless --out says otherwise:

    <gpu>x<count>/<model>-<preset>[-<label>]/<session>.open/    while it is open: one JSON file a record
    <gpu>x<count>/<model>-<preset>[-<label>]/<session>/         packed, and never changed again
        session.json              request, source, host, probes, and when and why it was closed
        records.jsonl.xz          every record as it was written, one a line: pandas.read_json(path, lines=True)
        <variant>.r1.trace.json.gz, wer.json, ...               what else the runs left

A session's name is the time of its begin, its boot and its GPU: 20261122T031500Z-13f405-c77b; cpu0 without a GPU, and
of several nodes that of rank 0. Packing writes a folder of another name and renames it, so that a reader finds the open
session or the packed one, whole. `publish` copies a packed session into results/, where sessions.sha256 lists every
file of every session; nothing else writes there. `benchmarks.publish` is the command.
"""

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from common import record as records
from common.files import sync, write_text

OPEN, PACKING = ".open", ".packing"
RECORDS, META, SUMS = "records.jsonl.xz", "session.json", "sessions.sha256"
META_SCHEMA = 1
# The same request goes on with an open session for so long.
CONTINUES = timedelta(hours=24)

NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}-[0-9a-z]{4}")
# A failed run that was made once more stands as .t1, .t2, ...
RECORD_NAME = re.compile(r"(?P<variant>.+?)\.r(?P<round>\d+)(\.a(?P<attempt>\d+))?(\.t(?P<try>\d+))?\.json")
# Made while a session is open, and no evidence.
_WORKING = (".partial", ".cache", ".stale", ".lock", ".nodes-")


class Damaged(ValueError):
    """A session, or a part of one, that is not as it was written; the message names the file."""


class Refused(ValueError):
    """What must not be done to a session; the message says why."""


# ------------------------------------------------------------------------------------------------
# Names


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def utc_text(when: datetime) -> str:
    """2026-11-22T03:15:00Z"""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(begin: datetime, boot_id: str | None, gpu_uuid: str | None) -> str:
    """The session's folder; boot and GPU by the first digits of their ids."""
    boot = re.sub("[^0-9a-f]", "", (boot_id or "").lower())[:6].ljust(6, "0")
    gpu = re.sub("^(gpu|mig)-", "", (gpu_uuid or "cpu0").lower())[:4].ljust(4, "0")
    return f"{begin.strftime('%Y%m%dT%H%M%SZ')}-{boot}-{gpu}"


def group_name(model: str, preset: str, label: str = "") -> str:
    return f"{model}-{preset}{f'-{label}' if label else ''}"


def label_of(flags: list[str], host_load: int, limit: int = 48) -> str:
    """What a folder's name says of flags after -- and of host load: `--lstm wavefront`, 16 -> lstm-wavefront-load16."""
    words = [Path(text).name if "/" in text else text for text in flags]
    label = re.sub("[^A-Za-z0-9.]+", "-", "-".join(words).replace("_", "-")).strip("-.").lower()
    if len(label) > limit:
        label = f"{label[: limit - 9].rstrip('-.')}-{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:8]}"
    return "-".join(filter(None, [label, f"load{host_load}" if host_load else ""]))


def is_open(path: Path) -> bool:
    return path.name.endswith(OPEN)


def session_name(path: Path) -> str:
    return path.name.removesuffix(OPEN)


# ------------------------------------------------------------------------------------------------
# Finding and reading


def find(root) -> list[Path]:
    """Folders of all sessions at or below root, sorted by name. An open one whose packed form is there is left out.

    Raises FileNotFoundError when there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    found = []
    for place, below, files in os.walk(root):
        here = Path(place)
        if NAME.fullmatch(session_name(here)) and (META in files or RECORDS in files or is_open(here)):
            found.append(here)
            below.clear()
            continue
        below[:] = [name for name in below if not name.startswith(".") and not name.endswith(PACKING)]
    packed = {path for path in found if not is_open(path)}
    found = [path for path in found if not is_open(path) or path.with_name(session_name(path)) not in packed]
    return sorted(found, key=lambda path: (path.parent, path.name))


def read_meta(path: Path) -> dict:
    """session.json of a session. Raises Damaged."""
    try:
        meta = json.loads((path / META).read_text())
    except FileNotFoundError:
        raise Damaged(f"{path}: no {META}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path / META}: {error}") from None
    if not isinstance(meta, dict) or meta.get("schema") != META_SCHEMA or "session" not in meta:
        raise Damaged(f"{path / META}: not a session of schema {META_SCHEMA}")
    return meta


def write_meta(path: Path, meta: dict) -> None:
    write_text(path / META, json.dumps(meta, indent=1) + "\n")


def record_files(folder: Path) -> list[Path]:
    """Single records of an open session, or of a folder of records that belongs to none."""
    found = [(match, path) for path in folder.glob("*.json") if (match := RECORD_NAME.fullmatch(path.name))]
    key = [(m["variant"], int(m["round"]), int(m["attempt"] or 1), int(m["try"] or 99), path) for m, path in found]
    return [path for *_, path in sorted(key)]


def read_lines(path: Path) -> tuple[list[str], str | None]:
    """Lines of a packed file, and what is wrong with it: of a truncated file the whole lines that are left."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return [], f"{path}: {error.strerror}"
    decompressor, text, fault = lzma.LZMADecompressor(), b"", None
    try:
        # In pieces, so that what stands before a damaged place is there.
        for start in range(0, len(data), 1 << 16):
            text += decompressor.decompress(data[start : start + (1 << 16)])
        if not decompressor.eof:
            fault = "it ends in the middle"
    except (lzma.LZMAError, EOFError) as error:
        fault = str(error)
    whole, _, rest = text.rpartition(b"\n")
    lines = whole.decode(errors="replace").split("\n") if whole else []
    if fault is None and rest:
        fault = "its last line has no end"
    return lines, fault and f"{path}: not a whole archive ({fault}); {len(lines)} records are left of it"


def read_records(path: Path) -> tuple[list[tuple[str, dict]], list[str]]:
    """((file or file:line, record) of a session or a folder of single records, a line for each that cannot be read)."""
    texts, faults = [], []
    if (path / RECORDS).exists():
        lines, fault = read_lines(path / RECORDS)
        faults += [fault] if fault else []
        texts = [(f"{path / RECORDS}:{number}", line) for number, line in enumerate(lines, 1)]
    else:
        for file in record_files(path):
            try:
                texts.append((str(file), file.read_text()))
            except (OSError, ValueError) as error:
                faults.append(f"{file}: {getattr(error, 'strerror', None) or error}")
    found = []
    for where, text in texts:
        try:
            found.append((where, records.parse(text, where)))
        except records.RecordError as error:
            faults.append(str(error))
    return found, faults


# ------------------------------------------------------------------------------------------------
# An open session


def create(group: Path, boot_id: str | None, gpu_uuid: str | None, meta: dict) -> Path:
    """A new open session in `group`; its name is not taken, not even by a packed one. Raises OSError."""
    begin = now()
    group.mkdir(parents=True, exist_ok=True)
    while True:
        name = name_of(begin, boot_id, gpu_uuid)
        path = group / f"{name}{OPEN}"
        if not any((group / f"{name}{suffix}").exists() for suffix in ("", OPEN, PACKING)):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
        # Another session began in this second.
        begin += timedelta(seconds=1)
    write_meta(path, {"schema": META_SCHEMA, "session": name, "begin_utc": utc_text(begin), "end_utc": None, **meta})
    return path


class Busy(RuntimeError):
    """Another process works in this folder; the message names it."""


def lock(folder: Path):
    """Take the folder's lock; it lasts until the returned file is closed or the process ends.

    Raises Busy, and FileNotFoundError where there is no such folder (any more).
    """
    file = open(folder / ".lock", "a+")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise Busy(f"{folder} is in use by another run, process {owner}") from None
    if not os.fstat(file.fileno()).st_nlink:
        file.close()
        raise Busy(f"{folder} was closed by another run at this moment")
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def open_sessions(root) -> list[tuple[Path, dict]]:
    """(folder, session.json) of every open session below root; one without a readable session.json is left out."""
    found = []
    for path in find(root) if Path(root).is_dir() else []:
        if is_open(path):
            with contextlib.suppress(Damaged):
                found.append((path, read_meta(path)))
    return found


def left_over(root) -> list[Path]:
    """Open folders below root whose packed form is there: whoever packed them was killed before they were removed."""
    found = Path(root).rglob(f"*{OPEN}")
    return sorted(path for path in found if (path.with_name(session_name(path)) / META).is_file())


def why_ended(meta: dict, source_hash: str, when: datetime | None = None) -> str | None:
    """Why nothing can continue an open session any more, in words, or None."""
    if meta.get("source", {}).get("source_hash") != source_hash:
        return "the source has changed since"
    age = (when or now()) - datetime.strptime(meta["begin_utc"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    if age > CONTINUES:
        return f"it began more than {CONTINUES.total_seconds() / 3600:.0f} hours ago"
    return None


# ------------------------------------------------------------------------------------------------
# Packing


def pack(path: Path, why: str) -> Path:
    """Close an open session: write its packed form, check it, rename it into place, then remove the open one.

    Killed at any moment, either the open session is whole or the packed one is, and the next call goes on from there.
    why: the reason, kept in session.json. Returns the packed folder. Raises Damaged for a record that cannot be read
    (nothing is packed then), Refused where a packed session of this name holds something else.
    """
    target = path.with_name(session_name(path))
    files = record_files(path)
    found = [(file, file.read_text().rstrip("\n")) for file in files]
    for file, text in found:
        if "\n" in text:
            raise Damaged(f"{file}: more than one line")
        try:
            record = json.loads(text)
        except ValueError as error:
            raise Damaged(f"{file}: not a whole JSON document ({error})") from None
        if not isinstance(record, dict):
            raise Damaged(f"{file}: not a record, no JSON object")
    data = "".join(f"{text}\n" for _, text in found).encode()
    if target.exists():
        # Killed after the rename; a part of the open one may be removed by now.
        lines, fault = read_lines(target / RECORDS)
        if fault or not {text for _, text in found} <= set(lines):
            raise Refused(f"{target}: a packed session of this name holds other records than {path.name}")
    else:
        _write_packed(path, target, why, data, files)
    shutil.rmtree(path)
    return target


def _write_packed(path, target, why, data, files):
    temporary = path.with_name(f"{session_name(path)}{PACKING}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    for entry in sorted(path.iterdir()):
        if entry in files or entry.name == META or entry.name.startswith(_WORKING):
            continue
        copy = shutil.copytree if entry.is_dir() else shutil.copy2
        copy(entry, temporary / entry.name)
    (temporary / RECORDS).write_bytes(compress(data))
    meta = read_meta(path)
    ends = [json.loads(line).get("end_utc") for line in data.decode().splitlines()]
    end = max(filter(None, ends), default=None) or utc_text(now())
    write_meta(temporary, meta | {"end_utc": end, "closed": why, "num_records": len(files)})
    lines, fault = read_lines(temporary / RECORDS)
    assert fault is None and "".join(f"{line}\n" for line in lines).encode() == data, fault
    for file in temporary.rglob("*"):
        sync(file)
    sync(temporary)
    temporary.rename(target)
    sync(target.parent)


def compress(data: bytes) -> bytes:
    """xz, the same bytes for the same data."""
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


# ------------------------------------------------------------------------------------------------
# Publishing


def listed(root: Path) -> dict[str, str]:
    """Path below root -> SHA-256 of every published file, from sessions.sha256; empty where that is not there."""
    path = Path(root) / SUMS
    lines = path.read_text().splitlines() if path.is_file() else []
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines if line.strip())}


def sums_of(session: Path, root: Path) -> dict[str, str]:
    """The same of one session, from its files."""
    every = sorted(path for path in session.rglob("*") if path.is_file())
    files = [path for path in every if path.relative_to(session).parts[0] != "logs"]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def publish(session: Path, results: Path) -> Path:
    """Copy a packed session, unchanged and whole, into results; its logs stay behind. Returns the copy.

    Raises Refused for an open session, a damaged one, or one whose name is taken by another there.
    """
    session, results = session.resolve(), Path(results)
    if is_open(session) or not NAME.fullmatch(session.name):
        raise Refused(f"{session}: not a packed session; make bench CLOSE=1 closes an open one")
    if not session.is_dir():
        raise Refused(f"{session}: no such folder")
    read_meta(session)
    found, faults = read_records(session)
    if faults or not found:
        raise Refused(faults[0] if faults else f"{session}: no records")
    relative = Path(*session.parts[-3:])
    target = results / relative
    if target.exists():
        if sums_of(target, target) == sums_of(session, session):
            return target
        raise Refused(f"{target}: another session of this name is published; nothing is copied")
    temporary = target.with_name(f"{target.name}{PACKING}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(session, temporary, ignore=lambda place, names: ["logs"] if Path(place) == session else [])
    temporary.rename(target)
    write_sums(results, listed(results) | sums_of(target, results))
    return target


def write_sums(results: Path, sums: dict[str, str]) -> None:
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    write_text(Path(results) / SUMS, "".join(lines))


def verify(results: Path) -> list[str]:
    """A line for each published file that is missing or changed, and for each file of a session that is not listed."""
    results = Path(results)
    known = listed(results)
    there = {name: digest for session in find(results) for name, digest in sums_of(session, results).items()}
    faults = [f"{name}: missing" for name in known if name not in there]
    changed = [name for name, digest in known.items() if there.get(name, digest) != digest]
    faults += [f"{name}: changed since it was published" for name in changed]
    return faults + [f"{name}: not in {SUMS}" for name in there if name not in known]
