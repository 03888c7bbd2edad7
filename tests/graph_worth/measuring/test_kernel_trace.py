"""Tests of graph_worth/measuring/kernel_trace.py: busy time of overlapping kernels, and the timeline of one step."""

import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from graph_worth.measuring import kernel_trace
from graph_worth.measuring.worker import Worker
from graph_worth.parallel.host_messages import of_all_ranks
from tests.helpers import gloo_ranks

ORIGIN_NS = 1_795_328_640_000_000_000


def call(name, ts, correlation=0):
    args = {"args": {"correlation": correlation}} if correlation else {}
    return {"name": name, "ph": "X", "cat": "cuda_runtime", "ts": ts, "dur": 1.0, "tid": 1} | args


def work(ts, duration, correlation=0, stream=7, category="kernel"):
    args = {"args": {"correlation": correlation}} if correlation else {}
    return {"name": "gemm", "ph": "X", "cat": category, "ts": ts, "dur": duration, "tid": stream} | args


def test_busy_is_the_union_of_all_streams():
    generator = random.Random(0)
    for _ in range(200):
        intervals = [(generator.randrange(60), generator.randrange(9)) for _ in range(12)]
        covered = {time for start, duration in intervals for time in range(start, start + duration)}
        events = [work(*interval, stream=index % 3) for index, interval in enumerate(intervals)]
        assert kernel_trace.busy_us(kernel_trace.gpu_work(events)) == len(covered)


def test_facts_are_of_a_step_and_of_the_gpus_work_alone():
    """Two steps of 1.2 ms of work; a second stream hides one copy behind a kernel."""
    events = [work(0, 9000, category="cpu_op"), work(0, 9000) | {"ph": "B"}]
    for origin in (0, 1500):
        events += [work(origin, 900, 3), work(origin + 100, 400, 4, stream=8, category="gpu_memcpy")]
        events += [work(origin + 1200, 300, 4)]
    events += [call("cudaGraphLaunch", 0, 3), call("cudaLaunchKernel", 0, 4)]
    found = kernel_trace.facts(events, 2)
    assert (found["busy_ms"], found["kernels"], found["graph_share"]) == (1.2, 3, 0.5)
    # 900 us of each 1,600 us of kernels and copies are the graph's.
    assert found["graph_time_share"] == pytest.approx(0.5625)
    assert kernel_trace.graph_time_share(kernel_trace.gpu_work([work(0, 5, 9)])) is None
    # From 0 to 3,000 us, 300 us idle in each step and 300 between them; the copy's 400 us lie behind a kernel.
    assert (found["gap_ms"], found["overlap_ms"]) == (0.3, 0.4)
    assert found["top_kernels"][0]["num"] == 3 and len(found["kernels_hash"]) == 16
    assert kernel_trace.facts(events[:1], 2) == {"busy_ms": None, "kernels": None, "graph_share": None}


def test_the_share_of_kernels_that_graphs_launched():
    def share(*events):
        return kernel_trace.graph_kernel_share(kernel_trace.gpu_work(events))

    eager = [call("cuLaunchKernelEx", 0.0, 5), work(9.0, 2.0, 5)]
    assert share(*eager) == 0.0
    assert share(*eager, call("cuGraphLaunch", 0.0, 9), work(5.0, 1.0, 9)) == 0.5
    # A trace without host calls, or without a kernel, does not tell.
    assert share(work(5.0, 1.0, 9)) is None
    assert share(call("cudaGraphLaunch", 0.0, 9), work(5.0, 1.0, 9, category="gpu_memcpy")) is None
    # A launch that the trace gave no id is nobody's.
    assert share(call("cudaGraphLaunch", 0.0), work(5.0, 1.0)) == 0.0


# --- the timeline of the last step


