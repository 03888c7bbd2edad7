"""The tables and sentences of the front page, each made from the records by a rule.

    <!-- table: front results law -->        part: law, decide, bought, minutes, lacks or published

A row enters with a ratio only if its sessions ran all eagers of the model. The ratio is that of the 10th percentiles,
or of the medians where steps exceed 0.4 s. Where several groups of sessions could stand in one place, the one with
the most hosts stands there, then the most pairs, then the newer records, then the GPU type of most rows. A row of
another GPU type names it.
"""

import itertools
import textwrap
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta

from benchmarks import bases, frame, law, tables
from benchmarks.overview_rows import rows_of, short_gpu, strategies
from benchmarks.overview_tables import linked
from benchmarks.published import PUBLISHED, of_model, stem
from benchmarks.rows import is_short

PARTS = ("law", "decide", "bought", "minutes", "lacks", "published")
NOT_YET = "not measured yet"
INCOMPLETE = "not measured yet against all eagers"
NUM_BOUGHT = 7


def text_of(part: str, root, runs, blocks, place) -> str:
    """One part as Markdown. runs: `frame.read(root)`; blocks: of these runs. place: the folder that links are from."""
    sentences = {"law": law_sentence, "minutes": minutes_sentence, "lacks": lacks_sentence}
    if part in sentences:
        lines = sentences[part](runs).splitlines()
        return "\n".join(textwrap.fill(line, 120, subsequent_indent="  " * line.startswith("- ")) for line in lines)
    # The quiet rows of one GPU; what has a `linked` name can be shown.
    rows = [row for row in rows_of(blocks) if row["device"] == "cuda" and not row["host_load"] and row["num_gpus"] == 1]
    usual = [gpu for gpu, _ in Counter(row["gpu"] for row in rows).most_common(1)]
    rows = [row | {"linked": linked(root, row, place), "is_usual": row["gpu"] in usual} for row in rows]
    rows.sort(key=lambda row: not row["is_usual"])
    found, columns = {"decide": (decide, DECIDE), "bought": (bought, BOUGHT), "published": (beside, BESIDE)}[part]
    return tables.piped(tables.cells(found(rows), columns), len(columns))


# ------------------------------------------------------------------------------------------------
# Which row stands for what


def evidence(row: dict) -> tuple:
    """What orders rows by how much they rest on."""
    return not row["missing_eagers"], row["num_hosts"], row["num_pairs"], "schema 1" not in row["lacks"]


def first_of(variants, rows: list[dict], **wanted) -> dict | None:
    """The row with the most evidence that has these values, of the first variant that came to a ratio."""
    for variant in variants:
        own = [row for row in rows if row["variant"] == variant and row["speedup"]]
        found = [row for row in own if all(row[key] == value for key, value in wanted.items())]
        if found:
            return max(found, key=evidence)
    return None


def ratio(row: dict) -> str:
    """With its interval, and the hosts and pairs that it rests on. Of two hosts, whose interval would say nothing, with
    what each of them gives; where no host has 3 pairs, with what all sessions give. Pairs of such hosts enter only
    where there is no other."""
    key = "speedup" if row["quiet_speedup"] is None else "quiet_speedup"
    text, both = tables.interval(key)(row), tables.two_hosts(row, key)
    if both:
        text += f", hosts {both}"
    if not row["num_hosts"] and row["every_low"] is not None:
        text += f", sessions {row['every_low']:.3f} to {row['every_high']:.3f}"
    return f"{text} ({row['num_hosts'] or 'none'}, {row['num_pairs']})"


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def named(row: dict) -> str:
    """`[gpt3/bench](...) graph`, and the GPU where it is not that of most rows."""
    return f"{row['linked']} {row['variant']}" + ("" if row["is_usual"] else f", {short_gpu(row['gpu'])}")


# ------------------------------------------------------------------------------------------------
# Sentences


