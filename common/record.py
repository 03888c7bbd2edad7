"""The record: one JSON object per run, the contract between training scripts and the harness.

A training script writes it (`write`), the harness fills in parity and status and publishes it, and
every table and figure is made from it (`read`). No torch here: reading must work without it.

Names end in their unit (`_ms`, `_s`, `_bytes`, `_j`, `_mhz`, `_w`); a count starts with `num_`. A
value that could not be measured is null, never zero.
"""

import json
import os
import tempfile
from pathlib import Path

SCHEMA = 1

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

# Every key that a record of schema 1 must have; what a run does not know is null or empty.
TEMPLATE = {
    "schema": SCHEMA,
    "model": "",
    "preset": "",
    "variant": "",
    "round": 0,
    "host_load": 0,
    "status": "failed",
    "message": "",
    "device": "",
    "config": {},
    "argv": [],
    "env": {
        "gpu_name": None,
        "gpu_uuid": None,
        "num_gpus": 0,
        "world_size": 1,
        "boot_id": None,
        "driver": None,
        "cuda": None,
        "cudnn": None,
        "nccl": None,
        "torch": None,
        "transformer_engine": None,
        "dali": None,
        "python": None,
        "host": None,
        "cpu": None,
        "git_sha": None,
        "git_dirty": None,
        "source_hash": None,
        "slurm": {},
        "variables": {},
    },
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
        "num_fallbacks": 0,
        "nodes": {},
    },
    "steps": {"gpu_ms": [], "batch": [], "wall_ms": None},
    "statistic_ms": None,
    "issue_ms": None,
    "busy_ms": None,
    "optimizer_ms": None,
    "rank_skew_ms": None,
    "num_kernels": None,
    "idle_fraction": None,
    "memory": {
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "graph_pool_bytes": None,
        "device_used_bytes": None,
    },
    "flops_per_step": None,
    "flops_convention": None,
    "items_per_step": None,
    "unit": None,
    "numerics": {
        "loss": [],
        "grad_norm": [],
        "state_hash": None,
        "parity": None,
        "max_rel_diff": None,
        "first_difference": None,
    },
    "extra": {},
}


class RecordError(ValueError):
    """A file that is not a whole record of this schema; the message names the file and what is wrong."""


def blank(**values) -> dict:
    """A new record with every key of the schema, `values` set at the top level.

    Raises ValueError for a key that the schema does not have.
    """
    record = json.loads(json.dumps(TEMPLATE))
    unknown = sorted(set(values) - set(record))
    if unknown:
        raise ValueError(f"not keys of record schema {SCHEMA}: {', '.join(unknown)}")
    record.update(values)
    return record


def file_name(variant: str, round_index: int) -> str:
    """`graph`, 3 -> `graph.r3.json`."""
    return f"{variant}.r{round_index}.json"


def dumps(record: dict) -> str:
    """One compact line of JSON; NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)


def write(path: str | os.PathLike, record: dict) -> None:
    """Write `record` so that a reader sees the old file or the whole new one, never a half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike) -> dict:
    """Read and check one record. Raises RecordError that names the file and the fault."""
    path = Path(path)
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad JSON or UTF-8, numbers and lists beyond Python's limits
        raise RecordError(f"{path}: not a whole JSON document ({error})") from None
    fault = check(record)
    if fault:
        raise RecordError(f"{path}: {fault}")
    return record


def check(record: object) -> str | None:
    """What makes `record` unfit for schema 1, in words, or None."""
    if not isinstance(record, dict) or "schema" not in record:
        return "a foreign JSON document, it has no key 'schema'"
    if record["schema"] != SCHEMA:
        return f"schema {record['schema']!r}, this code reads schema {SCHEMA}"
    missing = [key for key in TEMPLATE if key not in record]
    for group, default in TEMPLATE.items():
        if group in record and isinstance(default, dict):
            if not isinstance(record[group], dict):
                return f"key {group!r} is not an object"
            missing += [f"{group}.{key}" for key in default if key not in record[group]]
    if missing:
        return f"keys missing: {', '.join(missing)}"
    if record["status"] not in STATUSES:
        return f"unknown status {record['status']!r}, known: {', '.join(STATUSES)}"
    return None


def _finite(value):
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
