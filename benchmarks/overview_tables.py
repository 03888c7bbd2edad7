"""The overview as text: columns of its tables, headings, sources and notes, for a screen or as Markdown.

Four tables of the same rows in the same order, because one would not fit on a screen (what came to nothing is in
the first and third alone), then NVIDIA's table of the five strategies: what was submitted, what its mechanism gains
here, and below it this suite's best other capture.
"""

import os
from pathlib import Path

from benchmarks import compare, tables
from benchmarks.overview_rows import labels_of, rows_of, strategies
from benchmarks.published import PUBLISHED
from benchmarks.tables import field, number, ratio

# ------------------------------------------------------------------------------------------------
# Columns


def _from_to(key, text):
    """The base's value and the variant's."""

    def cell(row):
        values = [row[f"eager_{key}"], row[key]]
        if row[key] is None:
            return None
        return " -> ".join(tables.NOTHING if value is None else text(value) for value in values)

    return cell


def _ratio(key):
    return lambda row: ratio(key)(row | {"is_base": False})


def _alone(key):
    return lambda row: tables.plain_ratio(key)(row | {"is_base": False})


def _verdict(row):
    """A row that came to nothing says so where its verdict would stand."""
    return tables.verdict(row) if row["status"] == "pass" else row["status"]


def _verdict_under_load(row):
    return tables.verdict({"verdict": row["contended_verdict"], "scope": row["contended_scope"]})


def _base_ms(digits):
    """The base's step; its name where it is not eager."""

    def cell(row):
        if row["eager_ms"] is None:
            return None
        name = "" if row["base"] in (None, "eager") else f" ({row['base']})"
        return number(digits)(row["eager_ms"]) + name

    return cell


def _break_even(row):
    if row["break_even_never"]:
        return "never"
    return None if row["break_even_steps"] is None else f"{row['break_even_steps']:,.0f}"


def _graphs(row):
    return None if row["strategy"] is None else str(row["num_graphs"])


def _published(row):
    """Of NVIDIA's graphs, so it stands beside graphs."""
    return row["published_gain_range"] if row["num_graphs"] else None


_NAME = (("model", field("label")), ("variant", field("variant")))
# What the pairs say, with what it rests on.
_JUDGED = (
    ("speed-up", _alone("speedup")),
    ("95 %", tables.bounds("speedup")),
    ("verdict, 99 %", _verdict),
    ("hosts", tables.host_range),
    ("hosts, pairs", tables.hosts_pairs),
    ("by p10", _ratio("quiet_speedup")),
)
SPEED = (
    *_NAME,
    ("base ms", _base_ms(2)),
    ("step ms", field("step_ms", number(2))),
    ("ceiling", field("ceiling", lambda value: f"{value:.2f}x")),
    *_JUDGED[:-1],
    # Its interval stands in the next table.
    ("by p10", _alone("quiet_speedup")),
    ("over all layers", _ratio("across_speedup")),
    ("NVIDIA published", _published),
    ("older", lambda row: str(row["num_older"]) if row["num_older"] else None),
    ("lacks", lambda row: row["lacks"] or None),
)
HOST = (
    *_NAME,
    ("speed-up", _ratio("speedup")),
    ("by p10", _ratio("quiet_speedup")),
    ("beside busy processes", _ratio("contended_speedup")),
    ("verdict there, 99 %", _verdict_under_load),
    ("processes", field("contended_host_load")),
    ("p95/p50", _from_to("tail_p95_over_p50", number(3))),
    ("issue ms", _from_to("issue_ms", number(1))),
)
CAPTURE = (
    *_NAME,
    ("captured", field("strategy", lambda text: tables.short(text, 40))),
    ("graphs", _graphs),
    ("replays", field("replays")),
    ("parity", field("parity")),
    ("warm-up s", field("warmup_s", number(2))),
    ("compile s", lambda row: f"{row['compile_s']:.1f}" if row["compile_s"] else None),
    ("capture s", field("capture_s", number(2))),
    ("break-even", _break_even),
    ("status", field("status")),
)
COST = (
    *_NAME,
    ("idle %", _from_to("idle_fraction", number(1, 100))),
    ("kernels", _from_to("num_kernels", number(0))),
    ("reserved GiB", _from_to("peak_reserved_gib", number(2))),
    ("pool GiB", field("pool_gib", number(2))),
    ("J/step", _from_to("energy_per_step_j", number(1))),
    ("SM MHz", _from_to("sm_mhz", number(0))),
)
CPU = (
    *_NAME,
    ("captured", field("strategy", lambda text: tables.short(text, 44))),
    ("rounds", field("num_rounds")),
    ("parity", field("parity")),
    ("replays", field("replays")),
    ("graphs", field("num_graphs")),
    ("operators", field("num_operators")),
    ("eager ms", field("eager_ms", number(2))),
    ("step ms", field("step_ms", number(2))),
    ("status", field("status")),
)
# One table for a README: what was captured, what it gained, what it cost.
SUMMARY = (
    *_NAME,
    ("captured", field("strategy", lambda text: tables.short(text, 44))),
    ("base ms", _base_ms(1)),
    ("step ms", field("step_ms", number(1))),
    ("ceiling", field("ceiling", lambda value: f"{value:.2f}x")),
    *_JUDGED,
    ("over all layers", _ratio("across_speedup")),
    ("pool GiB", field("pool_gib", number(2))),
    ("parity", field("parity")),
    ("lacks", lambda row: row["lacks"] or None),
)


