"""The rows of a table: what each variant costs, and what it gains against its base, over all sessions of one group.

Within a session a variant is paired with its base (`benchmarks.bases`), round by round; `benchmarks.intervals` makes a
session's value and a verdict of the pairs. Sessions pool where configuration, versions and GPU type are equal and
variant and base ran the same program as in the newest session (`benchmarks.frame.identity_of`); the others are counted
as older.
"""

import math
import statistics

from benchmarks import frame, intervals
from benchmarks.bases import Group, base_of, class_of, group_of, standing, work_of

GIB = 2**30
CLOCK_TOLERANCE = 0.01
SAMPLE_TOLERANCE = 0.02
SYNC = "eager_sync"
INCOMPLETE = "not all eagers run"
# What a preset asks of a window; tiny and slices of seconds are exempt.
WINDOW_S, WINDOW_STEPS, LONG_WINDOW_S, LONG_WINDOW_STEPS = 5.0, 50, 20.0, 8
RATIOS = ("speedup", "quiet_speedup", "model_speedup", "sync_speedup", "across_speedup")


class Mixed(ValueError):
    """Records that must not stand in one table."""


# ------------------------------------------------------------------------------------------------
# Pairs


def _last_attempts(runs):
    """Of a run that was repeated because it did not settle, the last one alone."""
    last: dict[tuple, int] = {}
    for row in runs:
        place = row["session"], row["variant"], row["round"]
        last[place] = max(last.get(place, 0), row["attempt"])
    return [row for row in runs if row["attempt"] == last[row["session"], row["variant"], row["round"]]]


def pairs(group: Group, session: str, variant: str, base: str, last: bool = True) -> list[tuple[dict, dict]]:
    """(base, variant) of equal rounds and attempts in a session; of repeated rounds the last attempt, or the first.

    No pair where one of the variant's runs there computed other numbers: nothing says that the rest are the same work.
    """
    if any(row["status"] == "numerics_failed" for row in group.of(session, variant)):
        return []
    sides = [
        {(row["round"], row["attempt"]): row["record"] for row in group.timed(session, name)}
        for name in (base, variant)
    ]
    keys = sorted(set(sides[0]) & set(sides[1]))
    chosen = {number: (number, attempt) for number, attempt in (keys if last else reversed(keys))}
    return [(sides[0][chosen[number]], sides[1][chosen[number]]) for number in sorted(chosen)]


def log_ratios(both: list[tuple[dict, dict]], value) -> list[float]:
    """log(base / variant) of `value(record)`, ms, for each pair that has it."""
    values = [(value(a), value(b)) for a, b in both]
    return [math.log(a / b) for a, b in values if a and b and a > 0 and b > 0]


# ------------------------------------------------------------------------------------------------
# Rows


def summarise(found, base: str | None = None) -> list[dict]:
    """One row (a dict) per variant, base first. Raises Mixed for cpu beside cuda, several GPU types, models or loads.

    found: a frame of `benchmarks.frame`, or sound records as of one folder. Times are ms, `*_gib` GiB; None is unknown.

    speedup, quiet_speedup (10th percentiles), model_speedup (step less optimizer), sync_speedup (over eager_sync, which
    reads from the device in every step, as NVIDIA's published base does) and across_speedup (over across_base, the best
    eager of all kinds of layer, where eagers of several were timed) have _low, _high (95 % interval) and _half_width
    (logarithm). is_base: the base of its own kind of layer. ceiling: the base's step over the busy time of the
    variant's kernels, num_ceiling_runs: of how many runs; num_other_clock: how many were profiled at another clock than
    timed. range_low, range_high and quiet_range_*: of two or more hosts, the lowest and the highest ratio; every_low,
    every_high: of two or more sessions, older ones too, by 10th percentile. law, queue_model: the ratios that
    max(1, issue / busy) and the queue model predict for a variant that replays graphs. verdict and scope are at 99 %.
    num_hosts, num_pairs: what the speed-up rests on;
    num_judged_hosts: hosts with a session of 5 pairs. num_older: sessions of another program or schema, or with fewer
    eagers. missing_eagers: eagers that its sessions did not run.
    work: the configuration, without how it is measured.
    """
    runs = frame.of(found)
    if runs.empty:
        return []
    _refuse_mixture(runs)
    group = group_of(runs, base)
    first, bases = base_of(group), {name: base_of(group, name) for name in set(runs["variant"])}
    names = sorted(bases, key=lambda name: (name != first, name != bases[name], name != "eager", name))
    return [_row(group, name, bases[name]) for name in names]


