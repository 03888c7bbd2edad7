"""The workload of a run: model, preset, flags, build and machine."""

import itertools
from dataclasses import dataclass

from graph_worth.folders import OWN_STEP
from graph_worth.harness.files.facts import Build, Run, joined, stem, title_of


@dataclass(frozen=True, order=True)
class Workload:
    """Model, preset, flags (as `label`), build and machine of a measurement.

    Attributes:
        busy: number of busy processes.
        digest: of the file of a user's own step: two files of one name are two workloads.
    """

    gpu: str
    ranks: int
    model: str
    preset: str
    label: str
    build: str = ""
    busy: int = 0
    digest: str = ""

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
    """Return the workload of one build of a run.

    Its preset is bench-l6 where the GPU held 6 layers of more. Where a GPU's machine cannot use Transformer Engine, the
    same command runs torch's layers: that is the workload of `--layer torch --precision bf16`.
    """
    gpu = next((device.name for device in run.host.gpus), "CPU")
    build_facts = run.builds.get(build)
    asked_layers, held = (build_facts.asked_layers, build_facts.config.get("layers")) if build_facts else (None, None)
    is_smaller = asked_layers is not None and isinstance(held, int) and held < asked_layers
    preset = f"{run.preset}-l{held}" if is_smaller else run.preset
    label = "-".join(filter(None, [run.label, _instead(run, build_facts) if build_facts else ""]))
    flags = run.flags if run.model == OWN_STEP else []
    digest = next((after for flag, after in itertools.pairwise(flags) if flag == "--step-digest"), "")
    return Workload(gpu, run.ranks, run.model, preset, label, build_of(run, build), busy, digest)


def build_of(run: Run, name: str) -> str:
    """Return the build whose state a build of a run has: itself, unless its variants stand apart."""
    build = run.builds.get(name)
    return name.removesuffix(joined("", build.apart)) if build else name


def _instead(run: Run, build: Build) -> str:
    """The flags, as in labels, of torch's layers in the place of Transformer Engine's, which `bench` has by itself."""
    is_asked = "layer" in build.fields or any(flag.startswith(("--layer", "--precision")) for flag in run.flags)
    if is_asked or run.device == "cpu" or stem(run.preset) != "bench" or build.config.get("layer") != "torch":
        return ""
    return f"layer-torch-precision-{build.config.get('precision')}"
