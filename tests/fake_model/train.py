"""A training script without a model: writes records that behave, misbehave and lie, to test the harness.

Step times come from a generator seeded by variant and round; graph takes 1 / 1.25 of eager's time.

    python -m tests.fake_model.train --preset tiny --variant graph --record run.json
"""

import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from common import config, environment, phases, proof
from common import record as records

SPEEDUP = 1.25
NUM_TENSORS, NUM_SAMPLES = 3, 8


@dataclass(frozen=True, kw_only=True)
class Config:
    step_ms: float = config.option(10.0, "eager's step time")
    noise: float = config.option(0.01, "relative scatter of a step")
    run_noise: float = config.option(0.002, "relative scatter of a whole run")
    seconds: float = config.option(0.0, "how long a run sleeps")
    min_steps: int = config.option(50, "timed steps")
    nondeterministic: bool = config.option(False, "no two runs have the same bits")
    pretend_gpu: bool = config.option(False, "the record says that a GPU was used")
    fail_times: int = config.option(0, "leave no record this many times, counted in a file beside the record")
    batch: int = config.option(1, "step times grow with it")
    width: int = config.option(4, "nothing depends on it")
    inner: int = config.option(6, "goes with width")
    issue_ms: float = config.option(0.0, "an eager step takes at least this; above 0 graph gains by that alone")
    only: str = config.option("", "unsupported: no variant can run here")
    data: str = config.option("", "is not read", is_path=True, words=("corpus",))
    kind: str = config.option("auto", "nothing depends on it")

    def __post_init__(self):
        if self.batch == 3:
            raise ValueError("--batch 3: the fake takes every number but this")


PRESETS = {"tiny": Config(), "bench": Config(min_steps=60)}
KINDS = {"eager": "eager", "compile": "compile"}
NUM_GRAPHS, REPLAYS = 4, 2


def promises(settings: Config, variant: str) -> tuple[int | None, int | None]:
    """(graphs, replays a step) of a variant."""
    return (0, 0) if variant in KINDS else (NUM_GRAPHS, REPLAYS)


ABOUT = {
    "sweeps": {"batch": ["batch"], "width": ["width", "inner"], "kind": ["kind"]},
    "reference": {"shifted": "shifted", "on_shifted": "shifted"},
    "promises": promises,
    "presets_need": lambda preset, settings: config.needs(preset == "bench"),
}
VARIANTS = {
    "eager": "the reference",
    "graph": "bitwise equal and 1.25 x faster",
    "compile": "equal to 1e-5",
    "differs": "promises bits and breaks the promise at step 7 in tensor_1",
    "stale": "ignores its input: its loss never moves in timed rounds",
    "few_replays": "counts one replay too few",
    "edited": "its statistic does not follow from its steps",
    "hang": "never ends, nor does its child",
    "die": "killed by signal 9",
    "crash": "ends with a traceback",
    "half": "leaves half a record",
    "oom": "out of memory",
    "shifted": "trains on something else, each time alike",
    "on_shifted": "has the bits of shifted, not of eager",
    "unsupported": "cannot run here",
    "drops": "leaves its work out after step 50 of timed rounds, at 0.03 ms a step",
    "no_graph": "makes no graph in timed rounds",
    "no_norm": "leaves the gradient norm out of timed rounds",
    "busy_above": "is busy for longer than a step takes",
}
ABOUT["kinds"] = {variant: KINDS.get(variant, "graph") for variant in VARIANTS}
DROPS_AFTER, DROPPED_MS = 50, 0.03


