"""What figures are drawn from: folders of records below a root, grouped by what is measured.

A block is one group of sessions and the same under host load beside it (`gpt3-bench`, `gpt3-bench-load16`).
Nothing is paired across sessions. No matplotlib and no torch here.
"""

import gzip
import json
import re
import statistics
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import crossover, frame
from benchmarks import rows as table_rows
from benchmarks.figures import words
from benchmarks.overview_rows import suffix_of
from common import record as records
from common import trace

QUIET_LOAD = 3.0  # a run itself makes 1 to 2 of the load average
# What a figure takes from a sweep's `env`.
ENV_TEXTS, ENV_COUNTS = ("device", "gpu_name", "torch", "cuda", "driver", "git_sha"), ("world_size", "num_gpus")


class Missing(ValueError):
    """A figure whose data is not there; the message says what is missing."""


@dataclass(frozen=True)
class Evidence:
    """The runs of one group of sessions that its rows rest on, of one GPU type, model and host load, and the rows
    (`rows.summarise`). Sessions that stand beside a row unpooled are in `whole` alone."""

    path: Path
    whole: object
    frame: object
    found: list[dict]
    rows: list[dict]

    @property
    def runs(self) -> list[dict]:
        return frame.timed(self.found)

    @property
    def speaker(self) -> dict:
        """The record that says what all of them say; a run that came to nothing may not know its GPU or preset."""
        return (self.runs or [record for record in self.found if record["env"]["gpu_name"]] or self.found)[-1]

    @property
    def load(self) -> int:
        return self.speaker["host_load"]

    @property
    def host(self) -> str:
        if self.load:
            return f"beside {self.load} busy processes"
        known = [(record["extra"].get("host") or {}).get("load_1m_start") for record in self.runs]
        other = statistics.median([load for load in known if load is not None] or [0.0])
        return f"host with a load of {other:.1f}" if other > QUIET_LOAD else "quiet host"

    @property
    def gpu(self) -> str:
        return f"{self.gpu_name} x{self.num_gpus}"

    @property
    def gpu_name(self) -> str:
        return self.speaker["env"]["gpu_name"] or "GPU of unknown type"

    @property
    def num_gpus(self) -> int:
        return self.speaker["env"]["world_size"]

    def row(self, variant: str) -> dict | None:
        return next((row for row in self.rows if row["variant"] == variant), None)

    @property
    def eager(self) -> dict | None:
        """The base's row: the best eager of the newest session."""
        return next((row for row in self.rows if row["is_base"]), None)

    @property
    def base(self) -> str:
        """Its name, where it was measured."""
        return self.eager["variant"] if self.eager else "eager"

    @property
    def main(self) -> dict | None:
        """The row of the graphed variant that titles speak of."""
        return self.row(main_variant(self.rows) or "")

    @property
    def num_rounds(self) -> int:
        """Of all its sessions."""
        timed = self.frame[self.frame["is_timed"].astype(bool)]
        return len(set(zip(timed["session"], timed["round"], strict=True)))

    def of(self, variant: str) -> list[dict]:
        return [record for record in self.runs if record["variant"] == variant]


@dataclass(frozen=True)
class Block:
    """One folder and the same beside host load: `members` by load, the quiet one first where there is one."""

    key: str
    suffix: str
    members: list[Evidence]

    @property
    def first(self) -> Evidence:
        return self.members[0]

    @property
    def what(self) -> tuple[str, str]:
        return self.first.speaker["model"], self.first.speaker["preset"]

    @property
    def name(self) -> str:
        """`GPT-3 bench`, or `GPT-3 bench (overlap)` for a folder gpt3-bench-overlap."""
        model, preset = self.what
        name = f"{words.of_model(model)} {preset}" + (f" ({self.suffix})" if self.suffix else "")
        return f"{name} {self.first.host}" if self.first.load else name


