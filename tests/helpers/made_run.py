"""A sound run, made of facts as graph_worth.harness.builds adds them, on an H200 or on a CPU."""

from pathlib import Path

from graph_worth.harness import judge
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Alone, Raised, Run

STEPS = 20
HEADER = {
    "schema": run_file.SCHEMA,
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
    """The fact of a block: STEPS steps that take `ms` each, or the steps of a list."""
    step_ms = list(ms) if isinstance(ms, (list, tuple)) else [ms] * STEPS
    seconds, replays = sum(step_ms) / 1e3, 0 if variant == "eager" else len(step_ms)
    own = {
        **{"build": "", "variant": variant, "cycle": cycle, "place": place, "busy": 0, "step_ms": step_ms},
        **{"classes": [], "issue_ms": [], "gpu": None, "process": 1, "threads": 3, "untimed_steps": 2},
        **{"drained_steps": 3, "reserved_bytes": 0, "held_bytes": 2**30, "growth_bytes": 0, "replays": replays},
        **{"expected_replays": replays, "late_ms": 0.1, "late_change": False, "reset": True, "losses": [1.0, 0.5]},
        **{"moved": [1.0], "reruns": None, "parent_s": seconds, "begin_s": 0.0, "end_s": seconds},
    }
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
    *,
    preset="bench",
    gpus=H200,
    cycles=8,
    busy=0,
    unsupported=(),
    ms=None,
    issue=None,
    boot="b",
    names=("eager", "graph_layer"),
    alone=None,
    kernels=9,
    **header,
) -> Run:
    """A run of eager and graph_layer, each with a block in every cycle.

    Args:
        preset: of gpt3.
        gpus: () is a CPU.
        cycles: whole cycles; where `busy` is not 0, so many quiet ones and so many beside busy processes.
        busy: number of busy processes in every second cycle.
        unsupported: names of further variants, which cannot run.
        ms: variant -> ms of its steps; of each cycle's steps if it is a list.
        issue: (ms to issue a step of eager, ms of GPU time of every variant's step), or None.
        boot: of the host.
        names: of the variants that are measured, the base first; "eager..." is of kind eager, "control" repeats it.
        alone: variant -> bytes that it needs as the only one of a process.
        kernels: of a step.
        header: fields of the run that are others.
    """
    like = HEADER["builds"][""]["variants"]
    eagers = [name for name in (*names, *unsupported) if name.startswith("eager") or name == "control"]
    declared = {name: like["eager" if name in eagers else "graph_step"] for name in (*names, *unsupported)}
    head = {**HEADER, "preset": preset, "builds": {"": {"variants": declared}}, "id": "20261125T101500Z-a7d396c1"}
    head["host"] = {"boot": boot, "gpus": list(gpus), "versions": {"torch": "2.13"}}
    facts = [_fact("plan", base=names[0])]
    for name in names:
        made = int(name not in eagers)
        facts.append(_fact("capture", name, graphs=made, promised_graphs=made, promised_replays=made))
        if name != "control":
            courses = ("parity", "parity", "course", "course")
            facts += [_fact(kind, name, hashes=["h"], losses=[1.0]) for kind in courses]
        profiled = {"busy_ms": issue[1], "graph_share": 0.9 * made} if issue else {}
        facts.append(_fact("profile", name, kernels=kernels, **profiled))
    for name, size in (alone or {}).items():
        facts.append(
            _fact("alone", name, peak_reserved_bytes=size, driver_bytes=2 * size, is_only=True, step_ms=[10.0, 10.0])
        )
    facts += [_fact("left_out", name, kind="unsupported", reason="needs a GPU") for name in unsupported]
    order = [*names, names[0]]
    for cycle in range(2 * cycles if busy else cycles):
        beside = busy if cycle % 2 else 0
        for place, name in enumerate(order):
            own = (ms or {}).get(name, 10.0)
            taken = own[cycle % len(own)] if isinstance(own, list) else own
            more = {"replays": 0, "expected_replays": 0} if name in eagers else {}
            issued = [issue[0] if name in eagers else 0.5] * 3 if issue else []
            fact = block(name, cycle, place, busy=beside, ms=taken, issue_ms=issued, **more)
            facts.append({"fact": "block", **fact})
        facts.append(_fact("cycle", cycle=cycle, order=order, busy=beside, operator_us=9.0))
    facts.append(_fact("end", end_utc="2026-11-25T10:18:00Z"))
    run = partial.folded([{"fact": "header", **head, **header}, *facts])
    verdicts = judge.judged(run)[""].verdicts
    assert all(verdicts[name].status == judge.PASS for name in names), verdicts
    return run