def _here(key, text=str):
    def cell(row):
        return text(row["here"][key]) if row["here"] and row["here"][key] is not None else None

    return cell


def _measured(row):
    here = row["here"]
    if here is None:
        return "not measured yet" + (" with all eagers" if row["lacks_eagers"] else "")
    status = "" if here["status"] == "pass" else f" ({here['status']})"
    # gpt3/bench overlap -> bench overlap
    return f"{here['label'].partition('/')[2]} {here['variant']}{status}"


def _whose(row):
    return "NVIDIA's" if row["is_nvidias"] else "our best"


def _published_for(row):
    """Figures are of NVIDIA's own mechanism."""
    return row["gain_range"] if row["is_nvidias"] else None


SUBMITTED = (
    ("model", field("title")),
    ("submission", field("submission")),
    ("scope", field("scope")),
    ("captured by", field("mechanism")),
    ("graphs", field("graphs")),
    ("published gain", field("gain_range")),
    ("source", lambda row: row["link"]),
)
MEASURED = (
    ("model", field("title")),
    ("mechanism", _whose),
    ("measured here", _measured),
    ("captured", _here("strategy", lambda text: tables.short(text.partition(",")[0], 25))),
    ("graphs", _here("num_graphs")),
    ("pool GiB", _here("pool_gib", number(2))),
    ("ceiling", _here("ceiling", lambda value: f"{value:.2f}x")),
    ("speed-up", lambda row: row["here"] and _alone("speedup")(row["here"])),
    ("95 %", lambda row: row["here"] and tables.bounds("speedup")(row["here"])),
    ("verdict, 99 %", lambda row: row["here"] and tables.verdict(row["here"])),
    ("hosts, pairs", lambda row: row["here"] and tables.hosts_pairs(row["here"])),
    ("parity", _here("parity")),
    ("NVIDIA published", _published_for),
)


# ------------------------------------------------------------------------------------------------
# Text

PARTS = ("summary", "speed", "host", "capture", "cost", "submitted", "measured", "sources", "notes")
# The summary repeats columns of the others: it is for a README, and leaves out what cannot run here and eager's kinds.
ALL = PARTS[1:]


def text_of(root, blocks, faults, parts=ALL, markdown=False, link_from=None, sweeps=(), whole=False) -> str:
    """The overview as text. link_from: the folder that links to records start from (Markdown; None: no links).

    whole: without rows of sessions that did not run all eagers of their model.
    """
    rows = rows_of(blocks)
    left_out = [row for row in rows if whole and row["missing_eagers"]]
    rows = [row for row in rows if row not in left_out]
    sections: dict[str, list[dict]] = {}
    for row in rows:
        title = row["gpu"] if row["device"] == "cuda" else f"CPU: {row['gpu']}"
        sections.setdefault(title, []).append(row)
    lines = []
    for title, own in sections.items():
        texts = _section(root, own, parts, markdown, link_from)
        lines += [_heading(title, markdown), *texts] if texts else []
    on_gpu = [title for title, own in sections.items() if own[0]["device"] == "cuda"]
    if "submitted" in parts:
        lines += [
            _heading("NVIDIA's submissions", markdown),
            _table(_linked(strategies([]), markdown), SUBMITTED, markdown, 7),
        ]
    if "measured" in parts:
        # A CPU shows no speed-up: it stands here only where nothing else was measured.
        for title in on_gpu or list(sections) or [""]:
            heading = f"The same five, measured here{f' on {title}' if title else ''}"
            found = [
                row | {"lacks_eagers": row["model"] in {each["model"] for each in left_out}}
                for row in strategies(sections.get(title, []))
            ]
            lines += [_heading(heading, markdown), _table(found, MEASURED, markdown, 4)]
    if "sources" in parts:
        lines.append(_list([_source(published, markdown) for published in PUBLISHED], markdown))
    if "notes" in parts:
        notes = [*_notes(root, blocks, rows, sweeps), *(f"left out: {fault}" for fault in faults)]
        lines.append(_list(notes, markdown))
    return "\n\n".join(line for line in lines if line)


