"""A run while it is measured: a file of facts, one JSON object a line, that only grows, and the run that they make.

A kill at any moment loses the line that was being written. `folded` makes the run file's content of the lines; `seal`
writes it once.
"""

import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.files import run_file
from benchmarks.files.run_file import Block, Build, Parity, Run, Variant
from benchmarks.measuring import checks
from common.files import write_text

SUFFIX = ".partial.jsonl"
# Losses are printed with seven digits and added up in FP32.
LEAST_DEVIATION_AFTER = 1e-5
# Facts that go into the run file under the same name.
OF_HEADER = ("id", "model", "preset", "label", "flags", "source", "ranks", "begin_utc", "control")
# Facts of a variant that has the GPU to itself, which stand in the place of those of its capture.
ALONE = ("bytes_added", "pool_bytes", "memory", "peak_reserved_bytes", "driver_bytes")
OF_BLOCK = [name for name in Block.__dataclass_fields__ if name not in ("worker_s", "busy_processes")]
OF_BUILD = {"config": {}, "card": [], "notes": [], "flops_per_step": 0.0, "flops_convention": "", "items_per_step": 0.0}


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
    write_text(path, run_file.as_text(folded(partial.facts)).encode())
    os.chmod(path, 0o444)
    partial.close()
    partial.path.unlink()
    return path


# ------------------------------------------------------------------------------------------------
# From facts to a run


def folded(facts: list[dict]) -> Run:
    """Return the run that the facts make; `whole` says whether the run came to its end."""
    header, ends = facts[0], _of(facts, "end")
    worker = _first(facts, "worker")
    host = worker.get("host", header["host"])
    seconds: dict[str, float] = {}
    for each in _of(facts, "seconds"):
        seconds[each["phase"]] = round(seconds.get(each["phase"], 0.0) + each["seconds"], 2)
    builds = {name: [each for each in facts if each.get("build") == name] for name in header["builds"]}
    return Run(
        schema=run_file.SCHEMA,
        **{key: header[key] for key in OF_HEADER},
        device="cuda" if host["gpus"] else "cpu",
        versions=host["versions"],
        host={key: value for key, value in host.items() if key != "versions"}
        | {"gpus": worker.get("gpus", host["gpus"])},
        end_utc=ends[-1]["end_utc"] if ends else utc(),
        unit=worker.get("unit", ""),
        whole=bool(ends),
        seconds=seconds,
        builds={name: _build(header, name, own) for name, own in builds.items() if own},
    )


