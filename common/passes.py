"""The passes of a timed run: settling, the timed window, and what is measured around it, each without the others.

`common.measure` puts them together. In the timed window nothing synchronises and nothing is printed.
"""

import contextlib
import functools
import gc
import itertools
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch

from common import gpu_state, launches, marks, proof, queue_model, trace
from common.host_messages import barrier, of_all_ranks, of_first_rank
from common.variant import synchronize

SETTLE_BLOCK_S = 1.0
SETTLE_TOLERANCE = 0.01
# Steps of seconds fill the settling's ceiling with two blocks, the first of which heats the GPU: they get at least this
# many blocks to settle in. Llama 2's 8192 tokens, 2.7 s a step: 2552 ms, then 2722, in all of four runs.
LONG_SETTLE_BLOCKS = 4
PROFILE_HEAT_S = 2.0
# An issue pass has ISSUE_STEPS, or as many as end within ISSUE_S, a median's least number at least.
ISSUE_STEPS, ISSUE_S, LEAST_STEPS = 8, 1.0, 3
SECTION_STEPS = 12
# A profile has --profile-steps, or as many as fit in PROFILE_S, LEAST_PROFILE_STEPS at least: the time of a step's
# kernels hardly differs from step to step, and reading a profile of many launches takes the host seconds.
PROFILE_S, LEAST_PROFILE_STEPS = 0.7, 5
# The seconds before a profile whose clock counts as well where the profiler does not slow the steps. PROFILE_S holds
# three samples; their median was 0.98 to 1.05 of the window's in ten runs of GPT-3's graphs at the power limit.
CLOCK_S = 0.5
# A window is sized by the settled pace, and steps in a row are faster than those with a synchronisation in between.
WINDOW_MARGIN = 1.1
WINDOW_TRIES = 3
WINDOW_GROWTH = 4
# Fifty steps that take half a minute each say no more than eight. What asks for a shorter window than FULL_WINDOW_S, as
# tiny presets do, is left as it is.
LONG_STEP_MS = 400.0
LONG_WINDOW_S, LONG_WINDOW_STEPS = 20.0, 8
FULL_WINDOW_S = 5.0
EVENTS_TOLERANCE, EVENTS_SLACK_MS = 0.005, 1.0


def is_long(step_ms: float, config) -> bool:
    """Whether steps take so long that windows and parity have fewer of them; never so in a tiny preset."""
    return step_ms > LONG_STEP_MS and config.min_window_s >= FULL_WINDOW_S


def least(config, options, step_ms: float) -> tuple[int, float]:
    """(steps, seconds) that a timed window has at least, where a settled step takes step_ms."""
    if is_long(step_ms, config):
        return options.steps or LONG_WINDOW_STEPS, max(LONG_WINDOW_S, config.min_window_s)
    return options.steps or config.min_steps, config.min_window_s


# ------------------------------------------------------------------------------------------------
# Step boundaries


class Boundaries:
    """Times at step boundaries: events on a GPU, wall time on the CPU, nothing that waits."""

    def __init__(self, device, num_steps: int):
        cuda = device.type == "cuda"
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)] if cuda else None
        self.stamps: list[float] = []
        self.count = 0

    def note(self) -> None:
        if self.events is None:
            self.stamps.append(time.perf_counter())
        else:
            if self.count == len(self.events):
                self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[self.count].record()
        self.count += 1

    def step_ms(self) -> list[float]:
        """Between each two; on a GPU after a synchronisation."""
        if self.events is None:
            return [(b - a) * 1e3 for a, b in itertools.pairwise(self.stamps)]
        return [a.elapsed_time(b) for a, b in itertools.pairwise(self.events[: self.count])]


# ------------------------------------------------------------------------------------------------
# Settling


