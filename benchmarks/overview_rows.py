"""Folders of records below a root, and the rows of the overview: each variant against eager of its own folder.

Each folder is a block of rows: what ran in different sessions is never paired. A folder measured beside busy
processes joins the quiet folder of the same work.
"""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import compare
from benchmarks.published import PUBLISHED, of_model

BASE = "eager"
# How a run is measured, not what a step computes: folders that differ in these alone did the same work.
MEASURING = ("min_steps", "min_window_s", "warmup_min_s", "warmup_max_s")
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

_RECORD_NAME = re.compile(r".+\.r\d+\.json")

# ------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Block:
    """One folder: its sound records, the rows of its table, and what all its records have in common.

    name: the folder's path below the root. gpu: the GPU's name, or the CPU's. work: the configuration, without
    how it is measured.
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
    found: list
    rows: list

    @property
    def identity(self) -> tuple:
        return self.device, self.gpu, self.model, self.preset, self.num_gpus


def find_folders(root) -> tuple[list[Path], list[Path]]:
    """Folders of records at or below `root`, and folders of sweeps, whose points are left out; both sorted.

    Raises FileNotFoundError when there is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    folders, sweeps = [], []
    for place, below, files in os.walk(root):
        here = Path(place)
        if "sweep.json" in files and here != root:
            sweeps.append(here)
            below.clear()
            continue
        below[:] = [name for name in below if not name.startswith(".")]
        if any(_RECORD_NAME.fullmatch(name) for name in files):
            folders.append(here)
    return sorted(folders), sorted(sweeps)


def read(root) -> tuple[list[Block], list[str], list[str]]:
    """Blocks of all folders, a line for each unsound file, and a line for each folder that mixes what must not mix."""
    root = Path(root)
    blocks, faults, refused = [], [], []
    for folder in find_folders(root)[0]:
        name = folder.relative_to(root).as_posix() if folder != root else folder.resolve().name
        found, unsound = compare.load(folder)
        faults += [fault.replace(f"{folder}/", f"{name}/") for fault in unsound]
        try:
            rows = compare.summarise(found, BASE)
        except compare.Mixed as mixed:
            refused.append(f"{name}: {mixed}")
            continue
        if found:
            blocks.append(_block(folder, name, found, rows))
    return sorted(blocks, key=_order), faults, refused


def _block(folder, name, found, rows):
    # A run that came to nothing may not know what its preset became, nor its machine.
    sound = compare.timed(found) or [record for record in found if record["status"] == "pass"] or found
    first = sound[0]
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
        found=found,
        rows=rows,
    )


def _order(block):
    """cuda before cpu, then by GPU; models as in the table of published figures."""
    models = [published.model for published in PUBLISHED]
    place = models.index(block.model) if block.model in models else len(models)
    return block.device != "cuda", block.gpu, place, block.model, block.preset, block.num_gpus, block.name


# ------------------------------------------------------------------------------------------------
# Rows


def rows_of(blocks: list[Block]) -> list[dict]:
    """One row for each variant of each block that is not eager, in the order of the blocks.

    Names end in their unit; a name that begins with eager_ is the base's. What is not known is None.
    """
    labels = labels_of(blocks)
    folded = _fold(blocks)
    busy = {id(loaded) for partners in folded.values() for loaded in partners}
    rows = []
    for block in blocks:
        if id(block) not in busy:
            eager = next((row for row in block.rows if row["is_base"]), None)
            rows += [
                _row(block, row, eager, labels[id(block)], folded.get(id(block), []))
                for row in block.rows
                if not row["is_base"]
            ]
    return rows


def labels_of(blocks):
    """model/preset of each block by id, with what else tells it apart: number of GPUs, host load, folder."""
    many = {block.gpu for block in blocks if block.num_gpus > 1}
    labels = {}
    for block in blocks:
        gpus = f" x{block.num_gpus}" if block.gpu in many else ""
        load = f" load {block.host_load}" if block.host_load else ""
        labels[id(block)] = f"{block.model}/{block.preset}{gpus}{load}"
    for name_of in (_short_name, lambda block: f"({block.name})"):
        texts = [(block.device, block.gpu, labels[id(block)]) for block in blocks]
        for block, text in zip(blocks, texts, strict=True):
            if texts.count(text) > 1:
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
        **{key: row[key] for key in ("replays", "parity", "max_rel_diff", "num_rounds", "num_pairs")},
        "eager_ms": of_eager("step_ms"),
        "step_ms": row["step_ms"],
        "ceiling": of_eager("ceiling"),
        **{key: row[key] for key in _with_interval("speedup")},
        "verdict": row["verdict"],
        **{key: row[key] for key in _with_interval("quiet_speedup")},
        **_under_load(row["variant"], loaded),
    }
    for name, key in OF_BOTH.items():
        result[f"eager_{name}"], result[name] = of_eager(key), row[key]
    result |= {key: row[key] for key in ("pool_gib", "warmup_s", "capture_s")}
    result["compile_s"] = row["compile_cold_s"]
    result["break_even_steps"] = _break_even_steps(result)
    result["break_even_never"] = row["verdict"] in ("slower", "same")
    result["published_gain"] = published.gain if published else None
    result["published_gain_range"] = published.gain_range if published else None
    result["published_source"] = published.source if published else None
    return result


def _with_interval(key):
    return key, f"{key}_low", f"{key}_high", f"{key}_half_width"


def _under_load(variant, loaded):
    """The speed-up beside the most busy processes that this variant was measured with."""
    rows = [(block, row) for block in loaded for row in block.rows if row["variant"] == variant]
    block, row = rows[0] if rows else (None, None)
    return {
        "contended_host_load": block.host_load if block else None,
        "contended_folder": block.name if block else None,
        **{f"contended_{key}": row[key] if row else None for key in _with_interval("speedup")},
        "contended_verdict": row["verdict"] if row else None,
    }


def _break_even_steps(row):
    """Steps that pay for warm-up, compilation and capture; None where a gain is not settled."""
    if row["verdict"] != "faster":
        return None
    cost_s = sum(row[key] or 0.0 for key in ("warmup_s", "compile_s", "capture_s"))
    return cost_s * 1e3 / (row["eager_ms"] * (1 - 1 / row["speedup"]))


# ------------------------------------------------------------------------------------------------
# NVIDIA's table of the five strategies


def strategies(rows: list[dict]) -> list[dict]:
    """A row for each submission of NVIDIA's: what it captured and gained, and beside it what was measured here.

    Here: of rows of one GPU type or CPU, the model's largest preset on the most GPUs, its variant `graph`
    (where it has none, the first with graphs), of several folders the one with the most rounds.
    """
    return [{**asdict(published), "here": _pick(published.model, rows)} for published in PUBLISHED]


def _pick(model, rows):
    def rank(row):
        # A GPU that holds fewer layers names its preset bench-l6.
        preset = row["preset"].partition("-")[0]
        size = PRESET_ORDER.index(preset) if preset in PRESET_ORDER else len(PRESET_ORDER)
        return bool(row["host_load"]), size, -row["num_gpus"], row["variant"] != "graph", -row["num_rounds"]

    own = [row for row in rows if row["model"] == model and (row["variant"] == "graph" or row["num_graphs"])]
    return min(own, key=rank) if own else None
