"""Whether a timed run did its work: its losses, gradient norms, state and times beside those of its reference variant.

Two sound runs differ: kernels sum in any order, and training doubles a difference every few steps. In the 177 timed
runs of schema 1, eager and the variants that equal it bit for bit in round 0 part by up to 1e-5 relative in the loss
of step 0, 5e-4 by step 4, 2e-3 by step 20 and 7e-3 by step 50; in gradient norms by 2e-4, 2e-3, 1e-2 and 0.24. Of the
range that the loss (the norm) moves over in 50 steps that is 6e-3 (2.3e-2) at most. Allowed is therefore the smaller of
two bounds, each two to five times what was seen or more: one that grows with the step, relative to the value, and one
relative to the range. Where several reference runs show a larger spread at a step, three times that.

A run whose kernels are not deterministic leaves the common course at a step of chance, and how far away it is then
depends on how long ago that was. So a run that equals a reference run in all bits of loss and norm for EQUAL_STEPS or
more may be as far from it as two reference runs are as many steps after they parted from each other, three times: the
second largest of several pairs, and within the bound of the range all the same. In Llama 2 70B LoRA's session at 2e-5
three eager runs parted at steps 6 and 7, its graphs from them at 3 to 7 (one at 15), and then all by similar amounts.
At 5e-4, where random weights have no stable course, three of six graphs' runs go further than that, and an eager one.
What this allows stays within the bound of the range; a run that replays stale data or leaves work out is usually off by
far more. No torch here.
"""

import itertools
import math

from common import proof
from common import record as records

LOSS_BOUNDS = {"first": 1e-3, "growth": 4e-4, "largest": 0.1, "range": 0.05, "largest_range": 0.25, "flat": 2e-4}
NORM_BOUNDS = {"first": 1e-2, "growth": 1e-2, "largest": 1.0, "range": 0.1, "largest_range": 0.5, "flat": 2e-3}
SPREAD_FACTOR = 3.0
EQUAL_STEPS = 2
RANGE_STEPS = 50
# In hundreds of steps the difference of two sound runs grows until they are two runs of one training that have nothing
# but their course in common, spikes included. From step 50 on a value may therefore be off by as much as the reference
# run's own values differ around it, and half as much again, and a third of the values by more.
AROUND, SCATTER_FACTOR = 4, 1.5
LATE_SHARE, LATE_STEPS = 1 / 3, 2
# Loss scaling skips a step here and there, and not always the same one.
MISSING_SHARE, MISSING_STEPS = 0.1, 2
# Of each sampled tensor, how far it moved: a weight that was not trained has not, one trained on other numbers has
# moved elsewhere. Chaos turns directions of single moments, never those of most tensors.
MOVED_FACTOR, MOVED_SHARE, DIRECTION = 3.0, 0.25, 0.3
# A host that was busy while a run settled lets its steps become faster: by 0.72 at most in the history. Work that is
# left out makes them faster by far more. Neighbours on few cores slow a CPU run's warm-up tenfold.
FASTER = {"cuda": 0.5, "cpu": 0.05}
QUARTERS, QUARTER_STEPS = 4, 3
# Reading losses took an eager run 17 ms of processor time on an H100's host; a step's work left for then takes more.
LATE_MS, LATE_FACTOR = {"cuda": 100.0, "cpu": 20.0}, 3.0


def unproven(record: dict, base_records: list[dict]) -> str | None:
    """Why a timed run has not proven its work, in words, or None.

    base_records: timed runs that passed of the variant that its numbers are compared with; none for one of these
    itself, which is then judged by its memory and times alone. Its losses, norms and state have to be those of any one
    of them; the words name the one of the same round and attempt. Records of schema 1 are judged by what they have.
    """
    if not record["steps"]["gpu_ms"]:
        return None
    return wrong_numbers(record, base_records) or wrong_times(record, base_records)


def wrong_numbers(record: dict, base_records: list[dict]) -> str | None:
    """The part of `unproven` that does not depend on how busy the host was: losses, norms, state, memory."""
    leaked = proof.leaked(record) if record["schema"] == records.SCHEMA else None
    if leaked or not base_records:
        return leaked
    near = [other for other in base_records if _place(other) == _place(record)]
    base_records = near + [other for other in base_records if _place(other) != _place(record)]
    for name, bounds in (("loss", LOSS_BOUNDS), ("grad_norm", NORM_BOUNDS)):
        fault = _wrong_series(record, base_records, name, bounds)
        if fault:
            return fault
    return _wrong_state(record, base_records)


def _place(record):
    return record["round"], record.get("attempt", 1)


def series(record: dict, name: str) -> dict[int, float | None]:
    """step -> value of "loss" or "grad_norm": over the whole window, or the first steps in a record of schema 1."""
    first = dict(enumerate(record["numerics"][name]))
    given = record.get("proof")
    return {**first, **dict(zip(given["steps"], given[name], strict=True))} if given else first


