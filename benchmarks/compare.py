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

import argparse
import csv
import functools
import io
import math
import signal
import sys
from pathlib import Path

from benchmarks import frame, intervals, tables
from benchmarks.intervals import tail
from benchmarks.rows import Mixed, missing_base, summarise
from benchmarks.tables import console_table, headline, markdown_table
from common import record as records

__all__ = ["Mixed", "load", "main", "missing_base", "record_row", "report", "summarise", "timed", "write_summary"]


def load(folder):
    """(frame of all runs at or below a folder, a line for each record that is left out).

    Raises FileNotFoundError when there is no such folder.
    """
    runs = frame.read(folder)
    return runs.frame, runs.faults


def timed(group: list[dict]) -> list[dict]:
    return [record for record in group if frame.is_timed(record)]


# ------------------------------------------------------------------------------------------------
# Notes


def notes(found, table: list[dict], faults: list[str], metas: dict | None = None, doubts=()) -> list[str]:
    """What a reader of the table must know: machine, versions, source, sessions, host, doubts.

    found: as `summarise` takes it. metas, doubts: of `frame.Runs`.
    """
    runs = frame.of(found)
    skipped = [f"left out: {fault}" for fault in faults] + ([_left_out(faults)] if faults else [])
    if runs.empty:
        return skipped
    every = frame.records_of(runs)
    own = timed(every)
    lines = [*dict.fromkeys(_machine(record) for record in own or every[-1:])]
    lines += _base_notes(table) + _session_notes(runs, metas or {})
    lines += _source_notes(every)
    # What the scripts say of the configuration that really ran, once each.
    lines += dict.fromkeys(note for record in every for note in record["extra"].get("notes") or [])
    lines += _lost_notes(every) + _older_notes(table) + _eager_notes(table)
    for row in table:
        lines += _row_notes(row, every)
    if table and table[0]["device"] == "cpu":
        lines.append("CPU: parity and replays; a host graph says nothing about the speed of a GPU")
    return [*lines, *doubts, *skipped]


def _left_out(faults):
    return f"{len(faults)} record{'s are' if len(faults) > 1 else ' is'} left out"


def _machine(record):
    env = record["env"]
    versions = (
        ("torch", "torch"),
        ("cuda", "CUDA"),
        ("transformer_engine", "Transformer Engine"),
        ("nccl", "NCCL"),
        ("driver", "driver"),
    )
    # NCCL counts where there are several GPUs.
    named = ", ".join(
        f"{name} {env[key]}" for key, name in versions if env[key] and (key != "nccl" or env["world_size"] > 1)
    )
    where = f"{env['gpu_name']} x{env['world_size']}" if record["device"] == "cuda" else f"CPU ({env['cpu']})"
    where += f", {record['model']} preset {record['preset']}"
    return f"{where}, {named}" if named else where


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
    order = runs.drop_duplicates("session").sort_values(["begin", "session"])["session"]
    for name in order:
        part = runs[runs["session"] == name]
        own = timed(frame.records_of(part))
        schema = "schema 1: no times, no probe, " if part["schema"].max() == 1 else ""
        if not own:
            lines.append(f"{name}: {schema}no timed run")
            continue
        meta = metas.get((part["group"].iloc[0], name), {})
        steps = [len(record["steps"]["gpu_ms"]) for record in own]
        windows = [record["conditions"]["window_s"] for record in own if record["conditions"]["window_s"]]
        count = len({record["round"] for record in own})
        text = (
            f"{name}: {schema}{count} round{'s' if count > 1 else ''} x {_span(str(min(steps)), str(max(steps)))} steps"
        )
        if windows:
            text += f", windows of {_span(f'{min(windows):.1f}', f'{max(windows):.1f}')} s"
        text += _load_text(own) + _host(own) + _probe(meta) + _beside(own)
        closed, superseded = meta.get("closed"), meta.get("superseded")
        text += f", closed: {closed}" if closed and closed != "complete" and not schema else ""
        lines.append(f"{text}; {superseded}" if superseded else text)
        unsettled = [r for r in own if r["conditions"]["settled"] is False]
        if unsettled and own[0]["device"] == "cuda":
            names = ", ".join(sorted(frame.short_name(record) for record in unsettled))
            lines.append(f"{name}: step time or clock had not settled within 1 % when the window began: {names}")
    return lines


