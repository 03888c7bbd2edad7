"""The table of a group of sessions: what each variant costs and gains against the base.

    python -m benchmarks.compare runs/h200x1/gpt3-bench
    python -m benchmarks.compare results/h200x1/gpt3-bench --base graph_te --markdown

DIR is a group of sessions, one session, open or packed, or a folder of single records. A root that holds several such
folders is shown as `benchmarks.overview` shows it, and so is any folder with --csv or --json.

Exit status: 0; 1 where there is nothing to show or a record is not sound (the rest is shown); 2 for a mistake
on the command line, records that must not stand in one table, or a folder without eager.

docs/method.md says how pairs, sessions and hosts become a speed-up, an interval and a verdict. A record that
contradicts itself is left out of the rows and named. CPU records show parity and replays, never a speed-up. Reads
records only: no torch, no GPU.
"""

import functools
import math
import signal
import sys
from pathlib import Path

import pandas

from benchmarks import frame, intervals, overview, tables
from benchmarks.command import parser_of
from benchmarks.frame import timed
from benchmarks.rows import Mixed, missing_base, summarise
from benchmarks.script import CONTROL
from common import source
from common.files import write_text

__all__ = ["Mixed", "main", "notes", "report", "summarise", "timed", "write_summary"]

# ------------------------------------------------------------------------------------------------
# Notes


def notes(found, table: list[dict], faults: list[str], metas: dict | None = None, doubts=()) -> list[str]:
    """What a reader of the table must know: machine, versions, source, sessions, host, doubts.

    found: as `summarise` takes it. metas, doubts: of `frame.Runs`.
    """
    runs = frame.of(found)
    skipped = [f"left out: {fault}" for fault in faults]
    if faults:
        skipped.append(f"{len(faults)} record{'s are' if len(faults) > 1 else ' is'} left out")
    if runs.empty:
        return skipped
    every = frame.records_of(runs)
    own = timed(every)
    lines = [*dict.fromkeys(_machine(record) for record in own or every[-1:])]
    lines += _base_notes(table) + _session_notes(runs, metas or {}) + _source_notes(every)
    # What the scripts say of the configuration that really ran, once each.
    lines += dict.fromkeys(note for record in every for note in record["extra"].get("notes") or [])
    lines += _lost_notes(every)
    for num, names in _variants_by(table, lambda row: row["num_older"]).items():
        lines.append(f"{names}: {num} other session{'s' if num > 1 else ''} beside, {OLDER}: not pooled")
    for missing, names in _variants_by(table, lambda row: ", ".join(row["missing_eagers"])).items():
        lines.append(f"{names}: not all eagers run, {missing} missing: the base is the best of those that were")
    for row in table:
        lines += _row_notes(row, every)
    if table and table[0]["device"] == "cpu":
        lines.append("CPU: parity and replays; a host graph says nothing about the speed of a GPU")
    return [*lines, *doubts, *skipped]


OLDER = "of other code, configuration, versions or schema, or with fewer eagers"
VERSIONS = {
    "torch": "torch",
    "cuda": "CUDA",
    "transformer_engine": "Transformer Engine",
    "nccl": "NCCL",
    "driver": "driver",
}


def _machine(record):
    env = record["env"]
    # NCCL counts where there are several GPUs.
    versions = {key: name for key, name in VERSIONS.items() if env[key] and (key != "nccl" or env["world_size"] > 1)}
    where = f"{env['gpu_name']} x{env['world_size']}" if record["device"] == "cuda" else f"CPU ({env['cpu']})"
    where += f", {record['model']} preset {record['preset']}"
    return ", ".join([where, *(f"{name} {env[key]}" for key, name in versions.items())])


def _base_notes(table):
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in table if row["base"]):
        own = [row for row in table if row["layer"] == layer]
        bases = dict.fromkeys(row["base"] for row in own if row["base"])
        eagers = [row["variant"] for row in own if row["kind"] == "eager" and row["num_rounds"]]
        of = f", the best of {', '.join(eagers)}" if len(eagers) > 1 else ""
        lines.append(f"base{f' of layer {layer}' if layer else ''}: {' or '.join(bases)}{of}")
    return lines


