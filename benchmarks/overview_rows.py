"""Groups of sessions below a root, and the rows of the overview: each variant against the base of its sessions.

Each group is a block of rows. A group measured beside busy processes joins the quiet group of the same work.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import compare, frame, rows
from benchmarks.published import PUBLISHED, of_model
from benchmarks.rows import MEASURING

# The share of a model that says most about it, for the table of strategies.
PRESET_ORDER = ("mlperf", "full", "bench", "tiny")

# What stands in a row for eager and for the variant: name in the overview, name in a folder's row.
OF_BOTH = {
    "tail_p95_over_p50": "tail",
    "issue_ms": "issue_ms",
    "busy_ms": "busy_ms",
    "idle_fraction": "idle_fraction",
    "num_kernels": "num_kernels",
    "peak_reserved_gib": "peak_reserved_gib",
    "energy_per_step_j": "energy_j",
    "sm_mhz": "sm_mhz",
}

# ------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Block:
    """One group of sessions: its runs, the rows of its table, and what all its records have in common.

    name: the group's path below the root. gpu: the GPU's name, or the CPU's. work: the configuration, without
    how it is measured. runs: a frame. found: its records.
    """

    folder: Path
    name: str
    model: str
    preset: str
    device: str
    gpu: str
    num_gpus: int
    host_load: int
    sources: frozenset
    work: dict
    runs: object
    found: list
    rows: list

    @property
    def identity(self) -> tuple:
        return self.device, self.gpu, self.model, self.preset, self.num_gpus

    def base_of(self, row: dict) -> dict | None:
        """The row of its base: of its own kind of layer, and for a base that of the best eager of all kinds."""
        names = (row["base"], row["across_base"])
        found = [other for name in names for other in self.rows if name is not None and other["variant"] == name]
        return next(iter(found), None) or next((other for other in self.rows if other["is_base"]), None)


def read(root) -> tuple[list[Block], list[str], list[str]]:
    """Blocks of all groups, a line for each record left out, and a line for each group that cannot be shown: it mixes
    what must not mix, or has timed runs of everything but eager.
    """
    return blocks_of(frame.read(root), root)


def blocks_of(runs: frame.Runs, root) -> tuple[list[Block], list[str], list[str]]:
    """The same of runs that were read before."""
    root = Path(root)
    blocks, refused = [], []
    for group, part in runs.frame.groupby("group", sort=True):
        folder = root if group == "." else root / group
        name = root.resolve().name if group == "." else group
        lack = compare.missing_base(part)
        if lack:
            refused.append(f"{name}: {lack}")
            continue
        try:
            table = rows.summarise(part)
        except compare.Mixed as mixed:
            refused.append(f"{name}: {mixed}")
            continue
        blocks.append(_block(folder, name, part, table))
    return sorted(blocks, key=_order), list(runs.faults), refused


def _block(folder, name, part, table):
    found = frame.records_of(part)
    # A run that came to nothing may not know what its preset became, nor its machine. The newest speaks.
    sound = compare.timed(found) or [record for record in found if record["status"] == "pass"] or found
    first = sound[-1]
    return Block(
        folder=folder,
        name=name,
        model=first["model"],
        preset=first["preset"],
        device=first["device"],
        gpu=(first["env"]["gpu_name"] if first["device"] == "cuda" else first["env"]["cpu"]) or "unknown",
        num_gpus=first["env"]["world_size"] or 1,
        host_load=first["host_load"],
        sources=frozenset(record["env"]["source_hash"] for record in sound),
        work={key: value for key, value in first["config"].items() if key not in MEASURING},
        runs=part,
        found=found,
        rows=table,
    )


def _order(block):
    """cuda before cpu, then by GPU; models as in the table of published figures."""
    models = [published.model for published in PUBLISHED]
    place = models.index(block.model) if block.model in models else len(models)
    return block.device != "cuda", block.gpu, place, block.model, block.preset, block.num_gpus, block.name


# ------------------------------------------------------------------------------------------------
# Rows


def rows_of(blocks: list[Block]) -> list[dict]:
    """One row for each variant of each block that is not the best eager, in the order of the blocks.

    Names end in their unit; a name that begins with eager_ is the base's. What is not known is None.
    """
    labels = labels_of(blocks)
    folded = _fold(blocks)
    busy = {id(loaded) for partners in folded.values() for loaded in partners}
    table = []
    for block in blocks:
        if id(block) not in busy:
            table += [
                _row(block, row, block.base_of(row), labels[id(block)], folded.get(id(block), []))
                for row in block.rows
                if not (row["is_base"] and row["across_base"] in (None, row["variant"]))
            ]
    return table


def labels_of(blocks):
    """model/preset of each block by id, several GPUs, and what its folder's name adds and what else tells it apart."""
    labels = {}
    for block in blocks:
        gpus = f" x{block.num_gpus}" if block.num_gpus > 1 else ""
        load = f" load {block.host_load}" if block.host_load else ""
        labels[id(block)] = f"{block.model}/{block.preset}{gpus}{load}"
        if block.folder.name.startswith(f"{block.model}-{block.preset}-") and not block.host_load:
            labels[id(block)] += f" {_short_name(block)}"
    for name_of in (_short_name, lambda block: f"({block.name})"):
        texts = [(block.device, block.gpu, labels[id(block)]) for block in blocks]
        for block, text in zip(blocks, texts, strict=True):
            if texts.count(text) > 1 and not text[-1].endswith(f" {name_of(block)}"):
                labels[id(block)] = f"{text[-1]} {name_of(block)}".rstrip()
    return labels


