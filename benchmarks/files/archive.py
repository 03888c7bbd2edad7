"""Hosts of the archive (results/archive): mean steps of eager and of a graph, measured before blocks.

The archive's variants ran in processes of their own, so a host has two means and no interval. Its records hold each
step's time. They count as hosts of a row where eager made the same kernels as in the row's newest run.
"""

import json
import lzma
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files.workload import Workload

# Eager's kernels a step may differ by so much from those of a row's newest run.
SAME_KERNELS = 0.01
# Names of variants of that time, by model; "" is any other model.
NAMES = {
    "": {"one_graph": "graph_step", "full_step": "graph_step", "graph_te": "graph_layer_te"},
    "gpt3": {"graph": "graph_layer"},
    "llama2_lora": {"graph": "graph_layer"},
    "llama31": {"graph": "graph_fwd_bwd"},
    "rnnt": {"graph": "graph_networks", "full": "graph_step"},
    "stable_diffusion": {"graph": "graph_step", "lightning_graph": "graph_step_lightning"},
}
BUILDS = {"graph_layer_te": "te", "eager_te": "te"}


@dataclass(frozen=True)
class ArchivedHost:
    """A host of the archive.

    Attributes:
        boot: of the host.
        kernels: eager's, in a step.
        ms: variant, by its name of today -> mean step, over all its runs there.
    """

    boot: str
    kernels: float
    ms: dict[str, float]


def read(folder: Path) -> dict[Workload, list[ArchivedHost]]:
    """Return the hosts of each workload of an archive; {} where the folder is not there."""
    records: dict[tuple[Workload, str], list[dict]] = defaultdict(list)
    for path in sorted(folder.glob("*/*/*/records.jsonl.xz")):
        with lzma.open(path, "rt") as file:
            for record in map(json.loads, file):
                if record["status"] == "pass" and record["steps"]["gpu_ms"] and record["env"].get("boot_id"):
                    records[_workload(record, path), record["env"]["boot_id"]].append(record)
    found: dict[Workload, list[ArchivedHost]] = defaultdict(list)
    for (where, boot), own in sorted(records.items()):
        kernels = [record["num_kernels"] for record in own if record["variant"] == "eager" and record["num_kernels"]]
        times: dict[str, list[float]] = defaultdict(list)
        for record in own:
            times[_name(record)].append(math.fsum(record["steps"]["gpu_ms"]) / len(record["steps"]["gpu_ms"]))
        if kernels:
            means = {name: math.fsum(each) / len(each) for name, each in times.items()}
            found[where].append(ArchivedHost(boot, kernels[-1], means))
    return dict(found)


def _name(record) -> str:
    names = NAMES[""] | NAMES.get(record["model"], {})
    return names.get(record["variant"], record["variant"])


def _workload(record, path) -> Workload:
    folder, model = path.parent.parent.name, f"{record['model']}-{record['preset']}"
    label, gpus = folder.removeprefix(model).strip("-"), record["env"].get("world_size") or 1
    return Workload(record["env"]["gpu_name"], gpus, record["model"], record["preset"], label, "", record["host_load"])
