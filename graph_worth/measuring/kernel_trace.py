"""Profiles of steps: numbers for a run's file, and the trace of --profile, which people look at.

The numbers: the kernels of a step, how long the GPU is busy with them, and when. Kineto sees every kernel inside a
graph replay, so eager and graphed steps are read the same way. The profiler slows the host, not the kernels.
"""

import contextlib
import hashlib
import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from graph_worth.files import write_text

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
# The host call that `profile` makes before the last step, to show where it begins. No model makes it.
LAST_STEP_CALL = "cudaStreamQuery"
# Gaps of the GPU shorter than this share of a step are left out of its timeline.
SHORTEST_GAP = 1 / 2000
UNTRACED_STEPS = 2
TRACED_STEPS = 3


# ------------------------------------------------------------------------------------------------
# The numbers


@dataclass
class Profile:
    """events: as in a Chrome trace, host calls and GPU work. start_s, end_s: time.monotonic() of the profiled steps."""

    events: list[dict] = field(default_factory=list)
    start_s: float = 0.0
    end_s: float = 0.0


def profile(run_steps, num_steps: int, num_heat_steps: int, meet: Callable[[], None] = lambda: None) -> Profile:
    """The GPU's work in num_steps steps, and the host calls that started it.

    run_steps(n) issues n steps. num_heat_steps of them, two at least, are not in the profile: power and clock are to be
    those of timed steps, and a GPU that rested while the profiler was prepared runs faster for a while. meet() lets the
    ranks begin the profiled steps together: profilers take differently long to start.
    """
    gpu_profile = Profile()
    with contextlib.closing(profiled(gpu_profile, num_steps, num_heat_steps, meet)) as steps:
        for _ in steps:
            run_steps(1)
    return gpu_profile


def profiled(
    gpu_profile: Profile, num_steps: int, num_heat_steps: int, meet: Callable[[], None] = lambda: None
) -> Generator[None]:
    """Fill a profile, see `profile`; whoever iterates makes a step at each turn."""
    import torch

    # What torch.profiler.profile wraps, which besides imports torch's compiler and, with acc_events, makes objects of
    # its own of every event: seconds of each process. Preparing and starting apart, as it does, lets the first steps
    # under the profiler, which are slower, go by.
    profiler = torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
    profiler._prepare_trace()
    for _ in range(max(num_heat_steps, 2)):
        yield
    torch.cuda.synchronize()
    profiler._start_trace()
    try:
        torch.cuda.synchronize()
        meet()
        synced_ns = time.time_ns()
        gpu_profile.start_s = time.monotonic()
        for _ in range(num_steps - 1):
            yield
        torch.cuda.current_stream().query()
        yield
        torch.cuda.synchronize()
        gpu_profile.end_s = time.monotonic()
    finally:
        profiler.__exit__(None, None, None)
    results = profiler.kineto_results
    assert results is not None, "the profiler has just ended"
    gpu_profile.events = chrome_events(results.events(), synced_ns)


def chrome_events(events, origin_ns: int) -> list[dict]:
    """Return Kineto's events (torch.profiler, CUDA alone) as a Chrome trace holds them, without writing a file.

    Events of torch 2.11 do not tell their kind to Python: its deviceTypeFromActivity (torch/csrc/profiler/
    kineto_shim.cpp) gives kernels, copies and memsets the device, and every host call the CPU. Times count from
    origin_ns, ns since 1970, of which float64 would hold 0.3 us.
    """
    return [
        {
            "name": event.name(),
            "cat": _category(event),
            "ph": "X",
            "ts": (event.start_ns() - origin_ns) / 1e3,
            "dur": event.duration_ns() / 1e3,
            "tid": event.device_resource_id(),
            "args": {"correlation": event.correlation_id()},
        }
        for event in events
    ]


def _category(event):
    name = event.name()
    if event.is_user_annotation():
        return "user_annotation"
    if event.device_type().name == "CUDA":
        return "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    return "cuda_runtime" if name.startswith("cuda") else "cuda_driver" if name.startswith("cu") else "other"


