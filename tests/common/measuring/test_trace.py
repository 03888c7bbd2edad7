"""common/trace: busy time and gaps of overlapping kernels, the summary, and the timeline of one step."""

import json
import random
import time
from types import SimpleNamespace

import pytest
import torch

from common.measuring import trace

ORIGIN_NS = 1_795_328_640_000_000_000


def kernel(start, duration, name="gemm", stream=7, category="kernel", by_graph=False):
    return {
        "name": name,
        "category": category,
        "start_us": float(start),
        "duration_us": float(duration),
        "stream": stream,
        "by_graph": by_graph,
    }


def steps(num_steps, names, duration=2.0, gap=1.0):
    """num_steps times the kernels `names`."""
    count = len(names)
    return [
        kernel(100.0 + (step * count + index) * (duration + gap), duration, name)
        for step in range(num_steps)
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(10, 5)], (5, 5, [])),
        ([(0, 5), (5, 5)], (10, 10, [])),
        ([(0, 5), (7, 3)], (8, 10, [2])),
        # Two streams: a partial overlap, then a kernel within another.
        ([(0, 6), (4, 6)], (10, 10, [])),
        ([(0, 10), (2, 3), (6, 2)], (10, 10, [])),
        # A gap counts from the longest of all streams, not from the kernel that came before.
        ([(0, 10), (2, 3), (12, 1)], (11, 13, [2])),
        ([(0, 10), (2, 3), (8, 4), (15, 5), (15, 1), (21, 1)], (18, 22, [3, 1])),
        ([(0, 4), (0, 4), (0, 9), (10, 0), (11, 1)], (10, 12, [1, 1])),
        ([(3, 0)], (0, 0, [])),
    ],
)
def test_busy_is_the_union_and_gaps_lie_between(intervals, expected):
    work = [kernel(start, duration, stream=index % 3) for index, (start, duration) in enumerate(intervals)]
    assert trace.busy(work) == expected


def test_busy_equals_counting_microseconds_one_by_one():
    generator = random.Random(0)
    for _ in range(200):
        intervals = sorted((generator.randrange(60), generator.randrange(1, 9)) for _ in range(12))
        covered = {time for start, duration in intervals for time in range(start, start + duration)}
        busy, span, gaps = trace.busy([kernel(*interval) for interval in intervals])
        assert busy == len(covered)
        assert span == max(covered) - min(covered) + 1
        assert sum(gaps) == span - busy and all(gap > 0 for gap in gaps)


def test_gpu_work_keeps_kernels_and_copies_sorted():
    def event(name, ts, cat, **more):
        return {"name": name, "ph": "X", "cat": cat, "ts": ts, "dur": 2, "tid": 7} | more

    events = [
        event("copy", 30.5, "gpu_memcpy", tid=8),
        event("gemm", 10, "kernel"),
        event("fill", 20, "gpu_memset"),
        event("aten::mm", 9, "cpu_op"),
        event("cudaLaunchKernel", 9, "cuda_runtime"),
        event("step", 9, "gpu_user_annotation"),
        event("begin", 9, "kernel", ph="B"),
        {"ph": "M", "name": "process_name"},
    ]
    assert trace.gpu_work(events) == [
        kernel(10, 2, "gemm", 7),
        kernel(20, 2, "fill", 7, "gpu_memset"),
        kernel(30.5, 2, "copy", 8, "gpu_memcpy"),
    ]


def launched(name, launch, correlation, ts=10.0):
    """A kernel and the host call that Kineto links it with."""
    call = {
        "name": launch,
        "ph": "X",
        "cat": "cuda_driver" if launch.startswith("cu") and launch[2:3].isupper() else "cuda_runtime",
        "ts": ts - 5,
        "dur": 1,
        "tid": 1,
        "args": {"correlation": correlation},
    }
    work = {
        "name": name,
        "ph": "X",
        "cat": "kernel",
        "ts": ts,
        "dur": 2,
        "tid": 7,
        "args": {"correlation": correlation},
    }
    return [call, work]