def test_a_step_of_a_host_that_runs_ahead_begins_when_the_gpu_is_through_with_the_one_before():
    events = [
        call("cudaLaunchKernel", 0.0, 1),
        call("cudaStreamQuery", 10.0),
        call("cudaLaunchKernel", 20.0, 2),
        call("cudaLaunchKernel", 30.0, 3),
        call("cudaDeviceSynchronize", 40.0),
        work(5.0, 1000.0, 1),
        work(1006.0, 600.0, 2),
        work(1705.4, 300.0, 3),
    ]
    assert kernel_trace.timeline(events) == {"timeline_us": [[1, 601], [700, 1000]], "timeline_step_us": 1000}


def test_a_step_of_a_slow_host_begins_and_ends_with_the_host():
    """The GPU waits for the first launch, and the host goes on after the last kernel."""
    events = [
        work(1.0, 2.0, 1),
        call("cudaLaunchKernel", 0.0, 1),
        call("cudaStreamQuery", 100.0),
        call("cudaLaunchKernel", 150.0, 2),
        call("cudaDeviceSynchronize", 300.0),
        work(160.0, 40.0, 2),
    ]
    assert kernel_trace.timeline(events) == {"timeline_us": [[60, 100]], "timeline_step_us": 200}


def test_short_gaps_are_no_gaps_and_overlapping_work_is_one_interval():
    # A step of 4,000 us: gaps from 2 us on count.
    spans = [(0, 100), (101.9, 98.1), (202, 98), (250, 20), (290, 110), (3900, 100)]
    events = [call("cudaStreamQuery", 0.0), *(work(start, duration, 9) for start, duration in spans)]
    expected = {"timeline_us": [[0, 200], [202, 400], [3900, 4000]], "timeline_step_us": 4000}
    assert kernel_trace.timeline(events) == kernel_trace.timeline(events[::-1]) == expected


def test_a_copy_on_another_stream_moves_no_begin_and_is_cut_at_it():
    """The next batch's copy was issued with the step before and runs beside this one."""
    events = [
        call("cudaMemcpyAsync", 0.0, 1),
        call("cudaLaunchKernel", 0.0, 2),
        call("cudaStreamQuery", 10.0),
        call("cudaLaunchKernel", 11.0, 3),
        work(5.0, 95.0, 1, stream=8, category="gpu_memcpy"),
        work(5.0, 45.0, 2),
        work(70.0, 40.0, 3),
    ]
    assert kernel_trace.timeline(events) == {"timeline_us": [[0, 60]], "timeline_step_us": 60}


def test_without_the_mark_or_work_there_is_no_timeline():
    assert kernel_trace.timeline([]) == {}
    assert kernel_trace.timeline([call("cudaStreamQuery", 1.0)]) == {}
    assert kernel_trace.timeline([call("cudaLaunchKernel", 0.0, 1), work(1.0, 2.0, 1)]) == {}


# --- Kineto's events without a file


def kineto(name, device, start_ns, duration_ns, correlation, resource, annotation=False):
    """Return a Kineto event as Python sees it in torch 2.11."""
    values = {"name": name, "start_ns": start_ns, "duration_ns": duration_ns, "correlation_id": correlation}
    values |= {"device_resource_id": resource, "is_user_annotation": annotation}
    values["device_type"] = SimpleNamespace(name=device)
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def test_kinetos_events_become_those_of_a_chrome_trace():
    events = [
        kineto("cudaLaunchKernel", "CPU", ORIGIN_NS + 1000, 2001, 5, 1234),
        kineto("void gemm<int>(cudaArray)", "CUDA", ORIGIN_NS + 9_000_001, 5500, 5, 7),
        kineto("cuLaunchKernelEx", "CPU", ORIGIN_NS, 2000, 6, 1234),
        kineto("Memcpy HtoD (Pinned -> Device)", "CUDA", ORIGIN_NS, 1, 6, 8),
        kineto("Memset (Device)", "CUDA", ORIGIN_NS, 1, 8, 8),
        kineto("Activity Buffer Request", "CPU", ORIGIN_NS, 1, 0, 0),
        kineto("step", "CUDA", ORIGIN_NS, 1, 0, 7, annotation=True),
    ]
    found = kernel_trace.chrome_events(events, ORIGIN_NS)
    kinds = ["cuda_runtime", "kernel", "cuda_driver", "gpu_memcpy", "gpu_memset", "other", "user_annotation"]
    assert [event["cat"] for event in found] == kinds
    assert (found[0]["ts"], found[0]["dur"], found[0]["args"]) == (1.0, 2.001, {"correlation": 5})
    assert found[1]["ts"] == 9000.001
    assert [each["is_kernel"] for each in kernel_trace.gpu_work(found)] == [True, False, False]


