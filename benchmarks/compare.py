"""The table of a folder of records: what each variant costs and gains against a base.

    python -m benchmarks.compare runs/h200x1/gpt3-bench
    python -m benchmarks.compare results/h200x1/gpt3-bench --base graph_te --markdown

A root that holds folders of records is shown as `benchmarks.overview` shows it, and so is any folder with --csv or
--json.

Exit status: 0; 1 where there is nothing to show or a file is no sound record (the rest is shown); 2 for a mistake
on the command line, records that must not stand in one table, or a folder without eager.

Speed-ups come from pairs of runs of one round on one GPU, one boot and one source, as mean paired
log-ratio with a 95 % Student-t interval; the 10th percentiles beside them say what a quiet host would
see. A record whose statistic does not follow from its own steps is refused. CPU records show parity and
replays, never a speed-up. Reads records only: no torch, no GPU.
"""

import argparse
import csv
import io
import math
import signal
import statistics
import sys
from pathlib import Path

from benchmarks import intervals, tables
from benchmarks.intervals import statistic, tail
from benchmarks.tables import console_table, headline, markdown_table
from common import record as records

GIB = 2**30
SELF_CHECK_TOLERANCE = 1e-3
WALL_TOLERANCE = 0.05
# What other commands leave beside records.
OTHER_FILES = ("overview.json", "sweep.json", "wer.json")
CLOCK_TOLERANCE = 0.01
SYNC = "eager_sync"

# ------------------------------------------------------------------------------------------------
# Reading


def load(folder) -> tuple[list[dict], list[str]]:
    """All records of a folder by variant and round, and one line for each file that is not a sound record.

    Raises FileNotFoundError when there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    found, faults = [], []
    for path in sorted(folder.glob("*.json")):
        if path.name in OTHER_FILES:
            continue
        try:
            record = records.read(path)
            fault = _wrong_type(record) or self_check(record)
            if not fault and path.name != records.file_name(record["variant"], record["round"]):
                fault = f"holds {record['variant']}, round {record['round']}, which is not its name"
        except records.RecordError as error:
            faults.append(str(error))
            continue
        except (TypeError, KeyError, AttributeError) as error:
            fault = f"a value is not of its schema's type ({type(error).__name__}: {error})"
        if fault:
            faults.append(f"{path}: {fault}")
        else:
            found.append(record)
    return sorted(found, key=lambda record: (record["variant"] != "eager", record["variant"], record["round"])), faults


# Text that must be there, and text that may be null.
_WORDS = ("model", "preset", "variant", "message", "device")
_TEXTS = ("gpu_name", "gpu_uuid", "boot_id", "driver", "cuda", "cudnn", "nccl", "torch", "transformer_engine", "dali")
_TEXTS += ("python", "host", "cpu", "git_sha", "source_hash", "strategy", "unit", "parity", "state_hash")
# In a record names end in their unit and counts begin with num_; these numbers have neither.
_UNITS = ("_ms", "_s", "_j", "_w", "_c", "_mhz", "_bytes", "_fraction", "_replays", "_per_s", "_ratio", "_rel_diff")
_NUMBERS = ("round", "host_load", "world_size", "items_per_step", "flops_per_step", "load_1m_start", "load_1m_end")
_LEAST = {"world_size": 1}
_LARGEST = 1e300
# Of the free part of a record, what the tables read.
_EXTRA = {"notes": list, "settle": dict, "host": dict, "profile": dict, "request": dict}
_EXTRA |= dict.fromkeys(("items_per_s", "profiled_clock_ratio", "loss_rel_diff"), float)


def _wrong_type(record):
    """The first value that is not of its schema's type or cannot be, such as a negative time, in words, or None."""
    for name, default in records.TEMPLATE.items():
        group = isinstance(default, dict)
        for key, blank in default.items() if group else [(name, default)]:
            fault = _fault(key, record[name][key] if group else record[name], blank)
            if fault:
                return f"{name}.{key} {fault}" if group else f"{name} {fault}"
    extra, first = record["extra"], record["numerics"]["first_difference"]
    for key, kind in _EXTRA.items():
        value = extra.get(key)
        # A profile that saw nothing says so in words, and then there is no busy time.
        if value is None or (key == "profile" and isinstance(value, str) and record["busy_ms"] is None):
            continue
        if kind in _KINDS and not isinstance(value, kind):
            return f"extra.{key} is {value!r}, not {_KINDS[kind]}"
        # What was requested is the caller's own and compared as it is.
        named = {} if key in ("notes", "request") else value if kind is dict else {key: value}
        for name, each in named.items():
            fault = _fault(name, each, None)
            if fault:
                return f"extra.{key}{f'.{name}' if kind is dict else ''} {fault}"
    if not all(isinstance(note, str) for note in extra.get("notes") or []):
        return f"extra.notes is {extra['notes']!r}, not a list of text"
    if first is not None and not (isinstance(first, dict) and {"step", "tensor"} <= set(first)):
        return f"numerics.first_difference is {first!r}, not a step and a tensor"
    fault = _report_fault(extra.get("report"))
    if fault:
        return fault
    odd = next((ms for ms in record["steps"]["gpu_ms"] if ms is None or not _is_known(ms)), 0)
    if odd != 0:
        return f"steps.gpu_ms holds {odd!r}, not a number"
    odd = next((kind for kind in record["steps"]["batch"] if not isinstance(kind, str | int)), 0)
    if odd != 0:
        return f"steps.batch holds {odd!r}, not a number or a word"
    odd = next((num for num in record["capture"]["nodes"].values() if not _is_known(num) or not num or num < 0), 0)
    return None if odd == 0 else f"capture.nodes holds {odd!r}, not a number"


