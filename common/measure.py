"""What a run measures, in passes that do not disturb each other, and the record it writes.

A training script hands over how to build its state and its variants; `run` does the rest:

    build -> variant (warm-up and capture, timed apart) -> canary -> settle -> timed window
          -> issue pass -> section pass -> profile pass -> record

Window and parity start from the same seeded state (`state.reset()`), so that warm-up and capture leave
no trace. In the timed window nothing synchronises and nothing is printed. With --profile the steps after
settling are traced for people to look at, and nothing is timed.

The state a script builds:
    reset()               everything a step reads or writes, back to the seeded start, in place
    named_state()         (name, tensor) pairs of all that training carries from step to step
    read_losses(n)        losses of steps 0..n-1 as floats (after the window; may wait for the device)
    read_grad_norms(n)    the same for gradient norms
    batch_class(i)        which kind of batch step i has: batches of one shape are one class. Where none comes again,
                          the first min_steps steps are a class each, and all later ones one
    evaluate()            only for --mllog: mean loss over held-out batches, eager, on every rank; training
                          state stays as it is. Raises Unsupported where the data leaves nothing to hold out
    finish(variant, rec)  where there is more to say after the window, of its steps alone; it goes into the record.
                          rec["extra"]["report"], flat {column: number, True or False}, is shown below the table of
                          records, a row per variant: medians over rounds, yes where it is true in every round
    hyperparameters       where there is more for --mllog than `Workload.hyperparameters`, which only the data tell
    close()               where it holds something open, such as data workers; its dict goes into extra
A variant (what VARIANTS maps a name to, made from the state):
    step(i)               one training step on batch i
    replays_of(i)         graph replays that step i must make
    close()               release graphs
    as_eager()            only where the variant changed the model: a context in which it is eager again
    capture               a `Capture`: strategy, seconds and pools
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common import console, environment, memory, mllog, trace
from common import record as records
from common.capture import CaptureError
from common.state_hash import StateHasher

SETTLE_BLOCK_S = 1.0
SETTLE_TOLERANCE = 0.01
PROFILE_HEAT_S = 2.0


class Unsupported(RuntimeError):
    """This variant cannot run here; the message says what is missing. Status `unsupported`, not a failure."""


@dataclass(kw_only=True)
class Capture:
    """How a variant captured. Seconds are filled with `timed`."""

    strategy: str
    pools: list = field(default_factory=list)
    warmup_s: float = 0.0
    compile_s: float = 0.0
    capture_s: float = 0.0

    @contextlib.contextmanager
    def timed(self, name: str):
        """Add the wall seconds of the block, device work included, to warmup_s, compile_s or capture_s."""
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    @property
    def num_replays(self) -> int:
        return sum(pool.num_replays for pool in self.pools)


@dataclass(kw_only=True)
class Workload:
    """What a training script hands to `run`. flops_per_step and items_per_step are per GPU.

    card: lines that say what runs. notes: what differs from what was asked for (kept in the record).
    hyperparameters: what --mllog says of the training, MLPerf's key -> value; it needs global_batch_size.
    """

    model: str
    build: object
    variants: dict
    reference: object
    card: list
    notes: list
    flops_per_step: float
    flops_convention: str
    items_per_step: float
    unit: str
    peak_flops: float | None = None
    hyperparameters: dict = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------
# Marks and sections: places in a step that only their own pass looks at

_marks = None
_open_section = None
_nothing = contextlib.nullcontext()


def mark(tensor=None) -> None:
    """A place, at most some 800 launches after the last one, where the issue pass may drain the GPU's queue.

    tensor: the place in the backward pass where its gradient is ready is one as well.
    """
    if _marks is not None:
        _marks()
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda gradient: _marks() if _marks is not None else None)


def section(name: str):
    """A context for a named part of the step: events in the section pass, a range in a profile, else nothing.

    Outside of these it costs 0.15 us of host time. Parts are phases of a microbatch, not layers.
    """
    return _nothing if _open_section is None else _open_section(name)


@contextlib.contextmanager
def _between_events(pairs, name):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    yield
    end.record()
    pairs.append((name, begin, end))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------
# The run


def run(workload: Workload, args, device: torch.device, rank: int = 0, world_size: int = 1) -> dict:
    """Measure one variant once, write the record (rank 0) and return it.

    args: `common.config.Arguments`. A variant that cannot run, that runs out of memory or whose capture
    fails is a record with that status, not an exception.
    """
    config, options = args.config, args.run
    if rank > 0:
        # Ranks share the path; two that write one file at once leave neither.
        options = dataclasses.replace(options, record="")
    record = records.blank(
        model=workload.model,
        preset=options.preset,
        variant=options.variant,
        round=options.round,
        device=device.type,
        config=vars(config).copy(),
        argv=sys.argv[1:],
        env=environment.describe_environment(workload.model, device, world_size),
        flops_per_step=workload.flops_per_step,
        flops_convention=workload.flops_convention,
        items_per_step=workload.items_per_step,
        unit=workload.unit,
    )
    record["extra"]["notes"] = list(workload.notes)
    log = mllog.Log(options.mllog if rank == 0 else "", workload.hyperparameters)
    if rank == 0:
        console.print_card(record, workload)
    log.begin(record)
    state = variant = None
    try:
        with process_settings(device, options.parity):
            state = workload.build(config, device)
            log.say(getattr(state, "hyperparameters", {}))
            variant = workload.variants[options.variant](state)
            record["status"] = "pass"
            if options.parity:
                _parity_pass(record, state, variant, options)
            elif options.profile:
                _canary(state, variant, workload.reference, device)
                _traced_pass(record, state, variant, config, options, device, rank)
            else:
                peaks = memory.Peaks(device)
                # Its eager steps beside a graph's memory are no part of the variant.
                with peaks.set_aside():
                    _canary(state, variant, workload.reference, device)
                _timed_passes(record, workload, state, variant, config, options, device, log, peaks)
    except Unsupported as error:
        record.update(status="unsupported", message=str(error))
    except torch.OutOfMemoryError as error:
        record.update(status="oom", message=memory.explain_oom(error, device))
    except CaptureError as error:
        record.update(status="capture_failed", message=str(error))
    except FloatingPointError as error:
        record.update(status="numerics_failed", message=str(error))
    except ValueError as error:
        # A user's mistake that only building could show; the message names the flag.
        record.update(status="failed", message=str(error))
    except Exception as error:
        traceback.print_exc()
        record.update(status="failed", message=f"{type(error).__name__}: {str(error)[:300]}")
    # Graphs end before what they were captured over.
    _close(variant, record)
    _close(state, record)
    log.finish(record)
    if rank == 0:
        console.print_end(record, workload)
        if options.record:
            records.write(options.record, record)
        print(records.dumps(record), flush=True)
    return record


def _close(opened, record):
    if not hasattr(opened, "close"):
        return
    try:
        record["extra"].update(opened.close() or {})
    except Exception as error:
        traceback.print_exc()
        if record["status"] == "pass":
            record.update(status="failed", message=f"close: {type(error).__name__}: {str(error)[:300]}")


@contextlib.contextmanager
def process_settings(device, parity):
    """A side stream for everything (captures need one, and eager must not differ), seeds, kernel choice."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = not parity
    torch.use_deterministic_algorithms(parity)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------
