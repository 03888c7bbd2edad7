"""The run file, schema 3: one JSON object a run, sealed once and never changed. Its types, and reading it back.

Names end in their unit. A value that could not be measured is null. Reading a run starts no code of a model: the file
holds all that tables need.
"""

import dataclasses
import json
import math
import os
import statistics as plain
import types
import typing
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from benchmarks import statistics

# The model of a step that a user hands over.
OWN_STEP = "common.your_step"

SCHEMA = 3
MAX_BYTES = 8 * 2**20
PASSED_OVER = ("archive", "figures")
# Beside run files in the folder of a sweep.
NOT_RUNS = ("sweep.json", "point.json")
STATUSES = ("pass", "unsupported", "oom", "capture_failed", "numerics_failed", "failed", "timeout")


class Damaged(ValueError):
    """The file is no run file of this schema; the text is one line that says why."""

    def __init__(self, text: str):
        super().__init__(printable(text))


def _has_numbers(**least: float):
    """A check that an object has numbers from `least` up, or null, or nothing, under these keys."""

    def check(own):
        return all(own.get(key) is None or (_is_number(own[key]) and least[key] <= own[key] < 1e15) for key in least)

    return check


def _is_number(value):
    # A bool is an int to Python.
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Types with a check and its words: tables, figures and terminals take these values as they are.
Name = Annotated[str, lambda text: len(text) <= 100 and text.isprintable(), "a name that can be printed"]
Text = Annotated[str, lambda text: len(text) <= 2000, "a text of at most 2,000 letters"]
Status = Annotated[str, lambda text: text in STATUSES, "a known status"]
Ms = Annotated[float, lambda ms: 1e-6 < ms < 1e9, "a time in ms"]
Index = Annotated[int, lambda number: 0 <= number < 100_000, "a small number"]
Count = Annotated[int, lambda number: 1 <= number < 10**9, "a number from 1 up"]
Flops = Annotated[float, lambda number: 0 <= number < 1e24, "a number from 0 up"]
_CAPTURE = {"graphs": 0, "made_s": 0, "bytes_added": -1e15, "peak_reserved_bytes": 0, "driver_bytes": 0}
Capture = Annotated[dict, _has_numbers(**_CAPTURE), "an object of numbers"]
Reruns = Annotated[dict, _has_numbers(steps=1, reruns=0, rerun_ms=0), "an object of numbers"]
Profile = Annotated[dict, _has_numbers(busy_ms=1e-9, kernels=0, graph_share=0), "an object of numbers"]


@dataclass(kw_only=True)
class Block:
    """One block of a variant: `steps` timed steps in a row.

    Attributes:
        ms: mean over classes of batch of the median step of each class. Tables take `step_ms`.
        cpu_ms: processor time of the process in a step; older runs lack it.
        reruns: of a variant that runs some steps again, its "steps", the "reruns" among them, and their mean
            "rerun_ms".
    """

    cycle: Index
    place: Index
    busy_processes: Index
    process: int
    threads: int
    steps: Count
    untimed_steps: int
    drained_steps: int
    ms: Ms
    p5_ms: Ms
    p95_ms: Ms
    mean_ms: Ms
    issue_ms: Ms | None
    sm_mhz: float | None
    parent_s: float
    worker_s: float
    reserved_bytes: int | None
    growth_bytes: int | None
    replays: int
    expected_replays: int
    late_ms: float
    late_change: bool
    reset: bool
    losses: list[float | None]
    moved: list[float | None]
    classes: list[float]
    cpu_ms: float | None = None
    reruns: Reruns | None = None

    @property
    def step_ms(self) -> float:
        """The time of a step that the block stands for: `statistics.block_ms`."""
        return statistics.block_ms(self.ms, self.mean_ms, self.steps)


