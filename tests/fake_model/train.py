"""A training script without a model: writes records that behave, misbehave and lie, to test the harness.

Step times come from a generator seeded by variant and round; graph takes 1 / 1.25 of eager's time.

    python -m tests.fake_model.train --preset tiny --variant graph --record run.json
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from common import config, environment
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
ABOUT = {
    "sweeps": {"batch": ["batch"], "width": ["width", "inner"], "kind": ["kind"]},
    "reference": {"shifted": "shifted", "on_shifted": "shifted"},
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
}


def main():
    arguments = config.parse("tests.fake_model", Config, PRESETS, VARIANTS, about=ABOUT)
    run, settings = arguments.run, arguments.config
    print(f"fake {run.variant} round {run.round}", flush=True)
    time.sleep(settings.seconds)
    path = Path(run.record)
    misbehave(run.variant, path)
    if settings.fail_times and count_failures(path) <= settings.fail_times:
        sys.exit(3)
    record = new_record(run, settings)
    random = Random(f"{run.variant} {run.round} {os.getpid() if settings.nondeterministic else 0}")
    num_steps = max(20, run.steps) if run.parity else run.steps or settings.min_steps
    graphed = run.variant not in ("eager", "compile")
    num_replays = 2 * num_steps if graphed else 0
    record["capture"].update(
        strategy="fake",
        warmup_s=0.5,
        capture_s=0.25 if graphed else 0.0,
        compile_s=(30.0 if run.round == 0 else 2.0) if run.variant == "compile" else 0.0,
        num_graphs=4 if graphed else 0,
        num_replays=num_replays - (run.variant == "few_replays"),
        expected_replays=num_replays,
    )
    losses = [10.0 - 0.1 * index for index in range(num_steps)]
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
    record["numerics"].update(loss=losses, grad_norm=[1.0] * num_steps, state_hash="0" * 16)
    if run.parity:
        write_sidecar(
            path.with_suffix(".parity.npz"), run.variant, losses, random if settings.nondeterministic else None
        )
    else:
        time_steps(record, settings, random, num_steps, run.variant)
        path.with_suffix(".trace.json.gz").write_bytes(b"trace")
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
    env = environment.describe_environment("tests.fake_model", "cpu", 1)
    if settings.pretend_gpu:
        env.update(gpu_name="NVIDIA H200", gpu_uuid="GPU-0", num_gpus=1, driver="580.1")
    record = records.blank(
        model="tests.fake_model",
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
    statistic = median(times) * (0.9 if variant == "edited" else 1.0)
    record["steps"].update(gpu_ms=times, batch=[0] * num_steps, wall_ms=sum(times))
    record.update(statistic_ms=statistic, busy_ms=settings.step_ms * 0.7, optimizer_ms=1.0, issue_ms=2.0)
    record.update(idle_fraction=max(0.0, 1 - settings.step_ms * 0.7 / statistic), energy_j=5.0 * num_steps)
    record["memory"].update(peak_reserved_bytes=2**30, graph_pool_bytes=2**28)
    record["clocks"]["sm_mhz"] = 1755.0


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