def _report_fault(report):
    """What is wrong with extra.report, whose names are the model's own, or None."""
    if report is None or not isinstance(report, dict):
        return None if report is None else f"extra.report is {report!r}, not an object"
    odd = next((name for name, value in report.items() if not (isinstance(value, bool) or _is_known(value))), None)
    return None if odd is None else f"extra.report.{odd} is {report[odd]!r}, not a number, true or false"


_KINDS = {list: "a list", dict: "an object"}


def _fault(key, value, blank):
    """What is wrong with one value, or None. blank: the value in an empty record, which says whether null may be."""
    for kind, name in _KINDS.items():
        if isinstance(blank, kind) and not isinstance(value, kind):
            return f"is {value!r}, not {name}"
    if isinstance(blank, list | dict):
        return None
    if key in _WORDS or (key in _TEXTS and value is not None):
        return None if isinstance(value, str) else f"is {value!r}, not text"
    if not (key.endswith(_UNITS) or key.startswith("num_") or key in _NUMBERS):
        return None
    if not _is_known(value) or (value is None and blank is not None):
        return f"is {value!r}, not a number"
    if isinstance(blank, int) and not isinstance(value, int):
        return f"is {value!r}, not a whole number"
    # What is one less a quotient of sums may read a hair below nothing.
    least = _LEAST.get(key, -SELF_CHECK_TOLERANCE if key.endswith("_fraction") else 0)
    return f"is {value!r}, less than {least}" if value is not None and value < least else None


def _is_known(value):
    """A number, or None for what was not measured. Python reads NaN and infinity from JSON, which has neither."""
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    )


