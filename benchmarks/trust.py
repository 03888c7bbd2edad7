"""Whether a record can be believed: by itself, and beside the runs of its reference variant.

`contradiction` looks at one record: values of the wrong type, and numbers that do not follow from each other.
`unproven` (benchmarks/proven.py) looks at a timed run's proof of work beside eager's. Both say in words what is wrong,
or None. Nothing here imports torch or pandas.
"""

import calendar
import functools
import itertools
import math
import re
import time

from benchmarks.intervals import statistic
from benchmarks.proven import unproven
from common import proof
from common import record as records

__all__ = ["TIMED_WORK", "broken_promise", "contradiction", "same_run", "self_check", "step_key", "unproven"]

# How the message of a run begins whose work is not proven; what follows is what `unproven` says.
TIMED_WORK = "timed work: "

SELF_CHECK_TOLERANCE = 1e-3
# Of schema 1 and of the CPU; and what design.md asks of events on a GPU.
WALL_TOLERANCE = 0.05
EVENTS_TOLERANCE = 0.005
# The profiler's own stretch: nine runs of the history have busy up to 0.5 % above the step.
BUSY_TOLERANCE = 0.03
PROOF_TOLERANCE = 1e-6

# ------------------------------------------------------------------------------------------------
# Types

# Text that must be there, and text that may be null.
_WORDS = ("session", "model", "preset", "variant", "message", "device")
_TEXTS = ("gpu_name", "gpu_uuid", "boot_id", "driver", "cuda", "cudnn", "nccl", "torch", "transformer_engine", "dali")
_TEXTS += ("python", "host", "cpu", "git_sha", "git_tree", "source_hash", "run_hash", "strategy", "unit", "parity")
_TEXTS += ("state_hash", "reference", "begin_utc", "end_utc", "digest")
# In a record names end in their unit and counts begin with num_; these numbers have neither.
_UNITS = ("_ms", "_s", "_j", "_w", "_c", "_mhz", "_bytes", "_fraction", "_replays", "_per_s", "_ratio", "_rel_diff")
_UNITS += ("_step", "_share", "_operator", "_launch", "_node")
_NUMBERS = ("round", "attempt", "host_load", "world_size", "items_per_step", "load_1m_start", "load_1m_end", "graphs")
_LEAST = {"world_size": 1, "attempt": 1, "growth_bytes": -math.inf}
_LARGEST = 1e300
# An object where it is known, though its name ends in a unit.
_OBJECTS = ("settled_ms",)
_KINDS = {list: "a list", dict: "an object"}
# Of the free part of a record, what the tables read.
_EXTRA = {"notes": list, "settle": dict, "host": dict, "profile": dict, "request": dict}
_EXTRA |= {"traits": dict, "eagers": list}
_EXTRA |= dict.fromkeys(("items_per_s", "profiled_clock_ratio", "loss_rel_diff"), float)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def contradiction(record: dict) -> str | None:
    """Why a sound JSON record of either schema contradicts itself or is of wrong types, or None."""
    try:
        return _wrong_type(record) or _untyped_lists(record) or self_check(record)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        return f"a value is not of its schema's type ({type(error).__name__}: {error})"


def _wrong_type(record):
    """The first value that is not of its schema's type or cannot be, such as a negative time, in words, or None."""
    for group, key, kind, blank in _rules(record["schema"]):
        fault = _fault(key, record[group][key] if group else record[key], kind, blank)
        if fault:
            return f"{group}.{key} {fault}" if group else f"{key} {fault}"
    extra = record["extra"]
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
            fault = _fault(name, each, _kind(name, None), None)
            if fault:
                return f"extra.{key}{f'.{name}' if kind is dict else ''} {fault}"
    if not all(isinstance(note, str) for note in extra.get("notes") or []):
        return f"extra.notes is {extra['notes']!r}, not a list of text"
    return _report_fault(extra.get("report"))


@functools.cache
def _rules(schema):
    """(group or "", key, kind of value, value in an empty record) of each value of a schema."""
    out = []
    for name, default in records.TEMPLATES[schema].items():
        group, values = (name, default) if isinstance(default, dict) else ("", {name: default})
        # Phases have no unit in their names: all are seconds.
        kinds = {key: "number" if group == "seconds" else _kind(key, blank) for key, blank in values.items()}
        out += [(group, key, kinds[key], blank) for key, blank in values.items()]
    return out


