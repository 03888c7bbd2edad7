"""What figures are drawn from: folders of records below a root, grouped by what is measured, and words for them.

A block is one group of sessions and the same under host load beside it (`gpt3-bench`, `gpt3-bench-load16`).
Nothing is paired across sessions. No matplotlib and no torch here.
"""

import gzip
import json
import math
import re
import statistics
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import compare, crossover, frame, intervals
from benchmarks import rows as table_rows
from common import record as records
from common import trace

NAMES = {
    "gpt3": "GPT-3",
    "llama2_lora": "Llama 2 LoRA",
    "llama31": "Llama 3.1",
    "rnnt": "RNN-T",
    "stable_diffusion": "Stable Diffusion",
}
QUIET_LOAD = 3.0  # a run itself makes 1 to 2 of the load average
LARGE = 1.2  # from here on a ratio reads better than per cent


class Missing(ValueError):
    """A figure whose data is not there; the message says what is missing."""


@dataclass(frozen=True)
class Evidence:
    """The runs of one group of sessions that its rows rest on, of one GPU type, model and host load, and the rows
    (`compare.summarise`). Sessions that stand beside a row unpooled are in `whole` alone."""

    path: Path
    whole: object
    frame: object
    found: list[dict]
    rows: list[dict]

    @property
    def runs(self) -> list[dict]:
        return compare.timed(self.found)

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
        loads = [load for load in known if load is not None]
        other = statistics.median(loads) if loads else 0.0
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
        name = f"{NAMES.get(model, model)} {preset}" + (f" ({self.suffix})" if self.suffix else "")
        return f"{name} {self.first.host}" if self.first.load else name