def _refuse_mixture(runs) -> None:
    def values(column, part=runs):
        return sorted(set(part[column]) - {None, ""})

    if len(values("device")) > 1:
        raise Mixed("a table cannot mix cpu and cuda records")
    if len(values("gpu_name")) > 1:
        raise Mixed(f"a table cannot mix GPU types: {', '.join(values('gpu_name'))}")
    # The record of a run that did not pass may lack the final preset, and round 0 has no load.
    sound = runs[runs["status"] == "pass"]
    models = sorted({f"{row.model}/{row.preset}" for row in sound.itertuples()})
    if len(models) > 1:
        raise Mixed(f"a table cannot mix models or presets: {', '.join(models)}")
    loads = values("host_load", runs[runs["is_timed"].astype(bool)])
    if len(loads) > 1:
        raise Mixed(f"a table cannot mix host loads: {', '.join(map(str, loads))}")


def missing_base(found, base: str | None = None) -> str | None:
    """Why records have nothing to be compared with, or None: timed runs, of which none is eager, or `base`.

    A base that did not pass (oom, failed, ...) is not missing: its row has the status.
    """
    runs = frame.of(found)
    timed = runs[runs["is_timed"].astype(bool)]
    group = runs[runs["variant"] == base] if base else runs[runs["kind"] == "eager"]
    if timed.empty or group["is_timed"].any() or (group["status"] != "pass").any():
        return None
    return f"timed records, but none of {base or 'eager'!r}"


def _status(shown: list[dict], is_timed: bool) -> tuple[str, str]:
    """(status, message) of a row: those of the first run shown that is not a pass.

    What one machine lacks says nothing of timed runs on another: such a row is a pass, and the message names the
    session.
    """
    faults = [row for row in shown if row["record"]["status"] != "pass"]
    bad = next((row["record"] for row in faults if not (is_timed and row["record"]["status"] == "unsupported")), None)
    if bad is not None:
        return bad["status"], bad["message"]
    texts = dict.fromkeys(f"unsupported in {row['session']}: {row['record']['message']}" for row in faults)
    return "pass", "; ".join(texts)