def _kind(key, blank):
    """What a value of this name is: a list, an object, a word, a text, a number, or what is looked at elsewhere."""
    if key in _OBJECTS:
        return "free"
    for kind in _KINDS:
        if isinstance(blank, kind):
            return kind
    if key in _WORDS:
        return "word"
    if key in _TEXTS:
        return "text"
    if key in _NUMBERS or key.startswith("num_") or key.endswith(_UNITS):
        return "number"
    return "free"


def _fault(key, value, kind, blank):
    """What is wrong with one value, or None. blank: the value in an empty record, which says whether null may be."""
    if kind in _KINDS:
        return None if isinstance(value, kind) else f"is {value!r}, not {_KINDS[kind]}"
    if kind in ("word", "text"):
        known = isinstance(value, str) or (value is None and kind == "text")
        return None if known else f"is {value!r}, not text"
    if kind == "free" or (value is None and blank is None):
        return None
    if value is None or not _is_known(value):
        return f"is {value!r}, not a number"
    if isinstance(blank, int) and not isinstance(value, int):
        return f"is {value!r}, not a whole number"
    # What is one less a quotient of sums may read a hair below nothing.
    least = _LEAST.get(key, -SELF_CHECK_TOLERANCE if key.endswith("_fraction") else 0)
    return f"is {value!r}, less than {least}" if value < least else None


def _is_known(value):
    """A number, or None for what was not measured. Python reads NaN and infinity from JSON, which has neither."""
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    )


def _report_fault(report):
    """What is wrong with extra.report, whose names are the model's own, or None."""
    if report is None or not isinstance(report, dict):
        return None if report is None else f"extra.report is {report!r}, not an object"
    odd = next((name for name, value in report.items() if not (isinstance(value, bool) or _is_known(value))), None)
    return None if odd is None else f"extra.report.{odd} is {report[odd]!r}, not a number, true or false"


def _untyped_lists(record):
    """The first odd value inside a list or an object, in words, or None."""
    first, steps, numerics = record["numerics"]["first_difference"], record["steps"], record["numerics"]
    if first is not None and not (isinstance(first, dict) and {"step", "tensor"} <= set(first)):
        return f"numerics.first_difference is {first!r}, not a step and a tensor"
    if not set(map(type, steps["batch"])) <= {int, str, bool}:
        odd = next(kind for kind in steps["batch"] if not isinstance(kind, str | int))
        return f"steps.batch holds {odd!r}, not a number or a word"
    odd = next((num for num in record["capture"]["nodes"].values() if not _is_known(num) or not num or num < 0), 0)
    if odd != 0:
        return f"capture.nodes holds {odd!r}, not a number"
    # Names, numbers, and whether one may be null.
    lists = [("steps.gpu_ms", steps["gpu_ms"], False)]
    lists += [(f"numerics.{name}", numerics[name], True) for name in ("loss", "grad_norm")]
    if record["schema"] == records.SCHEMA:
        given = record["proof"]
        lists += [(f"proof.{name}", given[name], True) for name in ("loss", "grad_norm")]
        sampled = (tensor[key] for tensor in given["state_sample"] for key in ("start", "after", "end"))
        lists += [("proof.state_sample", values, True) for values in sampled]
        lists += [("proof.settled_ms", list((given["settled_ms"] or {}).values()), False)]
    for name, values, with_none in lists:
        odd = _odd_number(values, with_none)
        if odd:
            return f"{name} holds {odd}, not a number"
    return _untyped_2(record) if record["schema"] == records.SCHEMA else None