# Passes


def _parity_pass(record, state, variant, options):
    """Deterministic steps from the seeded start, the whole state hashed after each; nothing is timed."""
    num_steps = max(20, options.steps)
    state.reset()
    hasher = StateHasher(state.named_state())
    replays_before = variant.capture.num_replays
    for index in range(num_steps):
        variant.step(index)
        hasher.update()
    _fill_capture(record, variant, variant.capture.num_replays - replays_before, num_steps)
    losses, norms = state.read_losses(num_steps), state.read_grad_norms(num_steps)
    record["numerics"].update(loss=losses, grad_norm=norms, state_hash=hasher.digest())
    if options.record:
        hasher.write(Path(options.record).with_suffix(".parity.npz"), losses, norms)
    _require_finite(losses)


def _canary(state, variant, reference, device):
    """New inputs and moved weights: two steps of the variant against two eager ones in this process.

    A replay that ignores its input, or reads weights of the capture, is the fastest wrong benchmark.
    Raises CaptureError. On the host the losses must be equal. On a GPU timed runs use the fastest kernels,
    which may reorder sums, so they must agree to 1e-3 relative (round 0 asks for bitwise equality there);
    a replay of stale data misses that by far.
    """
    if not variant.capture.pools:
        return
    losses, tolerance = [], 0.0 if device.type == "cpu" else 1e-3
    # A variant that changes the layers themselves, as torch.compile does, changes them back for the reference.
    as_eager = getattr(variant, "as_eager", contextlib.nullcontext)
    for step, context in ((variant.step, contextlib.nullcontext), (lambda index: reference(state, index), as_eager)):
        state.reset()
        with context():
            for index in range(2):
                step(index)
        losses.append(state.read_losses(2))
    # Where eager diverges as well, the capture is not to blame.
    _require_finite(losses[1])
    for index, (ours, eager) in enumerate(zip(*losses, strict=True)):
        if not abs(ours - eager) <= tolerance * abs(eager):
            raise CaptureError(f"canary: step {index} replayed gives loss {ours:.6g}, eager {eager:.6g}")


