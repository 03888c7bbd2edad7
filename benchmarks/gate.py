"""The regression gate: a newer set of results against an earlier one. Exit 0: holds, 1: changed, 2: not comparable.

    python -m benchmarks.gate runs/h200x1/gpt3-bench --against results/h200x1/gpt3-bench
    python -m benchmarks.gate results --against ../main/results --tolerance 1

Each side is a session, a group of sessions, or a root of groups. Rows are matched by GPU type, model, preset, number of
GPUs, host load and variant; where a side has several folders of one such row, by the folder's path or name too.
docs/method.md, "How a change is judged", says which quantities are judged and what fails.
"""

import json
import math
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import frame, intervals, overview_rows, rows, tables
from benchmarks.command import parser_of
from common.config import checked

TOLERANCE_PERCENT = 2.0
# Two GPUs of one type, each off by about 1 %, differ by less than this in 97 of 100 cases.
OTHER_GPU_PERCENT = 3.0
ISSUE_PERCENT = 20.0
# From this factor on the interval is that of the side with few rounds, and the text says so.
UNEVEN_ROUNDS = 2
# Of a row that the base does not have; a variant that this machine cannot run is no mistake.
SOUND = ("pass", "oom", "unsupported")


class CannotCompare(ValueError):
    """Two sets of results of which no row can be set against another."""


@dataclass(frozen=True)
class Judged:
    """One quantity of one row. change: new over base less 1, low and high its 95 % interval; None where not known."""

    row: str
    quantity: str
    base: str
    new: str
    verdict: str  # ok, changed, unclear, missing, better, new, failed
    change: float | None = None
    low: float | None = None
    high: float | None = None
    allowed: float | None = None


# ------------------------------------------------------------------------------------------------
# Statistics


def difference(base: list[float], new: list[float]) -> tuple[float, float | None]:
    """Mean of `new` less mean of `base`, and half of its 95 % interval; None where a side has one value."""
    mean = statistics.fmean(new) - statistics.fmean(base)
    if min(len(base), len(new)) < 2:
        return mean, None
    degrees = len(base) + len(new) - 2
    variance = sum(statistics.variance(values) * (len(values) - 1) for values in (base, new)) / degrees
    return mean, intervals.student_t(degrees) * math.sqrt(variance * (1 / len(base) + 1 / len(new)))


def judge_time(base: list[float], new: list[float], allowed: float) -> tuple[str, float, float | None, float | None]:
    """Verdict, change and its interval, of logarithms per round; `allowed` is a fraction."""
    mean, half_width = difference(base, new)
    change = math.expm1(mean)
    beyond = not -allowed <= change <= allowed
    if half_width is None:
        return "changed" if beyond else "ok", change, None, None
    low, high = math.expm1(mean - half_width), math.expm1(mean + half_width)
    if beyond:
        return "changed" if abs(mean) > half_width else "unclear", change, low, high
    return "unclear" if half_width > math.log1p(2 * allowed) else "ok", change, low, high


# ------------------------------------------------------------------------------------------------
# Which row against which


def read(root) -> list[overview_rows.Block]:
    """Blocks of a side. Raises CannotCompare for a folder without records, an unsound record or a mixture."""
    try:
        blocks, faults, refused = overview_rows.read(root)
    except FileNotFoundError as error:
        raise CannotCompare(str(error)) from None
    if faults or refused:
        raise CannotCompare(f"{root}: {(faults + refused)[0]}")
    if not blocks:
        raise CannotCompare(f"no records in or below {root}")
    return blocks


def match(base: list, new: list) -> list[tuple]:
    """(block of the base, its block in the new set), for each block of either; None where a side lacks it.

    Raises CannotCompare for other devices, nothing in common, several folders that could be meant, or
    a configuration that computes something else.
    """
    kinds = [{(block.device, block.gpu if block.device == "cuda" else "") for block in side} for side in (base, new)]
    if not kinds[0] & kinds[1]:
        names = [", ".join(sorted(gpu or "CPU" for _, gpu in kind)) for kind in kinds]
        raise CannotCompare(f"the base is of {names[0]}, the new results are of {names[1]}")
    matched = [(block, _partner(block, base, new)) for block in base]
    if not any(partner for _, partner in matched):
        raise CannotCompare(f"no row in common: the base has {_names(base)}, the new results have {_names(new)}")
    for block, partner in matched:
        for key in sorted(set(block.work) & set(partner.work)) if partner else ():
            if block.work[key] != partner.work[key]:
                raise CannotCompare(f"{block.name}: {key} was {block.work[key]!r} and is {partner.work[key]!r}")
    taken = {id(partner) for _, partner in matched}
    return matched + [(None, block) for block in new if id(block) not in taken]