def self_check(record: dict) -> str | None:
    """Why a record contradicts itself, or None.

    Of a timed run: statistic_ms follows from the steps, and the rate and an ungraphed run's idle fraction
    from statistic_ms, within 0.1 %; the steps of one rank fill the window's wall time within 5 %. (A step
    of several ranks is its slowest rank's, so that their sum is no rank's wall time.)
    """
    times, batch, given = record["steps"]["gpu_ms"], record["steps"]["batch"], record["statistic_ms"]
    if given is None or record["status"] != "pass":
        return None
    if len(times) != len(batch):
        return f"{len(times)} step times and {len(batch)} batch kinds"
    if not times:
        return f"statistic_ms {given} without any step"
    odd = next((ms for ms in times if not 0 < ms < math.inf), None)
    if odd is not None:
        return f"a step of {odd} ms"
    follows = statistic(times, batch)
    if not _agree(given, follows):
        return f"statistic_ms {given} does not follow from its steps ({follows:.4f}): edited by hand?"
    wall = record["steps"]["wall_ms"]
    if wall is not None and record["env"]["world_size"] == 1 and not _agree(wall, sum(times), WALL_TOLERANCE):
        return f"wall_ms {wall} is not the time of its steps ({sum(times):.1f}): edited by hand?"
    rate = record["extra"].get("items_per_s")
    if rate and record["items_per_step"] and not _agree(rate, record["items_per_step"] / given * 1e3):
        return f"items_per_s {rate} does not follow from statistic_ms {given}: edited by hand?"
    idle, busy = record["idle_fraction"], record["busy_ms"]
    if None not in (idle, busy) and not record["capture"]["num_replays"]:
        follows = max(0.0, 1 - busy / given)
        if not abs(idle - follows) <= SELF_CHECK_TOLERANCE:
            return f"idle_fraction {idle} does not follow from busy_ms {busy} ({follows:.4f}): edited by hand?"
    return None


def _agree(given, follows, tolerance=SELF_CHECK_TOLERANCE):
    return abs(given - follows) <= tolerance * abs(follows)


# ------------------------------------------------------------------------------------------------
# Rows


class Mixed(ValueError):
    """Records that must not stand in one table."""


def summarise(found: list[dict], base: str = "eager") -> list[dict]:
    """One row (a dict) per variant, base first. Raises Mixed for cpu beside cuda, several GPU types, models or loads.

    Times are ms, `*_gib` GiB; speedup, quiet_speedup (10th percentiles) and model_speedup (step less
    optimizer), sync_speedup (over eager_sync, which reads from the device in every step, as NVIDIA's published base
    does) come with _low, _high (95 % interval) and _half_width (logarithm). What is not known is None.
    """
    if not found:
        return []
    _refuse_mixture(found)
    by_variant: dict[str, list[dict]] = {}
    for record in found:
        by_variant.setdefault(record["variant"], []).append(record)
    names = sorted(by_variant, key=lambda name: name != base)
    sync_group = by_variant.get(SYNC, [])
    return [_row(name, by_variant[name], by_variant.get(base, []), sync_group, base) for name in names]


def _refuse_mixture(found):
    def values(what):
        return sorted({what(record) for record in found} - {None, ""})

    devices = values(lambda record: record["device"])
    if len(devices) > 1:
        raise Mixed("a table cannot mix cpu and cuda records")
    gpus = values(lambda record: record["env"]["gpu_name"])
    if len(gpus) > 1:
        raise Mixed(f"a table cannot mix GPU types: {', '.join(gpus)}")
    # A run that came to nothing does not know what a preset became on this GPU, and round 0 has no load.
    models = sorted({f"{record['model']}/{record['preset']}" for record in found if record["status"] == "pass"})
    if len(models) > 1:
        raise Mixed(f"a table cannot mix models or presets: {', '.join(models)}")
    loads = sorted({record["host_load"] for record in timed(found)})
    if len(loads) > 1:
        raise Mixed(f"a table cannot mix host loads: {', '.join(map(str, loads))}")


def timed(group: list[dict]) -> list[dict]:
    return [record for record in group if record["round"] and record["status"] == "pass" and record["statistic_ms"]]