def _timed_passes(record, workload, state, variant, config, options, device, log, peaks):
    host = environment.HostActivity()
    host.start()
    sampler = environment.GpuSampler(record["env"]["gpu_uuid"]) if device.type == "cuda" else None
    if sampler:
        sampler.start()
    try:
        state.reset()
        settle = _settle(variant, config, device, sampler)
        state.reset()
        num_steps = max(options.steps or config.min_steps, int(config.min_window_s * 1e3 / settle["step_ms"]) + 1)
        num_steps = _of_first_rank(num_steps)
        log.end_init(variant.capture, settle["seconds"])
        window_start = _window(record, variant, num_steps, device, sampler)
        losses = state.read_losses(num_steps)
        log.window(record, losses, window_start)
        norms = state.read_grad_norms(min(config.min_steps, num_steps))
        record["numerics"].update(loss=losses[: config.min_steps], grad_norm=norms)
        _require_finite(losses)
        record["steps"]["batch"] = [state.batch_class(index) for index in range(num_steps)]
        record["statistic_ms"] = statistic(record["steps"]["gpu_ms"], record["steps"]["batch"])
        record["extra"].update(settle=settle, host=host.stop(), items_per_s=_rate(record))
        # Before an evaluation, whose activations are not the step's.
        record["memory"] = memory.account(device, variant.capture.pools, peaks)
        record["extra"]["allocator"] = memory.allocator_events(device)
        if options.mllog and hasattr(state, "evaluate"):
            _evaluate(record, state, variant, num_steps, log)
        if hasattr(state, "finish"):
            state.finish(variant, record)
        if device.type == "cuda":
            _issue_pass(record, variant)
            _section_pass(record, variant)
            if options.profile_steps:
                _profile_pass(record, variant, options, sampler)
    finally:
        if sampler:
            sampler.stop()
    record["capture"]["nodes"] = _nodes(variant)


def _settle(variant, config, device, sampler):
    """Steps until step time and SM clock have settled: two blocks in a row within 1 %, floor and ceiling in seconds."""
    start = time.perf_counter()
    index, previous, settled = 0, None, False
    while True:
        block_start, count = time.perf_counter(), 0
        block_s = min(SETTLE_BLOCK_S, config.warmup_min_s)
        while _of_first_rank(count < 2 or time.perf_counter() - block_start < block_s):
            variant.step(index)
            index, count = index + 1, count + 1
            if count % 4 == 0:
                synchronize()
        synchronize()
        now = time.perf_counter()
        block = ((now - block_start) * 1e3 / count, sampler.latest_sm_mhz() if sampler else None)
        if previous is not None:
            settled = all(
                a is None or b is None or abs(a - b) <= SETTLE_TOLERANCE * b
                for a, b in zip(block, previous, strict=True)
            )
        previous = block
        elapsed = now - start
        done = (settled and elapsed >= config.warmup_min_s) or elapsed >= config.warmup_max_s
        if _of_first_rank(done):
            return {"seconds": elapsed, "num_steps": index, "settled": settled, "step_ms": block[0]}