@dataclass
class Collection:
    """All that lies below a root. `refused` and `skipped` hold one line each: folders and files not used."""

    blocks: list[Block] = field(default_factory=list)
    sweeps: list[tuple[str, dict]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    num_cpu_folders: int = 0


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
        suffix = stem.removeprefix(f"{speaker['model']}-{speaker['preset']}").strip("-")
        result.blocks.append(Block("-".join([*inside, stem]), suffix, members))
    # The plain folder of a model before its relatives, and one GPU type after the other.
    result.blocks.sort(
        key=lambda block: (block.first.gpu_name, block.first.num_gpus, block.what, len(block.suffix), block.key)
    )
    return result


def _evidence(result, path, part):
    try:
        rows = compare.summarise(part)
    except compare.Mixed as error:
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
        for key in ("model", "preset", "over", "variant"):
            if not isinstance(sweep[key], str):
                raise ValueError(f"{key} is {sweep[key]!r}, not text")
        sweep |= {"points": crossover.checked(sweep["points"]), "env": _env_of_sweep(sweep)}
    except (OSError, ValueError) as error:
        result.refused.append(" ".join(f"{path / 'sweep.json'}: {error}".split()))
        return
    env = sweep["env"]
    where, is_cpu = env.get("gpu_name") or "a GPU", env.get("device") == "cpu"
    # What the file says of its points is not believed.
    sweep |= crossover.conclusion(sweep["points"], sweep["over"], sweep["variant"], where, is_cpu)
    if is_cpu:
        sweep["points"] = [point | {"speedup": None} for point in sweep["points"]]
    parts = path.relative_to(root).parts or (path.resolve().name,)
    result.sweeps.append(("-".join(parts), sweep))


def _env_of_sweep(sweep):
    """What a figure's footer takes from `env`. Raises ValueError for what is not text, or no count."""
    env = sweep.get("env")
    if env is None:
        return {}
    if not isinstance(env, dict):
        raise ValueError(f"env is {env!r}, not an object")
    for key in ("device", "gpu_name", "torch", "cuda", "driver", "git_sha"):
        if not isinstance(env.get(key), str | None):
            raise ValueError(f"env.{key} is {env[key]!r}, not text")
    for key in ("world_size", "num_gpus"):
        if not isinstance(env.get(key), int | None):
            raise ValueError(f"env.{key} is {env[key]!r}, not a count")
    return env


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


# ------------------------------------------------------------------------------------------------
# Kinds of variant


def main_variant(rows: list[dict]) -> str | None:
    """The graphed variant that titles speak of: `graph`, else the first by name. Never chosen by its result."""
    names = sorted(row["variant"] for row in rows if row["kind"] == "graph")
    return "graph" if "graph" in names else (names[0] if names else None)


# ------------------------------------------------------------------------------------------------
# Words


def percent(ratio: float) -> str:
    """0.009 -> `0.9 %`: one digit behind the point below 10."""
    value = 100 * ratio
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def ms_text(ms: float) -> str:
    """137.2, 9.88, 0.0041, 2,500,000."""
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 0.1 else f"{ms:.2g}"


def verdict_words(row: dict | None) -> str:
    """What a row's interval bears, as the end of a sentence about the variant: `gains 0.9 %`, `is unclear`."""
    if row is None:
        return "was not measured"
    ratio, verdict = row["speedup"], row["verdict"]
    where = f" {row['scope']}" if row["scope"] == "on this host" else ""
    if ratio is None:
        return f"has status {row['status']}" if row["status"] != "pass" else "has no eager run to compare with"
    if verdict in ("faster", "slower"):
        if ratio >= LARGE:
            words = f"is {ratio:.2f}x as fast"
        elif ratio > 1:
            words = f"gains {percent(ratio - 1)}"
        elif ratio > 1 / LARGE:
            words = f"loses {percent(1 - ratio)}"
        else:
            words = f"takes {1 / ratio:.2f}x as long"
        settled = intervals.bears(math.log(ratio), row["speedup_half_width"])
        return f"{words}{where}" if settled else f"is {verdict}{where}, by how much is not settled"
    if verdict == "same":
        return f"is the same within 0.5 %{where}"
    if verdict == "unclear":
        return "is unclear"
    return f"has no verdict ({no_verdict_words(row)})"


def no_verdict_words(row: dict) -> str:
    """Why a row has neither faster, slower, same nor unclear."""
    return row["verdict"] or "fewer than 5 pairs on a host"


def interval_text(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{value:.3f}x"
    return f"{value:.3f}x [{low:.3f}, {high:.3f}]"


def status_text(row: dict, limit: int = 64) -> str:
    """`oom`, or `unsupported: reason`, cut at a word."""
    # An escape character would make the SVG unreadable.
    message = " ".join("".join(c if c.isprintable() else " " for c in row["message"]).split())
    if not message:
        return row["status"]
    text = f"{row['status']}: {message}"
    return text if len(text) <= limit else text[: limit - 3].rsplit(" ", 1)[0] + " ..."


def provenance(members: list[Evidence]) -> str:
    """What a figure stands on: GPU x count, versions, commit, rounds x steps; where folders differ, all of it."""
    runs = [record for evidence in members for record in evidence.runs]
    speakers = [record["env"] for record in runs or [evidence.speaker for evidence in members]]
    counts: dict[str, list[str]] = {}
    for evidence in sorted(members, key=lambda evidence: evidence.num_gpus):
        counts.setdefault(evidence.gpu_name, []).append(f"x{evidence.num_gpus}")
    parts = [" and ".join(f"{gpu} {', '.join(_distinct(several))}" for gpu, several in counts.items())]
    for key, name in (("torch", "torch"), ("cuda", "CUDA"), ("driver", "driver")):
        values = _distinct(env[key] for env in speakers)
        if values:
            parts.append(f"{name} {' and '.join(values)}")
    shas = _distinct(
        env["git_sha"] and env["git_sha"][:12] + (" (changed)" if env["git_dirty"] else "") for env in speakers
    )
    if shas:
        parts.append(f"git {' and '.join(shas)}")
    if runs:
        rounds = [evidence.num_rounds for evidence in members if evidence.runs]
        steps = [len(record["steps"]["gpu_ms"]) for record in runs]
        parts.append(f"{_span(rounds)} round{'s' if max(rounds) > 1 else ''} x {_span(steps)} steps")
    return ", ".join(parts)


def _distinct(values):
    return list(dict.fromkeys(value for value in values if value))


def _span(counts):
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