def missing_base(found: list[dict], base: str = "eager") -> str | None:
    """Why records have nothing to be compared with, or None: timed runs, of which none is the base's.

    A base that came to nothing (oom, failed, ...) is not missing: its row says so.
    """
    group = [record for record in found if record["variant"] == base]
    if not timed(found) or timed(group) or any(record["status"] != "pass" for record in group):
        return None
    return f"timed records, but none of {base!r}"


def pairs(group: list[dict], base_group: list[dict]) -> list[tuple[dict, dict]]:
    """(base, variant) of the same round with equal GPU, boot and source."""

    def key(record):
        env = record["env"]
        return record["round"], env["gpu_uuid"], env["boot_id"], env["source_hash"], record["host_load"]

    base = {key(record): record for record in timed(base_group)}
    return [(base[key(record)], record) for record in timed(group) if key(record) in base]


def log_ratios(group: list[dict], base_group: list[dict], value=None) -> list[float]:
    """log(base / variant) of `value(record)`, ms, for each pair; the statistic unless told."""
    value = value or (lambda record: record["statistic_ms"])
    both = [(value(a), value(b)) for a, b in pairs(group, base_group)]
    return [math.log(a / b) for a, b in both if a and b and a > 0 and b > 0]


def _row(name, group, base_group, sync_group, base):
    is_base = name == base
    runs = timed(group)
    first = next((record for record in group if record["round"] == 0), None)
    bad = next((record for record in group if record["status"] != "pass"), None)
    cuda = group[0]["device"] == "cuda"
    row = {
        "variant": name,
        "status": bad["status"] if bad else "pass",
        "message": bad["message"] if bad else "",
        "device": group[0]["device"],
        "is_base": is_base,
        "strategy": next(iter(_known(record["capture"]["strategy"] for record in runs or group)), None),
        "num_rounds": len(runs),
        "num_steps": _median(len(record["steps"]["gpu_ms"]) for record in runs),
        "step_ms": _median(record["statistic_ms"] for record in runs),
        "p10_ms": _median(_quiet(record) for record in runs),
        "tail": _median(tail(record["steps"]["gpu_ms"], record["steps"]["batch"]) for record in runs),
        "issue_ms": _median(record["issue_ms"] for record in runs),
        "busy_ms": _median(record["busy_ms"] for record in runs),
        "idle_fraction": _median(_timed_idle(record) for record in runs),
        "profiled_idle_fraction": _median(
            record["idle_fraction"] for record in runs if record["capture"]["num_replays"]
        ),
        "profile_stretch": _median(_profile_stretch(record) for record in runs if record["capture"]["num_replays"]),
        "optimizer_ms": _median(record["optimizer_ms"] for record in runs),
        "num_kernels": _median(record["num_kernels"] for record in runs),
        "ceiling": _ceiling(runs) if is_base and cuda else None,
        "peak_reserved_gib": _gib(runs, "peak_reserved_bytes"),
        "pool_gib": _gib(runs, "graph_pool_bytes"),
        "warmup_s": _median(record["capture"]["warmup_s"] for record in runs or group),
        "capture_s": _median(record["capture"]["capture_s"] for record in runs or group),
        "compile_cold_s": max(_known(record["capture"]["compile_s"] for record in group), default=None),
        "compile_warm_s": min(_known(record["capture"]["compile_s"] for record in runs), default=None),
        "num_graphs": (runs or group)[-1]["capture"]["num_graphs"],
        "num_operators": sum((runs or group)[-1]["capture"]["nodes"].values()) or None,
        "replays": _replays(group),
        "parity": _parity(first or group[0], is_base),
        "max_rel_diff": (first or group[0])["numerics"]["max_rel_diff"],
        "energy_j": _median(
            record["energy_j"] / len(record["steps"]["gpu_ms"]) for record in runs if record["energy_j"] is not None
        ),
        "sm_mhz": _median(record["clocks"]["sm_mhz"] for record in runs),
        "report": _report(runs),
    }
    for key in ("speedup", "quiet_speedup", "model_speedup", "sync_speedup"):
        row.update({key: None, f"{key}_low": None, f"{key}_high": None, f"{key}_half_width": None})
    row["verdict"], row["num_pairs"] = None, 0
    if cuda and not is_base and runs:
        _compare(row, group, base_group, base)
    if cuda and runs and name != SYNC:
        _put_ratio(row, "sync_speedup", log_ratios(group, sync_group))
    return row