def _load_text(runs):
    load = runs[0]["host_load"]
    return f", {load} busy processes beside each" if load else ""


def _host(runs):
    seen = [record["extra"]["host"] for record in runs if isinstance(record["extra"].get("host"), dict)]
    steal = _known(host.get("steal_fraction") for host in seen)
    busy = _known(host.get("busy_fraction") for host in seen)
    load = _known(host.get("load_1m_end") for host in seen)
    parts = []
    if steal:
        parts.append(f"steal up to {100 * max(steal):.1f} %")
    if busy:
        parts.append(f"host busy {_span(f'{100 * min(busy):.0f}', f'{100 * max(busy):.0f}')} %")
    if load:
        parts.append(f"load {_span(f'{min(load):.1f}', f'{max(load):.1f}')}")
    return f", {', '.join(parts)}" if parts else ""


def _probe(meta):
    """What an eager operator and a bare launch cost this host, at the session's begin and end."""
    probes = [probe for probe in meta.get("probes") or [] if probe.get("us_per_operator")]
    parts = []
    for key, what in (("us_per_operator", "to issue an operator"), ("us_per_launch", "for a bare launch")):
        values = list(dict.fromkeys(f"{probe[key]:.1f}" for probe in probes if probe.get(key)))
        parts += [f"{' then '.join(values)} us {what}"] if values else []
    return "".join(f", {part}" for part in parts)


def _beside(runs):
    others = sorted(
        {text for r in runs for key in ("others_on_gpu", "other_sessions") for text in r["conditions"][key]}
    )
    return f", beside {'; '.join(others)}" if others else ""


def _known(values):
    return [value for value in values if value is not None]


def _span(low, high):
    return low if low == high else f"{low} to {high}"


def _source_notes(found):
    """Which commits and sources the records name, and whether the history has them so."""
    lines, texts = [], {}
    for record in found:
        env = record["env"]
        key = (record["schema"], record["model"], env["git_sha"], env["git_tree"], env["git_dirty"], env["source_hash"])
        texts.setdefault(key, 0)
    for schema, model, sha, _, dirty, source in sorted(texts, key=str):
        if not source:
            continue
        name = f"git {sha[:12]}{' (changed)' if dirty else ''}" if sha else "no commit"
        text = f"{name}, source {source}"
        expected = _hash_of_commit(schema, model, sha)
        if sha and expected is None:
            text += ", a commit that is not in this history"
        elif expected and expected != source:
            why = "measured with uncommitted changes" if dirty else "the records do not belong to it"
            text += f", which is not that of the commit ({expected}): {why}"
        lines.append(text)
    return list(dict.fromkeys(lines))


@functools.cache
def _hash_of_commit(schema, model, sha):
    """What a record of that schema would call the source of a commit; None where the history does not have it."""
    from common import source

    if not sha:
        return None
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


def _older_notes(table):
    """Sessions that stand beside a row and do not enter it, rows of one number together."""
    names: dict[int, list[str]] = {}
    for row in table:
        if row["num_older"]:
            names.setdefault(row["num_older"], []).append(row["variant"])
    why = "of other code, configuration, versions or schema, or with fewer eagers: not pooled"
    return [f"{', '.join(own)}: {n} other session{'s' if n > 1 else ''} beside, {why}" for n, own in names.items()]


def _eager_notes(table):
    """Eagers of the model that the sessions of a row did not run: its base may be slower than the best one."""
    names: dict[tuple, list[str]] = {}
    for row in table:
        if row["missing_eagers"]:
            names.setdefault(tuple(row["missing_eagers"]), []).append(row["variant"])
    return [
        f"{', '.join(own)}: not all eagers run, {', '.join(missing)} missing: the base is the best of those that were"
        for missing, own in names.items()
    ]


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