def law_sentence(runs) -> str:
    """How often max(1, issue / busy) holds, over one graph a session, on either side of 1, and how far it is off."""
    main = [point for point in law.points(runs.frame) if point.is_main]
    if not main:
        return f"The law is {NOT_YET}."
    hosts = {point.boot for point in main}
    sides = (
        ([point for point in main if point.x <= 1], "issue below busy", "no gain"),
        ([point for point in main if point.x > 1], "issue above busy", "issue / busy"),
    )
    said = "; ".join(_spread(side, where, first) for side, where, first in sides if side)
    sessions = f"{counted(len(main), 'session')} on {counted(len(hosts), 'host')}"
    return f"In {sessions}, by median steps and against the best eager run there, {said}."


def _spread(side, where, first):
    """How many points of one side lie near the law, above and below it."""
    above, below = ([sign * p.off for p in side if sign * p.off > law.NEAR] for sign in (1, -1))
    near = len(side) - len(above) - len(below)
    parts = [f"{near} of {len(side)} with {where} lie within {100 * law.NEAR:.0f} % of {first}"]
    for own, word in ((above, "above"), (below, "below")):
        if own:
            parts.append(f"{len(own)} {word} (up to {100 * max(own):.0f} %)")
    if all(point.off <= 0 for point in side):
        parts.append("none above")
    return ", ".join(parts)


def minutes_sentence(runs) -> str:
    """How long the session with the most timed runs on one GPU took, without what others took between its runs."""
    timed = runs.frame[(runs.frame["device"] == "cuda") & (runs.frame["world_size"] == 1)]
    timed = timed[timed["is_timed"].astype(bool)]
    spans = {}
    for (group, session), part in timed.groupby(["group", "session"]):
        meta = runs.metas.get((group, session), {})
        if meta.get("begin_utc") and meta.get("end_utc") and part["schema"].min() > 1:
            begin, end = (datetime.fromisoformat(meta[key]) for key in ("begin_utc", "end_utc"))
            spans[len(part), session] = (
                part,
                (end - begin - _laid_aside(runs.frame, group, session)).total_seconds() / 60,
            )
    if not spans:
        return f"How long a session takes is {NOT_YET}."
    part, minutes = spans[max(spans)]
    first, num_rounds, num_variants = part.iloc[0], part["round"].nunique(), part["variant"].nunique()
    what = f"{first['model']}/{first['preset']} ({num_variants} variants, {num_rounds} rounds)"
    return f"A session of {what} took {minutes:.0f} minutes on one {short_gpu(first['gpu_name'])}."


def _laid_aside(every, group, session) -> timedelta:
    """The pauses between a session's runs in which its host made those of another session."""
    own = (every["group"] == group) & (every["session"] == session)
    boots = {boot for boots in every[own]["boots"] for boot in boots}
    others = [record for record in frame.records_of(every[~own]) if record["env"]["boot_id"] in boots]
    times, elsewhere = _times(frame.records_of(every[own])), _times(others)
    pauses = [(before, after) for (_, before), (after, _) in itertools.pairwise(times)]
    laid = [after - before for before, after in pauses if any(before <= a and b <= after for a, b in elsewhere)]
    return sum(laid, timedelta())


def _times(found):
    """(begin, end) of records that know theirs, in order."""
    times = [(record.get("begin_utc"), record.get("end_utc")) for record in found]
    return sorted(tuple(map(datetime.fromisoformat, pair)) for pair in times if all(pair))


def lacks_sentence(runs) -> str:
    """What the records lack, over all timed runs on GPUs, and the models none of whose sessions ran all eagers."""
    on_gpu = runs.frame[runs.frame["device"] == "cuda"]
    timed = frame.timed(frame.records_of(on_gpu))
    old = sum(record["schema"] == 1 for record in timed)
    short = sum(map(is_short, timed))
    unsettled = sum(record["conditions"]["settled"] is False for record in timed)
    text = (
        f"- Of {len(timed)} timed runs {old} are of schema 1, {short} have short windows, {unsettled} had not settled."
    )
    lacking = _without_all_eagers(on_gpu)
    names = " and ".join(f"{of_model(model).title if of_model(model) else model}'s" for model in lacking)
    return text + (
        f"\n- {names} sessions lack an eager variant: such ratios are in the overview, marked." if names else ""
    )


