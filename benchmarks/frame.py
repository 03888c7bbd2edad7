"""All runs below a folder as one pandas frame: packed sessions, open ones and loose records, of schema 1 and 2 alike.

Every reader of records (compare, gate, overview, readme, plot, sweep, progress, collate) gets them from `read`.

Columns of the frame, one row a run:
    group      folder that the session stands in, below the root: h200x1/gpt3-bench; "." is the root itself
    session    the session's name; records of a folder without a session are one of each boot, GPU and source
    begin      when the session began, UTC text that sorts by time; empty where it is not known
    where      file, and line of a packed one
    path       folder of the session, where its sidecars are
    gpus, boots    of the whole session, tuples: all its nodes' and GPUs' ids; a CPU has none
    kind       eager, graph or compile, as the script declares it
    identity   what the run's code and kernels were: two runs of equal identity measured the same program
    quiet_ms   10th percentile of step time as the statistic is formed; None where steps exceed 0.4 s
    record     the record itself, with every key of schema 2
    and schema, model, preset, variant, round, attempt, status, device, host_load, world_size, gpu_name, statistic_ms,
    is_timed   passed, with a statistic

A record that cannot be read, or that contradicts itself, is named in `faults` and is no row. Equal step lists of one
variant are one run: of copies the first stands.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pandas

from benchmarks import intervals, sessions, trust
from common import record as records

# From here on a window holds too few steps for a tail or a 10th percentile.
LONG_STEP_MS = 400.0
COLUMNS = (
    *("group", "session", "begin", "where", "path", "schema", "model", "preset", "variant", "round", "attempt", "kind"),
    *("status", "device", "host_load", "world_size", "gpu_name", "gpus", "boots", "identity", "statistic_ms"),
    *("quiet_ms", "is_timed", "record"),
)


@dataclass
class Runs:
    """frame: see above. faults: a line for each file or record left out. doubts: a line for each copy of a run and
    each failed try that was made once more; neither is a row. metas: session.json by (group, session). sweeps: folders
    of sweeps, whose points are left out."""

    frame: pandas.DataFrame
    faults: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    metas: dict = field(default_factory=dict)
    sweeps: list[Path] = field(default_factory=list)


def read(root) -> Runs:
    """All runs at or below `root`. Raises FileNotFoundError when there is no such folder."""
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    rows, runs = [], Runs(pandas.DataFrame(columns=COLUMNS))
    published = _published(root)
    for folder, kind in _folders(root, runs):
        group, part = (folder.parent, _session) if kind == "session" else (folder, _loose)
        found, faults = sessions.read_records(folder)
        changed = _changed(folder, published)
        if changed:
            runs.faults.append(changed)
            continue
        runs.faults += faults
        name = _relative(group, root)
        rows += part(folder, name, found, runs)
        if kind == "loose":
            runs.faults += _foreign(folder)
    runs.frame = _frame(rows, runs)
    shown = f"{root}{os.sep}"
    runs.faults = [fault.replace(shown, "") for fault in runs.faults]
    return runs


def of(found) -> pandas.DataFrame:
    """A frame of records in memory, sound ones, as of one folder; a frame is returned as it is."""
    if isinstance(found, pandas.DataFrame):
        return found
    runs = Runs(pandas.DataFrame(columns=COLUMNS))
    return _frame(_loose(Path(), ".", [("", record) for record in found], runs), runs)


def records_of(frame) -> list[dict]:
    return frame["record"].tolist()


# ------------------------------------------------------------------------------------------------
# Folders


def _folders(root, runs):
    """(folder, "session" or "loose") at or below root, sorted; sweeps below it are only noted."""
    if sessions.NAME.fullmatch(sessions.session_name(root.resolve())):
        return [(root, "session")]
    found = []
    for place, below, files in os.walk(root):
        here = Path(place)
        if "sweep.json" in files and here != root:
            runs.sweeps.append(here)
            below.clear()
            continue
        below[:] = sorted(name for name in below if not name.startswith(".") and not name.endswith(sessions.PACKING))
        for name in list(below):
            plain = name.removesuffix(sessions.OPEN)
            if sessions.NAME.fullmatch(plain):
                below.remove(name)
                if name == plain or not (here / plain).exists():
                    found.append((here / name, "session"))
        if any(sessions.RECORD_NAME.fullmatch(name) for name in files):
            found.append((here, "loose"))
    return sorted(found)


def _relative(group, root):
    if group == root.parent and root.name and not root.samefile(group):
        return group.resolve().name
    return group.relative_to(root).as_posix() if group != root else "."


def _published(root):
    """Path -> SHA-256 of every published file, of the sessions.sha256 at root or up to three folders above it."""
    root = root.resolve()
    for place in (root, *root.parents[:3]):
        if (place / sessions.SUMS).is_file():
            return {place / name: digest for name, digest in sessions.listed(place).items()}
    return {}


def _changed(folder, published):
    """What is wrong with a published session, by its checksum, or None."""
    path = folder / sessions.RECORDS
    digest = published.get(path.resolve()) if published else None
    if digest is None or not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() == digest:
        return None
    return f"{path}: changed since it was published, its runs are left out"


# What other commands leave beside records.
_OTHERS = ("overview.json", "sweep.json", "wer.json", "session.json")


def _foreign(folder):
    """A line for each .json beside loose records that is none."""
    names = sorted(path.name for path in folder.glob("*.json"))
    odd = [name for name in names if not sessions.RECORD_NAME.fullmatch(name) and name not in _OTHERS]
    return [f"{folder / name}: not the name of a record" for name in odd if not name.startswith(".")]


# ------------------------------------------------------------------------------------------------
# Rows


def _session(folder, group, found, runs):
    try:
        meta = sessions.read_meta(folder)
    except sessions.Damaged as error:
        # The records hold nearly all that session.json says.
        runs.faults.append(f"{error}: its records are read without")
        meta = {}
    name = sessions.session_name(folder)
    runs.metas[group, name] = meta
    begin = meta.get("begin_utc") or name[:16]
    return _rows(folder, group, name, begin, meta, found, runs)


def _loose(folder, group, found, runs):
    """Records of a folder that is no session: one session for each boot, GPU and source."""
    parts: dict[tuple, list] = {}
    for where, record in found:
        key = tuple(str(record["env"].get(name) or "") for name in ("boot_id", "gpu_uuid", "source_hash"))
        parts.setdefault(key, []).append((where, record))
    # The record of a run that did not pass may have none of them.
    lost = [parts.pop(key) for key in list(parts) if key[:2] == ("", "")] if len(parts) > 1 else []
    for own in lost:
        parts.setdefault(max(parts, default=("", "", "")), []).extend(own)
    rows = []
    for (boot, gpu, source), own in sorted(parts.items()):
        name = f"loose-{(boot or '0' * 6)[:6]}-{(gpu.removeprefix('GPU-') or 'cpu0')[:4]}"
        if sum(key[:2] == (boot, gpu) for key in parts) > 1:
            name += f"-{source[:6]}"
        begin = min((str(record.get("begin_utc") or "") for _, record in own), default="")
        rows += _rows(folder, group, name, begin, {}, own, runs)
    return rows


def _rows(folder, group, name, begin, meta, found, runs):
    sound = []
    for where, record in found:
        fault = trust.contradiction(record) or _misnamed(where, record)
        if fault:
            runs.faults.append(f"{where}: {fault}" if where else fault)
        elif record["extra"].get("superseded"):
            runs.doubts.append(f"{short_name(records.upgrade(record))} of {name} failed at first: {record['message']}")
        else:
            sound.append((where, _today(records.upgrade(record))))
    nodes = meta.get("nodes") or []
    gpus = {gpu for node in nodes for gpu in node.get("gpu_uuids", ())} | {
        record["env"]["gpu_uuid"] for _, record in sound
    } - {None}
    boots = {node.get("boot_id") for node in nodes} | {record["env"]["boot_id"] for _, record in sound}
    states = {record["variant"]: record["numerics"]["state_hash"] for _, record in sound if not record["round"]}
    rows = []
    for where, record in sound:
        timed = is_timed(record)
        rows.append(
            {
                "group": group,
                "session": name,
                "begin": begin,
                "where": where,
                "path": folder,
                **{key: record[key] for key in _COPIED},
                "kind": kind_of(record),
                "world_size": record["env"]["world_size"] or 1,
                "gpu_name": record["env"]["gpu_name"],
                "gpus": tuple(sorted(gpus - {None})),
                "boots": tuple(sorted(boots - {None})),
                "identity": identity_of(record, states.get(record["variant"])),
                "quiet_ms": quiet_ms(record) if timed else None,
                "is_timed": timed,
                "record": record,
            }
        )
    return rows


# Variants of schema 1 that have another name today: gpt3's graph_te had one slot for all microbatches then.
RENAMED = {("gpt3", "graph_te"): "graph_te_slot"}


def _today(record):
    """The record under its variant's name of today; `where` says which file has it under the old one."""
    name = RENAMED.get((record["model"], record["variant"])) if record["schema"] == 1 else None
    return record | {"variant": name} if name else record