def test_the_share_of_kernels_that_graphs_launched():
    graph = [*launched("gemm", "cudaGraphLaunch", 3), launched("norm", "cudaGraphLaunch", 3, 20.0)[1]]
    eager = launched("gemm", "cudaLaunchKernel", 4, 30.0) + launched("relu", "cuLaunchKernelEx", 5, 40.0)
    copy = {"name": "copy", "ph": "X", "cat": "gpu_memcpy", "ts": 50.0, "dur": 2, "tid": 8, "args": {"correlation": 3}}
    assert trace.graph_kernel_share(trace.gpu_work([*graph, *eager, copy])) == 0.5
    assert trace.graph_kernel_share(trace.gpu_work(eager)) == 0.0
    assert trace.graph_kernel_share(trace.gpu_work(graph)) == 1.0
    assert trace.graph_kernel_share(trace.gpu_work(launched("gemm", "cuGraphLaunch", 9))) == 1.0
    # A trace without host calls, or without a kernel, does not tell.
    assert trace.graph_kernel_share(trace.gpu_work([event for event in graph if event["cat"] == "kernel"])) is None
    assert trace.graph_kernel_share(trace.gpu_work([copy, eager[0]])) is None
    # A launch that the trace gave no id is nobody's.
    bare = [{**event, "args": {}} for event in launched("gemm", "cudaGraphLaunch", 3)]
    assert trace.graph_kernel_share(trace.gpu_work(bare)) == 0.0


def test_the_hash_of_kernels_is_of_names_and_counts_in_a_step():
    def hash_of(names, num_steps=2):
        return trace.kernels_hash(steps(num_steps, names), num_steps)

    assert hash_of(["gemm", "relu", "gemm"]) == hash_of(["relu", "gemm", "gemm"], 5)
    assert len(hash_of(["gemm"])) == 16 and int(hash_of(["gemm"]), 16)
    assert len({hash_of(names) for names in (["gemm"], ["gemm", "gemm"], ["relu"], ["gemm", "relu"])}) == 4
    work = steps(2, ["gemm"])
    # How long they took and on which stream does not count, nor do copies.
    other = [{**event, "duration_us": 9.0, "stream": 8} for event in work] + [kernel(900, 1, "copy", 8, "gpu_memcpy")]
    assert trace.kernels_hash(other, 2) == trace.kernels_hash(work, 2)


def test_the_summary_is_per_step():
    """Two steps of 1.5 ms of which 1.2 ms is busy; a second stream hides one kernel behind another."""
    work = []
    for origin in (0, 1500):
        work += [kernel(origin, 900, "gemm"), kernel(origin + 100, 400, "copy", stream=8)]
        work += [kernel(origin + 1200, 300, "gemm")]
    summary = trace.summarise(work, 2)
    top = summary.pop("top_kernels")
    assert summary == pytest.approx(
        {
            "busy_ms": 1.2,
            "span_ms": 1.5,
            "num_kernels": 3,
            "idle_fraction": 1 - 2400 / 3000,
            "gap_per_kernel_us": 600 / 6,
        }
    )
    assert top == [{"name": "gemm", "num": 2, "ms": 1.2}, {"name": "copy", "num": 1, "ms": 0.4}]


def test_the_summary_names_the_twelve_kinds_that_take_longest():
    work = [kernel(index * 100, index + 1, f"kernel_{index:02}" + "x" * 200) for index in range(30)]
    top = trace.summarise(work, 1)["top_kernels"]
    assert [kind["name"][:9] for kind in top] == [f"kernel_{index:02}" for index in range(29, 17, -1)]
    assert all(len(kind["name"]) == 100 for kind in top)


def test_no_gaps_no_idle_time():
    assert trace.summarise([kernel(0, 5), kernel(5, 5)], 1)["idle_fraction"] == 0.0


# --- the timeline of the last step


