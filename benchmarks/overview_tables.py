"""The overview as text: columns of its tables, headings, sources and notes, for a screen or as Markdown.

There are four tables of the same rows in the same order, because one would not fit on a screen. Variants that did not
pass are only in the first and third. Then comes NVIDIA's table of the five strategies: what was submitted, what its
mechanism gains here, and below it this suite's best other capture.
"""

import os
from pathlib import Path

from benchmarks import frame, tables
from benchmarks.overview_rows import labels_of, rows_of, strategies
from benchmarks.published import PUBLISHED, rate_of
from benchmarks.tables import counted, field, interval, number, plain_ratio

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


def _quiet_to_busy(row):
    """The variant's step on a quiet host, and beside busy processes."""
    known = row["step_ms"] and row["contended_step_ms"]
    return f"{row['step_ms']:,.2f} -> {row['contended_step_ms']:,.2f}" if known else None


def _verdict(row):
    """The verdict, or the status of a variant that did not pass."""
    return tables.verdict(row) if row["status"] == "pass" else row["status"]


def _base_ms(row):
    """The base's step; its name where it is not eager."""
    if row["base_ms"] is None:
        return None
    return number(2)(row["base_ms"]) + ("" if row["base"] in (None, "eager") else f" ({row['base']})")


def _captured(limit):
    return "captured", field("strategy", lambda text: tables.short(text, limit))


def _range(row):
    """The 95 % interval; of two hosts, where it would say nothing, what each of them gives."""
    return tables.bounds("speedup")(row) or tables.two_hosts(row)


_NAME = (("model", field("label")), tables.VARIANT)
_JUDGED = (
    ("speed-up", plain_ratio("speedup")),
    ("95 %, 2 hosts", _range),
    ("verdict, 99 %", _verdict),
)
SPEED = (
    *_NAME,
    ("base ms", _base_ms),
    tables.STEP,
    tables.CEILING,
    *_JUDGED,
    ("hosts, pairs", tables.hosts_pairs),
    # Their intervals stand in the next table.
    ("by p10", plain_ratio("quiet_speedup")),
    ("all layers", plain_ratio("across_speedup")),
    *tables.OLDER_LACKS,
)
_VERDICT = ("verdict", "scope", "num_hosts", "num_judged_hosts")
HOST = (
    *_NAME,
    ("speed-up", interval("speedup")),
    ("by p10", interval("quiet_speedup")),
    ("p10, 2 hosts", lambda row: tables.two_hosts(row, "quiet_speedup")),
    ("all layers", interval("across_speedup")),
    ("beside busy processes", interval("contended_speedup")),
    (
        "verdict there, 99 %",
        lambda row: tables.verdict({key: row[f"contended_{key}"] for key in _VERDICT}),
    ),
    ("processes", field("contended_host_load")),
    ("step ms, there", _quiet_to_busy),
    ("p95/p50", _from_to("tail", number(3))),
    ("issue ms", _from_to("issue_ms", number(1))),
)
CAPTURE = (
    *_NAME,
    _captured(40),
    ("graphs", lambda row: None if row["strategy"] is None else str(row["num_graphs"])),
    ("replays", field("replays")),
    tables.PARITY,
    ("warm-up s", field("warmup_s", number(2))),
    ("compile s", lambda row: number(1)(row["compile_cold_s"]) if row["compile_cold_s"] else None),
    ("capture s", field("capture_s", number(2))),
    ("break-even", lambda row: "never" if row["break_even_never"] else field("break_even_steps", number(0))(row)),
    # NVIDIA's figures are of graphs, so they stand beside graphs.
    ("NVIDIA published", lambda row: row["published_gain_range"] if row["num_graphs"] else None),
    tables.STATUS,
)
COST = (
    *_NAME,
    ("idle %", _from_to("idle_fraction", number(1, 100))),
    ("kernels", _from_to("num_kernels", number(0))),
    ("reserved GiB", _from_to("peak_reserved_gib", number(2))),
    tables.MEMORY[1],
    ("J/step", _from_to("energy_j", number(1))),
    ("SM MHz", _from_to("sm_mhz", number(0))),
)
CPU = (
    *_NAME,
    _captured(44),
    ("rounds", field("num_rounds")),
    tables.PARITY,
    *tables.GRAPHS[::-1],
    ("operators", field("num_operators")),
    ("eager ms", field("base_ms", number(2))),
    tables.STEP,
    tables.STATUS,
)


