"""The record: one JSON object per run, the contract between training scripts and the harness.

A training script writes it (`write`), the harness fills in parity and status and publishes it, and
every table and figure is made from it (`read`, `upgrade`). No torch here: reading must work without it.

Names end in their unit (`_ms`, `_s`, `_bytes`, `_j`, `_mhz`, `_w`); a count starts with `num_`. A
value that could not be measured is null, never zero. Schema 1, which knew no session, times, conditions or proof of
work, stays readable as it was written.
"""

import copy
import hashlib
import json
import os
from pathlib import Path

from common.files import write_text

SCHEMA = 2

STATUSES = (
    "pass",
    "oom",
    "capture_failed",
    "numerics_failed",
    "eager_two_runs_differ",
    "unsupported",
    "timeout",
    "failed",
)

ENV = ("gpu_name", "gpu_uuid", "num_gpus", "world_size", "boot_id", "driver", "cuda", "cudnn", "nccl", "torch")
ENV += ("transformer_engine", "dali", "python", "host", "cpu", "git_sha", "git_tree", "git_dirty", "source_hash")
ENV += ("run_hash", "slurm", "variables")
PHASES = ("start", "import", "build", "warmup", "compile", "capture", "settle", "window", "passes", "profile")

# Every key that a record of schema 2 must have; what a run does not know is null or empty.
TEMPLATE = {
    "schema": SCHEMA,
    # The folder of the session: 20261122T031500Z-13f405-c77b; empty where a script ran by itself.
    "session": "",
    "model": "",
    "preset": "",
    "variant": "",
    "round": 0,
    # 2 where the first run of this round did not settle and was repeated.
    "attempt": 1,
    "host_load": 0,
    "status": "failed",
    "message": "",
    "device": "",
    "begin_utc": None,
    "end_utc": None,
    "config": {},
    "argv": [],
    # source_hash: of the whole session's code; run_hash: of what this run imported or compiled.
    "env": dict.fromkeys(ENV) | {"num_gpus": 0, "world_size": 1, "slurm": {}, "variables": {}},
    "conditions": {
        "settled": None,
        "window_s": None,
        "cores": [],
        "numa_node": None,
        "us_per_operator": None,
        "us_per_launch": None,
        # Text for each process of somebody else on the GPU, and for each other session of ours on the host.
        "others_on_gpu": [],
        "other_sessions": [],
    },
    # Wall seconds by phase. Records that were written later have those of common/phases.py that cost something besides;
    # their phases sum to the process's time, and `passes` is no longer that of issue pass and section pass.
    "seconds": dict.fromkeys(PHASES),
    "clocks": {"sm_mhz": None, "power_w": None, "temperature_c": None, "throttle": []},
    "energy_j": None,
    "capture": {
        "strategy": None,
        "warmup_s": None,
        "compile_s": None,
        "capture_s": None,
        "num_graphs": 0,
        "num_replays": 0,
        "expected_replays": 0,
        "nodes": {},
    },
    # What the script said before it ran: graphs 0 for an eager variant; null: at least one, as many as are needed.
    "promised": {"graphs": None, "replays_per_step": None},
    "steps": {"gpu_ms": [], "batch": [], "wall_ms": None},
    "statistic_ms": None,
    # Mean of the medians before and after the window (extra.issue); in records without extra.issue, of that after it.
    "issue_ms": None,
    "busy_ms": None,
    "optimizer_ms": None,
    "rank_skew_ms": None,
    # Of several ranks, each: rank, stage, gpu_uuid, statistic_ms, busy_ms, idle_fraction, num_replays, state_hash,
    # memory and clocks.
    "ranks": [],
    "num_kernels": None,
    "idle_fraction": None,
    "memory": dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "graph_pool_bytes", "device_used_bytes")),
    "flops_per_step": None,
    "flops_convention": None,
    "items_per_step": None,
    "unit": None,
    "numerics": {
        "loss": [],
        "grad_norm": [],
        "state_hash": None,
        "parity": None,
        # The variant that parity was asked against.
        "reference": None,
        "max_rel_diff": None,
        "first_difference": None,
    },
    # That the timed window did its work; see common/proof.py.
    "proof": {
        "steps": [],
        "loss": [],
        "grad_norm": [],
        "state_step": None,
        "state_sample": [],
        "settled_ms": None,
        "late_ms": None,
        "late_change": None,
        "growth_bytes": None,
        "graph_kernel_share": None,
    },
    # What not every run has, such as issue (the issue passes), microbatches (ms of forward and backward passes in
    # the steps of the section pass, and of the rest of these steps), profile, and queue_model: see common/passes.py.
    "extra": {},
    # SHA-256 of the rest; `write` fills it in. It shows an edit by hand, not a forger's.
    "digest": None,
}