def stored_variant(model: str, variant: str, schema: int) -> str:
    """The name that a run's variant has in the files of its session."""
    old = {(renamed, model): name for (model, name), renamed in RENAMED.items()} if schema == 1 else {}
    return old.get((variant, model), variant)


_COPIED = ("schema", "model", "preset", "variant", "round", "attempt", "status", "device", "host_load", "statistic_ms")


def _misnamed(where, record):
    """A single record whose name is another run's."""
    match = sessions.RECORD_NAME.fullmatch(Path(where).name)
    if not match:
        return None
    own = record["variant"], record["round"], record.get("attempt", 1)
    if own == (match["variant"], int(match["round"]), int(match["attempt"] or 1)):
        return None
    return f"holds {records.file_name(*own).removesuffix('.json')}, which is not its name"


def _frame(rows, runs):
    """Rows by group, session and run, without copies of a run."""
    rows.sort(key=lambda row: (row["group"], row["session"], row["round"], row["attempt"], row["variant"]))
    kept, seen = [], {}
    for row in rows:
        key = (row["variant"], trust.step_key(row["record"])) if row["is_timed"] else None
        if key and key in seen:
            runs.doubts.append(f"{_name(row)} has the steps of {_name(seen[key])}: one run, counted once")
            continue
        if key:
            seen[key] = row
        kept.append(row)
    # Objects, so that None stays None.
    return pandas.DataFrame({name: pandas.Series([row[name] for row in kept], dtype=object) for name in COLUMNS})