def _row(group, name, base):
    pooled, older = standing(group, name)
    part = group.variant(name)
    current = _last_attempts([row for row in part if row["session"] in pooled and row["is_timed"]])
    runs = [row["record"] for row in current]
    # A failure in the newest session is shown, though that session may have no timed run.
    shown = [row for row in part if row["session"] in (*pooled, part[-1]["session"])]
    every = [row["record"] for row in shown]
    first = next((record for record in reversed(every) if record["round"] == 0), None)
    status, message = _status(shown, bool(runs))
    own = runs or every
    cuda, is_base = every[0]["device"] == "cuda", name == base
    long_steps = any(record["statistic_ms"] > frame.LONG_STEP_MS for record in runs)
    missing = list(dict.fromkeys(eager for session in pooled if runs for eager in group.missing(session)))
    replayed = [record for record in runs if record["capture"]["num_replays"]]
    row = {
        "variant": name,
        "kind": part[-1]["kind"],
        "layer": class_of(part[-1]["record"])[0] or None,
        "status": status,
        "message": message,
        "device": every[0]["device"],
        "is_base": is_base,
        "work": work_of(own[-1]),
        "strategy": next(iter(_known(record["capture"]["strategy"] for record in own)), None),
        "num_rounds": len(runs),
        "num_sessions": len(pooled),
        "pooled": tuple(pooled),
        "num_older": len(older),
        "num_steps": _median(len(record["steps"]["gpu_ms"]) for record in runs),
        "step_ms": _median(map(_statistic, runs)),
        "p10_ms": _median(row["quiet_ms"] for row in current),
        "tail": None if long_steps else _median(map(_tail, runs)),
        **{key: _median(record[key] for record in runs) for key in _MEDIANS},
        "idle_fraction": _median(map(timed_idle, runs)),
        "profiled_idle_fraction": _median(record["idle_fraction"] for record in replayed),
        "profile_stretch": _median(map(_profile_stretch, replayed)),
        "graph_kernel_share": _median(record["proof"]["graph_kernel_share"] for record in runs),
        "ceiling": None,
        "num_ceiling_runs": None,
        "num_other_clock": sum(not _at_its_clock(record) for record in runs if record["busy_ms"]),
        "peak_reserved_gib": _gib(runs, "peak_reserved_bytes"),
        "pool_gib": _gib(runs, "graph_pool_bytes"),
        **{key: _median(record["capture"][key] for record in own) for key in ("warmup_s", "capture_s")},
        "compile_cold_s": max(_known(record["capture"]["compile_s"] for record in every), default=None),
        "compile_warm_s": min(_known(record["capture"]["compile_s"] for record in runs), default=None),
        "num_graphs": own[-1]["capture"]["num_graphs"],
        "num_operators": sum(own[-1]["capture"]["nodes"].values()) or None,
        "replays": _replays(every),
        "parity": _parity(first or own[-1], is_base),
        "max_rel_diff": (first or own[-1])["numerics"]["max_rel_diff"],
        "energy_j": _median(
            record["energy_j"] / len(record["steps"]["gpu_ms"]) for record in runs if record["energy_j"] is not None
        ),
        "sm_mhz": _median(record["clocks"]["sm_mhz"] for record in runs),
        "missing_eagers": missing,
        "lacks": ", ".join(filter(None, [lacks(runs) if cuda else "", INCOMPLETE if missing else ""])),
        "report": _report(runs),
    }
    row |= dict.fromkeys(f"{key}{end}" for key in RATIOS for end in ("", "_low", "_high", "_half_width"))
    row |= dict.fromkeys(("base", "base_ms", "across_base", "verdict", "scope"))
    row |= dict.fromkeys(("range_low", "range_high", "quiet_range_low", "quiet_range_high"))
    row |= dict.fromkeys(("every_low", "every_high"))
    row |= {"num_pairs": 0, "num_hosts": 0, "num_judged_hosts": 0, "law": None, "queue_model": None}
    if cuda and runs:
        if is_base:
            row["ceiling"], row["num_ceiling_runs"] = _ceiling([(record, record) for record in runs])
        else:
            _compare(row, group, name, pooled)
            row["every_low"], row["every_high"] = _over_every_session(group, name, [*older, *pooled])
        across = row["across_base"] = group.across(pooled[-1], name)
        for key, base in (("across_speedup", across), ("sync_speedup", SYNC)):
            if base not in (None, name):
                _put_ratio(row, key, group, name, dict.fromkeys(pooled, base), _statistic)
    return row


_MEDIANS = ("issue_ms", "busy_ms", "optimizer_ms", "num_kernels")


def _statistic(record):
    return record["statistic_ms"]


_VALUES = {
    "speedup": _statistic,
    "quiet_speedup": frame.quiet_ms,
    "model_speedup": lambda record: record["optimizer_ms"] and record["statistic_ms"] - record["optimizer_ms"],
}


def _compare(row, group, name, pooled):
    # Of sessions with other eagers beside, too, the newest one's base stands: it was the same program there.
    base = group.base(pooled[-1], name)
    bases = dict.fromkeys(pooled, base) if base not in (None, name) else {}
    for key, value in _VALUES.items():
        judged = _put_ratio(row, key, group, name, bases, value)
        if judged and key == "speedup":
            row.update(verdict=judged.verdict, scope=judged.scope, num_pairs=judged.num_pairs)
            row.update(num_hosts=judged.num_units, num_judged_hosts=judged.num_judged_units)
            row.update(range_low=judged.range_low, range_high=judged.range_high)
        if judged and key == "quiet_speedup":
            row.update(quiet_range_low=judged.range_low, quiet_range_high=judged.range_high)
    row["base"] = base if bases else None
    used = [pair for session in bases for pair in pairs(group, session, name, base)]
    row["base_ms"] = _median(a["statistic_ms"] for a, _ in used)
    row["ceiling"], row["num_ceiling_runs"] = _ceiling(used)
    row["law"], row["queue_model"] = _predicted(used)
    if not row["num_pairs"]:
        failed = row["status"] == "numerics_failed"
        row["verdict"] = row["status"] if failed else f"no {row['base'] or 'eager'} of the same round"


def _put_ratio(row, key, group, name, bases, value):
    """The judged ratio in the row's four places, over the sessions of `bases`; None where there is no pair."""
    measured = [_measured(group, session, name, base, value) for session, base in bases.items()]
    judged = intervals.judge([session for session in measured if session.log_ratios])
    if judged is None:
        return None
    row[key], row[f"{key}_low"], row[f"{key}_high"] = judged.ratio, judged.low, judged.high
    row[f"{key}_half_width"] = judged.half_width
    return judged


