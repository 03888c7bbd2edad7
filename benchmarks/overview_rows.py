"""Groups of sessions below a root, and the rows of the overview: each variant against the base of its sessions.

Each group is a block of rows. A group measured beside busy processes joins the quiet group of the same work.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pandas

from benchmarks import frame, rows
from benchmarks.bases import work_of
from benchmarks.published import PUBLISHED, beside, stem

# What a row says of its base as well, as eager_...
OF_BOTH = ("tail", "issue_ms", "busy_ms", "idle_fraction", "num_kernels", "peak_reserved_gib", "energy_j", "sm_mhz")


def short_gpu(name: str) -> str:
    """NVIDIA H100 80GB HBM3 -> H100"""
    return re.sub(r" \d+GB.*", "", name.removeprefix("NVIDIA "))


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
    runs: pandas.DataFrame
    found: list
    rows: list

    @property
    def identity(self) -> tuple:
        return self.device, self.gpu, self.model, self.preset, self.num_gpus

    def base_of(self, row: dict) -> dict | None:
        """The row of its base: of its own kind of layer, and for a base that of the best eager of all kinds."""
        by_name = {other["variant"]: other for other in self.rows}
        found = by_name.get(row["base"]) or by_name.get(row["across_base"])
        return found or next((other for other in self.rows if other["is_base"]), None)


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
        name = root.resolve().name if group == "." else group
        try:
            lack = rows.missing_base(part)
            if lack:
                raise rows.Mixed(lack)
            blocks.append(_block(root / group, name, part, rows.summarise(part)))
        except rows.Mixed as error:
            refused.append(f"{name}: {error}")
    return sorted(blocks, key=_order), list(runs.faults), refused


def _block(folder, name, part, table):
    found = frame.records_of(part)
    # The record of a run that did not pass may lack its final preset and its machine. The newest record is taken.
    sound = frame.timed(found) or [record for record in found if record["status"] == "pass"] or found
    first = sound[-1]
    return Block(
        folder=folder,
        name=name,
        **{key: first[key] for key in ("model", "preset", "device", "host_load")},
        gpu=(first["env"]["gpu_name"] if first["device"] == "cuda" else first["env"]["cpu"]) or "unknown",
        num_gpus=first["env"]["world_size"] or 1,
        sources=frozenset(record["env"]["source_hash"] for record in sound),
        work=work_of(first),
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

    The keys are those of `benchmarks.rows.summarise` and those of the block; one that begins with eager_ is the base's,
    with contended_ of the runs beside busy processes. What is not known is None.
    """
    labels = labels_of(blocks)
    folded = _fold(blocks)
    busy = {id(loaded) for partners in folded.values() for loaded in partners}
    return [
        _row(block, row, labels[id(block)], folded.get(id(block), []))
        for block in blocks
        if id(block) not in busy
        for row in block.rows
        if not (row["is_base"] and row["across_base"] in (None, row["variant"]))
    ]


def labels_of(blocks: list[Block]) -> dict[int, str]:
    """By id of the block: model/preset, the number of GPUs, what the folder's name adds, and what makes it unique."""
    labels = {}
    for block in blocks:
        gpus = f" x{block.num_gpus}" if block.num_gpus > 1 else ""
        load = f" load {block.host_load}" if block.host_load else ""
        labels[id(block)] = f"{block.model}/{block.preset}{gpus}{load}"
        if block.folder.name.startswith(f"{block.model}-{stem(block.preset)}-") and not block.host_load:
            labels[id(block)] += f" {_short_name(block)}"
    for name_of in (_short_name, lambda block: f"({block.name})"):
        texts = [(block.device, block.gpu, labels[id(block)]) for block in blocks]
        for block, text in zip(blocks, texts, strict=True):
            if texts.count(text) > 1 and not text[-1].endswith(f" {name_of(block)}"):
                labels[id(block)] = f"{text[-1]} {name_of(block)}".rstrip()
    return labels


def _short_name(block):
    """As suffix_of, without the names of flags whose values it has: layer-torch-precision-bf16 -> torch-bf16."""
    words = suffix_of(block.folder.name, block.model, block.preset).split("-")
    flags = set(block.found[0]["config"])
    pairs = zip(words, [*words[1:], None], strict=True)
    return "-".join(word for word, after in pairs if word not in flags or after is None or after in flags)


def suffix_of(folder: str, model: str, preset: str) -> str:
    """What a folder's name says beyond model and preset: gpt3-bench-overlap -> overlap."""
    return folder.removeprefix(f"{model}-{stem(preset)}").strip("-_ ")


def _fold(blocks):
    """For each quiet block, by id, the blocks measured under load that belong to it, most processes first.

    Same GPU type, model, preset, GPUs and configuration; of the same source where a quiet folder has that.
    A loaded block with a variant that no quiet block has stays a block of its own.
    """
    folded: dict[int, list[Block]] = {}
    quiet = [block for block in blocks if not block.host_load]
    for loaded in sorted((block for block in blocks if block.host_load), key=lambda block: -block.host_load):
        partners = [
            block
            for block in quiet
            if block.identity == loaded.identity and any(row["work"] == loaded.work for row in block.rows)
        ]
        partners = [block for block in partners if block.sources & loaded.sources] or partners
        known = {row["variant"] for block in partners for row in block.rows}
        if all(row["variant"] in known for row in loaded.rows):
            for block in partners:
                folded.setdefault(id(block), []).append(loaded)
    return folded


