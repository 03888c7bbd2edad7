"""The points of a sweep on disk: a folder a value with its runs and point.json; sweep.json and table.md of all."""

import contextlib
import fcntl
import itertools
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ask, statistics
from benchmarks.command import Mistake
from benchmarks.files.facts import Build, Run
from benchmarks.judge import PASS, judged
from benchmarks.pages.run_table import milliseconds
from benchmarks.sweeps import crossover
from benchmarks.sweeps.quantity import Quantity
from common.config import flag_of
from common.files import write_text

SCHEMA = 4
NUMBERS = ("base", "base_ms", "ms", "ratio", "low", "high", "word", "issue_ms", "busy_ms", "ceiling")
COLUMNS = ("base ms", "ms", "ratio", "95 %", "word", "issue ms", "busy ms", "at most")
WIDTH = 100


@dataclass
class Points:
    """The folder of one sweep.

    Attributes:
        root: folder with sweep.json; runs of a value lie below <over>-<value>.
        asked: what benchmarks.run would do without a value.
        quantity: what grows.
        variant: what stands against eager.
        host_load: busy processes; where there are some, the points are of the cycles beside them.
        least_cycles: a point with fewer is measured again.

    Raises:
        Mistake: the folder holds another sweep.
    """

    root: Path
    asked: ask.Ask
    quantity: Quantity
    variant: str
    host_load: int
    least_cycles: int

    def __post_init__(self):
        names = {"model": self.asked.model, "preset": self.asked.preset, "over": self.quantity.over}
        self.gpu = next(iter(self.asked.gpus.names), None)
        where = {"host_load": self.host_load, "gpu": self.gpu, "ranks": self.asked.ranks, "flags": self.asked.flags}
        self.about = names | {"variant": self.variant, **where}
        for point in self._all():
            odd = ", ".join(f"{key} {each}" for key, each in point["about"].items() if each != self.about.get(key))
            if odd:
                raise Mistake(f"--out {self.root} holds a sweep of {odd}; take another folder")

    def folder(self, value: int) -> Path:
        """Return the root of a point's runs."""
        return self.root / f"{self.quantity.over}-{value}"

    def measured(self, value: int) -> dict | None:
        """Return the point of a value if it passed, with enough cycles and today's source."""
        point = _read(self.folder(value) / "point.json")
        source = self.asked.host["env"]["source_hash"]
        if point is None or point["status"] != "pass" or point["source"] != source:
            return None
        return point if point["cycles"] >= self.least_cycles else None

    def add(self, value: int, flags: list[str], run: Run, path: Path | None) -> dict:
        """Write the point of a run, sealed at `path` or with no time at all, and return it."""
        where = str(path.relative_to(self.root)) if path else None
        return self._write(value, self._numbers(run, flags) | {"run": where, "versions": run.versions})

    def add_refused(self, value: int, message: str) -> dict:
        """Write a point that the script refuses, and return it."""
        return self._write(value, _unmeasured("unsupported", message))

    def _write(self, value, own):
        source = self.asked.host["env"]["source_hash"]
        point = {"run": None, "versions": {}, **own, "value": value, "about": self.about, "source": source}
        write_text(self.folder(value) / "point.json", json.dumps(point, allow_nan=False))
        return point

    def _all(self) -> list[dict]:
        found = map(_read, self.root.glob(f"{self.quantity.over}-*/point.json"))
        return sorted(filter(None, found), key=lambda point: point["value"])

    def write(self) -> dict:
        """Write sweep.json and table.md of all points in the folder, and return what sweep.json holds."""
        with open(self.root / ".sweep.lock", "a") as lock:
            # Jobs of an array write here too: the last one sees all points.
            fcntl.flock(lock, fcntl.LOCK_EX)
            points, kind = self._all(), self.asked.description["kinds"][self.variant]
            head = {"schema": SCHEMA, **self.about, "fields": self.quantity.fields}
            who = "graphs" if kind == "graph" else self.variant
            result = head | {"points": points}
            result |= crossover.conclusion(points, self.quantity.over, self.gpu, who)
            write_text(self.root / "sweep.json", json.dumps(result, indent=1, allow_nan=False))
            write_text(self.root / "table.md", f"{report(result)}\n")
        return result

    def _numbers(self, run, flags):
        """Status, message and numbers of a run."""
        variant, busy = self.variant, bool(self.host_load)
        builds = [own for own in judged(run).values() if variant in own.verdicts]
        if not builds:
            return _unmeasured("failed", "nothing was measured")
        own = next((each for each in builds if each.build.variants[variant].blocks), builds[0])
        ratio = own.ratio_of(variant, busy)
        for name in filter(None, (own.base or own.build.anchor or "eager", variant)):
            verdict = own.verdicts.get(name)
            if verdict is not None and verdict.status != PASS:
                return _unmeasured(verdict.status, verdict.reason)
        smaller = _smaller(own.build, flags, self.asked.description["presets"][self.asked.preset])
        if smaller or ratio is None:
            return _unmeasured(*(("oom", smaller) if smaller else ("failed", f"no cycle beside {own.base}")))
        has_interval = ratio.cycles > 1
        return _unmeasured(PASS, "") | {
            "base": own.base,
            "base_ms": ratio.base_ms,
            "ms": ratio.variant_ms,
            "ratio": ratio.ratio,
            "low": ratio.low if has_interval else None,
            "high": ratio.high if has_interval else None,
            "word": statistics.word(ratio),
            "cycles": len(own.build.cycles),
            "issue_ms": own.issue_ms(own.base, busy),
            "busy_ms": own.busy_ms(own.base),
            "ceiling": own.ceiling(variant, busy),
        }