def _wrong_series(record, base_records, name, bounds):
    base_records = [other for other in base_records if any(map(_finite, series(other, name).values()))]
    if not base_records:
        return None
    ours, bases = series(record, name), [series(other, name) for other in base_records]
    faults = [_missing(ours, base, name) for base in bases]
    if all(faults):
        return faults[0]
    spread, since_parting = _spread(bases), _spread_since_parting(base_records, name)
    faults = []
    for other, base in zip(base_records, bases, strict=True):
        parting = _parting(record, other)
        parted = {step: _last(since_parting, step - parting) for step in base} if parting is not None else {}
        faults.append(_too_far(ours, base, spread, parted, bounds, record, name))
    return faults[0] if all(faults) else None


def _parting(a, b):
    """The first step in which two runs differ in a bit of loss or norm, of the first RANGE_STEPS, which are all kept.

    None where they part later or never, and where they were not equal, with finite values, for EQUAL_STEPS before.
    """
    pairs = [(series(a, name), series(b, name)) for name in ("loss", "grad_norm")]
    for step in range(RANGE_STEPS):
        values = [(x.get(step), y.get(step)) for x, y in pairs]
        if any(x != y for x, y in values):
            return step if step >= EQUAL_STEPS else None
        if step < EQUAL_STEPS and not all(_finite(x) for x, _ in values):
            return None
    return None


def _spread_since_parting(base_records, name):
    """Steps since two reference runs parted -> the second largest distance of such pairs up to then, absolute."""
    pairs = []
    for a, b in itertools.combinations(base_records, 2):
        parting = _parting(a, b)
        if parting is None:
            continue
        x, y, largest, distances = series(a, name), series(b, name), 0.0, {}
        for step in sorted(x.keys() & y.keys()):
            if step >= parting and _finite(x[step]) and _finite(y[step]):
                largest = distances[step - parting] = max(largest, abs(x[step] - y[step]))
        pairs.append(distances)
    steps = sorted(set().union(*pairs))
    return {step: sorted(_last(own, step) for own in pairs)[-2] for step in steps} if len(pairs) > 1 else {}


def _last(spread, step):
    """The spread at a step or at the last one before it that is known; 0 before the first."""
    return spread[max(known)] if (known := [each for each in spread if each <= step]) else 0.0


def _finite(value):
    return value is not None and -math.inf < value < math.inf


def _missing(ours, base, name):
    """Where the reference run has values and this one has none."""
    # Later steps are kept by place; a shorter window has fewer.
    wanted = [step for step in base if _finite(base[step]) and step <= max(ours, default=-1)]
    missing = [step for step in wanted if not _finite(ours.get(step)) and (step in ours or step < RANGE_STEPS)]
    if not wanted or len(missing) > max(MISSING_STEPS, MISSING_SHARE * len(wanted)):
        count, of, first = len(missing) or len(base), len(wanted) or len(base), min(missing, default=0)
        return f"{name} is missing in {count} of {of} steps, first at step {first}"
    return None


def _spread(bases):
    """step -> the largest distance of two reference runs up to that step, absolute."""
    out: dict[int, float] = {}
    for a, b in itertools.combinations(bases, 2):
        largest = 0.0
        for step in sorted(a.keys() & b.keys()):
            if _finite(a[step]) and _finite(b[step]):
                largest = max(largest, abs(a[step] - b[step]))
            out[step] = max(out.get(step, 0.0), largest)
    return out


def _too_far(ours, base, spread, parted, bounds, record, name):
    """Where a run is further from a reference run than sound runs are from each other."""
    late, num_late = [], 0
    places = [step for step in sorted(base) if _finite(base[step])]
    known = [base[step] for step in places]
    span = max(known) - min(known)
    parity = 2 * (record["extra"].get("loss_rel_diff") or 0.0)
    for place, step in enumerate(places):
        if step not in ours or not _finite(ours[step]):
            continue
        size = abs(base[step])
        relative = min(bounds["first"] + bounds["growth"] * step, bounds["largest"])
        of_range = min(bounds["range"] * max(1.0, step / RANGE_STEPS), bounds["largest_range"])
        allowed = min(relative * max(size, span), of_range * span) + (bounds["flat"] + parity) * size
        if step >= RANGE_STEPS:
            around = known[max(0, place - AROUND) : place + AROUND + 1]
            allowed += SCATTER_FACTOR * (max(around) - min(around))
        allowed = max(allowed, SPREAD_FACTOR * spread.get(step, 0.0))
        allowed = max(allowed, min(SPREAD_FACTOR * parted.get(step, 0.0), of_range * span))
        distance = abs(ours[step] - base[step])
        num_late += step >= RANGE_STEPS
        if distance > allowed:
            late.append(
                f"{name} of step {step} is {ours[step]:.6g}, {base[step]:.6g} in the reference run, "
                f"{distance:.2g} apart where {allowed:.2g} are usual"
            )
            if step < RANGE_STEPS:
                return late[0]
    return late[0] if len(late) > max(LATE_STEPS, LATE_SHARE * num_late) else None