def _short_name(block):
    """What a folder's name says beyond model and preset: gpt3-bench-overlap -> overlap."""
    prefix = f"{block.model}-{block.preset}"
    return block.folder.name.removeprefix(prefix).strip("-_ ")


def _fold(blocks):
    """For each quiet block, by id, the blocks measured under load that belong to it, most processes first.

    Same GPU type, model, preset, GPUs and configuration; of the same source where a quiet folder has that.
    A loaded block with a variant that no quiet block has stays a block of its own.
    """
    folded: dict[int, list[Block]] = {}
    quiet = [block for block in blocks if not block.host_load]
    for loaded in sorted((block for block in blocks if block.host_load), key=lambda block: -block.host_load):
        partners = [block for block in quiet if block.identity == loaded.identity and block.work == loaded.work]
        partners = [block for block in partners if block.sources & loaded.sources] or partners
        known = {row["variant"] for block in partners for row in block.rows}
        if all(row["variant"] in known for row in loaded.rows):
            for block in partners:
                folded.setdefault(id(block), []).append(loaded)
    return folded


def _row(block, row, eager, label, loaded):
    published = of_model(block.model)

    def of_eager(key):
        return eager[key] if eager else None

    result = {
        "label": label,
        "folder": block.name,
        "model": block.model,
        "preset": block.preset,
        "device": block.device,
        "gpu": block.gpu,
        "num_gpus": block.num_gpus,
        "host_load": block.host_load,
        **{key: row[key] for key in ("variant", "status", "message", "strategy", "num_graphs", "num_operators")},
        **{key: row[key] for key in ("replays", "parity", "max_rel_diff", "num_rounds", "num_pairs", "num_hosts")},
        **{key: row[key] for key in ("kind", "num_sessions", "num_older", "lacks", "graph_kernel_share")},
        "missing_eagers": ", ".join(row["missing_eagers"]),
        "base": row["base"] or row["across_base"],
        "eager_ms": row["base_ms"] or of_eager("step_ms"),
        "step_ms": row["step_ms"],
        "ceiling": row["ceiling"],
        **{key: row[key] for key in _with_interval("speedup")},
        **{key: row[key] for key in ("verdict", "scope", "range_low", "range_high")},
        **{key: row[key] for key in _with_interval("quiet_speedup")},
        "across_base": row["across_base"],
        **{key: row[key] for key in _with_interval("across_speedup")},
        **_under_load(row["variant"], loaded),
    }
    for name, key in OF_BOTH.items():
        result[f"eager_{name}"], result[name] = of_eager(key), row[key]
    result |= {key: row[key] for key in ("pool_gib", "warmup_s", "capture_s")}
    result["compile_s"] = row["compile_cold_s"]
    result["break_even_steps"] = break_even_steps(row, eager) if row["verdict"] == "faster" else None
    result["break_even_never"] = row["verdict"] in ("slower", "same")
    result["published_gain"] = published.gain if published else None
    result["published_gain_range"] = published.gain_range if published else None
    result["published_source"] = published.source if published else None
    return result


