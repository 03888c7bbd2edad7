"""The run file, schema 4: one JSON object a run, sealed once and never changed; reading it back, and writing it.

It holds the facts of a run (facts.py). Files of schema 3 are read, too (schema_3.py).
"""

import os
from collections import Counter
from pathlib import Path

import msgspec

from graph_worth.harness.files import schema_3
from graph_worth.harness.files.facts import Census, Epochs, Index, Run
from graph_worth.text import printable

CENSUS, EPOCHS = "census", "epochs"
# What a file may hold.
Content = Run | Census | Epochs
SCHEMA = 4
MAX_BYTES = 32 * 2**20
# Of all runs of a file; each is compared with every other one on a page or in a figure.
MAX_VARIANTS = 500
# Of values whose fields have no type, such as a configuration.
MAX_INTEGER = 10**18
PASSED_OVER = ("archive", "figures", "operators")
# Names of variants in older files.
RENAMED = {
    "graph_compiled": "graph_step_compiled",
    "graph_step_compile": "graph_step_compiled",
    "graph_layer_compile": "graph_layer_compiled",
}


class Damaged(ValueError):
    """The file is no run file; the text is one line that says why."""

    def __init__(self, text: str):
        super().__init__(printable(text))


def read(path: Path) -> Run:
    """Return the run in a file; raise Damaged as `read_all` does, and for a census or epochs."""
    content = read_all(path)
    if not isinstance(content, Run):
        raise Damaged(f"{path}: {type(content).__name__.lower()} of {len(content.runs)} runs, not one run")
    return content


def runs_of(content: Content) -> list[Run]:
    """Return the runs in a file: its run, those of a census, none of epochs."""
    return [content] if isinstance(content, Run) else content.runs if isinstance(content, Census) else []


def read_all(path: Path) -> Content:
    """Return the run, the census, or the epochs, in a file.

    Raises:
        Damaged: the file holds none of them, is too large, or is of another schema.
    """
    try:
        if not path.is_file() or path.is_symlink():
            raise ValueError("no regular file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB, no run file is")
        return parsed(path.read_bytes())
    except OSError as error:
        fault = error.strerror or "cannot be read"
    except (ValueError, OverflowError) as error:
        fault = str(error)
    except RecursionError:
        fault = "no whole JSON"
    raise Damaged(f"{path}: {fault}")


class _Head(msgspec.Struct):
    schema: Index
    census: bool = False
    epochs: bool = False


def parsed(data: bytes) -> Content:
    """Return the run, the census, or the epochs, that the bytes of a file hold.

    Raises:
        ValueError: they hold none; the text names the place.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema == schema_3.SCHEMA:
            content: Content = msgspec.convert(schema_3.upgraded(msgspec.json.decode(data)), Run)
        elif head.schema != SCHEMA:
            raise ValueError(f"schema {head.schema}, this version reads {schema_3.SCHEMA} and {SCHEMA}")
        else:
            kind: type[Content] = Census if head.census else Epochs if head.epochs else Run
            content = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no whole JSON: {error}") from None
    every = runs_of(content)
    number = sum(len(build.variants) for run in every for build in run.builds.values())
    if number > MAX_VARIANTS:
        raise ValueError(f"{number:,} variants, a run file has at most {MAX_VARIANTS}")
    for run in every:
        _require_sound(run)
        _rename(run)
    if isinstance(content, Epochs):
        _require_printable([content.id, *(text for run in content.runs for text in (run.program, run.step))])
        _require_small([content.source, content.versions, content.host.variables, content.host.slurm])
    return content


def as_bytes(run: Content) -> bytes:
    """Return the content of a file."""
    return msgspec.json.encode(run) + b"\n"


def find(root: Path) -> tuple[list[tuple[Path, Run]], list[str]]:
    """Return every run below a folder, by path, and a line for each damaged file and each folder that is not readable.

    The runs of a census are among them. Hidden folders and those of PASSED_OVER are left out; links to folders are not
    followed.
    """
    runs: list[tuple[Path, Run]] = []
    faults: list[str] = []
    paths: list[Path] = []

    def unreadable(error):
        faults.append(printable(f"{error.filename}: {error.strerror}"))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name[0] != "." and name not in PASSED_OVER]
        names = (name for name in files if name.endswith(".json") and name[0] != ".")
        paths += [Path(folder, name) for name in names]
    for path in sorted(paths):
        try:
            runs += [(path, run) for run in runs_of(read_all(path))]
        except Damaged as error:
            faults.append(str(error))
    return runs, faults


def _rename(run: Run) -> None:
    """Give variants of an older file the names that they have now; only compiled ones changed, never a reference."""
    for build in run.builds.values():
        build.variants = {RENAMED.get(name, name): variant for name, variant in build.variants.items()}
        for cycle in build.cycles:
            cycle.order = [RENAMED.get(name, name) for name in cycle.order]


def _require_sound(run: Run) -> None:
    """Refuse what no single value shows.

    Raises:
        ValueError: a name that garbles a terminal, a huge integer, a block without steps, too many blocks in a cycle.
    """
    names = [run.id, run.model, run.preset, run.label, run.over, run.control, run.unit, run.begin_utc, *run.builds]
    names += [gpu.name for gpu in run.host.gpus] + [run.host.boot or ""]
    names += [name for build in run.builds.values() for name in (build.anchor, *build.variants)]
    _require_printable(names)
    values: list = [run.source, run.versions, run.host.variables, run.host.slurm]
    for build in run.builds.values():
        values += [build.config, build.fields]
        for variant in build.variants.values():
            values += [variant.capture.memory, variant.capture.report, variant.profile.top_kernels]
    _require_small(values)
    for build in run.builds.values():
        orders = {cycle.cycle: Counter(cycle.order) for cycle in build.cycles if cycle.order}
        for name, variant in build.variants.items():
            seen = Counter(block.cycle for block in variant.blocks)
            # A file of schema 3 has no orders, and one base.
            of_base = Counter({name: 2 if name == build.anchor else 1})
            if any(number > orders.get(cycle, of_base)[name] for cycle, number in seen.items()):
                raise ValueError(f"{name} has more blocks in a cycle than the order has")
            if run.schema == SCHEMA and variant.sealed is not None:
                raise ValueError(f"{name} holds a verdict, which a file of schema {SCHEMA} does not")
            if any(not block.steps for block in variant.blocks):
                raise ValueError(f"{name} has a block without steps")
            if any(block.classes and len(block.classes) != len(block.step_ms) for block in variant.blocks):
                raise ValueError(f"{name} has a block whose classes are not those of its steps")


def _require_printable(names) -> None:
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{name!a} is no name that can be printed")


def _require_small(value) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"an integer beyond {MAX_INTEGER:,}")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _require_small(item)