def _wrong_state(record, base_records):
    """Why the sampled state is not that of any reference run sampled after the same step, or None."""
    ours, faults = record.get("proof"), []
    for other in base_records:
        base = other.get("proof")
        if not base or not base["state_sample"] or not ours or base["state_step"] != ours["state_step"]:
            continue
        go_on = all(len(run["steps"]["gpu_ms"]) > base["state_step"] + 1 for run in (record, other))
        faults.append(_moved_otherwise(ours, base) or (_stopped(ours, base) if go_on else None))
    return faults[0] if faults and all(faults) else None


def _moved_otherwise(ours, base):
    by_name = {tensor["name"]: tensor for tensor in ours["state_sample"]}
    odd, directions = [], []
    for tensor in base["state_sample"]:
        if tensor["name"] not in by_name:
            return f"state after step {base['state_step']}: no sample of {tensor['name']}"
        a, b = _movement(by_name[tensor["name"]]), _movement(tensor)
        if b is None:
            continue
        if a is None or len(a) != len(b):
            odd.append(tensor["name"])
            continue
        long_a, long_b = math.hypot(*a), math.hypot(*b)
        if long_a == long_b == 0:
            continue
        if not long_b / MOVED_FACTOR <= long_a <= long_b * MOVED_FACTOR:
            odd.append(tensor["name"])
        if long_a and long_b and len(a) > 1:
            directions.append(sum(x * y for x, y in zip(a, b, strict=True)) / long_a / long_b)
    where = f"state after step {base['state_step']}"
    if len(odd) > MOVED_SHARE * len(base["state_sample"]):
        return f"{where}: {len(odd)} of {len(base['state_sample'])} tensors moved otherwise, first {odd[0]}"
    mean = sum(directions) / len(directions) if directions else 1.0
    return f"{where}: tensors moved elsewhere (mean cosine {mean:.2f})" if mean < DIRECTION else None


def _stopped(ours, base):
    """Why the state did not move any more after the sampled step, where the reference run's did, or None."""
    moving = {tensor["name"] for tensor in base["state_sample"] if tensor["end"] != tensor["after"]}
    still = [t["name"] for t in ours["state_sample"] if t["name"] in moving and t["end"] == t["after"]]
    if len(still) <= MOVED_SHARE * len(base["state_sample"]):
        return None
    return f"{len(still)} of {len(base['state_sample'])} tensors stay as they are after step {base['state_step']}"


def _movement(tensor):
    """after - start of a sampled tensor; None where a value is not finite."""
    if None in tensor["start"] or None in tensor["after"]:
        return None
    return [b - a for a, b in zip(tensor["start"], tensor["after"], strict=True)]


def wrong_times(record: dict, base_records: list[dict]) -> str | None:
    """The part of `unproven` that time tells: work left out once the steps are timed, and work done after them."""
    return _faster_than_settled(record) or _late_work(record, base_records)


def _faster_than_settled(record):
    times, kinds = record["steps"]["gpu_ms"], record["steps"]["batch"]
    given = record.get("proof") or {}
    settled = given.get("settled_ms")
    if settled:
        ratios = [ms / settled[str(kind)] for ms, kind in zip(times, kinds, strict=True) if settled.get(str(kind))]
    else:
        # Schema 1 knows one pace of all kinds of batch together.
        pace = (record["extra"].get("settle") or {}).get("step_ms")
        ratios = [ms / pace for ms in times] if pace and len(set(kinds)) == 1 else []
    factor = FASTER.get(record["device"], FASTER["cpu"])
    for quarter in range(QUARTERS):
        part = sorted(ratios[len(ratios) * quarter // QUARTERS : len(ratios) * (quarter + 1) // QUARTERS])
        if len(part) >= QUARTER_STEPS and part[len(part) // 2] < factor:
            return f"steps became {part[len(part) // 2]:.2g} times as long as they had settled"
    return None


def _late_work(record, base_records):
    given = record.get("proof")
    if not given:
        return None
    if given["late_change"]:
        return "losses or state still changed after the window"
    usual = max([(other.get("proof") or {}).get("late_ms") or 0.0 for other in base_records], default=0.0)
    allowed = LATE_MS[record["device"]] + LATE_FACTOR * usual
    if (given["late_ms"] or 0.0) > allowed:
        return f"{given['late_ms']:.0f} ms of work after the window, {allowed:.0f} are usual"
    return None
