"""The workload of a run: model, preset, flags, build and machine."""

import re
from dataclasses import dataclass

from benchmarks.files.run_file import Run, title_of

# The note of a script that made the model smaller (common/training/memory_fit.py).
FEWER_LAYERS = re.compile(r"(\d+) of \d+ layers: what fits into ")


@dataclass(frozen=True, order=True)
class Workload:
    """Model, preset, flags (as `label`), build and machine of a measurement. `busy`: number of busy processes."""

    gpu: str
    ranks: int
    model: str
    preset: str
    label: str
    build: str = ""
    busy: int = 0

    @property
    def name(self) -> str:
        """The name in tables: gpt3/bench, followed by label, build and busy processes."""
        title = title_of(self.model, self.preset, self.label)
        more = [self.label if title != self.label else "", self.build and f"({self.build})"]
        if self.busy and f"load{self.busy}" not in self.label:
            more.append(f"load{self.busy}")
        return " ".join(filter(None, [title, *more]))

    @property
    def machine(self) -> str:
        """NVIDIA H200, 2 GPUs."""
        return f"{self.gpu}, {self.ranks} GPUs" if self.ranks > 1 else self.gpu


def workload_of(run: Run, build: str = "", busy: int = 0) -> Workload:
    """Return the workload of one build of a run. Its preset is bench-l6 where the GPU held 6 layers of more."""
    gpu = next((each["name"] for each in run.host.get("gpus") or []), "CPU")
    own = run.builds.get(build)
    fewer = next(filter(None, map(FEWER_LAYERS.match, own.notes if own else [])), None)
    preset = f"{run.preset}-l{fewer[1]}" if fewer else run.preset
    return Workload(gpu, run.ranks, run.model, preset, run.label, build, busy)