def _without_all_eagers(runs) -> list[str]:
    is_whole: dict[str, bool] = {}
    for (_, model), part in runs.groupby(["group", "model"], sort=True):
        group = bases.group_of(part)
        for session in set(part[part["is_timed"].astype(bool)]["session"]):
            is_whole[model] = is_whole.get(model, False) or not group.missing(session)
    return [model for model, is_any_whole in is_whole.items() if not is_any_whole]


# ------------------------------------------------------------------------------------------------
# Should I graph my step?


@dataclass(frozen=True)
class Proof:
    """What shows a case: the row of the first of its variants that was measured.

    what: by variant, what it is, in words of the table.
    """

    model: str
    what: dict[str, str]
    preset: str = "bench"
    with_tails: bool = False


@dataclass(frozen=True)
class Case:
    """A kind of step, what to expect of a graph, and what shows it."""

    step: str
    expect: str
    proofs: tuple[Proof, ...]


CASES = (
    Case(
        step="many small kernels, issue above busy",
        expect="about issue / busy, or less (figure)",
        proofs=(Proof("stable_diffusion", {"graph": "the whole step"}),),
    ),
    Case(
        step="large kernels, issue near or below busy",
        expect="little; steadier steps on a noisy host",
        proofs=(Proof("gpt3", {"graph": "each layer"}, with_tails=True),),
    ),
    Case(
        step="lengths change",
        expect="a graph a bucket; padding may cost the gain",
        proofs=(Proof("rnnt", {"full": "the whole step", "graph": "encoder and prediction"}, preset="bench_lengths"),),
    ),
    Case(
        step="the host reads each loss",
        expect="remove the reads",
        proofs=(Proof("rnnt", {"eager_sync": "eager, reading"}),),
    ),
    Case(
        step="gradient accumulation; pipelines",
        expect="a graph a layer and microbatch",
        proofs=(Proof("gpt3", {"graph": "a stage alone"}, preset="rank"),),
    ),
    Case(
        step="torch.compile not tried",
        expect='try it too; `mode="reduce-overhead"` captures graphs itself',
        proofs=(
            Proof("rnnt", {"reduce_overhead": "its own graphs", "compile": "no graphs"}),
            Proof("stable_diffusion", {"compile_graph": "compiled, the whole step"}),
        ),
    ),
)


def decide(rows: list[dict]) -> list[dict]:
    found = []
    for case in CASES:
        shown = [first_of(proof.what, rows, model=proof.model, preset=proof.preset) for proof in case.proofs]
        found.append({"case": case, "proofs": list(zip(case.proofs, shown, strict=True))})
    return found


def _proof(proof, row):
    if row is None:
        return f"{of_model(proof.model).title} ({next(iter(proof.what.values()))}): {NOT_YET}"
    name = f"{named(row)} ({proof.what[row['variant']]})"
    if row["missing_eagers"]:
        return f"{name}: {INCOMPLETE}"
    text = f"{name}: {ratio(row)}"
    if not proof.with_tails:
        return text
    beside = f"beside {row['contended_host_load']} busy processes " if row["contended_tail"] else ""
    prefix = "contended_" if beside else ""
    tails = row[f"{prefix}eager_tail"], row[f"{prefix}tail"]
    return f"{text}; {beside}p95/p50 {tails[0]:.3f} eager, {tails[1]:.3f} graph" if all(tails) else text


DECIDE = (
    ("your step", lambda line: line["case"].step),
    ("what to expect", lambda line: line["case"].expect),
    ("measured (hosts, pairs)", lambda line: "; ".join(_proof(*each) for each in line["proofs"])),
)


# ------------------------------------------------------------------------------------------------
# What it bought here