def settle(variant, config, device, sampler, batch_class=lambda index: 0):
    """Steps until step time and SM clock have settled: two blocks in a row within 1 %, floor and ceiling in seconds.

    Long steps have LONG_SETTLE_BLOCKS blocks at least before the ceiling ends them. The clock of a block is the median
    of its samples: at the power limit one sample says little. Returns what the record's extra.settle says, `blocks`
    their (ms, MHz) among it, and the median ms of the last two blocks' steps by kind of batch.
    """
    start = time.perf_counter()
    index, previous, settled, last_steps, blocks = 0, None, False, [], []
    while True:
        block_start, sampled_from, count = time.perf_counter(), time.monotonic(), 0
        block_s = min(SETTLE_BLOCK_S, config.warmup_min_s)
        boundaries, first = Boundaries(device, 0), index
        boundaries.note()
        while of_first_rank(count < 2 or time.perf_counter() - block_start < block_s):
            variant.step(index)
            boundaries.note()
            index, count = index + 1, count + 1
            if count % 4 == 0:
                synchronize()
        synchronize()
        now = time.perf_counter()
        kinds = [str(batch_class(each)) for each in range(first, index)]
        last_steps = [*last_steps[-1:], list(zip(kinds, boundaries.step_ms(), strict=True))]
        clock = sampler.between(sampled_from, time.monotonic())["sm_mhz"] if sampler else None
        block = ((now - block_start) * 1e3 / count, clock)
        blocks.append((round(block[0], 3), clock))
        if previous is not None:
            settled = all(
                a is None or b is None or abs(a - b) <= SETTLE_TOLERANCE * b
                for a, b in zip(block, previous, strict=True)
            )
        previous = block
        elapsed = now - start
        may_go_on = elapsed < config.warmup_max_s or (is_long(block[0], config) and len(blocks) < LONG_SETTLE_BLOCKS)
        done = (settled and elapsed >= config.warmup_min_s) or not may_go_on
        if of_first_rank(done):
            summary = {"seconds": elapsed, "num_steps": index, "settled": settled, "step_ms": block[0]}
            summary["blocks"] = blocks
            medians = _medians(itertools.chain(*last_steps))
            return summary, {kind: round(ms, 4) for kind, ms in medians.items()}


# ------------------------------------------------------------------------------------------------
# The timed window


def windows(record, state, variant, config, options, device, sampler, step_ms, sample, clock):
    """The timed window, made again and larger where it ends before its seconds, at most WINDOW_TRIES times.

    step_ms: of a settled step. sample: a `proof.StateSample`. clock: the run's `Phases`. Returns time.monotonic() at
    the start of its first step. Of several ranks each has its statistic; the record's steps, wall time and statistic
    are those of the slowest one, and rank_skew_ms is the median over steps of last less first rank at the step's end.
    """
    min_steps, min_window_s = least(config, options, step_ms)
    num_steps, most = 0, math.inf
    for _ in range(WINDOW_TRIES):
        wanted = math.ceil(WINDOW_MARGIN * min_window_s * 1e3 / max(step_ms, 1e-6)) if min_window_s else 0
        num_steps = of_first_rank(int(min(max(min_steps, wanted), most)))
        with clock.phase("reset"):
            state.reset()
        sample.take(sample.start)
        window_start = _window(record, state, variant, num_steps, device, sampler, sample)
        total_ms = sum(record["steps"]["gpu_ms"])
        if of_first_rank(total_ms >= min_window_s * 1e3):
            break
        # Steps that take next to nothing are no reason for a million of them.
        step_ms, most = total_ms / num_steps, WINDOW_GROWTH * num_steps
    return window_start