def _here(cell):
    """A column of what was measured here, where something was."""
    return lambda row: row["here"] and cell(row["here"])


def _measured(row):
    here = row["here"]
    if here is None:
        return "not measured yet"
    # gpt3/bench overlap -> bench overlap
    status = "" if here["status"] == "pass" else f" ({here['status']})"
    return f"{here['label'].partition('/')[2]} {here['variant']}{status}"


def _published(key):
    return lambda row: getattr(row["published"], key)


SUBMITTED = (
    ("model", _published("title")),
    *((name, _published(name)) for name in ("submission", "scope")),
    ("captured by", _published("mechanism")),
    ("graphs", _published("graphs")),
    ("published gain", _published("gain_range")),
    ("source", lambda row: row["link"]),
)
MEASURED = (
    ("model", _published("title")),
    ("mechanism", lambda row: "NVIDIA's" if row["is_nvidias"] else "our best"),
    ("measured here", _measured),
    ("captured", _here(field("strategy", lambda text: tables.short(text.partition(",")[0], 22)))),
    ("graphs", _here(field("num_graphs"))),
    ("pool GiB", _here(tables.MEMORY[1][1])),
    ("ceiling", _here(tables.CEILING[1])),
    ("speed-up", _here(plain_ratio("speedup"))),
    ("95 %, 2 hosts", _here(_range)),
    ("verdict, 99 %", _here(tables.verdict)),
    ("hosts, pairs", _here(tables.hosts_pairs)),
    ("parity", _here(field("parity"))),
    ("lacks", _here(counted("lacks"))),
    # Figures are of NVIDIA's own mechanism.
    ("NVIDIA published", lambda row: row["published"].gain_range if row["is_nvidias"] else None),
)


# ------------------------------------------------------------------------------------------------
# Text

PARTS = ("speed", "host", "capture", "cost", "submitted", "measured", "sources", "notes")


def text_of(root, blocks, faults, parts=PARTS, markdown=False, link_from=None, sweeps=(), all_rows=True) -> str:
    """The overview as text. link_from: the folder that links to records start from (Markdown; None: no links).
    Not all_rows: without rows of sessions that did not run all eagers of their model."""
    rows = [row for row in rows_of(blocks) if all_rows or not row["missing_eagers"]]
    sections: dict[str, list[dict]] = {}
    for row in rows:
        title = row["gpu"] if row["device"] == "cuda" else f"CPU: {row['gpu']}"
        sections.setdefault(title, []).append(row)
    lines = []
    for title, own in sections.items():
        texts = _section(root, own, parts, markdown, link_from)
        lines += [_heading(title, markdown), *texts] if texts else []
    links = {each.model: f"[{each.model}]({each.source})" if markdown else f"[{each.model}]" for each in PUBLISHED}
    if "submitted" in parts:
        found = [{"published": each, "link": links[each.model]} for each in PUBLISHED]
        lines += [_heading("NVIDIA's submissions", markdown), _table(found, SUBMITTED, markdown, 7)]
    if "measured" in parts:
        on_gpu = [title for title, own in sections.items() if own[0]["device"] == "cuda"]
        # A CPU shows no speed-up: it stands here only where nothing else was measured.
        for title in on_gpu or list(sections) or [""]:
            heading = f"The same five, measured here{f' on {title}' if title else ''}"
            found = strategies(sections.get(title, []))
            lines += [_heading(heading, markdown), _table(found, MEASURED, markdown, 4)]
    if "sources" in parts:
        texts = []
        for each in PUBLISHED:
            link = links[each.model] if markdown else f"{links[each.model]} {each.source}"
            memory = f"; memory {each.memory}" if each.memory else ""
            texts.append(f"{link}: {each.gain}{memory}; {each.remark}")
            rate = rate_of(each.model)
            if rate:
                source = f"[{rate.where}]({rate.source})" if markdown else f"{rate.where}, {rate.source}"
                texts.append(f"{each.title}, {source}: {rate.tflops:.0f} TFLOP/s a GPU; {rate.remark}")
        lines.append(_list(texts, markdown))
    if "notes" in parts:
        notes = [*_notes(root, blocks, rows, sweeps), *(f"left out: {fault}" for fault in faults)]
        lines.append(_list(notes, markdown))
    return "\n\n".join(line for line in lines if line)