def _key(block):
    # CPUs of two machines may be compared: no time of theirs is judged.
    gpu = block.gpu if block.device == "cuda" else ""
    return block.device, gpu, block.model, block.preset, block.num_gpus, block.host_load


def _partner(block, base, new):
    candidates = [other for other in new if _key(other) == _key(block)]
    alone = sum(_key(other) == _key(block) for other in base) == 1
    if len(candidates) == 1 and (alone or candidates[0].folder.name == block.folder.name):
        return candidates[0]
    for same in (lambda other: other.name == block.name, lambda other: other.folder.name == block.folder.name):
        named = [other for other in candidates if same(other)]
        if len(named) == 1:
            return named[0]
    if candidates and alone:
        raise CannotCompare(f"{block.name} may be any of {', '.join(other.name for other in candidates)}: name one")
    return None


def _names(blocks):
    return ", ".join(sorted({f"{block.model}/{block.preset} x{block.num_gpus}" for block in blocks}))


# ------------------------------------------------------------------------------------------------
# Judging


def judge(matched: list[tuple], tolerance: float) -> list[Judged]:
    """Every quantity of every row of the base, then the rows that are new. tolerance: a fraction."""
    labels = overview_rows.labels_of([block or partner for block, partner in matched])
    judged, fresh = [], []
    for block, partner in matched:
        label = labels[id(block or partner)]
        new_rows = {row["variant"]: row for row in partner.rows} if partner else {}
        for variant in new_rows.keys() - {row["variant"] for row in block.rows} if block else new_rows:
            status = new_rows[variant]["status"]
            verdict = "new" if status in SOUND else "failed"
            fresh.append(Judged(f"{label} {variant}", "row", "-", status, verdict))
        for row in block.rows if block else ():
            name = f"{label} {row['variant']}"
            other = new_rows.get(row["variant"])
            if other is None:
                judged.append(Judged(name, "row", row["status"], "missing", "missing"))
            else:
                judged += _judge_row(name, block, partner, row, other, tolerance)
    return judged + sorted(fresh, key=lambda each: each.row)


def _judge_row(name, block, partner, row, other, tolerance):
    def word(quantity, key, best=None):
        base, new = row[key], other[key]
        verdict = "ok" if base == new else "better" if best is not None and new == best else "changed"
        return Judged(name, quantity, str(base or "-"), str(new or "-"), verdict)

    judged = [word("status", "status", best="pass")]
    if (row["status"], other["status"]) != ("pass", "pass"):
        return judged
    judged += [word("parity", "parity", best="bitwise"), word("replays", "replays", best="ok")]
    judged.append(word("graphs", "num_graphs"))
    if block.device != "cuda":
        return [*judged, word("operators", "num_operators")]
    judged += _judge_times(name, row, *_runs(block, partner, row), tolerance)
    for quantity, key, digits in (("reserved GiB", "peak_reserved_gib", 2), ("kernels", "num_kernels", 0)):
        base, new, text = row[key], other[key], tables.number(digits)
        if base is not None and new is None:
            judged.append(Judged(name, quantity, text(base), "missing", "missing", allowed=tolerance))
        elif base is not None:
            change = new / base - 1 if base else float(new != base)
            verdict = "ok" if abs(change) <= tolerance else "changed"
            judged.append(Judged(name, quantity, text(base), text(new), verdict, change, allowed=tolerance))
    return judged


def _runs(block, partner, row):
    """Of each side: timed records of a row, and the log ratios of its pairs, of the sessions that the row rests on.

    Both sides are paired with one eager, the base of the first that the other timed as well: a ratio against a new
    base would change with it.
    """
    variant = row["variant"]
    groups = [rows.group_of(side.runs) for side in (block, partner)]
    sides = [(group, rows.standing(group, variant)[0]) for group in groups]
    bases = dict.fromkeys(group.base(pooled[-1], variant) for group, pooled in sides)
    found = [[_log_ratios(*side, variant, base) for side in sides] for base in bases if base not in (None, variant)]
    ratios = next(filter(all, found), [*found, [[], []]][0])
    return [
        ([each["record"] for session in pooled for each in group.timed(session, variant)], logs)
        for (group, pooled), logs in zip(sides, ratios, strict=True)
    ]


def _log_ratios(group, pooled, variant, base):
    both = [pair for session in pooled for pair in rows.pairs(group, session, variant, base)]
    return rows.log_ratios(both, lambda record: record["statistic_ms"])


