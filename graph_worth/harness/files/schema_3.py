"""Files of schema 3 as files of schema 4: blocks have sums of their steps, and verdicts were sealed into the file."""

import re

SCHEMA = 3
# The note of a script that made the model smaller; no field of these files says it.
_FEWER_LAYERS = re.compile(r"\d+ of (\d+) layers: what fits into ")
_BLOCK = (
    *("cycle", "place", "busy_processes", "process", "threads", "untimed_steps", "drained_steps", "parent_s"),
    *("worker_s", "reserved_bytes", "growth_bytes", "replays", "expected_replays", "late_ms", "late_change", "reset"),
    *("losses", "moved", "reruns"),
)
# These files do not say what a compiled variant declared; none of those that were published declared more.
_COMPILED_TOLERANCE = 1e-2
# Statuses that say what a worker raised, and not what a check found.
_RAISED = ("unsupported", "oom", "capture_failed", "numerics_failed", "timeout")


def upgraded(data: dict) -> dict:
    """Return the object of a schema 3 file in the form of schema 4, its verdicts under `sealed`.

    Raises:
        ValueError: a part is not there, or of another type than it should be.
    """
    try:
        return data | {"host": data["host"], "builds": {name: _build(build) for name, build in data["builds"].items()}}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        fault = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"no run of schema {SCHEMA}: {fault}") from None


def _build(build: dict) -> dict:
    variants = {name: _variant(variant) for name, variant in build["variants"].items()}
    blocks = [block for variant in build["variants"].values() for block in variant["blocks"]]
    busy = {block["cycle"]: block["busy_processes"] for block in blocks}
    cycles = [{"cycle": number, "busy_processes": busy[number]} for number in sorted(busy)]
    # These files had both in one list.
    notes = {"flops_notes": [note for note in build["notes"] if note.startswith("FLOP")]}
    fewer = next(filter(None, map(_FEWER_LAYERS.match, build["notes"])), None)
    layers = {"asked_layers": int(fewer[1])} if fewer else {}
    return build | {"anchor": build["base"], "cycles": cycles, "variants": variants} | layers | notes


def _variant(variant: dict) -> dict:
    parity = variant.get("parity") or {}
    status, reason = variant["status"], variant["reason"]
    # A worker that ended has "failed", too, and no parity after its blocks.
    raised = status if status in _RAISED else "error" if status == "failed" and not variant["blocks"] else None
    sealed = {"status": status, "reason": reason, "parity": parity.get("result", "")}
    return variant | {
        "reference": parity.get("reference", "eager"),
        "raised": {"kind": raised, "reason": reason} if raised else None,
        "tolerance": _COMPILED_TOLERANCE if variant["kind"] == "compile" else None,
        "parity": [],
        "blocks": [_block(block) for block in variant["blocks"]],
        "sealed": sealed,
    }


def _block(block: dict) -> dict:
    summary = {"steps": block["steps"], "mean_ms": block["mean_ms"], "typical_ms": block["ms"]}
    return {key: block[key] for key in _BLOCK if key in block} | {
        "issue_ms": [] if block["issue_ms"] is None else [block["issue_ms"]],
        "gpu": None if block["sm_mhz"] is None else {"sm_mhz": block["sm_mhz"]},
        "summary": summary | {"num_classes": len(block["classes"]) or 1},
    }