def _put_ratio(row, key, ratios):
    """The mean of paired log-ratios with its interval, in the row's four places; None where there is no pair."""
    if not ratios:
        return None
    result = intervals.paired(ratios)
    row[key], row[f"{key}_low"], row[f"{key}_high"] = result.ratio, result.low, result.high
    row[f"{key}_half_width"] = result.half_width
    return result


def _compare(row, group, base_group, base):
    values = {
        "speedup": lambda record: record["statistic_ms"],
        "quiet_speedup": _quiet,
        "model_speedup": lambda record: record["optimizer_ms"] and record["statistic_ms"] - record["optimizer_ms"],
    }
    for key, value in values.items():
        result = _put_ratio(row, key, log_ratios(group, base_group, value))
        if result and key == "speedup":
            row["verdict"], row["num_pairs"] = result.verdict, result.num_rounds
    if not row["num_pairs"]:
        row["verdict"] = f"no {base} of the same round"


def _quiet(record):
    return statistic(record["steps"]["gpu_ms"], record["steps"]["batch"], 0.1)


def _ceiling(runs):
    """Step over busy time, the most that removing gaps can gain; blank where the profiled clock was another one."""
    return _median(
        record["statistic_ms"] / record["busy_ms"]
        for record in runs
        if record["busy_ms"] and abs((record["extra"].get("profiled_clock_ratio") or 1.0) - 1.0) <= CLOCK_TOLERANCE
    )


def _timed_idle(record):
    """What the timed step holds beyond busy time; the same formula for every variant."""
    return max(0.0, 1 - record["busy_ms"] / record["statistic_ms"]) if record["busy_ms"] else None


def _profile_stretch(record):
    """Profiled over timed length of a replayed step. The profiler costs a replay no host time, so what is beyond
    one is the profiler's own, in kernels or gaps: busy time may read long by as much."""
    profile = record["extra"].get("profile")
    span = profile.get("span_ms") if isinstance(profile, dict) and record["busy_ms"] else None
    return span / record["statistic_ms"] if span else None


def _replays(group):
    counts = [(record["capture"]["num_replays"], record["capture"]["expected_replays"]) for record in group]
    wrong = next((count for count in counts if count[0] != count[1]), None)
    if wrong:
        return f"{wrong[0]} of {wrong[1]}"
    return "ok" if any(expected for _, expected in counts) else None


def _parity(record, is_base):
    parity = record["numerics"]["parity"]
    if parity == "bitwise" and is_base:
        return "reference"
    if parity != "differs":
        return parity
    loss = record["extra"].get("loss_rel_diff")
    return "differs" if loss is None else f"loss {loss:.1e}"


def _report(runs):
    """What the model reports of its runs: medians over rounds; true where it is in every round."""
    reports = [record["extra"].get("report") or {} for record in runs]
    out = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = _known(report.get(name) for report in reports)
        truths = bool(values) and all(isinstance(value, bool) for value in values)
        out[name] = all(values) if truths else _median(values)
    return out


def _known(values):
    return [value for value in values if value is not None]


def _median(values):
    values = _known(values)
    return statistics.median(values) if values else None


def _gib(runs, key):
    values = _known(record["memory"][key] for record in runs)
    return max(values) / GIB if values else None


# ------------------------------------------------------------------------------------------------
# Notes


