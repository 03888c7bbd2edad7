"""common/trace: busy time and gaps of overlapping kernels, the summary, and one step in a sidecar."""

import gzip
import json
import random
import time

import pytest

from common import trace


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


def test_the_sidecar_is_the_middle_step_as_a_chrome_trace(tmp_path):
    path = tmp_path / "a folder that is not there yet" / "graph.r1.trace.json.gz"
    work = steps(5, ["gemm", "norm" + "x" * 200, "copy"])
    # What the host sends ahead of its replay is where it falls: here in the third and the fourth step.
    for index in (8, 11):
        work[index]["stream"], work[index]["category"] = 9, "gpu_memcpy"
    del work[14], work[5], work[2]
    assert trace.write_sidecar(path, work, 5) == path
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert set(document) == {"traceEvents"}
    events = document["traceEvents"]
    assert [event["name"] for event in events] == ["gemm", "norm" + "x" * 76, "copy"]
    assert [event["ts"] for event in events] == [0, 3, 6] and [event["dur"] for event in events] == [2, 2, 2]
    assert [event["tid"] for event in events] == [7, 7, 9]
    assert [event["cat"] for event in events] == ["kernel", "kernel", "gpu_memcpy"]
    assert {(event["ph"], event["pid"]) for event in events} == {("X", 0)}


def test_what_is_written_reads_back_as_the_same_work(tmp_path):
    path = tmp_path / "x.trace.json.gz"
    work = steps(1, ["a", "b", "c"], duration=1.25, gap=0.5)
    trace.write_sidecar(path, work, 1)
    back = trace.gpu_work(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    assert trace.busy(back) == trace.busy(work)
    assert [event["name"] for event in back] == [event["name"] for event in work]


def test_the_same_work_gives_the_same_bytes(tmp_path):
    """Committed evidence must not change because it was written later: no time in the gzip header."""
    path = tmp_path / "x.trace.json.gz"
    trace.write_sidecar(path, steps(1, ["a"]), 1)
    assert path.read_bytes()[4:8] == b"\0\0\0\0"


def test_a_sidecar_over_the_limit_is_not_written(tmp_path):
    generator = random.Random(0)
    path = tmp_path / "x.trace.json.gz"
    work = [kernel(index, 1, f"{generator.getrandbits(300):x}") for index in range(8000)]
    assert trace.write_sidecar(path, work, 1) is None
    assert not path.exists()
    assert trace.write_sidecar(path, work[:1000], 1) == path
    size = path.stat().st_size
    assert 40_000 < size <= 200_000
    path.unlink()
    assert trace.write_sidecar(path, work[:1000], 1, limit_bytes=size - 1) is None
    assert not path.exists()
    assert trace.write_sidecar(path, work[:1000], 1, limit_bytes=size) == path


def test_a_few_thousand_kernels_fit(tmp_path):
    names = [f"void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_{index % 40}>" for index in range(4000)]
    assert trace.write_sidecar(tmp_path / "x.trace.json.gz", steps(3, names), 3)


def test_a_long_profile_is_cut_in_no_time(tmp_path):
    """It was quadratic in the number of kernels, which cost each process of a run many seconds."""
    work = steps(64, ["gemm", "norm"] * 300)
    start = time.process_time()
    assert trace.write_sidecar(tmp_path / "x.trace.json.gz", work, 64)
    assert time.process_time() - start < 2


def test_steps_of_unequal_kernels_cannot_be_cut(tmp_path):
    path = tmp_path / "x.trace.json.gz"
    work = steps(4, ["gemm", "norm", "copy"])
    assert trace.write_sidecar(path, work[:-1], 4) is None
    # The sum divides, the steps are not alike.
    del work[-1]
    assert trace.write_sidecar(path, [*work, kernel(500.0, 2.0, "late copy")], 4) is None
    assert not path.exists()