def _window(record, state, variant, num_steps, device, sampler, sample):
    """num_steps timed steps. CUDA: events at step boundaries and no synchronisation inside. CPU: wall time per step."""
    replays_before = variant.capture.num_replays
    sampled_step = min(proof.STATE_STEP, num_steps - 1)
    energy = gpu_state.energy_joules(record["env"]["gpu_uuid"]) if device.type == "cuda" else None
    gc.collect()
    gc.disable()
    try:
        boundaries = Boundaries(device, num_steps)
        synchronize()
        barrier()
        start = time.perf_counter()
        window_start = time.monotonic()
        boundaries.note()
        for index in range(num_steps):
            variant.step(index)
            if index == sampled_step:
                sample.take(sample.after)
            boundaries.note()
        synchronize()
        # On the CPU the stamps are the wall clock.
        wall = time.perf_counter() - start if device.type == "cuda" else boundaries.stamps[-1] - boundaries.stamps[0]
        step_ms = boundaries.step_ms()
    finally:
        gc.enable()
    window_end = time.monotonic()
    energy_end = gpu_state.energy_joules(record["env"]["gpu_uuid"]) if energy is not None else None
    if energy_end is not None:
        record["energy_j"] = energy_end - energy
    if sampler:
        record["clocks"] = sampler.between(window_start, window_end)
    batch = [state.batch_class(index) for index in range(num_steps)]
    step_ms = [round(ms, 4) for ms in step_ms]
    every = of_all_ranks((statistic(step_ms, batch), step_ms, wall * 1e3))
    statistic_ms, slowest_ms, wall_ms = max(every, key=lambda own: own[0])
    record["steps"].update(gpu_ms=slowest_ms, batch=batch, wall_ms=wall_ms)
    record["statistic_ms"], record["rank_skew_ms"] = statistic_ms, skew_ms([own[1] for own in every])
    if len(every) > 1:
        record["extra"]["own_statistic_ms"] = statistic(step_ms, batch)
    record["conditions"]["window_s"] = wall_ms / 1e3
    record["proof"]["state_step"] = sampled_step
    fill_capture(record, variant, variant.capture.num_replays - replays_before, num_steps)
    return window_start


def wrong_wall(record) -> str | None:
    """Why the events of a window were not recorded where its steps are, in words, or None."""
    total_ms, wall_ms = sum(record["steps"]["gpu_ms"]), record["steps"]["wall_ms"]
    if record["device"] != "cuda":
        return None
    if abs(total_ms - wall_ms) <= max(EVENTS_TOLERANCE * wall_ms, EVENTS_SLACK_MS):
        return None
    return f"the events of the timed steps sum to {total_ms:.1f} ms, the wall clock says {wall_ms:.1f} ms"


def statistic(step_ms, batch) -> float:
    """Mean over the kinds of batch of each kind's median, ms; with one kind, the median."""
    medians = _medians(zip(batch, step_ms, strict=True)).values()
    return sum(medians) / len(medians)


def _medians(steps):
    """The median of each kind of batch; steps: pairs of kind and ms."""
    times = defaultdict(list)
    for kind, ms in steps:
        times[kind].append(ms)
    return {kind: statistics.median(own) for kind, own in times.items()}


# ------------------------------------------------------------------------------------------------
# Around the window


def issue_pass(record, variant, when, num_warm_steps=0):
    """Host time to issue a step: the queue is drained at each mark, and the drains are not counted.

    The launch queue holds about 1024 launches; a host that runs further ahead waits for the GPU, which
    is why a running loop cannot show this number. A host may change speed meanwhile, so there are two passes, `when`:
    "before" settling and "after" the window. Each is kept as extra.issue[when]: `ms`, median over steps, and
    `segments_ms`, the same for each part of a step that ends at a mark or with the step; null where steps differ in
    number of marks. issue_ms is the mean of both medians. num_warm_steps: not measured, for what a first step compiles.
    """
    for index in range(num_warm_steps):
        variant.step(index)
    steps, start = [], time.perf_counter()
    while of_first_rank(
        len(steps) < LEAST_STEPS or (len(steps) < ISSUE_STEPS and time.perf_counter() - start < ISSUE_S)
    ):
        steps.append(_issued_segments(variant, len(steps)))
    record["extra"].setdefault("issue", {})[when] = {
        "ms": round(statistics.median(map(sum, steps)), 4),
        "segments_ms": [round(statistics.median(own), 4) for own in zip(*steps, strict=True)]
        if len(set(map(len, steps))) == 1
        else None,
    }
    passes = record["extra"]["issue"].values()
    record["issue_ms"] = statistics.mean(own["ms"] for own in passes)
    record["extra"]["num_marks"] = statistics.mean(map(len, steps))


def _issued_segments(variant, index):
    """Host ms from mark to mark, the queue empty at each; the last one ends with the step."""
    spent, last = [], 0.0

    def drain():
        nonlocal last
        spent.append((time.perf_counter() - last) * 1e3)
        torch.cuda.synchronize()
        last = time.perf_counter()

    torch.cuda.synchronize()
    with marks.watching_marks(drain):
        last = time.perf_counter()
        variant.step(index)
        drain()
    return spent


