"""A sound run of schema 4, made of facts as benchmarks.measuring adds them, on an H200 or on a CPU."""

from pathlib import Path

from benchmarks.files import partial, run_file
from benchmarks.judge import judged

HEADER = {
    "id": "20261125T101500Z-a7d396",
    "model": "gpt3",
    "preset": "bench",
    "label": "",
    "flags": [],
    "source": {"commit": "c", "tree": "t", "clean": True, "hash": "h"},
    "ranks": 1,
    "begin_utc": "2026-11-25T10:15:00Z",
    "control": "control",
    "host": {"boot": "b", "gpus": [], "versions": {"torch": "2.13"}},
    "builds": {
        "": {
            "variants": {
                name: {
                    "kind": "eager" if name == "eager" else "graph",
                    "help": "",
                    "reference": "eager",
                    "parity": None,
                    "tolerance": None,
                    "headline": True,
                    "traits": {},
                }
                for name in ("eager", "graph_step")
            }
        }
    },
}


def block(variant, cycle, place, ms=10.0, **more):
    """The fact of a block of 100 steps, each of `ms` milliseconds."""
    own = {
        **{"build": "", "variant": variant, "cycle": cycle, "place": place, "busy": 0, "step_ms": [ms] * 100},
        **{"process": 1, "threads": 3, "untimed_steps": 2, "drained_steps": 3, "issue_ms": [], "gpu": None},
        **{"reserved_bytes": 0, "held_bytes": 0, "growth_bytes": 0, "replays": 100, "expected_replays": 100},
        **{"late_ms": 0.1, "late_change": False, "reset": True, "losses": [1.0, 0.5], "moved": [1.0]},
        **{"parent_s": ms / 10, "begin_s": 0.0, "end_s": ms / 10},
    }
    if variant == "eager":
        own |= {"replays": 0, "expected_replays": 0}
    return own | more


def add_cycle(own: partial.Partial, cycle: int, ms: dict[str, float], busy: int = 0, is_whole=True, **more) -> None:
    """Add the blocks of a cycle: each variant with its ms, the first one as the base."""
    order = [*ms, next(iter(ms))]
    for place, name in enumerate(order):
        own.add("block", **block(name, cycle, place, busy=busy, ms=ms[name], **more))
    if is_whole:
        own.add("cycle", build="", cycle=cycle, order=order, busy=busy)


FOLDER = "h200x1/gpt3-bench"
H200 = ({"name": "NVIDIA H200", "uuid": "GPU-1"},)


def made_run(
    *, preset="bench", gpus=H200, cycles=8, busy=0, unsupported=(), ms=None, issue=None, boot="b", **header
) -> run_file.Run:
    """A run of eager and graph_layer, each with a block in every cycle.

    Args:
        preset: of gpt3.
        gpus: () is a CPU.
        cycles: whole cycles; where `busy` is not 0, so many quiet ones and so many beside busy processes.
        busy: number of busy processes in every second cycle.
        unsupported: names of further variants, which cannot run.
        ms: variant -> ms of its blocks; of each cycle's if it is a list.
        issue: (ms to issue a step of eager, ms of GPU time of every variant's step), or None.
        boot: of the host.
        header: fields of the run that are others.
    """
    like = HEADER["builds"][""]["variants"]
    names = ("eager", "graph_layer", *unsupported)
    declared = {name: like["eager" if name == "eager" else "graph_step"] for name in names}
    head = {**HEADER, "preset": preset, "builds": {"": {"variants": declared}}, "id": "20261125T101500Z-a7d396c1"}
    head["host"] = {"boot": boot, "gpus": list(gpus), "versions": {"torch": "2.13"}}
    graphs = {"graphs": 1, "promised_graphs": 1, "promised_replays": 1}
    facts = [_fact("plan", base="eager"), _fact("capture", "graph_layer", **graphs)]
    for name in ("eager", "graph_layer"):
        kinds = ("parity", "parity", "course", "course") if name == "eager" else ("parity", "course")
        facts += [_fact(kind, name, hashes=["h"], losses=[1.0]) for kind in kinds]
        if issue:
            facts.append(_fact("profile", name, busy_ms=issue[1], kernels=9, graph_share=0.9 * (name != "eager")))
    facts += [_fact("left_out", name, kind="unsupported", reason="needs a GPU") for name in unsupported]
    for cycle in range(2 * cycles if busy else cycles):
        beside = busy if cycle % 2 else 0
        order = ("eager", "graph_layer", "eager")
        for place, name in enumerate(order):
            own = (ms or {}).get(name, 10.0)
            taken = own[cycle % len(own)] if isinstance(own, list) else own
            facts.append({"fact": "block", **block(name, cycle, place, busy=beside, ms=taken)})
            facts[-1]["issue_ms"] = [issue[0] if name == "eager" else 0.5] if issue else []
        facts.append(_fact("cycle", cycle=cycle, order=list(order), busy=beside))
    facts.append(_fact("end", end_utc="2026-11-25T10:18:00Z"))
    run = partial.folded([{"fact": "header", **head, **header}, *facts])
    verdicts = judged(run)[""].verdicts
    assert [own.status for own in verdicts.values()][:2] == ["pass", "pass"], verdicts
    return run


def _fact(fact, variant="", **more):
    return {"fact": fact, "build": "", "variant": variant, **more}


def write(run: run_file.Run, folder: Path) -> Path:
    """The sealed file of a run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.id}.json"
    path.write_bytes(run_file.as_bytes(run))
    path.chmod(0o444)
    return path


def put(root: Path, number: int = 0, **changes) -> Path:
    """A made run of its own id below a root."""
    return write(made_run(id=f"20261125T10150{number}Z-a7d396c{number}", **changes), root / FOLDER)
