"""Tables as text: the cells of rows, aligned for a screen or as Markdown.

Knows the rows of `benchmarks.rows.summarise`; reads no record. Columns are (heading, cell of a row); a cell is text, or
None where nothing is known.
"""

NOTHING = "-"
# The headline names the variant whose kernels allow so much more than the base's own.
CEILING_APART = 1.02

# ------------------------------------------------------------------------------------------------
# Any table


def cells(rows: list[dict], columns) -> list[list[str]]:
    """Heading and rows as text, without the columns that are empty in all rows."""
    lines = [[cell(row) for _, cell in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] is not None for line in lines)]
    heading = [columns[i][0] for i in kept]
    return [heading] + [[NOTHING if line[i] is None else line[i] for i in kept] for line in lines]


def aligned(lines: list[list[str]], num_left: int = 1) -> str:
    """ASCII, the first `num_left` columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i >= num_left else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def piped(lines: list[list[str]], num_left: int = 1) -> str:
    """The same as a Markdown table."""
    heading, *rest = lines
    rule = ["---" if i < num_left else "---:" for i in range(len(heading))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [heading, rule, *rest]
    )


def written(lines: list[list[str]], markdown: bool, num_left: int = 1) -> str:
    return (piped if markdown else aligned)(lines, num_left)


# ------------------------------------------------------------------------------------------------
# Cells


def field(key, text=str):
    return lambda row: None if row[key] is None else text(row[key])


def number(digits, scale=1.0):
    return lambda value: f"{value * scale:,.{digits}f}"


def times(value) -> str:
    """1.25x"""
    return f"{value:.2f}x"


def interval(key):
    """A speed-up with its 95 % interval where there is one."""

    def text(row):
        if row[key] is None:
            return None
        known = row[f"{key}_half_width"] is not None
        return f"{row[key]:.3f}x" + (f" [{row[f'{key}_low']:.3f}, {row[f'{key}_high']:.3f}]" if known else "")

    return text


def ratio(key):
    """The same, and 1 for the base."""
    return lambda row: "1" if row["is_base"] else interval(key)(row)


def plain_ratio(key):
    """1 for the base, else the speed-up alone."""
    return lambda row: "1" if row["is_base"] else None if row[key] is None else f"{row[key]:.3f}x"


def bounds(key):
    """A 95 % interval alone."""
    return lambda row: (
        None if row[f"{key}_half_width"] is None else f"{row[f'{key}_low']:.3f} to {row[f'{key}_high']:.3f}"
    )


def verdict(row):
    """The verdict at 99 % and what it holds for: faster (all hosts), faster on this host, faster on 1 host."""
    return f"{row['verdict']} {where(row)}".rstrip() if row["verdict"] else None


def where(row):
    """What a verdict holds for: "on this host", or "on 1 host" of the several that the ratio rests on; "" for all."""
    if row["scope"] != "on this host":
        return ""
    several, num = (row.get("num_hosts") or 1) > 1, row.get("num_judged_hosts")
    return f"on {num} host{'s' if num > 1 else ''}" if several else row["scope"]


def host_range(row, key="speedup"):
    """The lowest and the highest ratio of two or more hosts. key: speedup, or quiet_speedup."""
    low, high = (row[f"{key.removesuffix('speedup')}range_{end}"] for end in ("low", "high"))
    return None if low is None else f"{low:.3f} to {high:.3f}"


def two_hosts(row, key="speedup"):
    """What each of two hosts gives; nothing where there is an interval."""
    return None if row[f"{key}_half_width"] is not None else host_range(row, key)


def hosts_pairs(row):
    """Hosts whose sessions have the 3 pairs that count, and all pairs that the ratio rests on."""
    return f"{row['num_hosts']}, {row['num_pairs']}" if row["num_pairs"] else None


def counted(key):
    """A number, or nothing for 0 and for empty text."""
    return lambda row: str(row[key]) if row[key] else None


def ceiling(row):
    """1.02x; of how many runs, where the others were profiled at another clock: 1.02x (2/8)."""
    used, num_all = row["num_ceiling_runs"], row["num_pairs"] or row["num_rounds"]
    if row["ceiling"] is None:
        return None
    return times(row["ceiling"]) + (f" ({used}/{num_all})" if used < num_all else "")


def other_clock(row):
    """How many runs were profiled at another clock than timed, of all."""
    return f"{row['num_other_clock']}/{row['num_rounds']}" if row["num_other_clock"] else None


def short(text: str, limit: int = 200) -> str:
    """One line of at most `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ------------------------------------------------------------------------------------------------
# The tables of one folder


def _setup(row):
    known = [row[key] for key in ("warmup_s", "capture_s") if row[key] is not None]
    return f"{sum(known):.2f}" if known else None


def _cold_warm(row):
    if not row["compile_cold_s"]:
        return None
    warm = row["compile_warm_s"]
    return f"{row['compile_cold_s']:.1f} / " + (NOTHING if warm is None else f"{warm:.1f}")


def _by_p10(row):
    """Nothing where a window holds too few steps for a 10th percentile, of the base too."""
    return None if row["p10_ms"] is None else ratio("quiet_speedup")(row)


def _all_layers(row):
    """Against the best eager of all kinds of layer; nothing where a model has one kind."""
    return "1" if row["across_base"] == row["variant"] else interval("across_speedup")(row)


VARIANT = ("variant", field("variant"))
STEP = ("step ms", field("step_ms", number(2)))
PARITY = ("parity", field("parity"))
STATUS = ("status", field("status"))
GRAPHS = (("graphs", field("num_graphs")), ("replays", field("replays")))
CEILING = ("ceiling", ceiling)
OLDER_LACKS = (("older", counted("num_older")), ("lacks", counted("lacks")))
MEMORY = (("reserved GiB", field("peak_reserved_gib", number(2))), ("pool GiB", field("pool_gib", number(2))))

# Two for a GPU, because one would not fit on a screen.
GAIN = (
    VARIANT,
    ("rounds", field("num_rounds")),
    STEP,
    ("p95/p50", field("tail", number(3))),
    ("speed-up", plain_ratio("speedup")),
    ("95 %", bounds("speedup")),
    ("verdict, 99 %", verdict),
    ("host by host", host_range),
    ("hosts, pairs", hosts_pairs),
    ("by p10", _by_p10),
    ("fwd+bwd", ratio("model_speedup")),
    ("over eager_sync", interval("sync_speedup")),
    ("layer", field("layer")),
    ("all layers", _all_layers),
    PARITY,
    STATUS,
    *OLDER_LACKS,
)
COST = (
    VARIANT,
    ("issue ms", field("issue_ms", number(2))),
    ("busy ms", field("busy_ms", number(2))),
    ("at another clock", other_clock),
    CEILING,
    ("max(1, issue/busy)", field("law", times)),
    ("queue model", field("queue_model", times)),
    ("idle %", field("idle_fraction", number(1, 100))),
    ("profiled idle %", field("profiled_idle_fraction", number(1, 100))),
    ("in graphs %", field("graph_kernel_share", number(0, 100))),
    ("optimizer ms", field("optimizer_ms", number(2))),
    *MEMORY,
    ("warm-up+capture s", _setup),
    ("compile s cold/warm", _cold_warm),
    *GRAPHS,
    ("J/step", field("energy_j", number(1))),
    ("SM MHz", field("sm_mhz", number(0))),
)
CPU = (
    VARIANT,
    ("rounds", field("num_rounds")),
    PARITY,
    ("replays", field("replays")),
    ("graphs", field("num_graphs")),
    ("operators", field("num_operators")),
    STEP,
    ("warm-up+capture s", _setup),
    STATUS,
)


def of_folder(rows: list[dict]) -> dict:
    """The columns of each table that rows of one folder have, by name: gain and cost, or on a CPU parity; report."""
    if not rows:
        return {}
    named = {"parity": CPU} if rows[0]["device"] == "cpu" else {"gain": GAIN, "cost": COST}
    own = of_report(rows)
    return named | ({"report": (VARIANT, *own)} if own else {})


def of_report(rows: list[dict]) -> tuple:
    """The columns of what the model itself reports of its runs, in its order; none where no row has a report."""
    names = dict.fromkeys(name for row in rows for name in row.get("report") or {})
    return tuple((name, lambda row, name=name: _plain((row.get("report") or {}).get(name))) for name in names)


def _plain(value):
    """A number with three digits or more, yes or no."""
    if value is None or isinstance(value, bool):
        return {None: None, True: "yes", False: "no"}[value]
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def folder_text(rows: list[dict], markdown: bool = False) -> str:
    """The tables of one folder, then a line with the message of each variant that has one."""
    mark = "- " if markdown else ""
    messages = [f"{mark}{row['variant']}: {message_of(row)}" for row in rows if row["message"]]
    parts = [written(cells(rows, columns), markdown) for columns in of_folder(rows).values()]
    return "\n\n".join([*parts, *(["\n".join(messages)] if messages else [])])


def message_of(row: dict) -> str:
    """The status of a row that did not pass, and its message."""
    return short(row["message"]) if row["status"] == "pass" else f"{row['status']}: {short(row['message'])}"


def headline(rows: list[dict]) -> str:
    """The most that could be gained, which a reader needs before any gain; empty where busy time is not known.

    It is given for the base's own kernels, and for another variant's of the same sessions where these allow over
    CEILING_APART more.
    """
    row = next((row for row in rows if row["is_base"]), None)
    if row is None or row["device"] != "cuda" or row["step_ms"] is None or row["busy_ms"] is None:
        return ""
    text = f"{row['variant']}: step {row['step_ms']:.1f} ms, busy {row['busy_ms']:.1f} ms"
    if row["ceiling"] is None:
        return f"{text} (no ceiling: profiled at another clock)"
    text += f" -> at most {times(row['ceiling'])} to gain"
    near = [other for other in rows if set(other["pooled"]) & set(row["pooled"])]
    own = [other for other in near if other["base"] == row["variant"] and other["ceiling"]]
    best = max(own, key=lambda other: other["ceiling"], default=row)
    if best["ceiling"] > CEILING_APART * row["ceiling"]:
        text += f" with these kernels, {times(best['ceiling'])} with those of {best['variant']}"
    stretch = max((other["profile_stretch"] or 1.0 for other in near), default=1.0)
    # Said where it changes the second decimal.
    if round(row["ceiling"] * stretch, 2) <= round(row["ceiling"], 2):
        return text
    return (
        f"{text}, {times(max(row['ceiling'], best['ceiling']) * stretch)} if busy reads "
        f"{100 * (stretch - 1):.1f} % long (replays take that much longer under the profiler)"
    )