def main():
    arguments = config.parse(__package__, Config, PRESETS, VARIANTS, about=ABOUT)
    run, settings = arguments.run, arguments.config
    print(f"fake {run.variant} round {run.round}", flush=True)
    time.sleep(settings.seconds)
    path = Path(run.record)
    misbehave(run.variant, path)
    if settings.fail_times and count_failures(path) <= settings.fail_times:
        sys.exit(3)
    record = new_record(run, settings)
    random = Random(f"{run.variant} {run.round} {os.getpid() if settings.nondeterministic else 0}")
    num_steps = run.parity_steps or max(20, run.steps) if run.parity else run.steps or settings.min_steps
    if run.variant == "drops" and not run.parity:
        num_steps = 4 * max(num_steps, DROPS_AFTER)
    graphed = run.variant not in KINDS and not (run.variant == "no_graph" and not run.parity)
    num_replays = REPLAYS * num_steps if graphed else 0
    record["capture"].update(
        strategy="fake",
        warmup_s=0.5,
        capture_s=0.25 if graphed else 0.0,
        compile_s=(30.0 if run.round == 0 else 2.0) if run.variant == "compile" else 0.0,
        num_graphs=NUM_GRAPHS if graphed else 0,
        num_replays=num_replays - (run.variant == "few_replays"),
        expected_replays=num_replays,
    )
    # Falls by a tenth a step at first, and never below 1.
    losses = [1.0 + 9.0 * math.exp(-index / 90) for index in range(num_steps)]
    if settings.nondeterministic:
        losses = [loss * (1 + 1e-6 * random.gauss(0, 1)) for loss in losses]
    if run.variant == "compile":
        losses = [loss * (1 + 1e-5) for loss in losses]
    if run.variant == "differs":
        losses = [loss * (1 + 2e-3 * (index >= 7)) for index, loss in enumerate(losses)]
    if "shifted" in run.variant:
        losses = [loss * 1.1 for loss in losses]
    if run.variant == "stale" and not run.parity:
        losses = losses[:1] * num_steps
    if run.variant == "drops" and not run.parity:
        losses[DROPS_AFTER:] = losses[DROPS_AFTER - 1 : DROPS_AFTER] * (num_steps - DROPS_AFTER)
    norms = [None if run.variant == "no_norm" and not run.parity else 1.0] * num_steps
    record["numerics"].update(loss=losses, grad_norm=norms, state_hash="0" * 16)
    if run.parity:
        write_sidecar(
            path.with_suffix(".parity.npz"), run.variant, losses, random if settings.nondeterministic else None
        )
    else:
        time_steps(record, settings, random, num_steps, run.variant)
        prove(record, random if settings.nondeterministic else None)
        path.with_suffix(".trace.json.gz").write_bytes(b"trace")
    record["end_utc"] = phases.utc(time.time())
    if run.variant == "oom":
        record.update(status="oom", message="tried 9.0 GiB, 1.0 GiB free")
    records.write(path, record)
    print(records.dumps(record))


def misbehave(variant, path):
    if variant == "hang":
        if os.fork() == 0:
            os.setsid()
        while True:
            time.sleep(60)
    if variant == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if variant == "crash":
        raise RuntimeError("the fake model crashes")
    if variant == "half":
        path.write_text('{"schema": 1, "model": ')
        sys.exit(0)


def count_failures(path):
    counter = path.parent.parent / "calls"
    calls = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(calls))
    return calls


def new_record(run, settings):
    env = environment.describe_environment("cpu", 1)
    if settings.pretend_gpu:
        env.update(gpu_name="NVIDIA H200", gpu_uuid="GPU-0", num_gpus=1, driver="580.1")
    record = records.blank(
        model=__package__,
        preset=run.preset,
        variant=run.variant,
        round=run.round,
        status="pass",
        device="cuda" if settings.pretend_gpu else "cpu",
        config=vars(settings).copy(),
        argv=sys.argv[1:],
        env=env,
        items_per_step=1,
        unit="samples",
    )
    phases.Phases(record)
    graphs, replays = promises(settings, run.variant)
    record["promised"].update(graphs=graphs, replays_per_step=replays)
    record["extra"]["kind"] = ABOUT["kinds"][run.variant]
    if "unsupported" in (run.variant, settings.only):
        record.update(status="unsupported", message="needs hardware that nobody has")
        records.write(run.record, record)
        print(records.dumps(record))
        sys.exit(0)
    return record