def test_a_profile_holds_the_asked_steps_alone_and_marks_the_last(monkeypatch):
    """The CPU's operators stand in for a GPU's work; the profiler is torch's own."""
    own, order = torch.autograd.profiler.profile, []

    def on_the_cpu(use_cpu, use_device, use_kineto):
        assert (use_cpu, use_device, use_kineto) == (False, "cuda", True)
        return own(use_cpu=True, use_device=None, use_kineto=True)

    monkeypatch.setattr(torch.autograd.profiler, "profile", on_the_cpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    stream = SimpleNamespace(query=lambda: order.append("mark"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def run_steps(count):
        order.append(count)
        for _ in range(count):
            torch.ones(3).sin()

    found = kernel_trace.profile(run_steps, 4, 6)
    assert order == [1] * 9 + ["mark", 1]
    sines = [event for event in found.events if event["name"] == "aten::sin"]
    assert len(sines) == 4
    assert all(0 <= event["ts"] <= (found.end_s - found.start_s) * 1e6 + 1000 for event in sines)
    assert found.start_s < found.end_s


# --- several ranks

ALL_REDUCE, ALL_GATHER = "ncclDevKernel_AllReduce_Sum_bf16", "ncclDevKernel_AllGather"
EARLY = [(0, 100, "gemm", 7), (100, 300, ALL_REDUCE, 20), (120, 60, "copy", 9), (400, 100, "gemm", 7)]
LATE = [(0, 350, "gemm", 7), (350, 50, ALL_REDUCE, 21), (400, 100, "gemm", 7)]


def steps_of(*kernels, length=1000, num=2):
    """The events of `num` equal steps; kernels: (start us, us, name, stream)."""
    return [
        work(length * step + start, duration, stream=stream) | {"name": name}
        for step in range(num)
        for start, duration, name, stream in kernels
    ]


def over_two_ranks():
    """Both ranks' answers: the late rank's kernels are on streams of other ids."""
    rank = dist.get_rank()
    more = [(450, 10, ALL_GATHER, 20)] if rank else []
    return [
        kernel_trace.over_ranks(steps_of(*(LATE if rank else EARLY)), 2, of_all_ranks),
        kernel_trace.over_ranks(steps_of(*(LATE if rank else EARLY), *more), 2, of_all_ranks),
        kernel_trace.over_ranks([] if rank else steps_of((0, 100, "gemm", 7)), 2, of_all_ranks),
    ]


def test_a_kernel_that_waits_for_another_rank_is_not_working():
    """The early rank's collective spins for 250 us of 300; a copy runs beside it for 60."""
    first, second = gloo_ranks.run(__name__, "over_two_ranks", 2)
    assert first == second
    matched, of_other_counts, without_kernels = first
    assert matched == {"working_ms": [0.31, 0.5], "waiting_ms": [0.19, 0.0]}
    assert of_other_counts == {"unmatched": f"rank 1 ran {ALL_GATHER} 2 times, rank 0 0 times, on stream 0"}
    assert without_kernels == {"unmatched": "the profile of rank 1 has no kernel"}


def test_collectives_match_by_their_order_within_a_stream():
    """Two communicators run the same kernel, and which one begins first differs between ranks."""
    ranks = [
        [(0, 50, ALL_REDUCE, 20), (60, 10, ALL_REDUCE, 31), (80, 40, ALL_REDUCE, 20)],
        [(0, 90, ALL_REDUCE, 31), (100, 30, ALL_REDUCE, 20), (140, 70, ALL_REDUCE, 20)],
    ]
    events = [kernel_trace.gpu_work(steps_of(*kernels, num=1)) for kernels in ranks]
    times = [kernel_trace.durations_us(of_rank) for of_rank in events]
    assert times[0] == {(ALL_REDUCE, 0): [50, 40], (ALL_REDUCE, 1): [10]}
    assert kernel_trace.unmatched(times) == ""
    assert [kernel_trace.without_waiting_us(of_rank, times) for of_rank in events] == [30 + 10 + 40] * 2
    # As many kernels of the name, but on other streams.
    moved = {(ALL_REDUCE, 0): [50], (ALL_REDUCE, 1): [10, 40]}
    assert kernel_trace.unmatched([times[0], moved]) == f"rank 1 ran {ALL_REDUCE} 1 times, rank 0 2 times, on stream 0"


def test_the_profiled_steps_begin_when_all_ranks_are_there(monkeypatch):
    order = []
    profiler = SimpleNamespace(
        _prepare_trace=lambda: order.append("prepare"),
        _start_trace=lambda: order.append("start"),
        __exit__=lambda *error: order.append("end"),
        kineto_results=SimpleNamespace(events=list),
    )
    monkeypatch.setattr(torch.autograd.profiler, "profile", lambda **options: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: None))
    kernel_trace.profile(lambda count: order.append("step"), 2, 2, lambda: order.append("meet"))
    assert order == ["prepare", "step", "step", "start", "meet", "step", "step", "end"]


def late_rank():
    """The worker's profile of two GPUs: rank 1 is busy for milliseconds before each collective."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 20, device=device)

    def step(index):
        x.mul_(1.0)
        if dist.get_rank():
            torch.cuda._sleep(10_000_000)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)

    like_worker = SimpleNamespace(device=device, world_size=2, sampler=None)
    return Worker._profile(like_worker, SimpleNamespace(step=step), 4, 5.0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_which_one_is_late():
    facts, of_late = gloo_ranks.run(__name__, "late_rank", 2, device="cuda")
    assert facts["working_ms"] == of_late["working_ms"] and "unmatched" not in facts
    (early_ms, late_ms), (waits_ms, late_waits_ms) = facts["working_ms"], facts["waiting_ms"]
    # 10 million clocks take 5 ms and more; rank 0 waits for them, and has little to do itself.
    assert late_ms > 4.0 and early_ms < late_ms / 2
    assert waits_ms == pytest.approx(late_ms, rel=0.3) and late_waits_ms < waits_ms / 4
    assert facts["busy_ms"] == pytest.approx(early_ms + waits_ms, rel=0.01)


@pytest.mark.gpu
def test_events_on_a_gpu_are_those_of_the_chrome_trace_and_show_the_last_step(tmp_path):
    x = torch.randn(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x @ x
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x.sin()
    kept = []

    def run_steps(count):
        for _ in range(count):
            for _ in range(5):
                x.cos()
            graph.replay()
            time.sleep(0.01)

    own = torch.autograd.profiler.profile

    def keeping(**options):
        kept.append(own(**options))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "profile", keeping)
        found = kernel_trace.profile(run_steps, 4, 3)
    kept[0].kineto_results.save(str(tmp_path / "trace.json"))
    whole = kernel_trace.gpu_work(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    work = kernel_trace.gpu_work(found.events)
    for key in ("is_kernel", "by_graph"):
        assert sorted(event[key] for event in work) == sorted(event[key] for event in whole)
    assert kernel_trace.busy_us(work) == pytest.approx(kernel_trace.busy_us(whole), rel=1e-3)
    last = kernel_trace.timeline(found.events)
    assert 10_000 < last["timeline_step_us"] < 12_000
    work.sort(key=lambda event: event["start_us"])
    busy_us = sum(event["duration_us"] for event in work[-8:])
    assert sum(end - start for start, end in last["timeline_us"]) == pytest.approx(busy_us, abs=50)
    assert all(0 <= start <= end < 5000 for start, end in last["timeline_us"])
