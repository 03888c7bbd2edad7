"""common/launches: which segment of which step launched what, from traces made up event by event."""

import random
from types import SimpleNamespace

import numpy
import pytest

from common import launches, queue_model, trace
from tests import made_trace
from tests.made_trace import ORIGIN_NS, Trace


def three_steps(**more):
    made = Trace()
    for _ in range(3):
        made.stamps_ns.append([])
        made.stamp()
        made.launch([100.0], **more)
        made.launch([100.0], **more)
        made.stamp()
        # The backward pass: another thread of the host, Triton's launches, and a copy.
        made.launch([40.0], name="cuLaunchKernelEx", tid=2, **more)
        made.launch([40.0], name="cudaMemcpyAsync", tid=2, category="gpu_memcpy", **more)
        made.launch([40.0], name="cuLaunchKernelEx", tid=2, **more)
        made.stamp()
        made.stamp()
    return made


def test_each_launch_is_in_the_segment_that_issued_it():
    steps = three_steps().steps()
    assert [step.segment.tolist() for step in steps] == [[0, 0, 1, 1, 1]] * 3
    assert {step.num_segments for step in steps} == {3}
    assert [step.num_launches.tolist() for step in steps] == [[2, 3, 0]] * 3
    assert [step.duration_us.tolist() for step in steps] == [[100.0, 100.0, 40.0, 40.0, 40.0]] * 3


def test_launches_hold_all_of_the_busy_time_whatever_overlaps():
    generator = random.Random(1)
    made = Trace()
    for _ in range(4):
        made.stamps_ns.append([])
        made.stamp()
        for _ in range(30):
            correlation = made.call("cudaLaunchKernel")
            for _ in range(generator.choice([1, 1, 3])):
                start = made.now + generator.uniform(0, 60)
                made.event("k", "kernel", start, generator.uniform(1, 50), correlation, generator.choice([7, 8]))
            made.now += 4
            if generator.random() < 0.2:
                made.stamp()
        made.stamp()
    made.now += 500
    profile = made.profile()
    steps = launches.queue_steps(profile, made.stamps_ns)
    busy_us = trace.busy(trace.gpu_work(profile.events))[0]
    found = list(launches._launches(profile.events))
    inner_us = launches._gaps(found)[0] * sum(sum(launch.inner_us) for launch in found)
    assert sum(step.duration_us.sum() for step in steps) == pytest.approx(busy_us + inner_us, abs=1e-6)
    assert sum(len(step.segment) for step in steps) == 120
    assert [step.num_segments for step in steps] == [len(stamps) - 1 for stamps in made.stamps_ns]


def test_gaps_of_a_full_queue_count_less_what_the_profiler_adds():
    made = Trace()
    made.stamps_ns.append([])
    made.stamp()
    made.launch([5000.0])
    for _ in range(40):
        made.launch([100.0], gap_us=1.75)
    made.stamp()
    (step,) = made.steps()
    assert step.gap_us[1:] == pytest.approx(1.25) and step.gap_us.shape == (41,)


def test_a_gap_that_waited_for_the_host_is_not_the_gpus():
    """Each kernel is done before the next is launched: what the GPU itself would need is not seen."""
    made = Trace()
    made.stamps_ns.append([])
    made.stamp()
    for _ in range(40):
        made.launch([1.0])
        made.now += 50
    made.stamp()
    (step,) = made.steps()
    assert step.gap_us[1:] == pytest.approx(launches.LAUNCH_GAP_US)
    assert step.gpu_us == pytest.approx(40 * 2.0, abs=2.0)


def test_all_kernels_of_a_replay_are_one_launch():
    made = Trace()
    for _ in range(2):
        made.stamps_ns.append([])
        made.stamp()
        made.launch([10.0] * 50, name="cudaGraphLaunch", gap_us=1.5)
        made.stamp()
    steps = made.steps()
    assert [len(step.segment) for step in steps] == [1, 1]
    assert steps[1].duration_us[0] == pytest.approx(500 + 49 * 1.0, abs=0.5)


def test_gaps_that_the_profiler_made_alone_are_none():
    made = Trace()
    made.stamps_ns.append([])
    made.stamp()
    made.launch([10.0] * 50, name="cudaGraphLaunch", gap_us=0.3)
    made.stamp()
    assert made.steps()[0].duration_us[0] == pytest.approx(500)


def test_places_where_the_host_waits_are_told_by_what_was_issued_before():
    made = Trace()
    for _ in range(2):
        made.stamps_ns.append([])
        made.stamp()
        made.launch([10.0])
        made.launch([10.0])
        made.call("cudaStreamSynchronize", 30.0)
        made.launch([10.0])
        made.stamp()
        made.call("cudaEventSynchronize", 5.0)
        made.launch([10.0])
        made.call("cudaStreamSynchronize", 30.0)
        made.stamp()
    steps = made.steps()
    assert [step.waits for step in steps] == [[(0, 2), (1, 4)]] * 2