def utc() -> str:
    """Return the time as in 2026-11-25T10:15:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _of(facts, fact, **values) -> list[dict]:
    return [each for each in facts if each["fact"] == fact and all(each.get(key) == values[key] for key in values)]


def _first(facts, fact, **values) -> dict:
    return next(iter(_of(facts, fact, **values)), {})


def _build(header, name, facts) -> Build:
    worker, declared = _first(facts, "worker"), header["builds"][name]["variants"]
    made = Build(
        base=_of(facts, "plan")[-1]["base"] if _of(facts, "plan") else next(iter(declared)),
        fields=header["builds"][name].get("fields", {}),
        **{key: worker.get(key, default) for key, default in OF_BUILD.items()},
        cycles=len(_of(facts, "cycle")),
        variants={variant: _variant(variant, declared[variant], facts) for variant in declared},
    )
    # Two eager runs say little of how far eager runs differ. The base has many blocks, on the same batches.
    scatter = checks.scatter_of_losses(made)
    device = "cuda" if worker.get("host", header["host"])["gpus"] else "cpu"
    for variant, own in made.variants.items():
        own.parity = _parity(variant, declared[variant], facts, scatter)
    for variant, own in made.variants.items():
        capture, tolerance = _first(facts, "capture", variant=variant), declared[variant].get("tolerance") or 0.0
        promised = (capture.get("promised_graphs"), capture.get("promised_replays"))
        if own.status == "pass":
            fault = _parity_fault(own) or checks.fault_of(variant, made, device, tolerance, promised, header["ranks"])
            own.status, own.reason = ("failed", fault) if fault else ("pass", "")
    return made


def _variant(name, declared, facts) -> Variant:
    left_out = _first(facts, "left_out", variant=name)
    profiles = _of(facts, "profile", variant=name)
    parity, capture = _first(facts, "parity", variant=name), _first(facts, "capture", variant=name)
    # Measured where the variant was captured by itself, before any memory is shared.
    capture = capture | {key: parity[key] for key in ALONE if key in parity}
    orders = {each["cycle"]: each["order"] for each in _of(facts, "cycle")}
    own = [each for each in _of(facts, "block", variant=name) if _is_of_cycle(each, orders)]
    blocks = {(each["cycle"], each["place"]): each for each in own}
    return Variant(
        **{key: declared[key] for key in ("kind", "help", "headline", "traits")},
        status=left_out.get("status", "pass"),
        reason=left_out.get("reason", ""),
        apart=bool(_of(facts, "apart")),
        parity=None,
        capture=_plain(capture),
        profile=_plain(profiles[-1] if profiles else {}),
        blocks=[_block(blocks[key]) for key in sorted(blocks)],
    )


def _is_of_cycle(block, orders):
    """Return whether a block belongs to a whole cycle.

    A cycle that is begun again, perhaps without a variant, replaces the first.

    orders: cycle -> the names of its blocks by place, for whole cycles; [] where the order is not known.
    """
    order = orders.get(block["cycle"])
    return order == [] or (order is not None and order[block["place"] :][:1] == [block["variant"]])


def _plain(fact):
    return {key: value for key, value in fact.items() if key not in ("fact", "build", "variant", "say")}


def _block(fact) -> Block:
    return Block(
        **{name: fact.get(name) for name in OF_BLOCK},
        busy_processes=fact["busy"],
        worker_s=round(fact["end_s"] - fact["begin_s"], 5),
    )


# ------------------------------------------------------------------------------------------------
# Parity


def _parity(name, declared, facts, block_scatter) -> Parity | None:
    """Parity of a variant before and after its blocks. A reference is compared with another run of itself."""
    reference, promise = declared["reference"], declared["parity"]
    runs, courses = (_of(facts, fact, variant=name) for fact in ("parity", "course"))
    if not runs:
        return None
    made = Parity(reference=reference, steps=len(runs[0]["hashes"]), result="", after="")
    if reference == name:
        made.result = _compared(runs[0], runs[1]) if len(runs) > 1 else ""
        made.after = _compared(courses[0], courses[-1]) if courses else ""
        return made
    runs_of_reference, courses_of_reference = (_of(facts, fact, variant=reference) for fact in ("parity", "course"))
    if runs_of_reference:
        allowed = 2 * _scatter(runs_of_reference) if promise in ("bitwise", None) else promise
        made.result = _compared(runs[0], runs_of_reference[0], allowed)
        if made.result.startswith("differs"):
            made.result += f" from step {_first_difference(runs[0], runs_of_reference[0])}"
    if courses and courses_of_reference:
        scatter = max(_scatter(courses_of_reference), block_scatter)
        allowed = max(2 * scatter, declared.get("tolerance") or 0.0, LEAST_DEVIATION_AFTER)
        made.after = _compared(courses[0], courses_of_reference[0], allowed)
        if made.after.startswith("differs"):
            made.after += f", eager runs by {scatter:.1e}"
    return made


def _compared(own, other, allowed: float | None = None) -> str:
    """bitwise, or the largest relative difference of the losses, after "differs by" where it is more than allowed."""
    if own["hashes"] == other["hashes"]:
        return "bitwise"
    deviation = checks.loss_deviation(own["losses"], other["losses"])
    text = "no losses" if deviation is None else f"{deviation:.1e}"
    is_allowed = allowed is None or (allowed > 0 and deviation is not None and deviation <= allowed)
    return text if is_allowed else f"differs by {text}"


def _scatter(runs) -> float:
    """The deviation of two equal runs; 0 where there is one."""
    return (checks.loss_deviation(runs[0]["losses"], runs[1]["losses"]) or 0.0) if len(runs) > 1 else 0.0


def _first_difference(own, other) -> int:
    pairs = zip(own["hashes"], other["hashes"], strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), 0)


def _parity_fault(variant: Variant) -> str:
    """The line of a variant whose parity differs, or ""."""
    texts = {"": variant.parity.result, " after its blocks": variant.parity.after} if variant.parity else {}
    return next((f"parity{when}: {text}" for when, text in texts.items() if text.startswith("differs")), "")