def _row(block, row, label, loaded):
    eager = block.base_of(row) or dict.fromkeys(row)
    published = beside(block.model, block.preset)
    result = {"label": label, "folder": block.name}
    result |= {key: getattr(block, key) for key in ("model", "preset", "device", "gpu", "num_gpus", "host_load")}
    result |= {key: value for key, value in row.items() if key not in ("report", "layer", "work")}
    return result | {
        # No row here is the best eager of all.
        "is_base": False,
        "missing_eagers": ", ".join(row["missing_eagers"]),
        "base": row["base"] or row["across_base"],
        "base_ms": row["base_ms"] or eager["step_ms"],
        **{f"eager_{key}": eager[key] for key in OF_BOTH},
        **_under_load(row, loaded),
        "break_even_steps": break_even_steps(row, eager) if row["verdict"] == "faster" else None,
        "break_even_never": row["verdict"] in ("slower", "same"),
        "published_gain": published and published.gain,
        "published_gain_range": published and published.gain_range,
        "published_source": published and published.source,
    }


def _under_load(quiet, loaded):
    """Step and speed-up beside the most busy processes that this row's variant was measured with, configured alike."""
    variant, same = quiet["variant"], [block for block in loaded if block.work == quiet["work"]]
    found = [(block, row) for block in same for row in block.rows if row["variant"] == variant]
    block, row = found[0] if found else (None, {})
    keys = ("step_ms", "speedup", "speedup_low", "speedup_high", "speedup_half_width", "verdict", "scope", "tail")
    keys += ("num_hosts", "num_judged_hosts")
    return {
        "contended_host_load": block and block.host_load,
        "contended_folder": block and block.name,
        **{f"contended_{key}": row.get(key) for key in keys},
        "contended_eager_tail": (block.base_of(row) or {}).get("tail") if block else None,
    }


def setup_s(row: dict, eager: dict) -> float | None:
    """Seconds a variant takes before its first step that eager does not; None where the variant's are not known.

    Compilation, capture, and what its warm-up takes beyond eager's. row, eager: of `benchmarks.rows.summarise`.
    """
    known = [row[key] for key in ("compile_cold_s", "capture_s", "warmup_s")]
    if known == [None] * 3:
        return None
    *own, warmup = (seconds or 0.0 for seconds in known)
    return sum(own) + max(0.0, warmup - (eager["warmup_s"] or 0.0))


def break_even_steps(row: dict, eager: dict) -> float | None:
    """Steps after which the seconds of `setup_s` are won back by a variant's shorter step; None: never.

    A step's gain follows from the speed-up of the paired rounds, not from the difference of two medians.
    """
    seconds, gain_ms = setup_s(row, eager), eager["step_ms"] * (1 - 1 / row["speedup"])
    return 1e3 * seconds / gain_ms if seconds is not None and gain_ms > 0 else None


# ------------------------------------------------------------------------------------------------
# NVIDIA's table of the five strategies


def strategies(rows: list[dict]) -> list[dict]:
    """Rows for each submission of NVIDIA's: what it captured and gained, and beside it what was measured here.

    First the variant that stands for NVIDIA's mechanism (is_nvidias), measured or not; then, where there is one, the
    best other capture of this suite's own. Both are `here`: of rows of one GPU type or CPU, of presets that may stand
    beside the submission (on a CPU of any), quiet ones before those under load, those with a host of three pairs before
    those without, then the preset nearest to the submission on the most GPUs. Of several folders NVIDIA's is of the one
    with the most rounds; best is the highest lower end of the speed-up's interval, or of what two hosts give, at the
    same preset, if it was measured there, without what torch.compile made.
    """
    found = []
    for published in PUBLISHED:
        own = [row for row in rows if row["model"] == published.model]
        own = [row for row in own if row["device"] == "cpu" or stem(row["preset"]) in published.presets]
        theirs = [row for row in own if row["variant"] == published.variant]
        captured = [row for row in own if row["status"] == "pass" and row["num_graphs"] and row["kind"] == "graph"]
        others = [row for row in captured if row not in theirs]
        nvidias = min(theirs, key=lambda row: (*_share(row), -row["num_rounds"]), default=None)
        found.append({"published": published, "here": nvidias, "is_nvidias": True})
        beside = [row for row in others if nvidias and _share(row) == _share(nvidias)] or others
        best = min(beside, key=lambda row: (*_share(row), -_lower_end(row), -row["num_rounds"]), default=None)
        if best:
            found.append({"published": published, "here": best, "is_nvidias": False})
    return found


def _share(row):
    published = beside(row["model"], row["preset"])
    place = list(published.presets).index(stem(row["preset"])) if published else math.inf
    return bool(row["host_load"]), not row["num_hosts"], place, -row["num_gpus"]


def _lower_end(row):
    known = (row["speedup_low"], row["range_low"], row["speedup"] and row["speedup"] - 1)
    return next((value for value in known if value is not None), 0.0)
