"""Corrections of published runs and pages: results/corrections.toml, from which overview.py makes a page.

Its tables:

    [[published]]
    kind = "disturbed"        or unclean, superseded: the run is no headline; note: it says something of the run alone
    boots = ["da8284"]        hosts, by the first characters of their boot; or runs = ["20261125T095402Z-da8284db"]
    why = "..."               a few words, which stand in its rows; a note has none
    file, says, correct       cells of the page, in Markdown

    [[slowed]]                eager steps that the host limits were slowed in each run whose worker had the variable
    variable = "NAME"
    spares = ["gpt3/bench"]   but for these workloads
    why = "..."

    [[pages]]                 wrong sentences of earlier pages: title, text above the table, rows of three cells

A fault in the file is a line of `Results.faults`, and all else stands.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from graph_worth.folders import ROOT
from graph_worth.harness.command import shown
from graph_worth.harness.files.facts import Run
from graph_worth.harness.files.workload import workload_of
from graph_worth.harness.standing import NOTE, REASONS, Correction
from graph_worth.text import printable

NAME = "corrections.toml"


class Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A correction of runs."""

    kind: str
    runs: list[str] = []
    boots: list[str] = []
    why: str = ""
    file: str
    says: str
    correct: str

    def __post_init__(self):
        """Refuse what no rule could read."""
        if self.kind not in (*REASONS, NOTE):
            raise ValueError(f"kind {self.kind!r}, there are {', '.join((*REASONS, NOTE))}")
        if self.kind != NOTE and not (self.why and (self.runs or self.boots)):
            raise ValueError(f"{self.kind} without a why, or without runs and boots")
        if any(len(name) < 6 for name in (*self.runs, *self.boots)):
            raise ValueError("a run or a boot of less than 6 characters")

    def names(self, run: Run) -> list[str]:
        """Return the names in this entry that a run has."""
        boot = str(run.host.boot or "")
        return [name for name in self.runs if name == run.id] + [name for name in self.boots if boot.startswith(name)]


class Slowed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An environment variable that slows eager."""

    variable: str
    spares: list[str] = []
    why: str


class Sentences(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sentences of earlier pages. Each of `rows`: what the page said, what is correct, and what stands there now."""

    title: str
    text: str = ""
    rows: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Corrections:
    """The file's content. `unread`: lines on what cannot be read. `is_of_root`: it lies beside the runs."""

    path: Path = Path()
    published: list[Entry] = field(default_factory=list)
    slowed: list[Slowed] = field(default_factory=list)
    pages: list[Sentences] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    is_of_root: bool = False

    def of(self, run: Run) -> Correction | None:
        """Return the first reason for which a run is no headline."""
        return next(iter(self._reasons(run)), None)

    def slows(self, run: Run) -> str:
        """Return why a run's host took longer for eager steps; "" of other runs."""
        name = workload_of(run).name
        entries = [entry for entry in self.slowed if entry.variable in run.host.variables and name not in entry.spares]
        return entries[0].why if run.device == "cuda" and entries else ""

    def _reasons(self, run: Run) -> list[Correction]:
        entries = [entry for entry in self.published if entry.kind != NOTE and entry.names(run)]
        return [Correction(entry.kind, entry.why) for entry in entries]

    def faults(self, runs: Iterable[Run]) -> list[str]:
        """Return a line for what cannot be read, each name that no run has, and each run with two reasons."""
        if not self.is_of_root:
            return self.unread
        runs = list(runs)
        named = {name for entry in self.published for run in runs for name in entry.names(run)}
        missing = [name for entry in self.published for name in (*entry.runs, *entry.boots) if name not in named]
        path = shown(self.path)
        lines = [f"{path}: {name} names no run" for name in dict.fromkeys(missing)]
        for run in runs:
            kinds = [reason.kind for reason in self._reasons(run)]
            lines += [f"{path}: {run.id} is {' and '.join(kinds)}; the first counts"] if len(kinds) > 1 else []
        return [*self.unread, *map(printable, lines)]


NONE = Corrections()


def read(root: Path) -> Corrections:
    """Return the corrections beside the runs of a folder; where it has none, those of this repository's results/."""
    path = next((path for path in (root / NAME, ROOT / "results" / NAME) if path.is_file()), None)
    if path is None:
        return NONE
    known = Corrections(path, is_of_root=path.parent == root)
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        known.unread.append(printable(f"{shown(path)}: {' '.join(str(error).split())}"))
        return known
    kinds: dict[str, tuple[type, list]] = {
        "published": (Entry, known.published),
        "slowed": (Slowed, known.slowed),
        "pages": (Sentences, known.pages),
    }
    for name, entries in tables.items():
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            try:
                kind, entries_read = kinds[name]
                entries_read.append(msgspec.convert(entry, kind))
            except KeyError:
                known.unread.append(printable(f"{shown(path)}: {name}: there are {' and '.join(kinds)}"))
            except ValueError as error:
                known.unread.append(printable(f"{shown(path)}: entry {number} of {name}: {error}"))
    return known