def record_row(row: dict) -> dict:
    """One line of summary.csv: what a run says, flat, units in the names. row: of the frame, as a dict."""
    record = row["record"]
    env, capture, memory, conditions = (record[key] for key in ("env", "capture", "memory", "conditions"))
    steps = record["steps"]
    has_steps = bool(steps["gpu_ms"]) and len(steps["gpu_ms"]) == len(steps["batch"])
    return {
        "session": row["session"],
        "begin": row["begin"],
        **{key: record[key] for key in ("schema", "model", "preset", "variant", "round", "attempt", "host_load")},
        **{key: record[key] for key in ("status", "device")},
        "gpu_name": env["gpu_name"],
        "gpu_uuid": env["gpu_uuid"],
        "boot_id": env["boot_id"],
        "world_size": env["world_size"],
        "torch": env["torch"],
        "cuda": env["cuda"],
        "transformer_engine": env["transformer_engine"],
        "driver": env["driver"],
        "git_sha": env["git_sha"],
        "source_hash": env["source_hash"],
        "run_hash": env["run_hash"],
        "num_steps": len(steps["gpu_ms"]),
        "window_s": conditions["window_s"],
        "settled": conditions["settled"],
        "statistic_ms": record["statistic_ms"],
        "p10_ms": row["quiet_ms"],
        "tail_p95_over_p50": tail(steps["gpu_ms"], steps["batch"]) if has_steps and row["quiet_ms"] else None,
        **{key: record[key] for key in ("issue_ms", "busy_ms", "optimizer_ms", "rank_skew_ms", "num_kernels")},
        "idle_fraction": record["idle_fraction"],
        **{key: memory[key] for key in ("peak_allocated_bytes", "peak_reserved_bytes", "graph_pool_bytes")},
        **{key: capture[key] for key in ("warmup_s", "compile_s", "capture_s")},
        **{key: capture[key] for key in ("num_graphs", "num_replays", "expected_replays")},
        "energy_j": record["energy_j"],
        "sm_mhz": record["clocks"]["sm_mhz"],
        "parity": record["numerics"]["parity"],
        "max_rel_diff": record["numerics"]["max_rel_diff"],
        "message": tables.short(record["message"]),
    }


def report(found, faults, base=None, markdown=False, metas=None, doubts=()) -> tuple[str, list[dict]]:
    """The whole text (headline, tables, notes) and its rows. Raises Mixed."""
    table = summarise(found, base)
    text = markdown_table(table) if markdown else console_table(table)
    below = "\n".join(f"- {line}" if markdown else line for line in notes(found, table, faults, metas, doubts))
    return "\n\n".join(part for part in (headline(table), text, below) if part), table


def write_summary(folder, base: str | None = None) -> list[dict]:
    """Write summary.csv (one line a run) and table.md into a group of sessions; returns the table's rows.

    Where no session has a record, as one that only left a file, there is nothing to write. Raises Mixed.
    """
    folder = Path(folder)
    runs = frame.read(folder)
    if runs.frame.empty and not runs.faults:
        return []
    text, table = report(runs.frame, runs.faults, base, markdown=True, metas=runs.metas, doubts=runs.doubts)
    output = io.StringIO()
    if not runs.frame.empty:
        lines = [record_row(row) for row in runs.frame.to_dict("records")]
        writer = csv.DictWriter(output, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    records.write_text(folder / "summary.csv", output.getvalue())
    records.write_text(folder / "table.md", text + "\n")
    return table


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description="The table of a group of sessions.", allow_abbrev=False
    )
    parser.add_argument("folder", metavar="DIR", help="a group of sessions, a session, or a folder of such groups")
    parser.add_argument("--base", metavar="VARIANT", help="denominator of the speed-ups (the best eager)")
    form = parser.add_mutually_exclusive_group()
    for name, text in (("markdown", "Markdown"), ("csv", "the overview as CSV"), ("json", "the overview as JSON")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=f"print {text}")
    args = parser.parse_args(argv)
    try:
        from benchmarks import overview

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