def _session_notes(runs, metas):
    """A line for each session: rounds, steps, conditions, and what else was on the host."""
    lines = []
    for name in runs.drop_duplicates("session").sort_values(["begin", "session"])["session"]:
        part = runs[runs["session"] == name]
        own = timed(frame.records_of(part))
        schema = "schema 1: no times, no probe, " if part["schema"].max() == 1 else ""
        if not own:
            lines.append(f"{name}: {schema}no timed run")
            continue
        meta = metas.get((part["group"].iloc[0], name), {})
        num_rounds = len({record["round"] for record in own})
        windows = _span((record["conditions"]["window_s"] or None for record in own), 1)
        closed, superseded, load = meta.get("closed"), meta.get("superseded"), own[0]["host_load"]
        parts = [
            f"{num_rounds} round{'s' if num_rounds > 1 else ''} x "
            f"{_span(len(record['steps']['gpu_ms']) for record in own)} steps",
            windows and f"windows of {windows} s",
            load and f"{load} busy processes beside each",
            *_host(own),
            *_probe(meta),
            _beside(own),
            closed and closed != "complete" and not schema and f"closed: {closed}",
        ]
        text = f"{name}: {schema}{', '.join(part for part in parts if part)}"
        lines.append(f"{text}; {superseded}" if superseded else text)
        unsettled = sorted(frame.short_name(r) for r in own if r["conditions"]["settled"] is False)
        if unsettled and own[0]["device"] == "cuda":
            what = "step time or clock had not settled within 1 % when the window began"
            lines.append(f"{name}: {what}: {', '.join(unsettled)}")
        compared = {record["variant"] for record in frame.records_of(part) if not record["round"]} | {CONTROL}
        missing = [variant for variant in dict.fromkeys(r["variant"] for r in own) if variant not in compared]
        if missing and not schema:
            lines.append(f"{name}: ended before the parity run of {', '.join(missing)}")
    return lines


def _span(values, digits=0, scale=1):
    """The least and the largest of what is known; no text where nothing is."""
    known = [value * scale for value in values if value is not None]
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(known), max(known)))) if known else ""


def _host(runs):
    seen = [record["extra"]["host"] for record in runs if isinstance(record["extra"].get("host"), dict)]
    steal = max((host["steal_fraction"] for host in seen if host.get("steal_fraction") is not None), default=None)
    busy = _span((host.get("busy_fraction") for host in seen), scale=100)
    load = _span((host.get("load_1m_end") for host in seen), 1)
    steal = steal is not None and f"steal up to {100 * steal:.1f} %"
    return steal, busy and f"host busy {busy} %", load and f"load {load}"


def _probe(meta):
    """What an eager operator and a bare launch cost this host, at the session's begin and end."""
    probes = [probe for probe in meta.get("probes") or [] if probe.get("us_per_operator")]
    for key, what in (("us_per_operator", "to issue an operator"), ("us_per_launch", "for a bare launch")):
        values = dict.fromkeys(f"{probe[key]:.1f}" for probe in probes if probe.get(key))
        yield values and f"{' then '.join(values)} us {what}"


def _beside(runs):
    found = {text for r in runs for key in ("others_on_gpu", "other_sessions") for text in r["conditions"][key]}
    return found and f"beside {'; '.join(sorted(found))}"


def _source_notes(found):
    """Which commits and sources the records name, and whether the history has them so."""
    keys = ("git_sha", "git_dirty", "source_hash")
    named = {(record["schema"], record["model"], *(record["env"][key] for key in keys)) for record in found}
    lines = []
    for schema, model, sha, dirty, hashed in sorted(named, key=str):
        if not hashed:
            continue
        text = f"git {sha[:12]}{' (changed)' if dirty else ''}" if sha else "no commit"
        text += f", source {hashed}"
        expected = hash_of_commit(schema, model, sha) if sha else None
        if sha and expected is None:
            text += ", a commit that is not in this history"
        elif expected and expected != hashed:
            why = "measured with uncommitted changes" if dirty else "the records do not belong to it"
            text += f", which is not that of the commit ({expected}): {why}"
        lines.append(text)
    return list(dict.fromkeys(lines))


@functools.cache
def hash_of_commit(schema: int, model: str, sha: str) -> str | None:
    """What a record of that schema would call the source of a commit; None where the history does not have it."""
    return source.source_hash_1_of_commit(model, sha) if schema == 1 else source.source_hash_of_commit(sha)


def _lost_notes(found):
    """Shards and samples that runs could not train on, as their state counted and named them."""
    runs: dict[str, list[str]] = {}
    for record in found:
        count, named = record["extra"].get("num_dropped_samples"), record["extra"].get("dropped_samples")
        if isinstance(count, int) and count > 0 and isinstance(named, list):
            more = f" and {count - len(named[:3])} more" if count > 3 else ""
            text = f"{count} shards or samples were dropped: {'; '.join(map(str, named[:3]))}{more}"
            runs.setdefault(text, []).append(frame.short_name(record))
    return [f"{', '.join(names) if len(names) < 4 else f'{len(names)} runs'}: {text}" for text, names in runs.items()]


def _variants_by(table, value):
    """{value(row): the variants of all rows that have it}, without empty values."""
    names: dict[object, list[str]] = {}
    for row in table:
        names.setdefault(value(row), []).append(row["variant"])
    return {key: ", ".join(own) for key, own in names.items() if key}


