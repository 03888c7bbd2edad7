"""Records and sessions made by hand, for the tests of tables."""

import itertools
import lzma

from benchmarks import sessions
from common import record as records

STRATEGY = {"strategy": "whole step", "num_graphs": 1, "warmup_s": 3.0, "capture_s": 0.5, "compile_s": 0.0}
# Five pairs: a verdict on one host.
STEPS = ((10.0, 8.0), (10.1, 8.1), (9.9, 8.0), (10.0, 8.05), (10.05, 8.0))


def mean_ratio(steps=STEPS) -> float:
    product = 1.0
    for eager, graph in steps:
        product *= eager / graph
    return product ** (1 / len(steps))


SPEEDUP = mean_ratio()

_runs = itertools.count()


def make(variant="eager", number=1, step_ms=10.0, num_steps=20, **changes):
    """A sound CUDA record of schema 2, no two with the same steps; changes: top-level keys, or dicts that update a
    group."""
    record = records.blank(
        model="fake", preset="bench", variant=variant, round=number, status="pass", device="cuda", message=""
    )
    record["env"].update(gpu_name="NVIDIA H200", gpu_uuid="GPU-0", boot_id="boot", source_hash="abc", num_gpus=1)
    record["env"].update(run_hash="run")
    if number:
        scatter = 0.001 * (1 + 1e-6 * next(_runs))
        times = [step_ms * (1 + scatter * (index % 5 - 2)) for index in range(num_steps)]
        record["steps"].update(gpu_ms=times, batch=[0] * num_steps, wall_ms=sum(times))
        record.update(statistic_ms=step_ms, busy_ms=0.8 * step_ms if variant == "eager" else step_ms)
        record.update(optimizer_ms=1.0)
    for key, value in changes.items():
        record[key].update(value) if isinstance(value, dict) else record.__setitem__(key, value)
    return record


def session(steps=STEPS, **changes):
    """Rounds of eager and graph."""
    found = []
    for number, (eager, graph) in enumerate(steps, 1):
        found += [make("eager", number, eager, **changes), make("graph", number, graph, **changes)]
    return found


def graphed(steps=STEPS, **changes):
    """The same with one graph of the whole step, replayed in every one."""
    found = session(steps, **changes)
    for record in found:
        if record["variant"] != "eager":
            record["capture"].update(STRATEGY, num_replays=20, expected_replays=20)
    return found


def on_cpu(**changes):
    return graphed(device="cpu", env={"gpu_name": None, "gpu_uuid": None, "cpu": "Xeon, 2 cores"}, **changes)


def schema_1(found):
    """The same records as schema 1 had them."""
    old = []
    for record in found:
        lacks = records.ONLY_2
        record = {
            key: {name: each for name, each in value.items() if name not in lacks.get(key, ())}
            if isinstance(value, dict)
            else value
            for key, value in record.items()
            if key not in lacks[""]
        }
        record["capture"]["num_fallbacks"] = 0
        old.append(record | {"schema": 1})
    return old


def put(folder, *found):
    """Single files."""
    for record in found:
        records.write(folder / records.file_name(record["variant"], record["round"], record.get("attempt", 1)), record)
    return folder


def packed(group, found, hour=3, boot="13f405", gpu="c77b", day=22, **meta):
    """A packed session of `found` on a host of its own; hour: when it began. Returns its folder."""
    name = f"202611{day:02}T{hour:02}0000Z-{boot}-{gpu}"
    folder = group / name
    folder.mkdir(parents=True)
    own = [record | {"env": record["env"] | {"boot_id": boot, "gpu_uuid": f"GPU-{gpu}"}} for record in found]
    for record in own:
        if record["schema"] == 2:
            record.update(session=name)
            record["digest"] = records.digest_of(record)
    text = "".join(records.dumps(record) + "\n" for record in own)
    (folder / sessions.RECORDS).write_bytes(lzma.compress(text.encode(), preset=0))
    begin = f"2026-11-{day:02}T{hour:02}:00:00Z"
    node = {"boot_id": boot, "gpu_uuids": [f"GPU-{gpu}"]}
    whole = {"schema": sessions.META_SCHEMA, "session": name, "begin_utc": begin, "end_utc": begin, "nodes": [node]}
    sessions.write_meta(folder, whole | {"closed": "complete", "probes": [], "num_records": len(own)} | meta)
    return folder


def opened(group, found, hour=3, boot="13f405", gpu="c77b"):
    """The same while it is open."""
    name = f"20261122T{hour:02}0000Z-{boot}-{gpu}"
    folder = put(group / f"{name}{sessions.OPEN}", *found)
    sessions.write_meta(
        folder, {"schema": sessions.META_SCHEMA, "session": name, "begin_utc": f"2026-11-22T{hour:02}:00:00Z"}
    )
    return folder