def _section(root, rows, parts, markdown, link_from):
    # (columns, of the left), and of which rows: all, or those that were timed.
    on_gpu = {"speed": (SPEED, 2), "host": (HOST, 2), "capture": (CAPTURE, 3), "cost": (COST, 2)}
    chosen = {part: on_gpu[part] for part in parts if part in on_gpu}
    if rows[0]["device"] == "cpu":
        chosen = {"cpu": (CPU, 3)} if chosen else {}
    if link_from is not None:
        rows = [row | {"label": linked(root, row, link_from)} for row in rows]
    measured = [row for row in rows if row["num_rounds"]]
    texts = []
    for part, (columns, num_left) in chosen.items():
        own = measured if part in ("host", "cost") else rows
        texts += [_table(own, columns, markdown, num_left)] if own else []
    return texts


def linked(root, row: dict, link_from) -> str:
    """A row's label, with a link to the folder of its records where there is one."""
    folder = Path(root) / row["folder"]
    return f"[{row['label']}]({os.path.relpath(folder, link_from)})" if folder.is_dir() else row["label"]


def _table(rows, columns, markdown, num_left):
    return tables.written(tables.cells(rows, columns), markdown, num_left)


def _heading(text, markdown):
    return f"**{text}**" if markdown else f"{text}\n{'-' * len(text)}"


def _list(lines, markdown):
    return "\n".join(f"- {line}" if markdown else line for line in lines)


# What a word of the tables means, where a row has it.
_WORDS = {
    "break_even_steps": "break-even counts compilation, capture, and what a variant's warm-up takes beyond eager's",
    "num_older": "older: sessions of other code, configuration, versions or schema, or with fewer eagers, not pooled",
    "range_low": "2 hosts: what each of two hosts gives, whose 95 % interval would say nothing",
    "across_speedup": "all layers: against the best eager of all kinds of layer; speed-up: of the variant's own",
}


def _notes(root, blocks, rows, sweeps):
    labels = labels_of(blocks)
    lines = []
    for block in blocks:
        runs = frame.timed(block.found)
        env = (runs or block.found)[-1]["env"]
        versions = "".join(f"{key} {env[key]}, " for key in ("torch", "cuda", "driver") if env[key])
        load = f", {block.host_load} busy processes beside each run" if block.host_load else ""
        count = block.runs["session"].nunique()
        lines.append(
            f"{labels[id(block)]}: {block.name}, x{block.num_gpus}, {count} session{'s' if count > 1 else ''}, "
            f"{len(runs)} timed runs{load}, {versions}{_commits(block.found)}"
        )
        if all(row["is_base"] for row in block.rows):
            lines.append(f"{labels[id(block)]}: the base alone, nothing to compare")
    lines += [f"{r['label']} {r['variant']}: {tables.message_of(r)}" for r in rows if r["message"]]
    if any(row["device"] == "cpu" for row in rows):
        lines.append("CPU: parity and replays; a host graph says nothing about the speed of a GPU")
    lines += [text for key, text in _WORDS.items() if any(row[key] for row in rows)]
    for eagers in dict.fromkeys(row["missing_eagers"] for row in rows if row["missing_eagers"]):
        labels_of_them = dict.fromkeys(row["label"] for row in rows if row["missing_eagers"] == eagers)
        lines.append(f"not all eagers run, {eagers} missing: {', '.join(labels_of_them)}")
    return lines + [f"{sweep.relative_to(root).as_posix()}: a sweep, left out" for sweep in sweeps]


def _commits(found):
    """All commits that records name."""
    envs = {(r["env"]["git_sha"], bool(r["env"]["git_dirty"])) for r in found if r["env"]["git_sha"]}
    names = sorted(f"{sha[:12]}{' (changed)' if dirty else ''}" for sha, dirty in envs)
    return f"git {', '.join(names)}" if names else "no commit"