def num_warm_steps(batch_class) -> int:
    """Steps before an issue pass that meet each kind of batch of it once, at least 2."""
    return max([2, *(index + 1 for index in range(ISSUE_STEPS) if batch_class(index) != batch_class(0))])


def num_section_steps(record) -> int:
    """No more than fit in the time that heats the GPU before its profile, as these do; on the CPU few."""
    return max(LEAST_STEPS, min(SECTION_STEPS, _heat_steps(record))) if record["device"] == "cuda" else LEAST_STEPS


def num_profile_steps(record, options) -> int:
    """--profile-steps at most, but each kind of batch once: busy time is set beside the statistic, a mean over all."""
    fit = max(LEAST_PROFILE_STEPS, int(PROFILE_S * 1e3 / record["statistic_ms"]))
    return max(min(options.profile_steps, fit), len(set(record["steps"]["batch"])))


def _heat_steps(record):
    return int(PROFILE_HEAT_S * 1e3 / record["statistic_ms"]) + 1


def section_pass(record, variant, num_steps=SECTION_STEPS):
    """Device time a step of its sections, from events around them; two that overlap on two streams both count.

    extra.microbatches: what `microbatch_times` makes of them; on the CPU, by the host's clock, this alone.
    """
    on_gpu = record["device"] == "cuda"
    steps = []
    for index in range(num_steps):
        spans = []
        begin = _moment(on_gpu)
        with marks.opening_sections(functools.partial(_between, spans, on_gpu), inner=True):
            variant.step(index)
        steps.append((begin, _moment(on_gpu), spans))
    synchronize()
    times = [
        (_ms_between(begin, end), [(name, _ms_between(*ends)) for name, *ends in spans]) for begin, end, spans in steps
    ]
    record["extra"]["microbatches"] = microbatch_times(times)
    if on_gpu:
        totals = defaultdict(lambda: [0.0] * num_steps)
        for index, (_, sections) in enumerate(times):
            for name, ms in sections:
                totals[name][index] += ms
        medians = {name: statistics.median(per_step) for name, per_step in totals.items()}
        record["optimizer_ms"] = medians.pop("optimizer", None)
        record["extra"]["sections_ms"] = medians


def report_layers(record, num_flops: float | None) -> None:
    """extra.report's "layers TFLOP/s": num_flops, of the layers in a step, over their forward and backward passes.

    These are the sections "forward" and "backward" without what of the latter is "loss gradient". Nothing is said
    where a model has no such sections, or where they overlap on two streams and so take longer than the step.
    """
    sections = record["extra"].get("sections_ms", {})
    if num_flops is None or not {"forward", "backward"} <= set(sections):
        return
    ms = sections["forward"] + sections["backward"] - sections.get("loss gradient", 0.0)
    if 0 < ms <= record["statistic_ms"]:
        record["extra"].setdefault("report", {})["layers TFLOP/s"] = round(num_flops / ms / 1e9, 1)


def microbatch_times(steps) -> dict | None:
    """Of each step the ms of its forward and of its backward passes in their order, and of all that is neither.

    steps: of each (its ms, [(name, ms) of each section]). A pass is a section of that name: of a microbatch, or of a
    microbatch in a chunk of a pipeline's stage. None where the numbers of both passes differ, or differ between steps,
    as where one graph holds several.
    """
    found = {
        f"{name}_ms": [[round(ms, 4) for own, ms in sections if own == name] for _, sections in steps]
        for name in ("forward", "backward")
    }
    numbers = {len(own) for every in found.values() for own in every}
    if len(numbers) != 1 or numbers == {0}:
        return None
    passes_ms = [sum(forward) + sum(backward) for forward, backward in zip(*found.values(), strict=True)]
    rest_ms = [round(step_ms - own, 4) for (step_ms, _), own in zip(steps, passes_ms, strict=True)]
    return found | {"rest_ms": rest_ms}


