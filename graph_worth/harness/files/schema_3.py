"""Files of schema 3 as files of schema 4: blocks have sums of their steps, and verdicts were sealed into the file."""

import re

SCHEMA = 3
# The note of a script that made the model smaller; no field of these files says it.
_FEWER_LAYERS = re.compile(r"\d+ of (\d+) layers: what fits into ")
_BLOCK = (
    *("cycle", "place", "busy_processes", "process", "threads", "untimed_steps", "drained_steps", "parent_s"),
    *("worker_s", "reserved_bytes", "growth_bytes", "replays", "expected_replays", "late_ms", "late_change", "reset"),
    *("losses", "moved", "cpu_ms", "reruns"),
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
        return data | {"host": data["host"], "builds": {name: _build(own) for name, own in data["builds"].items()}}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        said = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"no run of schema {SCHEMA}: {said}") from None


def _build(own: dict) -> dict:
    variants = {name: _variant(each) for name, each in own["variants"].items()}
    blocks = [block for each in own["variants"].values() for block in each["blocks"]]
    busy = {block["cycle"]: block["busy_processes"] for block in blocks}
    cycles = [{"cycle": number, "busy_processes": busy[number]} for number in sorted(busy)]
    # These files had both in one list.
    notes = {"flops_notes": [note for note in own["notes"] if note.startswith("FLOP")]}
    fewer = next(filter(None, map(_FEWER_LAYERS.match, own["notes"])), None)
    asked = {"asked_layers": int(fewer[1])} if fewer else {}
    return own | {"anchor": own["base"], "cycles": cycles, "variants": variants} | asked | notes


def _variant(own: dict) -> dict:
    parity = own.get("parity") or {}
    status, reason = own["status"], own["reason"]
    # A worker that ended has "failed", too, and no parity after its blocks.
    raised = status if status in _RAISED else "error" if status == "failed" and not own["blocks"] else None
    sealed = {
        "status": status,
        "reason": reason,
        "parity": parity.get("result", ""),
    }
    return own | {
        "reference": parity.get("reference", "eager"),
        "raised": {"kind": raised, "reason": reason} if raised else None,
        "tolerance": _COMPILED_TOLERANCE if own["kind"] == "compile" else None,
        "parity": [],
        "blocks": [_block(block) for block in own["blocks"]],
        "sealed": sealed,
    }


def _block(own: dict) -> dict:
    summary = {
        "steps": own["steps"],
        "mean_ms": own["mean_ms"],
        "typical_ms": own["ms"],
        "num_classes": len(own["classes"]) or 1,
    }
    return {key: own[key] for key in _BLOCK if key in own} | {
        "issue_ms": [] if own["issue_ms"] is None else [own["issue_ms"]],
        "gpu": None if own["sm_mhz"] is None else {"sm_mhz": own["sm_mhz"]},
        "summary": summary,
    }
