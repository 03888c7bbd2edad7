"""A run while it is measured: a file of facts, one JSON object a line, that only grows, and the run that they make.

A kill at any moment loses the line that was being written. `folded` makes the run file's content of the lines; `seal`
writes it once.
"""

import fcntl
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from graph_worth.files import with_leaves, write_text
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import (
    Again,
    Alone,
    Audit,
    Block,
    Build,
    CaptureFacts,
    Census,
    Course,
    Cycle,
    Profile,
    Raised,
    Run,
    Trained,
    Variant,
)
from graph_worth.text import name_of, without_folders

SUFFIX = ".partial.jsonl"
# Facts that go into the run file under the same name.
OF_HEADER = ("id", "model", "preset", "label", "flags", "source", "ranks", "begin_utc", "control")
OF_DECLARATION = ("kind", "help", "headline", "traits", "reference", "tolerance")
OF_BUILD = ("config", "card", "notes", "flops_per_step", "flops_convention", "flops_notes", "items_per_step")


class Busy(RuntimeError):
    """Another process writes this run."""


class Partial:
    """The facts of one run, on disk and in `facts`. The file is locked until `close`.

    Args:
        path: a file that ends in SUFFIX. The constructor reads it, and cuts off half a line at its end.

    Raises:
        Busy: another process holds it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise Busy(f"{path} is written by another process") from None
        self.facts, good = _read_lines(self._file)
        self._file.truncate(good)

    def add(self, fact: str, **values) -> dict:
        """Append one fact and return it. When this returns, the system has it."""
        line = {"fact": fact, **values}
        try:
            self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            # Errors of an open file name none.
            raise type(error)(error.errno, error.strerror, str(self.path)) from None
        self.facts.append(line)
        return line

    def of(self, fact: str, **values) -> list[dict]:
        """Return the facts of one kind that have these values."""
        return _of(self.facts, fact, **values)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _read_lines(file):
    """The facts, and the end of the last whole line."""
    file.seek(0)
    facts: list[dict] = []
    good = 0
    for line in file.read().splitlines(keepends=True):
        try:
            fact = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(fact, dict) or "fact" not in fact:
            break
        facts.append(fact)
        good += len(line)
    return facts, good


def find(group: Path) -> list[Path]:
    """Return the runs of a folder that were begun and are not sealed, newest first."""
    return sorted(group.glob(f"*{SUFFIX}"), reverse=True)


def seal(partial: Partial) -> Path:
    """Write the run file beside the partial one, remove the partial one, and return the run file's path.

    Raises:
        OSError: the disk takes no file; the partial one stays.
    """
    path = partial.path.with_name(partial.path.name.removesuffix(SUFFIX) + ".json")
    _write(path, folded(partial.facts))
    partial.close()
    partial.path.unlink()
    return path


def seal_together(folder: Path, id: str, runs: list[Run], left_out: dict[str, str]) -> Path:
    """Write the one file of several runs, and return its path. Their partial files stay."""
    path = folder / f"{id}.json"
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, Census(schema=run_file.SCHEMA, census=True, id=id, left_out=left_out, runs=runs))
    return path


def _write(path, content):
    write_text(path, run_file.as_bytes(content))
    os.chmod(path, 0o444)


# ------------------------------------------------------------------------------------------------
# From facts to a run


def folded(facts: list[dict]) -> Run:
    """Return the run that the facts make; `whole` says whether the run came to its end."""
    header, ends = facts[0], _of(facts, "end")
    workers = _of(facts, "worker") or [{}]
    worker = workers[0]
    host = worker.get("host", header["host"])
    if worker:
        # A job may have gone on with the run of another one.
        host = host | {"slurm": workers[-1].get("host", {}).get("slurm", {})}
    seconds: dict[str, float] = {}
    for fact in _of(facts, "seconds"):
        seconds[fact["phase"]] = round(seconds.get(fact["phase"], 0.0) + fact["seconds"], 2)
    by_build: dict[str, list[dict]] = {name: [] for name in header["builds"]}
    for fact in facts:
        if fact.get("build") in by_build:
            by_build[fact["build"]].append(fact)
    fields = {
        "schema": run_file.SCHEMA,
        **{key: header[key] for key in OF_HEADER},
        "flags": [without_folders(flag) for flag in header["flags"]],
        "parity": header.get("parity", "courses"),
        **{key: header[key] for key in ("over", "value") if key in header},
        "device": "cuda" if host["gpus"] else "cpu",
        "versions": host["versions"],
        "host": host | {"gpus": worker.get("gpus", host["gpus"])},
        "end_utc": ends[-1]["end_utc"] if ends else utc(),
        "unit": worker.get("unit", ""),
        "whole": bool(ends),
        "stopped": ends[-1].get("stopped", "") if ends else "",
        "seconds": seconds,
        "builds": {
            name: _build(header["builds"][name], known, header["control"]) for name, known in by_build.items() if known
        },
    }
    return msgspec.convert(fields, Run)


def utc() -> str:
    """Return the time as in 2026-11-25T10:15:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _of(facts, fact, **values) -> list[dict]:
    return [line for line in facts if line["fact"] == fact and all(line.get(key) == values[key] for key in values)]