def _untyped_2(record):
    """The same of what schema 2 added, less its numbers."""
    given, conditions = record["proof"], record["conditions"]
    for name in ("begin_utc", "end_utc"):
        if record[name] is not None and not _TIME.fullmatch(record[name]):
            return f"{name} is {record[name]!r}, not a time such as 2026-11-22T03:15:00Z"
    for name, values in (("proof.steps", given["steps"]), ("conditions.cores", conditions["cores"])):
        odd = next((value for value in values if type(value) is not int or value < 0), None)
        if odd is not None:
            return f"{name} holds {odd!r}, not a whole number from 0 up"
        if any(a >= b for a, b in itertools.pairwise(values)):
            return f"{name} does not rise"
    for name, value in (("conditions.settled", conditions["settled"]), ("proof.late_change", given["late_change"])):
        if not (value is None or isinstance(value, bool)):
            return f"{name} is {value!r}, not true or false"
    for name in ("others_on_gpu", "other_sessions"):
        if not all(isinstance(text, str) for text in conditions[name]):
            return f"conditions.{name} is {conditions[name]!r}, not a list of text"
    for rank in record["ranks"]:
        known = isinstance(rank, dict) and all(key in rank and _is_known(rank[key]) for key in ("rank", "statistic_ms"))
        if not known:
            return f"ranks holds {rank!r}, not a rank and its statistic_ms"
    told = [rank["rank"] for rank in record["ranks"]]
    if told and told != list(range(record["env"]["world_size"])):
        return f"ranks holds {told}, the run had {record['env']['world_size']}"
    return None


def _odd_number(values, with_none=False):
    """The first value of a list that is no finite number, as text, or None."""
    if set(map(type, values)) <= {int, float} and all(-_LARGEST < value < _LARGEST for value in values):
        return None
    odd = [value for value in values if not _is_known(value) or (value is None and not with_none)]
    return repr(odd[0]) if odd else None


# ------------------------------------------------------------------------------------------------
# One record by itself


def self_check(record: dict) -> str | None:
    """Why a record that passed contradicts itself, or None. Its types are taken to be right, see `contradiction`.

    Replays are as many as its steps make, and graphs and replays as they were promised. Of a timed run: statistic_ms
    follows from the steps, and the rate and an ungraphed run's idle fraction from statistic_ms, within 0.1 %; the steps
    fill the window's wall time (0.5 %; schema 1 and CPU: 5 %); busy is at most 3 % above the step; losses
    are those of its steps. Steps and wall time of several ranks are those of the slowest one (schema 1: the slowest of
    each step, whose sum is no rank's wall time).
    """
    if record["status"] != "pass":
        return None
    return _check_work(record) or _check_times(record) or (_check_2(record) if record["schema"] == 2 else None)


def _check_work(record):
    capture, losses, times = record["capture"], record["numerics"]["loss"], record["steps"]["gpu_ms"]
    if capture["num_replays"] != capture["expected_replays"]:
        return f"{capture['num_replays']} replays counted, its steps make {capture['expected_replays']}"
    if capture["num_replays"] and not capture["num_graphs"]:
        return f"{capture['num_replays']} replays of no graph"
    odd = next((index for index, loss in enumerate(losses) if loss is None), None)
    if odd is not None:
        return f"it passed with a loss at step {odd} that is not finite"
    if times and len(losses) > len(times):
        return f"{len(losses)} losses of {len(times)} steps"
    return None


def _check_times(record):
    times, batch, given = record["steps"]["gpu_ms"], record["steps"]["batch"], record["statistic_ms"]
    if given is None:
        return f"{len(times)} steps without statistic_ms" if times else None
    if len(times) != len(batch):
        return f"{len(times)} step times and {len(batch)} batch kinds"
    if not times:
        return f"statistic_ms {given} without any step"
    if not min(times) > 0:
        return f"a step of {min(times)} ms"
    follows = statistic(times, batch)
    if not _agree(given, follows):
        return f"statistic_ms {given} does not follow from its steps ({follows:.4f}): edited by hand?"
    wall = record["steps"]["wall_ms"]
    strict = record["schema"] == records.SCHEMA and record["device"] == "cuda"
    tolerance = EVENTS_TOLERANCE if strict else WALL_TOLERANCE
    one_clock = record["env"]["world_size"] == 1 or record["schema"] == records.SCHEMA
    if wall is not None and one_clock and not _agree(wall, sum(times), tolerance):
        return f"wall_ms {wall} is not the time of its steps ({sum(times):.1f}): edited by hand?"
    rate = record["extra"].get("items_per_s")
    if rate and record["items_per_step"] and not _agree(rate, record["items_per_step"] / given * 1e3):
        return f"items_per_s {rate} does not follow from statistic_ms {given}: edited by hand?"
    idle, busy = record["idle_fraction"], record["busy_ms"]
    if busy is not None and busy > given * (1 + BUSY_TOLERANCE):
        return f"busy_ms {busy} is above statistic_ms {given} by {100 * (busy / given - 1):.1f} %, more than 3 %"
    if None not in (idle, busy) and not record["capture"]["num_replays"]:
        follows = max(0.0, 1 - busy / given)
        if not abs(idle - follows) <= SELF_CHECK_TOLERANCE:
            return f"idle_fraction {idle} does not follow from busy_ms {busy} ({follows:.4f}): edited by hand?"
    return None