def _with_interval(key):
    return key, f"{key}_low", f"{key}_high", f"{key}_half_width"


def _under_load(variant, loaded):
    """The speed-up beside the most busy processes that this variant was measured with."""
    found = [(block, row) for block in loaded for row in block.rows if row["variant"] == variant]
    block, row = found[0] if found else (None, None)
    return {
        "contended_host_load": block.host_load if block else None,
        "contended_folder": block.name if block else None,
        **{f"contended_{key}": row[key] if row else None for key in _with_interval("speedup")},
        "contended_verdict": row["verdict"] if row else None,
        "contended_scope": row["scope"] if row else None,
    }


def setup_s(row: dict, eager: dict) -> float | None:
    """Seconds a variant takes before its first step that eager does not; None where the variant's are not known.

    Compilation, capture, and what its warm-up takes beyond eager's. row, eager: of `compare.summarise`.
    """
    known = [row[key] for key in ("compile_cold_s", "capture_s", "warmup_s")]
    if known == [None] * 3:
        return None
    *own, warmup = (seconds or 0.0 for seconds in known)
    return sum(own) + max(0.0, warmup - (eager["warmup_s"] or 0.0))


def step_gain_ms(row: dict, eager: dict) -> float:
    """What a step gains, by the speed-up of the paired rounds and not by the difference of two medians."""
    return eager["step_ms"] * (1 - 1 / row["speedup"])


def break_even_steps(row: dict, eager: dict) -> float | None:
    """Steps after which the seconds of `setup_s` are won back by a variant's shorter step; None: never."""
    seconds, gain_ms = setup_s(row, eager), step_gain_ms(row, eager)
    return 1e3 * seconds / gain_ms if seconds is not None and gain_ms > 0 else None


# ------------------------------------------------------------------------------------------------
# NVIDIA's table of the five strategies


def strategies(rows: list[dict]) -> list[dict]:
    """Rows for each submission of NVIDIA's: what it captured and gained, and beside it what was measured here.

    First the variant that stands for NVIDIA's mechanism (is_nvidias), measured or not; then, where there is one, the
    best other capture of this suite's own. Both are `here`: of rows of one GPU type or CPU, quiet ones before those
    under load, those with an interval before those of one round, then the model's largest preset on the most GPUs. Of
    several folders NVIDIA's is of the one with the most rounds; best is the highest lower end of the speed-up's
    interval at the same preset, if it was measured there, without what torch.compile made.
    """
    found = []
    for published in PUBLISHED:
        own = [row for row in rows if row["model"] == published.model]
        others = [row for row in own if row["variant"] != published.variant and _is_own_capture(row)]
        theirs = [row for row in own if row["variant"] == published.variant]
        nvidias = min(theirs, key=lambda row: (*_share(row), -row["num_rounds"]), default=None)
        found.append({**asdict(published), "here": nvidias, "is_nvidias": True})
        beside = [row for row in others if nvidias and _share(row) == _share(nvidias)] or others
        best = min(beside, key=lambda row: (*_share(row), -_lower_end(row), -row["num_rounds"]), default=None)
        if best:
            found.append({**asdict(published), "here": best, "is_nvidias": False})
    return found


def _share(row):
    # A GPU that holds fewer layers names its preset bench-l6.
    preset = row["preset"].partition("-")[0]
    size = PRESET_ORDER.index(preset) if preset in PRESET_ORDER else len(PRESET_ORDER)
    return bool(row["host_load"]), row["speedup_low"] is None, size, -row["num_gpus"]


def _is_own_capture(row):
    return row["status"] == "pass" and row["num_graphs"] and row["kind"] == "graph"


def _lower_end(row):
    known = (row["speedup_low"], row["speedup"] and row["speedup"] - 1)
    return next((value for value in known if value is not None), 0.0)
