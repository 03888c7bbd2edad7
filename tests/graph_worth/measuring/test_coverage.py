"""graph_worth/measuring/coverage.py: nodes in regions and launches beside them, on the CPU and in a made-up trace."""

import torch

from graph_worth.measuring import coverage, kernel_trace, marks


class Region:
    """Two operators, replayed with `launch`."""

    def __init__(self):
        self.num_replays = 0

    def nodes(self):
        return {"operator": 2, "empty": 7}

    def launch(self, inputs):
        self.num_replays += 1
        return [inputs[0].sin().cos()], []


def test_operators_of_forward_and_backward_beside_the_regions_are_counted():
    region = Region()

    def step(index):
        x = torch.empty(3).fill_(index)
        with marks.section("forward"):
            [y], _ = region.launch([x])
            y = y.view(3, 1)[1:] + 1
        with marks.section("loss"), marks.section("inner"):
            y.mul_(2)
        with marks.section("optimizer"):
            y.sub_(1)

    assert coverage.measure(step, [region], cuda=False) == {"nodes": 2.0, "eager": 2.0, "coverage": 0.5}
    assert "launch" not in vars(region)
    step(0)
    assert coverage.measure(lambda index: None, [], cuda=False)["coverage"] is None


def test_launches_of_a_trace_count_in_their_sections_and_by_themselves_alone(monkeypatch):
    region = Region()

    def of_kind(cat, name, ts, correlation=None, dur=1.0):
        args = {} if correlation is None else {"correlation": correlation}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        of_kind("user_annotation", "forward", 0.0, dur=10.0),
        of_kind("user_annotation", "optimizer", 20.0, dur=10.0),
        of_kind("cuda_runtime", "cudaLaunchKernel", 1.0, 1),
        of_kind("cuda_runtime", "cudaGraphLaunch", 2.0, 2),
        of_kind("cuda_runtime", "cudaMemsetAsync", 3.0, 3),
        of_kind("cuda_runtime", "cudaLaunchKernel", 15.0, 4),
        of_kind("cuda_runtime", "cudaLaunchKernel", 21.0, 5),
        *(of_kind("kernel", "k", 100.0, correlation) for correlation in (1, 2, 2, 2, 4, 5)),
        of_kind("gpu_memset", "m", 100.0, 3),
    ] * kernel_trace.TRACED_STEPS

    def trace_steps(step, cuda):
        assert cuda
        for index in range(kernel_trace.UNTRACED_STEPS + kernel_trace.TRACED_STEPS):
            step(index)
        return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}

    monkeypatch.setattr(kernel_trace, "trace_steps", trace_steps)
    found = coverage.measure(lambda index: region.launch([torch.ones(1)]), [region], cuda=True)
    assert found == {"nodes": 2.0, "eager": 2.0, "coverage": 0.5}


class Patched:
    """A region that patches some nodes in each launch."""

    def __init__(self, launches, nodes, seconds):
        self.each = launches, nodes, seconds
        self.total = [10, 10, 10.0]

    def row(self):
        return dict(zip(("launches", "patched", "patch_s"), self.total, strict=True))


def test_patching_is_counted_over_launches_and_changed_nodes_of_steps_alone():
    regions = [Patched(2, 6, 3e-6), Patched(1, 0, 0.0)]

    def step(index):
        for region in regions:
            region.total = [total + own for total, own in zip(region.total, region.each, strict=True)]

    found = coverage.patching(step, regions)
    assert found["patched_per_launch"] == 2.0
    assert abs(found["patch_us_per_node"] - 0.5) < 1e-6
    assert coverage.patching(lambda index: None, regions) == {"patched_per_launch": None, "patch_us_per_node": None}