@dataclass
class Collection:
    """All that lies below a root. `refused` and `skipped` hold one line each: folders and files not used."""

    blocks: list[Block] = field(default_factory=list)
    sweeps: list[tuple[str, dict]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    num_cpu_folders: int = 0


def main_variant(rows: list[dict]) -> str | None:
    """The graphed variant that titles speak of: `graph`, else the first by name. Never chosen by its result."""
    names = sorted(row["variant"] for row in rows if row["kind"] == "graph")
    return "graph" if "graph" in names else (names[0] if names else None)


def rates(found, model: str) -> list[dict]:
    """Rows (`benchmarks.rows`) of the model's eager and graphed variants on quiet GPUs, with useful TFLOP/s a GPU.

    found: a frame of `benchmarks.frame`, or sound records as of one folder. Useful: a record's flops_per_step, the
    closed formula of the model, over the median step; recomputed work does not count. Each row has besides: tflops,
    group, preset, gpu, num_gpus, items (tokens or samples of a step) and unit. Left out are rows with
    a failed run, and those without a timed one, FLOP or peak of reserved memory.
    """
    runs = frame.of(found)
    quiet = (runs["device"] == "cuda") & (runs["model"] == model) & (runs["host_load"] == 0)
    result = []
    for group, part in runs[quiet].groupby("group", sort=True):
        newest = {run.variant: run.record for run in part.itertuples() if run.is_timed}
        for row in table_rows.summarise(part):
            record = newest.get(row["variant"])
            known = row["status"] == "pass" and record and record["flops_per_step"] and row["peak_reserved_gib"]
            if known and row["kind"] in ("eager", "graph"):
                env = record["env"]
                row |= {"group": group, "preset": record["preset"], "gpu": env["gpu_name"] or ""}
                row |= {"num_gpus": env["world_size"], "items": record["items_per_step"], "unit": record["unit"]}
                result.append(row | {"tflops": record["flops_per_step"] / row["step_ms"] / 1e9})
    return result


# ------------------------------------------------------------------------------------------------
# Reading


def collect(root: Path) -> Collection:
    """Read every folder of records and every sweep at or below root. Raises FileNotFoundError without root.

    The folders of a sweep's points belong to its own figure. Folders of CPU records are counted, not drawn.
    """
    result = Collection()
    groups: dict[tuple[Path, str], list[Evidence]] = {}
    runs = frame.read(root)
    result.skipped += runs.faults
    own = root / "sweep.json"
    for sweep in [root, *runs.sweeps] if own.is_file() else runs.sweeps:
        _add_sweep(result, sweep, root)
    for name, part in runs.frame.groupby("group", sort=True):
        path = root if name == "." else root / name
        evidence = _evidence(result, path, part) if not own.is_file() else None
        if evidence:
            stem = re.sub(r"-load\d+$", "", path.resolve().name)
            groups.setdefault((path.parent if path != root else path, stem), []).append(evidence)
    for (parent, stem), members in groups.items():
        members.sort(key=lambda evidence: (evidence.load, evidence.path.name))
        speaker = members[0].speaker
        inside = [] if members[0].path == root else parent.relative_to(root).parts
        suffix = suffix_of(stem, speaker["model"], speaker["preset"])
        result.blocks.append(Block("-".join([*inside, stem]), suffix, members))
    # The plain folder of a model before its relatives, and one GPU type after the other.
    result.blocks.sort(
        key=lambda block: (block.first.gpu_name, block.first.num_gpus, block.what, len(block.suffix), block.key)
    )
    return result


def _evidence(result, path, part):
    try:
        rows = table_rows.summarise(part)
    except table_rows.Mixed as error:
        result.refused.append(f"{path}: {error}")
        return None
    if set(part["device"]) != {"cuda"}:
        result.num_cpu_folders += 1
        return None
    order = ("eager", "control", "graph", "compile")
    rows.sort(key=lambda row: (order.index(row["kind"]), row["variant"]))
    group = table_rows.group_of(part)
    pooled = {row["variant"]: table_rows.standing(group, row["variant"])[0] for row in rows}
    # A run that came to nothing stands in its row.
    drawn = part[[row.session in pooled[row.variant] or not row.is_timed for row in part.itertuples()]]
    return Evidence(path, part, drawn, frame.records_of(drawn), rows)


def _add_sweep(result, path, root):
    try:
        sweep = json.loads((path / "sweep.json").read_text())
        if not isinstance(sweep, dict) or sweep.get("schema") != 1:
            raise ValueError("not a sweep of schema 1")
        lacking = [key for key in ("model", "preset", "over", "variant", "points") if key not in sweep]
        if lacking:
            raise ValueError(f"keys missing: {', '.join(lacking)}")
        _expect("", sweep, ("model", "preset", "over", "variant"), str, "text")
        env = {} if sweep.get("env") is None else sweep["env"]
        if not isinstance(env, dict):
            raise ValueError(f"env is {env!r}, not an object")
        env = dict.fromkeys((*ENV_TEXTS, *ENV_COUNTS)) | env
        _expect("env.", env, ENV_TEXTS, str | None, "text")
        _expect("env.", env, ENV_COUNTS, int | None, "a count")
        points = crossover.checked(sweep["points"])
    except (OSError, ValueError) as error:
        result.refused.append(" ".join(f"{path / 'sweep.json'}: {error}".split()))
        return
    is_cpu = env["device"] == "cpu"
    # What the file says of its points is not believed.
    kind = sweep.get("kind", "graph")
    sweep |= crossover.conclusion(points, sweep["over"], sweep["variant"], env["gpu_name"] or "a GPU", is_cpu, kind)
    sweep |= {"points": [point | {"speedup": None} for point in points] if is_cpu else points, "env": env}
    parts = path.relative_to(root).parts or (path.resolve().name,)
    result.sweeps.append(("-".join(parts), sweep))


def _expect(prefix, values, keys, kind, what):
    for key in keys:
        if not isinstance(values[key], kind):
            raise ValueError(f"{prefix}{key} is {values[key]!r}, not {what}")


def read_trace(path: Path) -> list[dict]:
    """One step's GPU work from a sidecar, as `common.trace.gpu_work` gives it. Raises Missing for a broken file."""
    try:
        work = trace.gpu_work(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Missing(f"{path}: not a trace ({type(error).__name__})") from None
    if not work:
        raise Missing(f"{path}: a trace without any kernel")
    return work


def traces(evidence: Evidence) -> tuple[dict[str, Path], bool]:
    """(variant -> its sidecar, of the newest session and first round that has one; whether they are of sessions that
    the rows do not rest on, because no other has any)."""
    found = _traces(evidence.frame)
    return (found, False) if found else (_traces(evidence.whole), True)


def _traces(runs):
    found: dict[str, Path] = {}
    runs = runs[runs["is_timed"].astype(bool)]
    for row in runs.sort_values(["begin", "round"], ascending=[False, True]).itertuples():
        stored = frame.stored_variant(row.model, row.variant, row.schema)
        name = records.file_name(stored, row.round, row.attempt)
        path = (row.path / name).with_suffix(".trace.json.gz")
        if path.is_file():
            found.setdefault(row.variant, path)
    return found