def _judge_times(name, row, base, new, tolerance):
    same_gpu = len({record["env"]["gpu_uuid"] for records, _ in (base, new) for record in records}) == 1
    allowed = tolerance if same_gpu else tolerance + OTHER_GPU_PERCENT / 100

    def logs(key):
        return [[math.log(record[key]) for record in records if record[key]] for records, _ in (base, new)]

    judged = [_judge_logs(name, "step ms", *logs("statistic_ms"), allowed, tables.number(2))]
    if same_gpu:
        judged.append(_judge_logs(name, "issue ms", *logs("issue_ms"), ISSUE_PERCENT / 100, tables.number(2)))
    if not row["is_base"]:
        judged.append(_judge_logs(name, "speed-up", base[1], new[1], tolerance, lambda value: f"{value:.3f}x"))
    return filter(None, judged)


def _judge_logs(name, quantity, base, new, allowed, text):
    if not base:
        return None
    shown = text(math.exp(statistics.fmean(base)))
    if not new:
        return Judged(name, quantity, shown, "missing", "missing", allowed=allowed)
    verdict, *change = judge_time(base, new, allowed)
    return Judged(name, quantity, shown, text(math.exp(statistics.fmean(new))), verdict, *change, allowed)


# ------------------------------------------------------------------------------------------------
# Text

_COLUMNS = (
    ("row", tables.field("row")),
    ("quantity", tables.field("quantity")),
    ("base", tables.field("base")),
    ("now", tables.field("new")),
    ("change", tables.field("change", lambda value: f"{100 * value:+.2f} %")),
    ("95 %", lambda row: None if row["low"] is None else f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f} %"),
    ("allowed", tables.field("allowed", lambda value: f"{100 * value:g} %")),
    ("verdict", tables.field("verdict")),
)


def text_of(matched, judged, every=False) -> str:
    """What changed, or with `every` all quantities; then what differs in machine and versions, and one line of sum."""
    shown = [asdict(each) for each in judged if every or each.verdict != "ok"]
    parts = [tables.aligned(tables.cells(shown, _COLUMNS), 2)] if shown else []
    parts.append("\n".join(_machines(matched)))
    verdicts = ("changed", "missing", "failed", "unclear", "new")
    counts = {verdict: sum(each.verdict == verdict for each in judged) for verdict in verdicts}
    num_rows = len({each.row for each in judged})
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "all hold"
    parts.append(f"{len(judged)} quantities of {num_rows} rows: {found}")
    return "\n\n".join(part for part in parts if part)


def _machines(matched):
    lines = []
    for block, partner in matched:
        if block is None or partner is None:
            continue
        rounds = [{row["variant"]: row["num_rounds"] for row in side.rows} for side in (block, partner)]
        for variant in rounds[0]:
            few, many = sorted(side.get(variant, 0) for side in rounds)
            if 0 < few * UNEVEN_ROUNDS <= many:
                numbers = " -> ".join(str(side[variant]) for side in rounds)
                lines.append(f"{block.name} {variant}: rounds {numbers}: few on one side judge little")
        changes = []
        for key in ("gpu_uuid", "driver", "cuda", "cudnn", "torch", "transformer_engine", "source_hash"):
            values = [_values(side, key) for side in (block, partner)]
            if values[0] != values[1]:
                changes.append("another GPU of the type" if key == "gpu_uuid" else f"{key} {values[0]} -> {values[1]}")
        if changes:
            lines.append(f"{block.name}: {', '.join(changes)}")
    return lines


def _values(block, key):
    return "/".join(sorted({str(record["env"][key]) for record in frame.timed(block.found) or block.found}))


# ------------------------------------------------------------------------------------------------
# Command


_percent = checked(
    lambda text: float(text.removesuffix("%").strip()) / 100,
    lambda share: 0 < share < 1,
    "a percentage above 0 and below 100",
)


def main(argv=None) -> int:
    parser = parser_of(
        "gate",
        "A newer set of results against an earlier one.",
        "exit status: 0 all hold, 1 something changed, is missing or failed, 2 the two cannot be compared",
    )
    parser.add_argument("new", metavar="DIR", help="the newer results: a session, a group of sessions, or a root")
    parser.add_argument("--against", required=True, metavar="BASE", help="the earlier results, of either kind")
    parser.add_argument(
        "--tolerance", type=_percent, default=TOLERANCE_PERCENT / 100, metavar="PERCENT", help="allowed change (2)"
    )
    parser.add_argument("--all", action="store_true", help="print what holds too")
    parser.add_argument("--json", action="store_true", help="print JSON, every quantity")
    args = parser.parse_args(argv)
    try:
        if Path(args.new).resolve() == Path(args.against).resolve():
            raise CannotCompare(f"{args.new} is the base itself: --against takes the earlier results")
        matched = match(read(args.against), read(args.new))
    except CannotCompare as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    judged = judge(matched, args.tolerance)
    failed = any(each.verdict in ("changed", "missing", "failed") for each in judged)
    if args.json:
        print(json.dumps({"schema": 1, "holds": not failed, "judged": [asdict(each) for each in judged]}, indent=1))
    else:
        print(text_of(matched, judged, args.all))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
