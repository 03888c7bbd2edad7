"""Issue passes, profile and prediction over a made-up GPU: its loop is known, and the passes must foretell it."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from common import marks, passes, trace
from common import record as records
from tests.made_trace import ORIGIN_NS, Trace

GAP_US = 1.0


class Gpu(Trace):
    """Host and GPU in simulated us. It is `time` and `torch.cuda` for common.passes."""

    def __init__(self, queue=1024):
        self.queue, self.ends, self.is_profiled = queue, [], False
        super().__init__()

    def perf_counter(self):
        return self.now * 1e-6

    monotonic = perf_counter

    def time_ns(self):
        return ORIGIN_NS + round(1e3 * self.now)

    def synchronize(self):
        self.now = max(self.now, self.gpu_end)

    def work(self, host_us, kernels_us):
        """One launch. The profiler makes the host slower and gaps longer."""
        self.now += host_us - 1.0 + 3.0 * self.is_profiled
        if len(self.ends) >= self.queue:
            self.now = max(self.now, self.ends[-self.queue])
        correlation = self.call("cudaLaunchKernel", 1.0)
        for us in kernels_us:
            start = max(self.now, self.gpu_end + GAP_US + 0.5 * self.is_profiled)
            self.event("gemm", "kernel", start, us, correlation, tid=7)
            self.gpu_end = start + us
        self.ends.append(self.gpu_end)

    def profile(self, run_steps, num_steps, num_heat_steps):
        """What common.trace.profile does."""
        run_steps(num_heat_steps + 2)
        self.synchronize()
        self.events.clear()
        self.is_profiled = True
        first_ns = self.wait_for_gpu()
        run_steps(num_steps)
        self.synchronize()
        last_ns = self.wait_for_gpu()
        self.is_profiled = False
        for event in self.events:
            event["ts"] -= (first_ns - ORIGIN_NS) / 1e3
        return trace.Profile(self.events, 0.0, 1.0, (first_ns, last_ns))


class Loop:
    """A variant whose step issues launches: segments of (number, host us of each, kernel us of each)."""

    def __init__(self, gpu, segments, kernels=1, waits=False):
        self.gpu, self.segments, self.kernels, self.waits = gpu, segments, kernels, waits
        self.slower, self.indices = 1.0, []
        self.capture = SimpleNamespace(num_replays=0)

    def step(self, index):
        self.indices.append(index)
        for place, (number, host_us, kernel_us) in enumerate(self.segments):
            if place:
                marks.mark()
            for _ in range(number):
                self.gpu.work(self.slower * host_us, [kernel_us] * self.kernels)
            if self.waits:
                begin = self.gpu.now
                self.gpu.synchronize()
                self.gpu.correlation += 1
                name = "cudaStreamSynchronize"
                self.gpu.event(name, "cuda_runtime", begin, self.gpu.now - begin, self.gpu.correlation)

    def period_ms(self, num_steps=16):
        """Of a running loop, by the GPU's own clock."""
        ends = []
        for index in range(num_steps):
            self.step(index)
            ends.append(self.gpu.gpu_end)
        return (ends[-1] - ends[num_steps // 2]) / (num_steps - 1 - num_steps // 2) / 1e3


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(passes, "time", made)
    monkeypatch.setattr(passes.torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(passes.trace, "profile", made.profile)
    return made


def measured(variant, slower=1.0):
    """All passes around a window, during which the host changes speed, and the record."""
    record = records.blank(extra={})
    passes.issue_pass(record, variant, "before", 2)
    variant.slower = slower
    record.update(statistic_ms=variant.period_ms())
    record["steps"]["batch"] = [0] * 50
    passes.issue_pass(record, variant, "after")
    sampler = SimpleNamespace(between=lambda start, end: {"sm_mhz": None})
    passes.profile_pass(record, variant, SimpleNamespace(profile_steps=5, record=""), sampler)
    return record


def test_issue_is_told_for_each_segment_without_the_drains(gpu):
    record = records.blank(extra={})
    passes.issue_pass(record, Loop(gpu, [(100, 5.0, 50.0), (10, 20.0, 1.0), (0, 0.0, 0.0)]), "after")
    assert record["extra"]["issue"] == {"after": {"ms": 0.7, "segments_ms": [0.5, 0.2, 0.0]}}
    assert record["issue_ms"] == pytest.approx(0.7) and record["extra"]["num_marks"] == 3


def test_issue_is_the_mean_of_before_and_after(gpu):
    record, loop = records.blank(extra={}), Loop(gpu, [(100, 5.0, 50.0), (10, 20.0, 1.0)])
    passes.issue_pass(record, loop, "before", 2)
    assert record["issue_ms"] == pytest.approx(0.7)
    loop.slower = 2.0
    passes.issue_pass(record, loop, "after")
    issue = record["extra"]["issue"]
    assert (issue["before"]["ms"], issue["after"]["ms"]) == (0.7, 1.4) and record["issue_ms"] == pytest.approx(1.05)
    assert issue["after"]["segments_ms"] == [1.0, 0.4]
    assert loop.indices == [0, 1, *range(8), *range(8)]


def test_long_steps_are_issued_fewer_times(gpu):
    """A second, and three steps at least."""
    for host_us, expected in ((10.0, 8), (4000.0, 3), (2500.0, 4)):
        loop = Loop(gpu, [(100, host_us, 1.0)])
        passes.issue_pass(records.blank(extra={}), loop, "after")
        assert len(loop.indices) == expected, host_us


def test_every_kind_of_batch_warms_up():
    assert passes.num_warm_steps(lambda index: 0) == 2
    assert passes.num_warm_steps(lambda index: index % 4) == 8
    assert passes.num_warm_steps(lambda index: index) == 8
    assert passes.num_warm_steps(lambda index: index >= 3) == 8


def test_steps_of_unequal_marks_have_no_segments_and_no_prediction(gpu):
    loop = Loop(gpu, [(10, 5.0, 50.0)])
    whole = loop.step

    def step(index):
        if index % 2:
            marks.mark()
        whole(index)

    loop.step = step
    record = measured(loop)
    assert record["extra"]["issue"]["after"]["segments_ms"] is None and record["issue_ms"] == pytest.approx(0.05)
    said = record["extra"]["queue_model"]
    assert said == {"step_ms": None, "reason": "steps of the issue pass differ in number of marks"}
    assert record["busy_ms"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("segments", "more", "bound"),
    [
        # The GPU is the slower one, with gaps of its own.
        ([(200, 5.0, 40.0), (100, 10.0, 20.0)], {}, "gpu"),
        # The host is.
        ([(200, 30.0, 10.0), (100, 60.0, 20.0)], {}, "host"),
        # Long kernels issued at once, then short ones slowly, more of them than the queue holds: neither alone.
        ([(750, 3.0, 20.0)] * 4 + [(750, 15.0, 2.0)] * 4, {}, "bursts"),
        # A graph.
        ([(1, 900.0, 40.0)], {"kernels": 300}, "gpu"),
        # The host reads from the device in each segment, as eager_sync does.
        ([(200, 5.0, 10.0), (100, 15.0, 10.0)], {"waits": True}, "waits"),
    ],
)
def test_the_passes_foretell_the_running_loop(gpu, segments, more, bound):
    loop = Loop(gpu, segments, **more)
    record = measured(loop)
    step_ms, busy_ms, issue_ms = record["statistic_ms"], record["busy_ms"], record["issue_ms"]
    model = record["extra"]["queue_model"]
    assert model["step_ms"] == pytest.approx(step_ms, rel=0.01)
    assert model["before_ms"] == pytest.approx(model["after_ms"])
    assert model["num_waits"] == (len(segments) if more.get("waits") else 0)
    if bound == "gpu":
        assert model["host_bound_fraction"] < 0.001 and step_ms > issue_ms
    if bound == "host":
        assert step_ms == pytest.approx(issue_ms) and model["host_bound_fraction"] > 0.5
    if bound == "bursts":
        assert step_ms > 1.1 * max(busy_ms, issue_ms)
    if bound == "waits":
        assert step_ms > 1.1 * busy_ms
    assert record["extra"]["profile"]["segments"]["launches"] == [number for number, _, _ in segments]


def test_a_host_that_changes_speed_is_in_both_predictions(gpu):
    record = measured(Loop(gpu, [(200, 30.0, 10.0)]), slower=1.5)
    model = record["extra"]["queue_model"]
    assert (model["before_ms"], model["after_ms"], model["step_ms"]) == pytest.approx((6.0, 9.0, 7.5))
    assert record["statistic_ms"] == pytest.approx(9.0)


def test_the_window_is_no_part_of_the_prediction(gpu):
    loop = Loop(gpu, [(200, 30.0, 10.0)])
    loop.period_ms = lambda: 1234.0
    assert measured(loop)["extra"]["queue_model"]["step_ms"] == pytest.approx(6.0)


def test_sections_heat_the_gpu_for_its_profile(gpu):
    """The steps of the section pass count, and long ones are few."""
    for step_ms, sections, heat in ((10.0, 12, 201), (140.0, 12, 15), (300.0, 7, 7), (3000.0, 3, 1)):
        record = {"device": "cuda", "statistic_ms": step_ms, "steps": {"batch": [0]}, "extra": {}}
        assert passes.num_section_steps(record) == sections
        seen = []
        gpu_profile = lambda run, num_steps, num_heat, seen=seen: seen.append(num_heat) or trace.Profile()  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes.trace, "profile", gpu_profile)
            sampler = SimpleNamespace(between=lambda start, end: {"sm_mhz": None})
            passes.profile_pass(record, None, SimpleNamespace(profile_steps=5), sampler, sections)
        assert seen == [max(0, heat - sections)]
        assert record["extra"]["profile"] == "the profiler saw no kernels" and "queue_model" not in record["extra"]


@pytest.mark.parametrize(("num_replays", "seconds"), [(1, 0.5), (0, 0.0)])
def test_the_clock_of_a_replays_profile_is_that_of_the_steps_before_it_too(num_replays, seconds, monkeypatch):
    """The profiler slows eager steps: a clock from before it is not theirs."""
    kernel = {"name": "k", "cat": "kernel", "ph": "X", "ts": 0.0, "dur": 1.0, "args": {"stream": 7}}
    profile = trace.Profile([kernel], start_s=100.0, end_s=101.0)
    monkeypatch.setattr(trace, "profile", lambda *arguments: profile)
    record = records.blank(device="cuda", statistic_ms=1.0, extra={})
    record["clocks"]["sm_mhz"], record["steps"]["batch"] = 1000.0, [0]
    sampler = SimpleNamespace(between=lambda start, end: {"sm_mhz": 1000.0 + 10.0 * (end - start)})
    variant = SimpleNamespace(capture=SimpleNamespace(num_replays=num_replays))
    passes.profile_pass(record, variant, SimpleNamespace(profile_steps=5, record=""), sampler)
    assert record["extra"]["profiled_clock_ratio"] == pytest.approx(1.01 + 0.01 * seconds)


def test_the_median_of_a_loop_is_its_period(gpu):
    """That the made-up GPU itself is right: what host and GPU take, and no more than 1,024 launches ahead."""
    loop = Loop(gpu, [(200, 30.0, 10.0)])
    assert loop.period_ms() == pytest.approx(6.0)
    waiting = Loop(gpu, [(2000, 1.0, 10.0)])
    waiting.step(0)
    assert statistics.mean(gpu.ends[-2000:]) < gpu.gpu_end
    assert gpu.gpu_end - gpu.now == pytest.approx(1024 * 11.0, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 8192])
def test_the_passes_of_a_gpu_foretell_its_loop(size):
    """Small kernels, for which the host is too slow, and large ones, for which the GPU is."""
    x = torch.randn(size, size, device="cuda")

    class Plain:
        capture = SimpleNamespace(num_replays=0)

        def step(self, index):
            for _ in range(300):
                x.cos()
            marks.mark()
            for _ in range(200):
                x.sin()

    record, loop = records.blank(extra={}), Plain()
    passes.issue_pass(record, loop, "before", 2)
    boundaries = passes.Boundaries(x.device, 60)
    torch.cuda.synchronize()
    boundaries.note()
    for index in range(60):
        loop.step(index)
        boundaries.note()
    torch.cuda.synchronize()
    record.update(statistic_ms=statistics.median(boundaries.step_ms()))
    record["steps"]["batch"] = [0] * 60
    passes.issue_pass(record, loop, "after")
    sampler = SimpleNamespace(between=lambda start, end: {"sm_mhz": None})
    passes.profile_pass(record, loop, SimpleNamespace(profile_steps=5, record=""), sampler)
    assert record["extra"]["profile"]["segments"]["launches"] == [300, 200]
    # Tests run beside others; a host that is held up meanwhile is not what is tested.
    assert record["extra"]["queue_model"]["step_ms"] == pytest.approx(record["statistic_ms"], rel=0.2)
    assert (record["extra"]["queue_model"]["host_bound_fraction"] > 0.2) == (size == 64)