def _window(record, variant, num_steps, device, sampler):
    """The timed steps. CUDA: events at step boundaries and no synchronisation inside. CPU: wall time per step.

    Returns time.monotonic() at the start of the first.
    """
    replays_before = variant.capture.num_replays
    energy = environment.energy_joules(record["env"]["gpu_uuid"]) if device.type == "cuda" else None
    gc.collect()
    gc.disable()
    try:
        synchronize()
        _barrier()
        start = time.perf_counter()
        window_start = time.monotonic()
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
            events[0].record()
            for index in range(num_steps):
                variant.step(index)
                events[index + 1].record()
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
            step_ms = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        else:
            stamps = [start]
            for index in range(num_steps):
                variant.step(index)
                stamps.append(time.perf_counter())
            wall = stamps[-1] - start
            step_ms = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
    finally:
        gc.enable()
    window_end = time.monotonic()
    energy_end = environment.energy_joules(record["env"]["gpu_uuid"]) if energy is not None else None
    if energy_end is not None:
        record["energy_j"] = energy_end - energy
    if sampler:
        record["clocks"] = sampler.between(window_start, window_end)
    slowest, skew = _slowest_rank(step_ms)
    record["steps"].update(gpu_ms=[round(ms, 4) for ms in slowest], wall_ms=wall * 1e3)
    record["rank_skew_ms"] = skew
    # Events that do not add up to the wall clock were not recorded where the step is.
    assert abs(sum(step_ms) / (wall * 1e3) - 1) < 0.05, (sum(step_ms), wall * 1e3)
    _fill_capture(record, variant, variant.capture.num_replays - replays_before, num_steps)
    return window_start


def _evaluate(record, state, variant, num_steps, log):
    """Mean loss over held-out batches after the window, for the log and as extra.eval_loss.

    What was timed stands, whether an evaluation is possible or not.
    """
    start = time.monotonic()
    try:
        with getattr(variant, "as_eager", contextlib.nullcontext)():
            record["extra"]["eval_loss"] = state.evaluate()
    except (Unsupported, torch.OutOfMemoryError) as error:
        record["extra"]["notes"].append(f"no evaluation: {str(error).splitlines()[0]}")
    else:
        log.evaluation(record["extra"]["eval_loss"], num_steps, start)


def _issue_pass(record, variant, num_steps=8):
    """Host time to issue a step: the queue is drained at each mark, and the drains are not counted.

    The launch queue holds about 1024 launches; a host that runs further ahead waits for the GPU, which
    is why a running loop cannot show this number.
    """
    global _marks
    issue_ms, num_marks = [], 0
    for index in range(num_steps):
        spent, last = 0.0, 0.0

        def drain():
            nonlocal spent, last, num_marks
            spent += time.perf_counter() - last
            num_marks += 1
            torch.cuda.synchronize()
            last = time.perf_counter()

        torch.cuda.synchronize()
        _marks, last = drain, time.perf_counter()
        try:
            variant.step(index)
            drain()
        finally:
            _marks = None
        issue_ms.append(spent * 1e3)
    record["issue_ms"] = statistics.median(issue_ms)
    record["extra"]["num_marks"] = num_marks / num_steps


def _section_pass(record, variant, num_steps=12):
    """Device time a step of its sections, from events around them; two that overlap on two streams both count."""
    global _open_section
    steps = [[] for _ in range(num_steps)]
    try:
        for index, pairs in enumerate(steps):
            _open_section = functools.partial(_between_events, pairs)
            variant.step(index)
    finally:
        _open_section = None
    torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for index, pairs in enumerate(steps):
        for name, begin, end in pairs:
            totals.setdefault(name, [0.0] * num_steps)[index] += begin.elapsed_time(end)
    times = {name: statistics.median(per_step) for name, per_step in totals.items()}
    record["optimizer_ms"] = times.pop("optimizer", None)
    record["extra"]["sections_ms"] = times