def with_apart(run: Run, apart: str, **changes) -> Run:
    """Add the only build of another made run to a run, as that of variants that stand apart."""
    (build,) = made_run(**changes).builds.values()
    build.apart = apart
    run.builds[f"+{apart}"] = build
    return run


def _fact(fact, variant="", /, **more):
    return {"fact": fact, "build": "", "variant": variant, **more}


def write(run: Run, folder: Path) -> Path:
    """The sealed file of a run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.id}.json"
    path.write_bytes(run_file.as_bytes(run))
    path.chmod(0o444)
    return path


def put(root: Path, number: int = 0, **changes) -> Path:
    """A made run of its own id below a root."""
    return write(made_run(id=f"20261125T10150{number}Z-a7d396c{number}", **changes), root / FOLDER)


def quiet(run: Run, alone_ms: float | None = None) -> Run:
    """The run with all that shows a quiet host: no other benchmark, and eager alone as fast as in its blocks."""
    build = run.builds[""]
    for cycle in build.cycles:
        cycle.others = 0
    alone_ms = alone_ms or judge.judged(run)[""].ms("eager")
    build.variants["eager"].alone = Alone(peak_reserved_bytes=0, step_ms=[alone_ms] * STEPS)
    return run


def with_slowing_variable(run: Run, root: Path, spares: str = "[]") -> Run:
    """The run with a variable that slowed eager, by the corrections of the root."""
    text = f'[[slowed]]\nvariable = "A"\nspares = {spares}\nwhy = "A slowed eager"\n'
    (root / "corrections.toml").write_text(text)
    run.host.variables = {"A": "1"}
    return run


def put_sweep(root: Path, host_ms=30.0, boot="b", number=0, oom=(), change=None) -> Path:
    """A sealed sweep of llama2_lora over sequence below a root: a host of 50 us a kernel, of which there are 600.

    The GPU is busy for 10, 20, 40 and 80 ms; `oom`: values that do not fit.
    """
    runs = []
    for place, value in enumerate((128, 256, 512, 1024)):
        busy_ms, is_full = 10.0 * 2**place, place in (0, 3)
        header = {"label": f"sequence-{value}", "flags": ["--sequence", f"{value}"], "over": "sequence", "value": value}
        header |= {"model": "llama2_lora", "preset": "slice", "parity": "courses" if is_full else "blocks"}
        scatter = [1.0, 1.01, 0.99]
        ms = {"eager": [max(host_ms, busy_ms) * by for by in scatter], "graph_layer": 1.01 * busy_ms}
        more = {"ms": ms, "issue": (host_ms, busy_ms), "kernels": 600.0, "cycles": 8 if is_full else 3, "boot": boot}
        run = quiet(made_run(id=f"20261129T10{number}5{place}0Z-a7d396c{place}", control="", **more, **header))
        if value in oom:
            for name, variant in run.builds[""].variants.items():
                reason = "out of memory" if name == "eager" else "no eager variant is left"
                variant.blocks, variant.alone, variant.raised = [], None, Raised(kind="oom", reason=reason)
            run.builds[""].cycles = []
        runs.append(run)
    if change:
        change(runs)
    return partial.seal_together(root / "h200x1" / "llama2_lora-slice-over-sequence", runs[-1].id, runs, {})