def _measured(group, session, name, base, value):
    row = group.session(session)
    boots = row["boots"] or (session,)
    return intervals.Session(
        name=session,
        boot=boots[0],
        # Of several nodes any boot in common makes one unit.
        gpus=(*row["gpus"], *boots),
        begin=row["begin"],
        log_ratios=tuple(log_ratios(pairs(group, session, name, base), value)),
        first_log_ratios=tuple(log_ratios(pairs(group, session, name, base, last=False), value)),
        may_be_plain=row["schema"] > 1 and not group.missing(session),
    )


def lacks(runs: list[dict]) -> str:
    """What a reader of a row must know of its runs: what schema 1 does not tell, short windows, runs not settled."""
    counts = {
        "windows short": sum(map(is_short, runs)),
        "not settled": sum(record["conditions"]["settled"] is False for record in runs),
        "beside others": sum(
            bool(record["conditions"]["others_on_gpu"] or record["conditions"]["other_sessions"]) for record in runs
        ),
    }
    old = ["schema 1"] if any(record["schema"] == 1 for record in runs) else []
    return ", ".join(old + [f"{count}/{len(runs)} {what}" for what, count in counts.items() if count])


def is_short(record: dict) -> bool:
    """A window of fewer seconds or steps than issue and design ask of every preset but tiny."""
    window_s, steps = record["conditions"]["window_s"], len(record["steps"]["gpu_ms"])
    if window_s is None or record["preset"].startswith("tiny"):
        return False
    if record["statistic_ms"] > frame.LONG_STEP_MS:
        return window_s < LONG_WINDOW_S or steps < LONG_WINDOW_STEPS
    return window_s < WINDOW_S or steps < WINDOW_STEPS


def _tail(record):
    return intervals.tail(record["steps"]["gpu_ms"], record["steps"]["batch"])


def predicted_ms(record: dict) -> float | None:
    """The queue model's step; None where the record has none."""
    model = record["extra"].get("queue_model")
    value = model.get("step_ms") if isinstance(model, dict) else None
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return value if known else None


def _predicted(both):
    """(max(1, base's issue over the variant's busy time), the queue model's ratio), over pairs whose variant replays
    graphs; None where a record has none."""
    both = [pair for pair in both if pair[1]["capture"]["num_replays"]]
    first = _median(max(1.0, a["issue_ms"] / b["busy_ms"]) if a["issue_ms"] and b["busy_ms"] else None for a, b in both)
    logs = log_ratios(both, predicted_ms)
    return first, math.exp(statistics.mean(logs)) if logs else None


def _at_its_clock(record):
    """Whether the profile, which busy time is from, had the clock of the timed window."""
    return abs((record["extra"].get("profiled_clock_ratio") or 1.0) - 1.0) <= CLOCK_TOLERANCE


def _ceiling(both):
    """(The base's step over the busy time of the variant's kernels, of (base, variant): the most that these kernels can
    gain by running without gaps; of how many runs that is). Runs whose profiled clock was another one do not count;
    nothing where those that count are no sample of all, by the median step of the base."""
    known = [(base, record) for base, record in both if record["busy_ms"]]
    used = [(base, record) for base, record in known if _at_its_clock(record)]
    steps, all_steps = (_median(base["statistic_ms"] for base, _ in of) for of in (used, known))
    if not used or abs(steps - all_steps) > SAMPLE_TOLERANCE * all_steps:
        return None, None
    return _median(base["statistic_ms"] / record["busy_ms"] for base, record in used), len(used)


def _over_every_session(group, name, sessions):
    """The lowest and the highest ratio that any session gave, of other programs and schemas too; None of fewer than 2.

    10th percentiles, or medians where windows hold too few steps for these."""
    values = []
    for session in sessions:
        base = group.base(session, name)
        both = pairs(group, session, name, base) if base not in (None, name) else []
        logs = log_ratios(both, frame.quiet_ms) or log_ratios(both, _statistic)
        values += [math.exp(statistics.mean(logs))] if logs else []
    return (min(values), max(values)) if len(values) > 1 else (None, None)


def timed_idle(record):
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
    if parity == "differs":
        loss = record["extra"].get("loss_rel_diff")
        return "differs" if loss is None else f"loss {loss:.1e}"
    reference = record["numerics"]["reference"]
    # Against what, where that is not eager.
    other = reference not in (None, "eager", record["variant"])
    return f"bitwise to {reference}" if parity == "bitwise" and other else parity


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