def bought(rows: list[dict]) -> list[dict]:
    """One row for the preset bench of each of the five models, measured or not, then the other presets with the most
    evidence, of equal evidence those with the longer step; of each the headline capture."""
    places = {(row["model"], row["preset"]): None for row in rows} | {(each.model, "bench"): None for each in PUBLISHED}
    for model, preset in places:
        places[model, preset] = first_of(law.HEADLINE, rows, model=model, preset=preset)
    first = [place for place in places if place[1] == "bench"]
    rest = [place for place in places if place not in first and places[place]]
    rest.sort(key=lambda place: (evidence(places[place]), places[place]["base_ms"]), reverse=True)
    order = [*dict.fromkeys([each.model for each in PUBLISHED] + [model for model, _ in places])]
    chosen = [*first, *rest[: max(0, NUM_BOUGHT - len(first))]]
    chosen.sort(key=lambda place: (order.index(place[0]), place[1]))
    return [
        {"model": model, "preset": preset, "row": places[model, preset], "failed": _failed(rows, model, (preset,))}
        for model, preset in chosen
    ]


def _failed(rows, model, presets):
    """The first row of a capture that did not pass and has no ratio, or None."""
    names = (*law.HEADLINE, *_of_scope(model))
    own = [row for row in rows if row["model"] == model and stem(row["preset"]) in presets and not row["speedup"]]
    return next((row for row in own if row["variant"] in names and row["status"] != "pass"), None)


def _known(cell):
    """A cell of rows that may stand with their ratio."""
    return lambda line: cell(line["row"]) if line["row"] and not line["row"]["missing_eagers"] else None


def _workload(line):
    row = line["row"] or line["failed"]
    if row is None:
        return f"{line['model']}/{line['preset']}"
    return f"{row['linked']} {row['variant']}, {short_gpu(row['gpu'])}"


def _caveat(line):
    row = line["row"]
    if row is None:
        return line["failed"]["status"] if line["failed"] else NOT_YET
    if row["missing_eagers"]:
        return INCOMPLETE
    few = "no verdict" if row["num_hosts"] else "no interval"
    word = tables.verdict(row) if row["scope"] else few
    return f"{word}; {row['lacks']}" if row["lacks"] else word


BOUGHT = (
    ("workload", _workload),
    ("best eager ms", _known(tables.field("base_ms", tables.number(1)))),
    ("graph ms", _known(tables.field("step_ms", tables.number(1)))),
    ("ratio [95 %] (hosts, pairs)", _known(ratio)),
    ("caveat", _caveat),
)


# ------------------------------------------------------------------------------------------------
# Beside NVIDIA


def beside(rows: list[dict]) -> list[dict]:
    """A row for each submission: NVIDIA's mechanism where it was measured here, else this suite's own capture of the
    same scope, which every model calls `graph`. No other capture stands beside NVIDIA's gain."""
    alike = [row for row in rows if row["variant"] in _of_scope(row["model"]) and row["speedup"]]
    complete = strategies([row for row in alike if not row["missing_eagers"]])
    partly = {row["model"] for row in alike if row["missing_eagers"]}
    found = []
    for each in PUBLISHED:
        own = [row["here"] for row in complete if row["published"] is each and row["here"]]
        failed = None if own else _failed(rows, each.model, each.presets)
        found.append(
            {"published": each, "row": own[0] if own else None, "is_partly": each.model in partly, "failed": failed}
        )
    return found


def _of_scope(model):
    published = of_model(model)
    return (published.variant, "graph") if published else ()


def _here(line):
    row = line["row"]
    if row is None and line["failed"]:
        return f"{named(line['failed'])}: {line['failed']['status']}"
    if row is None:
        return INCOMPLETE if line["is_partly"] else NOT_YET
    return f"{named(row)}: {ratio(row)}"


BESIDE = (
    ("workload", lambda line: line["published"].title),
    ("NVIDIA's mechanism", lambda line: line["published"].mechanism),
    ("NVIDIA's gain", lambda line: f"[{line['published'].gain_range}]({line['published'].source})"),
    ("here, same scope (hosts, pairs)", _here),
    ("what differs", lambda line: line["row"] and line["published"].presets[stem(line["row"]["preset"])]),
)