def _name(row):
    attempt = f" attempt {row['attempt']}" if row["attempt"] > 1 else ""
    return f"{row['variant']} round {row['round']}{attempt} of {row['session']}"


def short_name(record: dict) -> str:
    """eager r3, or eager r3 attempt 2"""
    return f"{record['variant']} r{record['round']}" + (
        f" attempt {record['attempt']}" if record["attempt"] > 1 else ""
    )


def is_timed(record: dict) -> bool:
    return bool(record["round"] and record["status"] == "pass" and record["statistic_ms"])


def timed(found: list[dict]) -> list[dict]:
    return [record for record in found if is_timed(record)]


def quiet_ms(record: dict) -> float | None:
    """10th percentile of step time, as the statistic is formed of medians; None where steps exceed LONG_STEP_MS."""
    if record["statistic_ms"] > LONG_STEP_MS:
        return None
    return intervals.statistic(record["steps"]["gpu_ms"], record["steps"]["batch"], 0.1)


def kind_of(record: dict) -> str:
    """eager, graph or compile: what a variant is a kind of. Schema 1 did not say, there its name does."""
    return record["extra"].get("kind") or family(record["variant"])


def family(variant: str) -> str:
    if variant.split("_")[0] in ("eager", "control"):
        return "eager" if variant.startswith("eager") else "control"
    return "compile" if variant.startswith(("compile", "reduce_overhead")) else "graph"


# ------------------------------------------------------------------------------------------------
# Which program ran


def identity_of(record: dict, state_hash: str | None) -> tuple[str, str]:
    """(hash of the run's code, fingerprint of what it did); either equal makes two runs one program.

    The code: run_hash, or in schema 1 source_hash, of that model and common/. The fingerprint: names and counts of
    kernels, graphs, and state_hash, the state after the variant's round 0; empty where that is not all known.
    """
    code = record["env"]["run_hash"] or (f"1:{record['env']['source_hash']}" if record["env"]["source_hash"] else "")
    profile = record["extra"].get("profile")
    if not (isinstance(profile, dict) and state_hash):
        return code, ""
    # Schema 1 knew the largest kernels by name.
    kernels = profile.get("kernels_hash") or [[top["name"], top["num"]] for top in profile.get("top_kernels", ())]
    told = [kernels, state_hash, record["num_kernels"], record["capture"]["num_graphs"]]
    return code, hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] if kernels else ""


def same_program(a: tuple, b: tuple) -> bool:
    return any(x and x == y for x, y in zip(a, b, strict=True))