def _moment(on_gpu):
    """A place in the step: an event on the GPU's current stream, or seconds of the host's clock."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(begin, end):
    """Of two moments; on a GPU after a synchronisation."""
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


@contextlib.contextmanager
def _between(spans, on_gpu, name):
    begin = _moment(on_gpu)
    yield
    spans.append((name, begin, _moment(on_gpu)))


def profile_pass(record, variant, options, sampler, num_warm_steps=0):
    """Busy time, kernels and gaps from profiled steps; the clock of this pass beside the window's.

    num_warm_steps: undrained steps right before it, which heat the GPU as well.
    """
    num_steps = num_profile_steps(record, options)
    index = itertools.count()
    stamps: list[list[int]] = []

    def run_steps(count):
        stamps.clear()
        for _ in range(count):
            stamps.append([time.time_ns()])
            with marks.watching_marks(lambda: stamps[-1].append(time.time_ns())):
                variant.step(next(index))
            stamps[-1].append(time.time_ns())

    profile = trace.profile(run_steps, num_steps, max(0, _heat_steps(record) - num_warm_steps))
    work = trace.gpu_work(profile.events)
    if not work:
        record["extra"]["profile"] = "the profiler saw no kernels"
        return
    summary = trace.summarise(work, num_steps)
    record["busy_ms"], record["num_kernels"] = summary.pop("busy_ms"), summary.pop("num_kernels")
    record["proof"]["graph_kernel_share"] = trace.graph_kernel_share(work)
    # The profiler slows the host, so an ungraphed step's idle time is what the timed window had beyond busy.
    graphed = variant.capture.num_replays > 0
    clock = sampler.between(profile.start_s - (CLOCK_S if graphed else 0.0), profile.end_s)["sm_mhz"]
    record["idle_fraction"] = (
        summary["idle_fraction"] if graphed else max(0.0, 1 - record["busy_ms"] / record["statistic_ms"])
    )
    record["extra"]["profile"] = summary | {
        "num_steps": num_steps,
        "kernels_hash": trace.kernels_hash(work, num_steps),
    }
    _predict(record, profile, stamps)
    timed_clock = record["clocks"]["sm_mhz"]
    if clock and timed_clock:
        record["extra"]["profiled_clock_ratio"] = clock / timed_clock
    if options.record:
        trace.write_sidecar(Path(options.record).with_suffix(".trace.json.gz"), work, num_steps)


def _predict(record, profile, stamps):
    """extra.queue_model: the step that the passes predict, from the pace of each issue pass; never from the window.

    extra.profile.segments: launches and GPU ms of each segment, means over the profiled steps.
    """
    try:
        steps = launches.queue_steps(profile, stamps)
        record["extra"]["profile"]["segments"] = queue_model.segments(steps)
        found = {
            when: queue_model.predict(steps, own["segments_ms"])
            for when, own in record["extra"].get("issue", {}).items()
        }
    except ValueError as error:
        record["extra"]["queue_model"] = {"step_ms": None, "reason": str(error)}
        return
    if found:
        record["extra"]["queue_model"] = {
            "step_ms": round(statistics.mean(own.step_ms for own in found.values()), 4),
            "host_bound_fraction": round(statistics.mean(own.host_bound_fraction for own in found.values()), 4),
            **{f"{when}_ms": round(own.step_ms, 4) for when, own in found.items()},
            "num_waits": sum(len(step.waits) for step in steps) / len(steps),
        }


# ------------------------------------------------------------------------------------------------
# Small parts


def fill_capture(record, variant, num_replays, num_steps):
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


def nodes(variant):
    found = Counter()
    for pool in variant.capture.pools:
        found.update(pool.nodes())
    return dict(found)


def own_cores() -> list[int]:
    """The cores that this process may use, rising; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def skew_ms(every: list[list[float]]) -> float | None:
    """Median over steps of last less first rank at the step's end, ms; None with one rank.

    every: step times of each rank, ms. All ranks start a window together, after a barrier, so that a step ends at the
    sum of the times up to it.
    """
    if len(every) == 1:
        return None
    ends = [list(itertools.accumulate(own)) for own in every]
    return statistics.median(max(at_once) - min(at_once) for at_once in zip(*ends, strict=True))