@dataclass(kw_only=True)
class Parity:
    """Comparison with the reference from one seeded start.

    Attributes:
        result, after: before and after the blocks, "bitwise", a relative difference of the losses as in "2.1e-05", or
            "differs ..."; "" where nothing was compared.
    """

    reference: str
    steps: int
    result: str
    after: str = ""


@dataclass(kw_only=True)
class Variant:
    """All facts of one variant of a build."""

    kind: str
    help: Text
    status: Status
    reason: Text
    apart: bool
    headline: bool
    traits: dict
    parity: Parity | None
    capture: Capture
    profile: Profile
    blocks: list[Block]
    ranks: list = field(default_factory=list)

    def issue_ms(self, busy: bool = False) -> float | None:
        """Return the host's time to issue a step, in quiet cycles or in those beside busy processes.

        It is the geometric mean over blocks, like the ms that stand beside it.
        """
        found = [b.issue_ms for b in self.blocks if b.issue_ms is not None and bool(b.busy_processes) == busy]
        return round(plain.geometric_mean(found), 4) if found else None


@dataclass(kw_only=True)
class Build:
    """One state with its variants, which share base and cycles. `fields` differ from the preset's."""

    base: Name
    fields: dict
    config: dict
    card: list[str]
    notes: list[str]
    flops_per_step: Flops
    flops_convention: str
    items_per_step: float
    cycles: int
    variants: dict[Name, Variant]

    def ratio_of(self, name: str, busy: bool = False, without_last: int = 0) -> statistics.Ratio | None:
        """Return the ratio of a variant to the base; None for the base and where no cycle has both.

        Args:
            name: of the variant.
            busy: of the cycles beside busy processes, instead of the quiet ones.
            without_last: so many last cycles do not count.
        """
        base, own = self.variants.get(self.base), self.variants[name]
        if base is None or base.status != "pass" or name == self.base:
            return None
        bases: dict[int, list[float]] = {}
        for block in base.blocks:
            if bool(block.busy_processes) == busy:
                bases.setdefault(block.cycle, []).append(block.step_ms)
        counted = sorted(bases)[: len(bases) - without_last]
        rows = [(bases[block.cycle], block.step_ms) for block in own.blocks if block.cycle in counted]
        return statistics.ratio_of(rows) if rows else None

    def predicted_gain(self, name: str, busy: bool = False) -> float | None:
        """Return max(1, issue of the base / busy time of a variant); None where one is unknown.

        The base's own busy time gives what can be known before a capture. A graph's busy time is longer: a GPU that
        does not wait for its host runs at a lower clock.
        """
        base, busy_ms = self.variants.get(self.base), self.variants[name].profile.get("busy_ms")
        issue_ms = base.issue_ms(busy) if base else None
        return statistics.predicted_gain(issue_ms, busy_ms) if issue_ms and busy_ms else None


@dataclass(kw_only=True)
class Run:
    """One request on one host."""

    schema: int
    id: Name
    model: Name
    preset: Name
    label: Name
    flags: list[str]
    device: str
    control: Name
    source: dict
    versions: dict
    host: dict
    ranks: Count
    begin_utc: str
    end_utc: str
    unit: Name
    whole: bool
    seconds: dict
    builds: dict[Name, Build]

    @property
    def title(self) -> str:
        """The name for people, see title_of."""
        return title_of(self.model, self.preset, self.label)


def title_of(model: str, preset: str, label: str) -> str:
    """Return gpt3/bench, or the label of a step of the user's own."""
    return label if model == OWN_STEP else f"{model}/{preset}"


def folder_of(model: str, preset: str, label: str) -> str:
    """Return the name of the folder of a model's runs, as gpt3-bench."""
    return "-".join(filter(None, [model.removeprefix("common."), preset, label]))