def time_steps(record, settings, random, num_steps, variant):
    step_ms = settings.step_ms * settings.batch / (1.0 if variant == "eager" or settings.issue_ms else SPEEDUP)
    step_ms = max(step_ms, settings.issue_ms) if variant == "eager" else step_ms
    step_ms *= 1 + settings.run_noise * random.gauss(0, 1)
    times = [round(step_ms * (1 + settings.noise * random.gauss(0, 1)), 4) for _ in range(num_steps)]
    if variant == "drops":
        times[DROPS_AFTER:] = [DROPPED_MS] * (num_steps - DROPS_AFTER)
    record["proof"]["settled_ms"] = {"0": round(step_ms, 4)}
    record["conditions"].update(settled=True, window_s=sum(times) / 1e3)
    statistic = median(times) * (0.9 if variant == "edited" else 1.0)
    busy_ms = 1.1 * statistic if variant == "busy_above" else min(settings.step_ms * 0.7, statistic)
    record["steps"].update(gpu_ms=times, batch=[0] * num_steps, wall_ms=sum(times))
    record.update(statistic_ms=statistic, busy_ms=busy_ms, optimizer_ms=1.0, issue_ms=2.0)
    record.update(idle_fraction=max(0.0, 1 - busy_ms / statistic), energy_j=5.0 * num_steps)
    record["memory"].update(peak_reserved_bytes=2**30, graph_pool_bytes=2**28)
    record["clocks"]["sm_mhz"] = 1755.0


def prove(record, random):
    """What a timed run shows of its training: a state that moved by a tenth."""
    numerics, given = record["numerics"], record["proof"]
    num_steps = len(record["steps"]["gpu_ms"])
    proof.fill_series(given, num_steps, numerics["loss"], numerics["grad_norm"])
    noise = 1 + 1e-6 * random.gauss(0, 1) if random else 1.0
    start = [index / 8 for index in range(8)]
    sample = {"name": "weight", "start": start, "after": [value + 0.1 * noise for value in start]}
    sample["end"] = [value + 0.001 for value in sample["after"]]
    given.update(state_step=min(proof.STATE_STEP, num_steps - 1), state_sample=[sample])
    given.update(late_ms=0.5, late_change=False, growth_bytes=0)
    given["graph_kernel_share"] = 1.0 if record["extra"]["kind"] == "graph" else 0.0


def write_sidecar(path, variant, losses, random):
    import numpy

    num_steps = len(losses)
    steps, tensors = numpy.meshgrid(numpy.arange(num_steps), numpy.arange(NUM_TENSORS), indexing="ij")
    hashes = (1000 * steps + tensors + 1).astype(numpy.uint64)
    samples = numpy.linspace(-1, 1, NUM_TENSORS * NUM_SAMPLES, dtype=numpy.float32).reshape(NUM_TENSORS, NUM_SAMPLES)
    samples[-1, 4:] = numpy.nan
    if variant == "compile":
        hashes += numpy.uint64(7)
        samples *= numpy.float32(1 + 1e-5)
    if "shifted" in variant:
        hashes += numpy.uint64(9)
    if variant == "differs":
        hashes[7:, 1] += numpy.uint64(1)
        samples[1] *= numpy.float32(1.5)
    if random is not None:
        hashes += numpy.uint64(random.randrange(1, 2**40))
        samples *= numpy.float32(1 + 1e-6 * random.gauss(0, 1))
    numpy.savez_compressed(
        path,
        names=numpy.array([f"tensor_{index}" for index in range(NUM_TENSORS)]),
        hashes=hashes,
        samples=samples,
        loss=losses,
        grad_norm=numpy.ones(num_steps),
    )


if __name__ == "__main__":
    main()