def gpu_work(events: list[dict]) -> list[dict]:
    """The GPU's kernels and copies out of Chrome trace events.

    Each has name, start_us, duration_us, stream, is_kernel and by_graph: whether the launch of a graph started it, by
    the correlation id that Kineto gives a host call and its work; None where the trace has no host calls.
    """
    calls = [event for event in events if event.get("cat") in HOST_CALLS]
    launches = {correlation_of(event) for event in calls if event["name"].startswith(GRAPH_LAUNCHES)} - {None}
    return [
        {
            "name": event["name"],
            "start_us": float(event["ts"]),
            "duration_us": float(event["dur"]),
            "stream": event.get("tid", 0),
            "is_kernel": event["cat"] == "kernel",
            "by_graph": correlation_of(event) in launches if calls else None,
        }
        for event in events
        if event.get("cat") in GPU_WORK and event.get("ph") == "X"
    ]


def correlation_of(event: dict):
    """The id that Kineto gives a host call and the work that it started; None where there is none."""
    return event.get("args", {}).get("correlation")


def graph_kernel_share(work: list[dict]) -> float | None:
    """The share of kernels that launches of graphs started; None where the trace does not tell, or has no kernel."""
    started = [event["by_graph"] for event in work if event["is_kernel"]]
    return None if None in started or not started else sum(started) / len(started)


def graph_time_share(work: list[dict]) -> float | None:
    """The share of the work's time that launches of graphs started; None where the trace does not tell."""
    total = sum(event["duration_us"] for event in work)
    if not total or any(event["by_graph"] is None for event in work):
        return None
    return sum(event["duration_us"] for event in work if event["by_graph"]) / total


def busy_us(work: list[dict]) -> float:
    """Microseconds in which the GPU does any of this work: the union of its intervals."""
    end, covered = -math.inf, 0.0
    for event in sorted(work, key=lambda event: event["start_us"]):
        start, stop = event["start_us"], event["start_us"] + event["duration_us"]
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


# ------------------------------------------------------------------------------------------------
# Several ranks: a collective waits until all of them are there, and its kernel counts as busy meanwhile

COLLECTIVE = "nccl"
Collectives = dict[tuple[str, int], list[float]]