def notes(found: list[dict], rows: list[dict], faults: list[str]) -> list[str]:
    """What a reader of the table must know: machine, versions, source, rounds, host, doubts."""
    if not found:
        return [f"skipped: {fault}" for fault in faults]
    env = found[-1]["env"]
    lines = [_machine(found[-1])]
    runs = timed(found)
    sha = f"git {env['git_sha'][:12]}{' (changed)' if env['git_dirty'] else ''}, " if env["git_sha"] else ""
    lines.append(f"{sha}source {env['source_hash']}, {found[-1]['model']} preset {found[-1]['preset']}")
    if runs:
        steps = [len(record["steps"]["gpu_ms"]) for record in runs]
        count = _span(str(min(steps)), str(max(steps)))
        lines.append(f"{len({record['round'] for record in runs})} rounds x {count} steps" + _load_text(runs))
    host = _host(runs)
    if host:
        lines.append(host)
    unsettled = [record for record in runs if (record["extra"].get("settle") or {}).get("settled") is False]
    if unsettled:
        names = ", ".join(sorted(f"{record['variant']} r{record['round']}" for record in unsettled))
        lines.append(f"step time or clock had not settled within 1 % when the window began: {names}")
    lines += _source_notes(found)
    # What the scripts say of the configuration that really ran, once each.
    lines += dict.fromkeys(note for record in found for note in record["extra"].get("notes") or [])
    for row in rows:
        lines += _row_notes(row, found)
    if rows and rows[0]["device"] == "cpu":
        lines.append("CPU: parity and replays; a host graph says nothing about the speed of a GPU")
    return lines + [f"skipped: {fault}" for fault in faults] + ([f"{len(faults)} files skipped"] if faults else [])


def _machine(record):
    env = record["env"]
    versions = (
        ("torch", "torch"),
        ("cuda", "CUDA"),
        ("transformer_engine", "Transformer Engine"),
        ("driver", "driver"),
    )
    named = ", ".join(f"{name} {env[key]}" for key, name in versions if env[key])
    where = f"{env['gpu_name']} x{env['world_size']}" if record["device"] == "cuda" else f"CPU ({env['cpu']})"
    return f"{where}, {named}" if named else where


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
        parts.append(f"busy {_span(f'{100 * min(busy):.0f}', f'{100 * max(busy):.0f}')} %")
    if load:
        parts.append(f"load {_span(f'{min(load):.1f}', f'{max(load):.1f}')}")
    return f"host: {', '.join(parts)}" if parts else ""


def _span(low, high):
    return low if low == high else f"{low} to {high}"


def _source_notes(found):
    from common import environment

    lines = []
    hashes = sorted({str(record["env"]["source_hash"]) for record in found})
    if len(hashes) > 1:
        lines.append(f"records of {len(hashes)} sources ({', '.join(hashes)}): only equal ones are paired")
    commits = {
        (record["model"], record["env"]["git_sha"], record["env"]["source_hash"], record["env"]["git_dirty"])
        for record in found
        if record["env"]["git_sha"] and record["env"]["source_hash"]
    }
    for model, sha, source, dirty in sorted(commits, key=str):
        expected = environment.source_hash_of_commit(model, sha)
        if expected and expected != source:
            why = "measured with uncommitted changes" if dirty else "the records do not belong to it"
            lines.append(f"source {source} is not that of commit {sha[:12]} ({expected}): {why}")
    return lines


def _row_notes(row, found):
    lines = []
    runs = timed([record for record in found if record["variant"] == row["variant"]])
    if row["device"] == "cuda" and not row["is_base"] and runs:
        if row["num_pairs"] < len(runs):
            lines.append(
                f"{row['variant']}: {len(runs) - row['num_pairs']} of {len(runs)} rounds have no base"
                " of the same GPU, boot and source"
            )
        if row["verdict"] in ("faster", "slower") and not intervals.bears(
            math.log(row["speedup"]), row["speedup_half_width"]
        ):
            lines.append(
                f"{row['variant']}: {row['verdict']}, but the half-width is over half of the difference:"
                " its size is not settled"
            )
    first = next((r for r in found if r["variant"] == row["variant"] and r["numerics"]["first_difference"]), None)
    if first:
        where = first["numerics"]["first_difference"]
        lines.append(f"{row['variant']}: differs first at step {where['step']} in {where['tensor']}")
    return lines