def _build(declared, facts, control) -> Build:
    worker, plans = (_of(facts, "worker") or [{}])[0], _of(facts, "plan")
    cycles = {cycle["cycle"]: cycle for cycle in _of(facts, "cycle")}
    anchor = plans[-1]["base"] if plans else ""
    # Where a base failed and another follows, the control repeated the first one so far: no control of the second.
    repeats = {number: cycle for number, cycle in cycles.items() if cycle["order"][:1] == [anchor]}
    variants = {
        name: _variant(name, declaration, facts, repeats if name == control else cycles)
        for name, declaration in declared["variants"].items()
    }
    fields = {
        "anchor": anchor,
        "apart": declared.get("apart", ""),
        "fields": _without_folders(declared.get("fields", {})),
        "asked_layers": declared.get("asked_layers"),
        **{key: _without_folders(worker[key]) for key in OF_BUILD if key in worker},
        "cycles": [_as(Cycle, cycle | {"busy_processes": cycle["busy"]}) for _, cycle in sorted(cycles.items())],
        "variants": variants,
    }
    # A constructor checks no type.
    return msgspec.convert(fields, Build)


def _variant(name, declared, facts, cycles) -> Variant:
    variant_facts = [fact for fact in facts if fact.get("variant") == name]
    left_out, alone, profiles = (_of(variant_facts, kind) for kind in ("left_out", "alone", "profile"))
    captures = _of(variant_facts, "capture") or _of(variant_facts, "parity") or [{}]
    if declared["kind"] == "compile":
        # A later process finds compiled code in the cache.
        makings = [*captures, *_of(variant_facts, "parity")]
        captures = [max(makings, key=lambda fact: fact.get("made_s", 0.0))]
    # A cycle that is begun again, perhaps without a variant, replaces the first.
    of_cycles = [block for block in _of(variant_facts, "block") if _is_of_cycle(block, cycles)]
    blocks = {(block["cycle"], block["place"]): block for block in of_cycles}
    fields = {
        **{key: declared[key] for key in OF_DECLARATION},
        "promise": declared["parity"],
        "raised": _as(Raised, _without_folders(left_out[0])) if left_out else None,
        "apart": bool(_of(facts, "apart")),
        "capture": _as(CaptureFacts, captures[0]),
        "alone": _as(Alone, alone[-1]) if alone else None,
        "parity": [_as(Course, course) for course in _of(variant_facts, "parity")],
        "after": [_as(Course, course) for course in _of(variant_facts, "course")],
        "audits": [_audit(fact, _of(facts, "repetition", seed=fact["seed"])) for fact in _of(variant_facts, "audit")],
        "again": [_as(Again, block) for block in _of(variant_facts, "again")],
        "profile": _as(Profile, profiles[-1] if profiles else {}),
        "blocks": [_block(blocks[key]) for key in sorted(blocks)],
    }
    return msgspec.convert(fields, Variant)


_PATH_IN_PROSE = re.compile(r"""(?<![\w.)/])~?(?:/[^\s/:;,="'()\[\]]+){2,}/?""")


def prose_without_folders(text: str) -> str:
    """Return a sentence with the last name of each absolute path in it; a path ends at a space."""
    return _PATH_IN_PROSE.sub(name_of, text)


def _audit(fact, repetitions) -> Audit:
    lines = fact, *(repetitions[:1] or [{}])
    block, repetition = (_as(Trained, line) if "losses" in line else None for line in lines)
    reasons = {key: prose_without_folders(fact.get(key, "")) for key in ("raised", "ended")}
    return Audit(seed=fact["seed"], first=fact["first"], own=block, repetition=repetition, **reasons)


def _without_folders(value):
    """A value of JSON whose sentences and fields name no folder of a machine; each path has its last name alone."""
    return with_leaves(value, lambda leaf: prose_without_folders(leaf) if isinstance(leaf, str) else leaf)


def _is_of_cycle(block, cycles) -> bool:
    cycle = cycles.get(block["cycle"])
    return cycle is not None and cycle["order"][block["place"] :][:1] == [block["variant"]]


def _as(kind, fact):
    """The fact as a type of the run file, which has other fields, too."""
    return msgspec.convert({key: fact[key] for key in kind.__struct_fields__ if key in fact}, kind)


def _block(fact) -> Block:
    times = {"busy_processes": fact["busy"], "worker_s": round(fact["end_s"] - fact["begin_s"], 5)}
    return _as(Block, fact | times)