def _row_notes(row, found):
    lines = []
    name = row["variant"]
    judged = row["device"] == "cuda" and not row["is_base"] and row["verdict"] in ("faster", "slower")
    if judged and not intervals.bears(math.log(row["speedup"]), row["speedup_half_width"]):
        lines.append(f"{name}: {row['verdict']}, but how much is not settled: see its interval and range")
    first = next((r for r in found if r["variant"] == name and r["numerics"]["first_difference"]), None)
    if first:
        where = first["numerics"]["first_difference"]
        lines.append(f"{name}: differs first at step {where['step']} in {where['tensor']}")
    return lines


# ------------------------------------------------------------------------------------------------
# Files

# What summary.csv says of a run beside its session: keys of the record, and of groups of it.
OF_RECORD = {
    "": (
        *("schema", "model", "preset", "variant", "round", "attempt", "host_load", "status", "device", "statistic_ms"),
        *("issue_ms", "busy_ms", "optimizer_ms", "rank_skew_ms", "num_kernels", "idle_fraction", "energy_j"),
    ),
    "env": (
        *("gpu_name", "gpu_uuid", "boot_id", "world_size", "torch", "cuda", "transformer_engine", "driver"),
        *("git_sha", "source_hash", "run_hash"),
    ),
    "conditions": ("window_s", "settled"),
    "memory": ("peak_allocated_bytes", "peak_reserved_bytes", "graph_pool_bytes"),
    "capture": ("warmup_s", "compile_s", "capture_s", "num_graphs", "num_replays", "expected_replays"),
    "clocks": ("sm_mhz",),
    "numerics": ("parity", "max_rel_diff"),
}


def _summary_row(row):
    """One line of summary.csv: what a run says, flat, units in the names. row: of the frame."""
    record, steps = row["record"], row["record"]["steps"]
    places = [(record[group] if group else record, keys) for group, keys in OF_RECORD.items()]
    return {
        "session": row["session"],
        "begin": row["begin"],
        **{key: place[key] for place, keys in places for key in keys},
        "num_steps": len(steps["gpu_ms"]),
        "p10_ms": row["quiet_ms"],
        "tail_p95_over_p50": intervals.tail(steps["gpu_ms"], steps["batch"]) if row["quiet_ms"] else None,
        "message": tables.short(record["message"]),
    }


def report(found, faults, base=None, markdown=False, metas=None, doubts=()) -> tuple[str, list[dict]]:
    """The whole text (headline, tables, notes) and its rows. Raises Mixed."""
    table = summarise(found, base)
    text = tables.folder_text(table, markdown)
    below = "\n".join(f"- {line}" if markdown else line for line in notes(found, table, faults, metas, doubts))
    return "\n\n".join(part for part in (tables.headline(table), text, below) if part), table


def write_summary(folder, base: str | None = None) -> list[dict]:
    """Write summary.csv (one line a run) and table.md into a group of sessions; returns the table's rows.

    Where no session has a record, as one that only left a file, there is nothing to write. Raises Mixed.
    """
    folder = Path(folder)
    runs = frame.read(folder)
    if runs.frame.empty and not runs.faults:
        return []
    text, table = report(runs.frame, runs.faults, base, markdown=True, metas=runs.metas, doubts=runs.doubts)
    lines = pandas.DataFrame([_summary_row(row) for row in runs.frame.to_dict("records")], dtype=object)
    write_text(folder / "summary.csv", "" if lines.empty else lines.to_csv(index=False))
    write_text(folder / "table.md", text + "\n")
    return table


def main(argv=None) -> int:
    parser = parser_of("compare", "The table of a group of sessions.")
    parser.add_argument("folder", metavar="DIR", help="a group of sessions, a session, or a folder of such groups")
    parser.add_argument("--base", metavar="VARIANT", help="denominator of the speed-ups (the best eager)")
    overview.add_forms(parser)
    args = parser.parse_args(argv)
    try:
        runs = frame.read(args.folder)
        if args.form in ("csv", "json") or runs.sweeps or runs.frame["group"].nunique() > 1:
            if args.base:
                parser.exit(2, f"{parser.prog}: --base {args.base} is for the table of one group of sessions\n")
            return overview.main([args.folder, *([f"--{args.form}"] if args.form else [])])
        # What is at fault is said even where no table follows.
        for fault in runs.faults:
            print(f"{parser.prog}: left out: {fault}", file=sys.stderr)
        found = runs.frame
        names = sorted(set(found["variant"]))
        if names and ((args.base and args.base not in names) or missing_base(found, args.base)):
            base = args.base or "eager"
            others = [name for name in names if not missing_base(found, name)]
            take = f", --base takes one of {', '.join(others)}" if others else ""
            lack = "no records" if base not in names else "no timed records"
            parser.exit(2, f"{parser.prog}: {args.folder}: {lack} of {base!r}{take}\n")
        text, _ = report(found, runs.faults, args.base, args.form == "markdown", runs.metas, runs.doubts)
    except (FileNotFoundError, Mixed) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(text)
    if found.empty:
        print(f"{parser.prog}: no records in {args.folder}", file=sys.stderr)
    return 0 if not found.empty and not runs.faults else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
