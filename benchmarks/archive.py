"""Hosts of the archive (results/archive/hosts.json): mean steps of eager and of a graph, by the older method.

The archive's variants ran in processes of their own, so a host has two means and no interval. They count as hosts of a
row where eager made the same kernels as in the row's newest run.
"""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from graph_worth.harness.files.workload import Workload
from graph_worth.text import printable

# Eager's kernels a step may differ by so much from those of a row's newest run.
SAME_KERNELS = 0.01


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


class _Entry(msgspec.Struct):
    workload: Workload
    hosts: list[ArchivedHost]


def read(folder: Path) -> tuple[dict[Workload, list[ArchivedHost]], list[str]]:
    """Return the hosts of each workload of an archive, and a line where its hosts.json cannot be read."""
    path = folder / "hosts.json"

    def below(kind, name):
        return kind(folder, name)

    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Entry], dec_hook=below)
    except FileNotFoundError:
        return {}, []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return {}, [printable(f"{path}: no hosts of the archive ({error})")]
    return {entry.workload: entry.hosts for entry in entries}, []