def call(name, ts, correlation=0):
    args = {"args": {"correlation": correlation}} if correlation else {}
    return {"name": name, "ph": "X", "cat": "cuda_runtime", "ts": ts, "dur": 1.0, "tid": 1} | args


def work(ts, duration, correlation=0, stream=7, category="kernel"):
    args = {"args": {"correlation": correlation}} if correlation else {}
    return {"name": "gemm", "ph": "X", "cat": category, "ts": ts, "dur": duration, "tid": stream} | args


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
    assert trace.timeline(events) == {"timeline_us": [[1, 601], [700, 1000]], "timeline_step_us": 1000}


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
    assert trace.timeline(events) == {"timeline_us": [[60, 100]], "timeline_step_us": 200}


def test_short_gaps_are_no_gaps_and_overlapping_work_is_one_interval():
    # A step of 4,000 us: gaps from 2 us on count.
    spans = [(0, 100), (101.9, 98.1), (202, 98), (250, 20), (290, 110), (3900, 100)]
    events = [call("cudaStreamQuery", 0.0), *(work(start, duration, 9) for start, duration in spans)]
    expected = {"timeline_us": [[0, 200], [202, 400], [3900, 4000]], "timeline_step_us": 4000}
    assert trace.timeline(events) == trace.timeline(events[::-1]) == expected


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
    assert trace.timeline(events) == {"timeline_us": [[0, 60]], "timeline_step_us": 60}


def test_work_without_a_call_in_the_trace_goes_by_its_time():
    events = [call("cudaStreamQuery", 10.0), work(0.0, 12.0), work(20.0, 10.0)]
    assert trace.timeline(events) == {"timeline_us": [[0, 2], [10, 20]], "timeline_step_us": 20}


def test_without_the_mark_or_work_there_is_no_timeline():
    assert trace.timeline([]) == {}
    assert trace.timeline([call("cudaStreamQuery", 1.0)]) == {}
    assert trace.timeline([call("cudaLaunchKernel", 0.0, 1), work(1.0, 2.0, 1)]) == {}


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
    found = trace.chrome_events(events, ORIGIN_NS)
    kinds = ["cuda_runtime", "kernel", "cuda_driver", "gpu_memcpy", "gpu_memset", "other", "user_annotation"]
    assert [event["cat"] for event in found] == kinds
    assert (found[0]["ts"], found[0]["dur"], found[0]["args"]) == (1.0, 2.001, {"correlation": 5})
    assert found[1]["ts"] == 9000.001
    work = trace.gpu_work(found)
    assert [event["name"] for event in work] == [
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void gemm<int>(cudaArray)",
    ]
    assert work[-1] | {"stream": 7, "duration_us": 5.5, "by_graph": False} == work[-1]


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

    found = trace.profile(run_steps, 4, 6)
    assert order == [6, 3, "mark", 1]
    sines = [event for event in found.events if event["name"] == "aten::sin"]
    assert len(sines) == 4
    assert all(0 <= event["ts"] <= (found.end_s - found.start_s) * 1e6 + 1000 for event in sines)
    assert found.start_s < found.end_s


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
        found = trace.profile(run_steps, 4, 3)
    kept[0].kineto_results.save(str(tmp_path / "trace.json"))
    whole = trace.gpu_work(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    work = trace.gpu_work(found.events)
    for key in ("name", "category", "stream", "by_graph"):
        assert [event[key] for event in work] == [event[key] for event in whole]
    assert trace.busy(work)[0] == pytest.approx(trace.busy(whole)[0], rel=1e-3)
    last = trace.timeline(found.events)
    assert 10_000 < last["timeline_step_us"] < 12_000
    busy_us = sum(event["duration_us"] for event in work[-8:])
    assert sum(end - start for start, end in last["timeline_us"]) == pytest.approx(busy_us, abs=50)
    assert all(0 <= start <= end < 5000 for start, end in last["timeline_us"])