def read(path: Path) -> Run:
    """Return the run in a file.

    Raises:
        Damaged: the file holds no run, is too large, or is of another schema.
    """
    try:
        if not path.is_file() or path.is_symlink():
            raise ValueError("no regular file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB, no run file is")
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or "schema" not in data:
            raise ValueError("no run file")
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {str(data['schema'])[:20]}, this version reads {SCHEMA}")
        run = _made(Run, data, "")
        _require_sound(run)
        return run
    except (json.JSONDecodeError, RecursionError):
        fault = "no whole JSON"
    except UnicodeDecodeError:
        fault = "is no text"
    except OSError as error:
        fault = error.strerror or "cannot be read"
    except (ValueError, OverflowError) as error:
        fault = str(error)
    raise Damaged(f"{path}: {fault}")


def find(root: Path) -> tuple[list[tuple[Path, Run]], list[str]]:
    """Return every run below a folder, by path, and a line for each damaged file and each folder that is not readable.

    Hidden folders and those named archive or figures are passed over; links to folders are not followed.
    """
    found: list[tuple[Path, Run]] = []
    faults: list[str] = []
    paths: list[Path] = []

    def unreadable(error):
        faults.append(printable(f"{error.filename}: {error.strerror}"))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name[0] != "." and name not in PASSED_OVER]
        names = (name for name in files if name.endswith(".json") and name[0] != "." and name not in NOT_RUNS)
        paths += [Path(folder, name) for name in names]
    for path in sorted(paths):
        try:
            found.append((path, read(path)))
        except Damaged as error:
            faults.append(str(error))
    return found, faults


def as_text(run: Run) -> str:
    """Return the text of a run file."""
    return json.dumps(dataclasses.asdict(run), allow_nan=False, separators=(",", ":")) + "\n"


def printable(text: str) -> str:
    """Return a text in which every letter can be printed, in one line of a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# ------------------------------------------------------------------------------------------------
# From JSON to the types above


def _require_sound(run: Run) -> None:
    """Refuse what no single value shows: hosts without names of GPUs, and cycles with too many blocks."""
    gpus = run.host.get("gpus", ())
    _require(isinstance(gpus, list) and all(isinstance(gpu, dict) for gpu in gpus), "host.gpus", "a list of objects")
    for gpu in gpus:
        _require("name" in gpu, "host.gpus", "named")
        _made(Name, gpu["name"], "host.gpus")
    _require(isinstance(run.host.get("boot"), (str, type(None))), "host.boot", "a text")
    for build in run.builds.values():
        for name, own in build.variants.items():
            most, seen = 2 if name == build.base else 1, Counter(block.cycle for block in own.blocks)
            _require(all(number <= most for number in seen.values()), name, f"measured {most} times a cycle at most")


def _made(kind: typing.Any, value, place):
    """`value` as `kind`; ValueError that names the place. Unknown keys are left out: a later file may have more."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        _require(isinstance(value, dict), place or "the file", "an object")
        hints, own, make = typing.get_type_hints(kind, include_extras=True), {}, typing.cast(type, kind)
        for each in dataclasses.fields(kind):
            inside = f"{place}.{each.name}".lstrip(".")
            if each.name in value:
                own[each.name] = _made(hints[each.name], value[each.name], inside)
            elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
                raise ValueError(f"{inside} is missing")
        return make(**own)
    if origin is Annotated:
        made = _made(parts[0], value, place)
        _require(parts[1](made), place, parts[2])
        return made
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _made(parts[0], value, place)
    if origin is list:
        _require(isinstance(value, list), place, "a list")
        return [_made(parts[0], each, f"{place}[{index}]") for index, each in enumerate(value)]
    if origin is dict:
        _require(isinstance(value, dict), place, "an object")
        return {_made(parts[0], key, place): _made(parts[1], each, f"{place}.{key}") for key, each in value.items()}
    if kind is float:
        _require(_is_number(value) and math.isfinite(value), place, "a number")
        return float(value)
    _require(isinstance(value, kind) and (kind is not int or _is_number(value)), place, f"of type {kind.__name__}")
    return value


def _require(good, place, expected):
    if not good:
        raise ValueError(f"{place} is not {expected}")
