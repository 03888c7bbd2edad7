"""The points of a sweep on disk: a folder of runs for each value, and sweep.json and table.md made of them."""

import fcntl
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ask, run, statistics
from benchmarks.command import Mistake
from benchmarks.files import run_file
from benchmarks.files.run_file import Build, Run
from benchmarks.pages import run_table
from benchmarks.sweeps import crossover
from benchmarks.sweeps.quantity import Quantity
from benchmarks.sweeps.sweep_table import report
from common.config import flag_of
from common.files import write_text

SCHEMA = 2
NUMBERS = ("base", "base_ms", "ms", "ratio", "low", "high", "word", "issue_ms", "busy_ms", "predicted")


@dataclass
class Points:
    """The folder of one sweep.

    Attributes:
        root: folder with sweep.json; runs of a value lie below <over>-<value>.
        asked: what benchmarks.run would do without a value.
        quantity: what grows.
        variant: what stands against eager.
        kind: of the variant.
        host_load: busy processes; where there are some, the points are of the cycles beside them.
    """

    root: Path
    asked: ask.Ask
    quantity: Quantity
    variant: str
    kind: str
    host_load: int

    def folder(self, value: int) -> Path:
        """Return the root of a point's runs."""
        return self.root / f"{self.quantity.over}-{value}"

    @property
    def gpu(self) -> str | None:
        """Name of the GPU; None on a CPU."""
        return next(iter(self.asked.gpus.names), None)

    @property
    def head(self) -> dict:
        """The keys that set this sweep apart from others."""
        names = {"model": self.asked.model, "preset": self.asked.preset}
        return names | {"over": self.quantity.over, "variant": self.variant}

    @property
    def wanted(self) -> set[str]:
        """The variants of a run."""
        return {name for build in self.asked.builds for name in build.variants if name != ask.CONTROL}

    def newest(self, value: int) -> tuple[Path | None, Run | None, list[str]]:
        """Return the newest run of a point that is this sweep's, and a line for each newer file that is not."""
        try:
            folder, flags = self.folder(value), [*self.asked.flags, *self.quantity.flags(value)]
        except Mistake:
            return None, None, []
        label = ask.label_of([folder.name], self.host_load)
        group = folder / self.asked.group.parent.name / f"{self.asked.model}-{self.asked.preset}-{label}"
        found, left_out = run_file.find(group) if group.is_dir() else ([], [])
        for path, own in reversed(found):
            gpu = next((each["name"] for each in own.host["gpus"]), None)
            names = sorted({name for build in own.builds.values() for name in build.variants})
            if own.flags == flags and gpu == self.gpu and self.wanted <= set(names):
                return path, own, left_out
            what = f"flags {' '.join(own.flags)}, on {gpu or 'a CPU'}, variants {', '.join(names)}"
            left_out.append(f"{path.relative_to(self.root)} is left out: {what}")
        return None, None, left_out

    def is_measured(self, value: int, cycles: int | str | None) -> bool:
        """Return whether a point has a run that is all that benchmarks.run would measure now.

        Args:
            value: of the quantity.
            cycles: of each run; "auto", or None for as many as benchmarks.run makes.
        """
        _, own, _ = self.newest(value)
        if own is None or own.source.get("hash") != self.asked.host["env"]["source_hash"]:
            return False
        cycles = cycles or run.CYCLES["tiny" if self.asked.preset.startswith("tiny") else "other"]
        least = (statistics.LEAST_CYCLES if isinstance(cycles, str) else cycles) * (2 if self.host_load else 1)
        return run_table.is_sound(own) and max(build.cycles for build in own.builds.values()) >= least

    def on_disk(self) -> dict:
        """Return what sweep.json holds; nothing where it is damaged, as it is made of the runs."""
        path = self.root / "sweep.json"
        try:
            found = json.loads(path.read_text()) if path.is_file() else {}
        except (OSError, ValueError, RecursionError):
            return {}
        points = found.get("points", []) if isinstance(found, dict) else None
        if not isinstance(points, list):
            return {}
        keys = {"value", *unmeasured("", "")}
        sound = all(isinstance(each, dict) and keys <= each.keys() for each in points)
        return found if sound and all(isinstance(each["value"], int) for each in points) else {}

    def write(self, more: dict[int, dict]) -> tuple[dict, list[str]]:
        """Write sweep.json and table.md of all points in the folder, those of other calls too.

        Args:
            more: value -> a point that counts whatever run there is.

        Returns:
            What sweep.json holds, and a line for each file that is left out.
        """
        over, left_out, runs = self.quantity.over, [], []
        with open(self.root / ".sweep.lock", "a") as lock:
            # Jobs of an array write here too: the last one sees all points.
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.on_disk()
            points = {each["value"]: each for each in known.get("points", []) if known.get("schema") == SCHEMA} | more
            words = [path.name.removeprefix(f"{over}-") for path in self.root.glob(f"{over}-*")]
            for value in {*points, *(int(word) for word in words if word.isdecimal())} - more.keys():
                path, own, lines = self.newest(value)
                left_out += lines
                if path is not None and own is not None:
                    runs.append(own)
                    points[value] = self._point_of(own) | {"run": str(path.relative_to(self.root))}
                elif points.get(value, {}).get("run"):
                    del points[value]
            rows = [{"value": value, **points[value]} for value in sorted(points)]
            result = self._result(rows, runs)
            write_text(self.root / "sweep.json", json.dumps(result, indent=1, allow_nan=False))
            write_text(self.root / "table.md", f"{report(result, left_out, is_markdown=True)}\n")
        return result, left_out

    def _result(self, points, runs):
        versions = [own.versions for own in runs]
        alike = {name: text for name, text in (versions or [{}])[0].items() if all(v[name] == text for v in versions)}
        who = "graphs" if self.kind == "graph" else self.variant
        return {
            **{"schema": SCHEMA, **self.head, "fields": self.quantity.fields, "kind": self.kind},
            **{"host_load": self.host_load, "gpu": self.gpu, "ranks": self.asked.ranks, "versions": alike},
            **{"sources": sorted({str(own.source.get("hash")) for own in runs}), "points": points},
            **crossover.conclusion(points, self.quantity.over, self.gpu, who),
        }

    def _point_of(self, own):
        """Status, message and numbers of a run."""
        variant, busy = self.variant, bool(self.host_load)
        builds = [build for build in own.builds.values() if variant in build.variants]
        build = next((build for build in builds if build.variants[variant].blocks), builds[0])
        base, ratio = build.variants[build.base], build.ratio_of(variant, busy)
        smaller = _smaller(build, own.flags, self.asked.description["presets"][self.asked.preset])
        for each in (build.variants[variant], base):
            if each.status != "pass":
                return unmeasured(each.status, each.reason)
        if ratio is None or smaller:
            return unmeasured(*(("oom", smaller) if smaller else ("failed", f"no cycle beside {build.base}")))
        return unmeasured("pass", "") | {
            **{"base": build.base, "base_ms": ratio.base_ms, "ms": ratio.variant_ms, "ratio": ratio.ratio},
            **({"low": ratio.low, "high": ratio.high} if ratio.cycles > 1 else {}),
            **{
                "word": statistics.word(ratio),
                "cycles": ratio.cycles,
                "predicted": build.predicted_gain(self.variant, busy),
            },
            **{"issue_ms": base.issue_ms(busy), "busy_ms": base.profile.get("busy_ms")},
        }


def unmeasured(status: str, message: str) -> dict:
    """Return a point without numbers."""
    return {"status": status, "message": message, "run": None, "cycles": 0} | dict.fromkeys(NUMBERS)


def _smaller(build: Build, flags: list[str], config: dict) -> str:
    """Return the reason why a run does not measure its value, or "": its script made the model smaller to fit."""
    words = [word for text in flags for word in text.split("=", 1)]
    given = {flag: int(text) for flag, text in itertools.pairwise(words) if text.isdecimal()}
    for name, asked in config.items():
        asked, had = given.get(flag_of(name), asked), build.config.get(name)
        if type(asked) is int and type(had) is int and had < asked and name not in build.fields:
            return f"it ran with {flag_of(name)} {had} in the place of {asked}, which does not fit"
    return ""