def _unmeasured(status, message):
    return {"status": status, "message": message, "cycles": 0} | dict.fromkeys(NUMBERS)


def _read(path: Path) -> dict | None:
    """The point in a file; None where there is none, or a damaged one, which is measured again."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        point = json.loads(path.read_text())
        if {"value", "about", "source", "status", "cycles", *NUMBERS} <= point.keys():
            return point
    return None


def _smaller(build: Build, flags: list[str], config: dict) -> str:
    """Return the reason why a run does not measure its value, or "": its script made the model smaller to fit."""
    words = [word for text in flags for word in text.split("=", 1)]
    given = {flag: int(text) for flag, text in itertools.pairwise(words) if text.isdecimal()}
    for name, asked in config.items():
        asked, had = given.get(flag_of(name), asked), build.config.get(name)
        if type(asked) is int and type(had) is int and had < asked and name not in build.fields:
            return f"it ran with {flag_of(name)} {had} in the place of {asked}, which does not fit"
    return ""


# ------------------------------------------------------------------------------------------------
# The table


def is_timed(result: dict) -> bool:
    """Return whether any point has a time."""
    return any(point["cycles"] for point in result["points"])


def report(result: dict) -> str:
    """Return table, notes and finding of what sweep.json holds, as Markdown that reads well on a screen."""
    rows = [(result["over"], *COLUMNS), *map(_row, result["points"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * (width - 1) + ":" for width in widths))
    cells = ([text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in rows)
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    notes = [textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in _notes(result)]
    return "\n\n".join([table, "\n".join(notes), textwrap.fill(result["finding"], WIDTH)])


def _row(point):
    interval = f"{point['low']:.3f} to {point['high']:.3f}" if point["low"] else "-"
    base_ms, ms, issue_ms, busy_ms = (milliseconds(point[name]) for name in ("base_ms", "ms", "issue_ms", "busy_ms"))
    own, ceiling = (f"{point[name]:.3f}x" if point[name] else "-" for name in ("ratio", "ceiling"))
    word = point["word"] or point["status"]
    return (str(point["value"]), base_ms, ms, own, interval, word, issue_ms, busy_ms, ceiling)


def _notes(result):
    over, points, (first, *others) = result["over"], result["points"], map(flag_of, result["fields"])
    notes = [f"{over} {each['value']}: {each['message']}" for each in points if each["message"]]
    what = f"{over} is {first} of {result['model']}, preset {result['preset']}; {result['variant']} against eager"
    what += f"; {', '.join(others)} in proportion" if others else ""
    what += f"; beside {result['host_load']} busy processes" if result["host_load"] else ""
    torch = sorted({str(each["versions"]["torch"]) for each in points if each["versions"].get("torch")})
    sources = sorted({str(each["source"]) for each in points})
    where = [f"{result['gpu'] or 'CPU'} x{result['ranks']}", f"torch {' and '.join(torch)}" if torch else ""]
    return [*notes, what, ", ".join(filter(None, [*where, f"source {' and '.join(sources)}"]))]