# Schema 1 had these besides, and none of what it lacks here.
_ONLY_1 = {"capture": ("num_fallbacks",)}
ONLY_2 = {
    "": ("session", "attempt", "begin_utc", "end_utc", "conditions", "seconds", "promised", "ranks", "proof", "digest"),
    "env": ("git_tree", "run_hash"),
    "numerics": ("reference",),
}


def _template(schema):
    if schema == SCHEMA:
        return TEMPLATE
    template = copy.deepcopy(TEMPLATE)
    for group, keys in ONLY_2.items():
        for key in keys:
            del (template[group] if group else template)[key]
    for group, keys in _ONLY_1.items():
        template[group].update(dict.fromkeys(keys, 0))
    return template


TEMPLATES = {schema: _template(schema) for schema in (1, SCHEMA)}


class RecordError(ValueError):
    """A file that is not a whole record of this schema; the message names the file and what is wrong."""


def blank(**values) -> dict:
    """A new record with every key of the schema, `values` set at the top level.

    Raises ValueError for a key that the schema does not have.
    """
    record = copy.deepcopy(TEMPLATE)
    unknown = sorted(set(values) - set(record))
    if unknown:
        raise ValueError(f"not keys of record schema {SCHEMA}: {', '.join(unknown)}")
    record.update(values)
    return record


def file_name(variant: str, round_index: int, attempt: int = 1) -> str:
    """`graph`, 3 -> `graph.r3.json`; attempt 2 -> `graph.r3.a2.json`."""
    return f"{variant}.r{round_index}{f'.a{attempt}' if attempt > 1 else ''}.json"


def dumps(record: dict, **options) -> str:
    """One compact line of JSON; NaN and infinity, which JSON does not have, become null. options: of json.dumps."""
    options |= {"separators": (",", ":"), "allow_nan": False}
    try:
        return json.dumps(record, **options)
    except ValueError:
        return json.dumps(_finite(record), **options)


def digest_of(record: dict) -> str:
    """SHA-256 (hex) of a record without its digest; the order of keys does not count."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(dumps(rest, sort_keys=True).encode()).hexdigest()


def write(path: str | os.PathLike, record: dict) -> None:
    """Write `record` so that a reader sees the old file or the whole new one, never a half.

    A record of schema 2 gets its digest. Raises OSError, whose filename is `path`, where the disk is full or the
    folder cannot be written; the old file is then as it was.
    """
    if record.get("schema") == SCHEMA and "digest" in record:
        record["digest"] = digest_of(record)
    write_text(path, dumps(record) + "\n")


def read(path: str | os.PathLike) -> dict:
    """Read and check one record. Raises RecordError that names the file and the fault."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise RecordError(f"{path}: not a whole JSON document ({error})") from None
    return parse(text, str(path))


def parse(text: str, where: str) -> dict:
    """The record in `text`. Raises RecordError that begins with `where`."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # bad JSON or UTF-8, numbers and lists beyond Python's limits
        raise RecordError(f"{where}: not a whole JSON document ({error})") from None
    fault = check(record)
    if fault:
        raise RecordError(f"{where}: {fault}")
    return record


def check(record: object) -> str | None:
    """What makes `record` unfit for its schema, in words, or None."""
    if not isinstance(record, dict) or "schema" not in record:
        return "a foreign JSON document, it has no key 'schema'"
    if record["schema"] not in TEMPLATES or isinstance(record["schema"], bool):
        return f"schema {record['schema']!r}, this code reads schema {' and '.join(map(str, TEMPLATES))}"
    template = TEMPLATES[record["schema"]]
    missing = [key for key in template if key not in record]
    for group, default in template.items():
        if group in record and isinstance(default, dict):
            if not isinstance(record[group], dict):
                return f"key {group!r} is not an object"
            missing += [f"{group}.{key}" for key in default if key not in record[group]]
    if missing:
        return f"keys missing: {', '.join(missing)}"
    if record["status"] not in STATUSES:
        return f"unknown status {record['status']!r}, known: {', '.join(STATUSES)}"
    if record.get("digest") is not None and record["digest"] != digest_of(record):
        return "its digest is not that of its content: edited by hand?"
    return None


def upgrade(record: dict) -> dict:
    """A sound record with every key of schema 2; what its own schema lacks is null or empty. "schema" stays."""
    if record["schema"] == SCHEMA:
        return record
    full = copy.deepcopy(TEMPLATE) | record
    for group, default in TEMPLATE.items():
        if isinstance(default, dict):
            full[group] = default | record.get(group, {})
    settle = record["extra"].get("settle")
    full["conditions"] = copy.deepcopy(TEMPLATE["conditions"])
    if isinstance(settle, dict):
        full["conditions"]["settled"] = settle.get("settled")
    wall_ms = record["steps"].get("wall_ms")
    full["conditions"]["window_s"] = wall_ms / 1e3 if isinstance(wall_ms, int | float) else None
    return full


def _finite(value):
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