# ------------------------------------------------------------------------------------------------
# Files


def record_row(record: dict) -> dict:
    """One line of summary.csv: what a record says, flat, units in the names."""
    env, capture, memory = record["env"], record["capture"], record["memory"]
    has_steps = bool(record["steps"]["gpu_ms"]) and len(record["steps"]["gpu_ms"]) == len(record["steps"]["batch"])
    return {
        **{key: record[key] for key in ("model", "preset", "variant", "round", "host_load", "status", "device")},
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
        "num_steps": len(record["steps"]["gpu_ms"]),
        "statistic_ms": record["statistic_ms"],
        "p10_ms": _quiet(record) if has_steps else None,
        "tail_p95_over_p50": tail(record["steps"]["gpu_ms"], record["steps"]["batch"]) if has_steps else None,
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


def report(found, faults, base="eager", markdown=False) -> tuple[str, list[dict]]:
    """The whole text (headline, tables, notes) and its rows. Raises Mixed."""
    rows = summarise(found, base)
    table = markdown_table(rows) if markdown else console_table(rows)
    below = "\n".join(f"- {line}" if markdown else line for line in notes(found, rows, faults))
    return "\n\n".join(part for part in (headline(rows), table, below) if part), rows


def write_summary(folder, base: str = "eager") -> list[dict]:
    """Write summary.csv (one row a record) and table.md beside the records; returns the table's rows."""
    folder = Path(folder)
    found, faults = load(folder)
    text, rows = report(found, [fault.replace(f"{folder}/", "") for fault in faults], base, markdown=True)
    output = io.StringIO()
    if found:
        writer = csv.DictWriter(output, list(record_row(found[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(record_row(record) for record in found)
    (folder / "summary.csv").write_text(output.getvalue())
    (folder / "table.md").write_text(text + "\n")
    return rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description="The table of a folder of records.", allow_abbrev=False
    )
    parser.add_argument(
        "folder", metavar="DIR", help="folder of records, as written by benchmarks.run, or of such folders"
    )
    parser.add_argument("--base", default="eager", metavar="VARIANT", help="denominator of the speed-ups (eager)")
    form = parser.add_mutually_exclusive_group()
    for name, text in (("markdown", "Markdown"), ("csv", "the overview as CSV"), ("json", "the overview as JSON")):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=f"print {text}")
    args = parser.parse_args(argv)
    try:
        from benchmarks import overview, overview_rows

        folders, sweeps = overview_rows.find_folders(args.folder)
        if args.form in ("csv", "json") or sweeps or any(folder != Path(args.folder) for folder in folders):
            if args.base != "eager":
                parser.exit(2, f"{parser.prog}: --base {args.base} is for the tables of one folder of records\n")
            return overview.main([args.folder, *([f"--{args.form}"] if args.form else [])])
        found, faults = load(args.folder)
        # What is at fault is said even where no table follows.
        for fault in faults:
            print(f"{parser.prog}: unsound: {fault}", file=sys.stderr)
        names = sorted({record["variant"] for record in found})
        if found and (args.base not in names or missing_base(found, args.base)):
            others = [name for name in names if not missing_base(found, name)]
            take = f", --base takes one of {', '.join(others)}" if others else ""
            lack = "no records" if args.base not in names else "no timed records"
            parser.exit(2, f"{parser.prog}: {args.folder}: {lack} of {args.base!r}{take}\n")
        text, _ = report(found, faults, args.base, args.form == "markdown")
    except (FileNotFoundError, Mixed) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(text)
    if not found:
        print(f"{parser.prog}: no records in {args.folder}", file=sys.stderr)
    return 0 if found and not faults else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