def test_work_whose_call_is_missing_is_a_launch_after_the_one_before_it_and_too_much_of_it_is_refused():
    made = Trace()
    made.stamps_ns.append([])
    made.stamp()
    for _ in range(100):
        made.launch([10.0])
    made.stamp()
    kernels = [event for event in made.events if event["cat"] == "kernel"]
    for event in kernels[50:70]:
        event["args"] = {}
    (step,) = made.steps()
    assert step.num_launches.tolist() == [100] and step.duration_us.sum() == pytest.approx(1000, abs=2.0)
    for event in kernels[70:80]:
        event["args"] = {}
    with pytest.raises(ValueError, match="30 of 100 kernels and copies have no launch"):
        made.steps()
    made.events = [event for event in made.events if event["cat"] != "kernel"]
    with pytest.raises(ValueError, match="0 of 0 kernels"):
        made.steps()


def test_a_graphs_kernels_before_work_without_a_call_stay_one_launch():
    made = Trace()
    made.stamps_ns.append([])
    made.stamp()
    made.launch([10.0, 10.0, 10.0], name="cudaGraphLaunch")
    made.launch([10.0])
    made.launch([10.0])
    made.launch([10.0])
    made.launch([10.0])
    made.stamp()
    [event for event in made.events if event["cat"] == "kernel"][3]["args"] = {}
    (step,) = made.steps()
    # Three kernels and the gaps between them.
    assert step.duration_us.tolist() == [pytest.approx(31.0, abs=1.0), 10.0, 10.0, 10.0, 10.0]


@pytest.mark.parametrize("ahead_us", [-400.0, 0.0, 30.0])
def test_clocks_that_differ_are_set_right(ahead_us, monkeypatch):
    monkeypatch.setitem(globals(), "AHEAD_US", ahead_us)
    assert [step.segment.tolist() for step in three_steps().steps()] == [[0, 0, 1, 1, 1]] * 3


def test_clocks_that_have_nothing_in_common_are_refused(monkeypatch):
    monkeypatch.setattr(made_trace, "AHEAD_US", 5000.0)
    with pytest.raises(ValueError, match="does not show where the profiled steps begin and end"):
        three_steps().steps()


def test_the_model_of_a_trace_predicts_its_period():
    """From trace to prediction: 5 launches a step, 2 segments that launch and one that does not."""
    steps = three_steps(gap_us=1.5).steps()
    assert queue_model.predict(steps, [0.4, 0.9, 0.1]).step_ms == pytest.approx(1.4)
    gpu_ms = numpy.mean([step.gpu_us for step in steps]) / 1e3
    assert queue_model.predict(steps, [0.01, 0.02, 0.0]).step_ms == pytest.approx(gpu_ms)
    assert queue_model.segments(steps)["launches"] == [2, 3, 0]
    assert sum(queue_model.segments(steps)["gpu_ms"]) == pytest.approx(gpu_ms, abs=1e-3)
    assert queue_model.segments([*steps, queue_model.Step(*[numpy.zeros(0)] * 3, 1)]) is None


# --- Kineto's events without a file


def kineto(name, device, start_ns, duration_ns, correlation, resource, annotation=False):
    """What Python sees of an event of Kineto's, in torch 2.11."""
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


def test_a_profile_holds_the_asked_steps_alone_by_the_hosts_clock(monkeypatch):
    """The CPU's operators stand in for a GPU's work; the profiler is torch's own."""
    import torch

    own, counts = torch.autograd.profiler.profile, []

    def on_the_cpu(use_cpu, use_device, use_kineto):
        assert (use_cpu, use_device, use_kineto) == (False, "cuda", True)
        return own(use_cpu=True, use_device=None, use_kineto=True)

    monkeypatch.setattr(torch.autograd.profiler, "profile", on_the_cpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run_steps(count):
        counts.append(count)
        for _ in range(count):
            torch.ones(3).sin()

    found = trace.profile(run_steps, 4, 6)
    assert counts == [6, 4]
    sines = [event for event in found.events if event["name"] == "aten::sin"]
    assert len(sines) == 4
    assert all(0 <= event["ts"] <= (found.synced_ns[1] - found.synced_ns[0]) / 1e3 for event in sines)
    assert found.start_s < found.end_s


@pytest.mark.gpu
def test_events_on_a_gpu_are_those_of_the_chrome_trace_and_launches_are_placed(tmp_path):
    import json
    import time

    import torch

    from common import marks

    x = torch.randn(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x @ x
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x.sin()
    stamps, kept = [], []

    def run_steps(count):
        stamps.clear()
        for _ in range(count):
            stamps.append([time.time_ns()])
            with marks.watching_marks(lambda: stamps[-1].append(time.time_ns())):
                for _ in range(5):
                    x.cos()
                marks.mark()
                graph.replay()
            stamps[-1].append(time.time_ns())

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
    steps = launches.queue_steps(found, stamps)
    assert [step.num_launches.tolist() for step in steps] == [[5, 1]] * 4
    assert [step.waits for step in steps] == [[]] * 4