def _profile_pass(record, variant, options, sampler):
    """Busy time, kernels and gaps from profiled steps; the clock of this pass beside the window's."""
    # Busy time is set beside the statistic, a mean over all kinds of batch.
    num_steps = max(options.profile_steps, len(set(record["steps"]["batch"])))
    index = itertools.count()

    def run_steps(count):
        for _ in range(count):
            variant.step(next(index))

    heat = int(PROFILE_HEAT_S * 1e3 / record["statistic_ms"]) + 1
    work, start, end = trace.profile(run_steps, num_steps, heat)
    clock = sampler.between(start, end)["sm_mhz"]
    if not work:
        record["extra"]["profile"] = "the profiler saw no kernels"
        return
    summary = trace.summarise(work, num_steps)
    record["busy_ms"], record["num_kernels"] = summary.pop("busy_ms"), summary.pop("num_kernels")
    # The profiler slows the host, so an ungraphed step's idle time is what the timed window had beyond busy.
    graphed = variant.capture.num_replays > 0
    record["idle_fraction"] = (
        summary["idle_fraction"] if graphed else max(0.0, 1 - record["busy_ms"] / record["statistic_ms"])
    )
    record["extra"]["profile"] = summary
    timed_clock = record["clocks"]["sm_mhz"]
    if clock and timed_clock:
        record["extra"]["profiled_clock_ratio"] = clock / timed_clock
    if options.record:
        trace.write_sidecar(Path(options.record).with_suffix(".trace.json.gz"), work, num_steps)


def _traced_pass(record, state, variant, config, options, device, rank):
    """With --profile: a few steady steps as a Chrome trace, each section a range in it; nothing is timed."""
    global _open_section
    sampler = environment.GpuSampler(record["env"]["gpu_uuid"]) if device.type == "cuda" else None
    if sampler:
        sampler.start()
    try:
        state.reset()
        record["extra"]["settle"] = _settle(variant, config, device, sampler)
    finally:
        if sampler:
            sampler.stop()
    state.reset()
    replays_before = variant.capture.num_replays
    _open_section = trace.named_range
    try:
        # All ranks make the same steps; rank 0 traces its own.
        events = trace.trace_steps(variant.step, device.type == "cuda")
    finally:
        _open_section = None
    num_steps = trace.UNTRACED_STEPS + trace.TRACED_STEPS
    _fill_capture(record, variant, variant.capture.num_replays - replays_before, num_steps)
    losses, norms = state.read_losses(num_steps), state.read_grad_norms(num_steps)
    record["numerics"].update(loss=losses, grad_norm=norms)
    _require_finite(losses)
    if rank == 0:
        trace.write(options.profile, events)
        trace.report(options.profile, events)


# ------------------------------------------------------------------------------------------------
# Small parts


def statistic(step_ms, batch) -> float:
    """Mean over the kinds of batch of each kind's median, ms; with one kind, the median."""
    by_batch: dict = {}
    for ms, kind in zip(step_ms, batch, strict=True):
        by_batch.setdefault(kind, []).append(ms)
    return sum(statistics.median(times) for times in by_batch.values()) / len(by_batch)


def _rate(record):
    return record["items_per_step"] / record["statistic_ms"] * 1e3


def _fill_capture(record, variant, num_replays, num_steps):
    capture = variant.capture
    record["capture"].update(
        strategy=capture.strategy,
        warmup_s=round(capture.warmup_s, 4),
        compile_s=round(capture.compile_s, 4),
        capture_s=round(capture.capture_s, 4),
        num_graphs=sum(len(pool.graphs) for pool in capture.pools),
        num_replays=num_replays,
        expected_replays=sum(variant.replays_of(index) for index in range(num_steps)),
    )


def _nodes(variant):
    nodes: dict[str, int] = {}
    for pool in variant.capture.pools:
        for kind, count in pool.nodes().items():
            nodes[kind] = nodes.get(kind, 0) + count
    return nodes


def _require_finite(losses):
    for index, loss in enumerate(losses):
        if not abs(loss) < float("inf"):
            raise FloatingPointError(f"loss is {loss} at step {index}")


def _barrier():
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _of_first_rank(value):
    """Rank 0's value on every rank: clocks differ, and ranks that take different numbers of steps wait for ever."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def _slowest_rank(step_ms):
    """A step is as long as its slowest rank; skew is the median over steps of slowest less fastest rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return step_ms, None
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, step_ms)
    slowest = [max(times) for times in zip(*every, strict=True)]
    return slowest, statistics.median(max(times) - min(times) for times in zip(*every, strict=True))