def collectives(work: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """NCCL's kernels in order of their start, by name and number of their stream.

    Kineto does not name the communicator. A communicator has one stream, and ranks make their streams in one order, so
    streams are numbered by their ids.
    """
    kernels = [event for event in work if event["is_kernel"] and event["name"].startswith(COLLECTIVE)]
    numbers = {stream: number for number, stream in enumerate(sorted({event["stream"] for event in kernels}))}
    in_order: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for event in sorted(kernels, key=lambda event: event["start_us"]):
        in_order[event["name"], numbers[event["stream"]]].append(event)
    return dict(in_order)


def durations_us(work: list[dict]) -> Collectives:
    """Microseconds of NCCL's kernels, in the order of `collectives`."""
    return {key: [event["duration_us"] for event in events] for key, events in collectives(work).items()}


def unmatched(ranks: list[Collectives]) -> str:
    """The reason why the collectives of ranks are not the same ones, in a line; "" where they are."""
    for rank, of_rank in enumerate(ranks):
        for name, stream in sorted(ranks[0].keys() | of_rank.keys()):
            first, number = (len(counts.get((name, stream), [])) for counts in (ranks[0], of_rank))
            if first != number:
                return f"rank {rank} ran {name[:60]} {number} times, rank 0 {first} times, on stream {stream}"
    return ""


def without_waiting_us(work: list[dict], ranks: list[Collectives]) -> float:
    """`busy_us`, each collective as short as on the rank where it is shortest.

    The last rank to come does not wait. A collective waits first and transfers then, so it keeps its end.
    """
    least = {key: [min(times) for times in zip(*(of_rank[key] for of_rank in ranks), strict=True)] for key in ranks[0]}
    shortened = [
        event | {"start_us": event["start_us"] + event["duration_us"] - duration_us, "duration_us": duration_us}
        for key, events in collectives(work).items()
        for event, duration_us in zip(events, least[key], strict=True)
    ]
    rest = [event for event in work if not (event["is_kernel"] and event["name"].startswith(COLLECTIVE))]
    return busy_us([*rest, *shortened])


def over_ranks(events: list[dict], num_steps: int, gather: Callable[[object], list]) -> dict:
    """The time that ranks wait for others in their collectives, of a `Profile`'s events of this rank.

    gather(value) returns every rank's value by rank, and is called twice by all of them.

    Returns:
        working_ms and waiting_ms, by rank: the time in a step in which the GPU is busy, without and with nothing but
        waiting. `unmatched` in their place where the collectives are not the same ones on all ranks.
    """
    work = gpu_work(events)
    ranks = gather(durations_us(work))
    reason = unmatched(ranks)
    working_us = 0.0 if reason else without_waiting_us(work, ranks)
    every = gather((working_us / num_steps / 1e3, busy_us(work) / num_steps / 1e3))
    idle = [rank for rank, (_, busy_ms) in enumerate(every) if not busy_ms]
    if idle or reason:
        return {"unmatched": reason or f"the profile of rank {idle[0]} has no kernel"}
    return {
        "working_ms": [round(working_ms, 4) for working_ms, _ in every],
        "waiting_ms": [round(max(0.0, busy_ms - working_ms), 4) for working_ms, busy_ms in every],
    }


def facts(events: list[dict], num_steps: int) -> dict:
    """The GPU's work in a step, of a `Profile`'s events.

    Returns:
        busy_ms; gap_ms, in which the GPU does nothing, from the first kernel to the last; overlap_ms, by which kernels
        together take longer than the GPU is busy; collective_ms, of NCCL's kernels; kernels; graph_share of these;
        graph_time_share of the GPU's time; kernels_hash, 16 hex digits over the names of all kernels and how often each
        runs; top_kernels, the five that take most; and `timeline`.
    """
    work = gpu_work(events)
    if not work:
        return {"busy_ms": None, "kernels": None, "graph_share": None}
    busy_ms = busy_us(work) / num_steps / 1e3
    num = Counter(event["name"] for event in work)
    kernels = Counter(event["name"] for event in work if event["is_kernel"])
    ms: dict[str, float] = defaultdict(float)
    for event in work:
        ms[event["name"]] += event["duration_us"] / num_steps / 1e3
    start_us = min(event["start_us"] for event in work)
    span_ms = (max(event["start_us"] + event["duration_us"] for event in work) - start_us) / num_steps / 1e3
    names = "".join(f"{name} {count / num_steps:.6g}\n" for name, count in sorted(kernels.items()))
    largest = sorted(ms.items(), key=lambda item: -item[1])[:5]
    top = [{"name": name[:100], "num": num[name] / num_steps, "ms": round(took_ms, 4)} for name, took_ms in largest]
    return {
        "busy_ms": round(busy_ms, 4),
        "gap_ms": round(span_ms - busy_ms, 4),
        "overlap_ms": round(sum(ms.values()) - busy_ms, 4),
        "collective_ms": round(sum(duration_ms for name, duration_ms in ms.items() if name.startswith(COLLECTIVE)), 4),
        "kernels": round(len(work) / num_steps, 2),
        "graph_share": graph_kernel_share(work),
        "graph_time_share": graph_time_share(work),
        "kernels_hash": hashlib.sha256(names.encode()).hexdigest()[:16],
        "top_kernels": top,
        **timeline(events),
    }


def timeline(events: list[dict]) -> dict:
    """When the GPU was busy in the last profiled step.

    The step begins where an event of a timed run would: when the work issued before it is done, or when the host
    begins with it, whichever is later. It ends when its work is done and the host has issued it.

    Returns:
        timeline_us: [start, end] of each busy interval, us from the step's begin; gaps shorter than SHORTEST_GAP of the
        step are left out. timeline_step_us: length of the step. Empty where the trace does not show the step's begin.
    """
    calls = [event for event in events if event["cat"] in HOST_CALLS]
    work = [event for event in events if event["cat"] in GPU_WORK]
    marks = [call["ts"] for call in calls if call["name"].startswith(LAST_STEP_CALL)]
    if not marks or not work:
        return {}
    begin = max(marks)
    issued_before = {correlation_of(call) for call in calls if call["ts"] < begin} - {None}
    # Copies on another stream may belong to a later step.
    (main_stream, _), *_ = Counter(event.get("tid", 0) for event in work).most_common(1)
    for event in work:
        if event.get("tid", 0) == main_stream and correlation_of(event) in issued_before:
            begin = max(begin, event["ts"] + event["dur"])
    end = max([event["ts"] + event["dur"] for event in work] + [call["ts"] for call in calls])
    merged: list[list[float]] = []
    for event in sorted(work, key=lambda event: event["ts"]):
        start, stop = max(event["ts"], begin), event["ts"] + event["dur"]
        if stop <= begin:
            continue
        if merged and start - merged[-1][1] < SHORTEST_GAP * (end - begin):
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return {
        "timeline_us": [[round(start - begin), round(stop - begin)] for start, stop in merged],
        "timeline_step_us": round(end - begin),
    }


# ------------------------------------------------------------------------------------------------
# The trace of --profile


@contextlib.contextmanager
def named_range(name: str):
    """A range of that name in torch's profiler and, with CUDA, in NVTX, where Nsight Systems shows it."""
    import torch

    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else contextlib.nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield


def traced_steps(trace: dict, cuda: bool) -> Iterator[int]:
    """Yield the numbers of steps, UNTRACED_STEPS and then TRACED_STEPS that are traced.

    trace: gets the entries of the Chrome trace: host operators and, with CUDA, kernels.
    """
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    schedule = torch.profiler.schedule(wait=0, warmup=UNTRACED_STEPS, active=TRACED_STEPS, repeat=1)
    last = UNTRACED_STEPS + TRACED_STEPS - 1
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for index in range(last + 1):
            yield index
            if cuda and index in (UNTRACED_STEPS - 1, last):
                # What was issued before the trace is not in it, and what was issued in it is.
                torch.cuda.synchronize()
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace.update(json.loads(path.read_text()))


def trace_steps(step, cuda: bool) -> dict:
    """Trace steps, step(index) from 0 on, and return the Chrome trace; see `traced_steps`."""
    trace: dict = {}
    for index in traced_steps(trace, cuda):
        step(index)
    return trace


def sections(trace: dict) -> dict[str, float]:
    """Host ms a step of each of the script's sections, in order of appearance; # and : are in torch's own ranges."""
    times: dict[str, float] = {}
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("cat") == "user_annotation" and not set("#:") & set(event["name"]):
            times[event["name"]] = times.get(event["name"], 0.0) + event["dur"] / 1e3 / TRACED_STEPS
    return times


def single_work(trace: dict, names: tuple[str, ...]) -> float:
    """Kernels, copies and memsets a step that single launches in sections of these names started, not graphs."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    windows = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in names
    ]
    launches = {
        correlation_of(event)
        for event in events
        if event.get("cat") in HOST_CALLS
        and not event["name"].startswith(GRAPH_LAUNCHES)
        and any(start <= event["ts"] <= end for start, end in windows)
    } - {None}
    return sum(event.get("cat") in GPU_WORK and correlation_of(event) in launches for event in events) / TRACED_STEPS


def report(path: str, trace: dict) -> None:
    """Print where the trace is and its sections."""
    print(f"traced, not timed: {TRACED_STEPS} steps in {path}, for https://ui.perfetto.dev")
    print(f"{'section':16s}{'host ms':>9s}  a step, slowed by the profiler")
    for name, ms in sections(trace).items():
        print(f"{name:16s}{ms:9.3f}")


def write(path: str, trace: dict) -> None:
    """Write a Chrome trace whole or not at all, without the path that torch gave it."""
    write_text(path, json.dumps({**trace, "traceName": Path(path).name}, separators=(",", ":")))
