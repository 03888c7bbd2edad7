"""Hosts of the archive (results/archive): mean steps of eager and of a graph, measured before blocks.

The archive's variants ran in processes of their own, so a host has two means and no interval. Its records hold each
step's time. They count as hosts of a row where eager made the same kernels as in the row's newest run.
"""

import json
import lzma
import statistics as plain
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.files.workload import Workload
from common.text import printable

# Eager's kernels a step may differ by so much from those of a row's newest run.
SAME_KERNELS = 0.01
# Names of variants of that time, by model; "" is any other model.
NAMES = {
    "": {"one_graph": "graph_step", "full_step": "graph_step", "graph_te": "graph_layer_te"},
    "gpt3": {"graph": "graph_layer"},
    "llama2_lora": {"graph": "graph_layer"},
    "llama31": {"graph": "graph_fwd_bwd", "chunk": "graph_microbatch", "layer": "graph_layer"},
    "rnnt": {"graph": "graph_networks", "full": "graph_step"},
    "stable_diffusion": {"graph": "graph_step", "lightning_graph": "graph_step_lightning"},
}


@dataclass(frozen=True)
class ArchivedHost:
    """A host of the archive; variants have their names of today.

    `kernels`: variant -> its kernels in a step, of the last run. `ms`: variant -> its mean step, a geometric mean over
    its runs there. `reserved_bytes`: variant -> peak of torch's reserved memory, the only variant of its process.
    `folder`: of the workload's sessions.
    """

    boot: str
    kernels: dict[str, float]
    ms: dict[str, float]
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    folder: Path = Path()


def read(folder: Path) -> tuple[dict[Workload, list[ArchivedHost]], list[str]]:
    """Return the hosts of each workload of an archive, and a line for each file that cannot be read."""
    records: dict[tuple[Workload, str], list[dict]] = defaultdict(list)
    folders: dict[Workload, Path] = {}
    faults = []
    for path in sorted(folder.glob("*/*/*/records.jsonl.xz")):
        try:
            found = [(_workload(record, path), record["env"]["boot_id"], record) for record in _timed(path)]
        except (OSError, lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            faults.append(printable(f"{path}: no records of the archive ({type(error).__name__})"))
            continue
        for where, boot, record in found:
            records[where, boot].append(record)
            folders[where] = path.parent.parent
    return _hosts(records, folders), faults


def _timed(path: Path) -> list[dict]:
    """The records of a file that passed and have times."""
    with lzma.open(path, "rt") as file:
        records = [json.loads(line) for line in file]
    return [
        record
        for record in records
        if record["status"] == "pass" and record["steps"]["gpu_ms"] and record["env"].get("boot_id")
    ]


def _hosts(records, folders) -> dict[Workload, list[ArchivedHost]]:
    found: dict[Workload, list[ArchivedHost]] = defaultdict(list)
    for (where, boot), own in sorted(records.items()):
        kernels = {_name(record): record["num_kernels"] for record in own if record["num_kernels"]}
        times: dict[str, list[float]] = defaultdict(list)
        for record in own:
            times[_name(record)].append(plain.fmean(record["steps"]["gpu_ms"]))
        peaks: dict[str, int] = {}
        for record in own:
            memory = record.get("memory")
            peak = memory.get("peak_reserved_bytes") if isinstance(memory, dict) else None
            if isinstance(peak, int) and peak > peaks.get(_name(record), 0):
                peaks[_name(record)] = peak
        if "eager" in kernels:
            ms = {name: plain.geometric_mean(each) for name, each in times.items()}
            found[where].append(ArchivedHost(boot, kernels, ms, peaks, folders[where]))
    return dict(found)


def _name(record) -> str:
    names = NAMES[""] | NAMES.get(record["model"], {})
    return names.get(record["variant"], record["variant"])


def _workload(record, path) -> Workload:
    folder, model = path.parent.parent.name, f"{record['model']}-{record['preset']}"
    label, gpus = folder.removeprefix(model).strip("-"), record["env"].get("world_size") or 1
    return Workload(record["env"]["gpu_name"], gpus, record["model"], record["preset"], label, "", record["host_load"])