def _check_2(record):
    """What schema 2 says twice, once as a promise, or as a time and its span."""
    times, given = record["steps"]["gpu_ms"], record["proof"]
    # Where nothing is timed, replays were held against the steps' own (`_check_work`).
    fault = broken_promise(record, {**record["promised"], "kind": record["extra"].get("kind")})
    if fault:
        return fault
    wall, window = record["steps"]["wall_ms"], record["conditions"]["window_s"]
    if None not in (wall, window) and not _agree(window * 1e3, wall):
        return f"conditions.window_s {window} is not steps.wall_ms {wall}: edited by hand?"
    if record["begin_utc"] and record["end_utc"]:
        span = _seconds(record["end_utc"]) - _seconds(record["begin_utc"])
        # Both are cut to whole seconds, and a clock may be set meanwhile.
        if span < (window or 0.0) - 2.0:
            return f"a window of {window:.1f} s from {record['begin_utc']} to {record['end_utc']}"
    if not len(given["steps"]) == len(given["loss"]) == len(given["grad_norm"]):
        return f"proof of {len(given['steps'])} steps, {len(given['loss'])} losses and {len(given['grad_norm'])} norms"
    last = max([*given["steps"][-1:], given["state_step"] or 0])
    if given["steps"] and last >= len(times):
        return f"proof of step {last} in a window of {len(times)} steps"
    for name in ("loss", "grad_norm"):
        for step, value in zip(given["steps"], given[name], strict=True):
            if step >= len(record["numerics"][name]):
                break
            other = record["numerics"][name][step]
            if value != other and (None in (value, other) or not _agree(value, other, PROOF_TOLERANCE)):
                return f"proof.{name} of step {step} is {value}, numerics.{name} {other}: edited by hand?"
    told = [rank["statistic_ms"] for rank in record["ranks"] if rank["statistic_ms"] is not None]
    if told and record["statistic_ms"] and not _agree(max(told), record["statistic_ms"]):
        return f"the slowest rank takes {max(told)} ms, statistic_ms is {record['statistic_ms']}"
    return None


def _agree(given, follows, tolerance=SELF_CHECK_TOLERANCE):
    return abs(given - follows) <= tolerance * abs(follows)


@functools.lru_cache(8192)
def _seconds(text):
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def broken_promise(record: dict, promise: dict | None) -> str | None:
    """Why a record is not what --describe promised of its variant, in words, or None.

    promise: graphs and replays_per_step, null for at least one, and the variant's kind; None: nothing was promised.
    """
    if promise is None:
        return None
    num_steps = len(record["steps"]["gpu_ms"]) or None
    fault = proof.broken_promise(record["capture"], num_steps, promise, promise["kind"])
    return fault or proof.wrong_share(record["proof"]["graph_kernel_share"], promise, promise["kind"])


# ------------------------------------------------------------------------------------------------
# One run twice


def step_key(record: dict) -> tuple | None:
    """What is equal in two records only if they are one run: every step's time; None for a run that timed nothing."""
    return tuple(record["steps"]["gpu_ms"]) or None


def same_run(a: dict, b: dict) -> bool:
    """Whether two records hold one run, copied: no two runs take equally long in every step."""
    return step_key(a) is not None and step_key(a) == step_key(b)