def _section(root, rows, parts, markdown, link_from):
    on_gpu = {"summary": SUMMARY, "speed": SPEED, "host": HOST, "capture": CAPTURE, "cost": COST}
    if rows[0]["device"] == "cpu":
        columns = [CPU] if set(parts) & set(on_gpu) else []
    else:
        columns = [on_gpu[part] for part in parts if part in on_gpu]
    if link_from is not None:
        rows = [
            row | {"label": f"[{row['label']}]({os.path.relpath(Path(root) / row['folder'], link_from)})"}
            if (Path(root) / row["folder"]).is_dir()
            else row
            for row in rows
        ]
    measured = [row for row in rows if row["num_rounds"]]
    num_left = {id(CAPTURE): 3, id(CPU): 3, id(SUMMARY): 3}
    texts = []
    for each in columns:
        own = measured if each in (HOST, COST) else rows
        if each is SUMMARY:
            own = [row for row in rows if row["status"] != "unsupported" and row["kind"] not in ("eager", "control")]
        texts += [_table(own, each, markdown, num_left.get(id(each), 2))] if own else []
    return texts


def _table(rows, columns, markdown, num_left):
    lines = tables.cells(rows, columns)
    return tables.piped(lines, num_left) if markdown else tables.aligned(lines, num_left)


def _heading(text, markdown):
    return f"**{text}**" if markdown else f"{text}\n{'-' * len(text)}"


def _list(lines, markdown):
    return "\n".join(f"- {line}" if markdown else line for line in lines)


def _linked(rows, markdown):
    """Rows of strategies with `link`: the source, or on a console the name under which it stands below."""
    return [row | {"link": f"[{row['model']}]({row['source']})" if markdown else f"[{row['model']}]"} for row in rows]


def _source(published, markdown):
    link = f"[{published.model}]({published.source})" if markdown else f"[{published.model}] {published.source}"
    memory = f"; memory {published.memory}" if published.memory else ""
    return f"{link}: {published.gain}{memory}; {published.remark}"


def _notes(root, blocks, rows, sweeps):
    labels = labels_of(blocks)
    lines = []
    for block in blocks:
        runs = compare.timed(block.found)
        env = (runs or block.found)[-1]["env"]
        versions = "".join(f"{key} {env[key]}, " for key in ("torch", "cuda", "driver") if env[key])
        load = f", {block.host_load} busy processes beside each run" if block.host_load else ""
        count = block.runs["session"].nunique()
        lines.append(
            f"{labels[id(block)]}: {block.name}, x{block.num_gpus}, {count} session{'s' if count > 1 else ''}, "
            f"{len(runs)} timed runs{load}, {versions}{_commits(block.found)}"
        )
        if not any(not row["is_base"] for row in block.rows):
            lines.append(f"{labels[id(block)]}: the base alone, nothing to compare")
    for row in rows:
        if row["message"]:
            lines.append(f"{row['label']} {row['variant']}: {row['status']}: {tables.short(row['message'])}")
    if any(row["device"] == "cpu" for row in rows):
        lines.append("CPU: parity and replays; a host graph says nothing about the speed of a GPU")
    if any(row["break_even_steps"] for row in rows):
        lines.append("break-even counts compilation, capture, and what a variant's warm-up takes beyond eager's")
    if any(row["num_older"] for row in rows):
        lines.append(
            "older: sessions of other code, configuration, versions or schema, or with fewer eagers, not pooled"
        )
    if any(row["across_speedup"] for row in rows):
        lines.append("over all layers: against the best eager of all kinds of layer; speed-up: of the variant's own")
    for eagers in dict.fromkeys(row["missing_eagers"] for row in rows if row["missing_eagers"]):
        labels_of_them = dict.fromkeys(row["label"] for row in rows if row["missing_eagers"] == eagers)
        lines.append(f"not all eagers run, {eagers} missing: {', '.join(labels_of_them)}")
    lines += [f"{sweep.relative_to(root).as_posix()}: a sweep, left out" for sweep in sweeps]
    return lines


def _commits(found):
    """All commits that records name."""
    envs = {(r["env"]["git_sha"], bool(r["env"]["git_dirty"])) for r in found if r["env"]["git_sha"]}
    names = sorted(f"{sha[:12]}{' (changed)' if dirty else ''}" for sha, dirty in envs)
    return f"git {', '.join(names)}" if names else "no commit"
