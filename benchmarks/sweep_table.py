"""One point of a sweep from the runs of its session, and the tables of all points."""

from benchmarks import compare, frame, tables
from common.config import flag_of

UNTIMED = "no timed round of"
# What of a point is None where it was not measured.
UNKNOWN = ("speedup", "low", "high", "verdict", "scope", "ceiling", "issue_ms", "busy_ms", "eager_ms", "graph_ms")


def read_point(found: list[dict], variant: str, preset: str) -> dict:
    """The numbers of a point from the runs of its folder, a frame or records; what is not known is None."""
    runs = frame.of(found)
    rows = {row["variant"]: row for row in compare.summarise(of_point(runs, variant))}
    row = rows.get(variant, {})
    base = row.get("base") or "eager"
    eager = rows.get(base, {})
    failed = next((one for one in (row, eager) if one.get("status", "pass") != "pass"), None)
    untimed = " and ".join(name for name, one in ((base, eager), (variant, row)) if not one.get("num_rounds"))
    status, message = ("failed", f"{UNTIMED} {untimed}") if untimed else ("pass", "")
    if failed:
        status, message = failed["status"], failed["message"]
    point = {key: row.get(key) for key in ("speedup", "verdict", "scope", "ceiling", "parity", "replays")}
    point |= {"low": row.get("speedup_low"), "high": row.get("speedup_high"), "graph_ms": row.get("step_ms")}
    point |= {"eager_ms": eager.get("step_ms"), "issue_ms": eager.get("issue_ms"), "busy_ms": eager.get("busy_ms")}
    point |= {"rounds": row.get("num_pairs") or row.get("num_rounds", 0), "report": row.get("report", {})}
    point |= {"status": status, "message": message}
    timed = compare.timed(frame.records_of(runs))
    shrunk = next((record["preset"] for record in timed if record["preset"] != preset), None)
    if shrunk:
        # The script made the model smaller: a step of another model, which says nothing about this value.
        point |= dict.fromkeys(set(UNKNOWN) - {"scope"}) | {"report": {}}
        point |= {"status": "oom", "message": f"ran as {shrunk}: {preset} does not fit"}
    return point


def of_point(runs, variant: str):
    """Of a frame, the runs that a point compares: the variant's and those of every eager."""
    return runs[(runs["variant"] == variant) | (runs["kind"] == "eager")]


def unmeasured(status: str, message: str) -> dict:
    """A point without numbers."""
    nothing = {"rounds": 0, "parity": None, "replays": None, "report": {}}
    return dict.fromkeys(UNKNOWN) | nothing | {"status": status, "message": message}


# ------------------------------------------------------------------------------------------------
# Tables


def speedup(point: dict) -> str | None:
    if point["speedup"] is None:
        return None
    text = f"{point['speedup']:.3f}x"
    return text if point["low"] is None else f"{text} [{point['low']:.3f}, {point['high']:.3f}]"


def _issue_over_busy(point):
    return f"{point['issue_ms'] / point['busy_ms']:.2f}" if point["issue_ms"] and point["busy_ms"] else None


def report(result: dict, left_out: list[str], is_markdown: bool = False) -> str:
    """Finding, table and notes of what `Sweep.result` gives."""
    over, env, points = result["over"], result["env"], result["points"]
    value = (over, tables.field("value"))
    columns = (
        value,
        ("rounds", tables.field("rounds")),
        ("eager ms", tables.field("eager_ms", tables.number(2))),
        (f"{result['variant']} ms", tables.field("graph_ms", tables.number(2))),
        ("ceiling", tables.field("ceiling", lambda value: f"{value:.2f}x")),
        ("issue/busy", _issue_over_busy),
        ("speed-up", speedup),
        ("verdict, 99 %", tables.verdict),
        *((name, tables.field(name)) for name in ("parity", "replays", "status")),
    )
    # Of the variant, not of eager.
    own = tables.of_report(points)
    found = [tables.cells(points, each) for each in ([columns, (value, *own)] if own else [columns])]
    first, *others = map(flag_of, result["fields"])
    what = f"{over} is {first} of {result['model']}, preset {result['preset']}"
    what += f"; {', '.join(others)} in proportion" if others else ""
    what += f"; {result['host_load']} busy processes beside each run" if result["host_load"] else ""
    where = f"{env['gpu_name']} x{env['world_size']}" if env["gpu_name"] else f"CPU ({env['cpu']})"
    named = (("torch", "torch"), ("cuda", "CUDA"), ("transformer_engine", "Transformer Engine"), ("driver", "driver"))
    versions = [f"{name} {env[key]}" for key, name in named if env[key]]
    sha = f"git {env['git_sha'][:12]}{' (changed)' if env['git_dirty'] else ''}, " if env["git_sha"] else ""
    notes = [f"{over} {point['value']}: {tables.short(point['message'])}" for point in points if point["message"]]
    notes += [what]
    if versions:
        source = f"source {env['source_hash']}" if env["source_hash"] else "points of several sources"
        notes += [", ".join([where, *versions]), sha + source]
    if any(point["verdict"] in ("unclear", "one round") for point in points):
        notes += ["unclear: the interval holds 1 and is wider than +-0.5 %; --rounds auto narrows it to +-1 %"]
    notes += left_out
    if is_markdown:
        parts = [f"**{result['finding']}**", *map(tables.piped, found), "\n".join(f"- {note}" for note in notes)]
    else:
        parts = [*(tables.aligned(lines, num_left=0) for lines in found), "\n".join(notes), result["finding"]]
    return "\n\n".join(parts)
