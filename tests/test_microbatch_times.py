"""common/passes: what the section pass tells of forward and backward passes, and of the rate of the layers in them."""

import time

import pytest

from common import passes
from common import record as records
from common.marks import section


def test_passes_and_the_rest_of_each_step():
    steps = [
        (
            20.0,
            [("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 3.0), ("loss", 1.0), ("backward", 5.0)],
        ),
        (22.5, [("forward", 2.5), ("forward", 3.0), ("backward", 4.0), ("backward", 5.00004), ("optimizer", 2.0)]),
    ]
    assert passes.microbatch_times(steps) == {
        "forward_ms": [[2.0, 3.0], [2.5, 3.0]],
        "backward_ms": [[4.0, 5.0], [4.0, 5.0]],
        "rest_ms": [6.0, 8.0],
    }


@pytest.mark.parametrize(
    "sections",
    [
        [["replay"], ["replay"]],
        [["forward", "forward", "backward"]] * 2,
        [["forward", "backward"], ["forward", "backward"] * 2],
        [["backward"], ["backward"]],
        [[], []],
    ],
)
def test_where_passes_cannot_be_told_apart_nothing_is_said(sections):
    assert passes.microbatch_times([(9.0, [(name, 1.0) for name in names]) for names in sections]) is None


class Sleeps:
    """A variant on the CPU: two microbatches a step."""

    def step(self, index):
        for ms in (10, 20):
            with section("forward"):
                time.sleep(ms / 1e3)
            with section("backward"):
                time.sleep(2 * ms / 1e3)
        with section("optimizer"):
            time.sleep(0.03)


def test_the_hosts_clock_times_sections_on_the_cpu():
    record = records.blank(device="cpu", statistic_ms=120.0)
    num_steps = passes.num_section_steps(record)
    passes.section_pass(record, Sleeps(), num_steps)
    found = record["extra"]["microbatches"]
    assert len(found["forward_ms"]) == len(found["backward_ms"]) == len(found["rest_ms"]) == num_steps == 3
    for forward, backward, rest_ms in zip(*found.values(), strict=True):
        assert forward[0] >= 10 and forward[1] >= 20 and backward[0] >= 20 and backward[1] >= 40 and rest_ms >= 30
    # These stand for a GPU's.
    assert record["optimizer_ms"] is None and "sections_ms" not in record["extra"]


def layers_report(sections, num_flops=6e9, statistic_ms=20.0):
    record = records.blank(device="cuda", statistic_ms=statistic_ms)
    record["extra"]["sections_ms"] = sections
    passes.report_layers(record, num_flops)
    return record["extra"].get("report")


def test_the_rate_of_the_layers_leaves_out_the_losss_backward():
    sections = {"data": 1.0, "forward": 4.0, "backward": 10.0, "loss gradient": 2.0, "loss": 1.0}
    # 6e9 operations in 12 ms.
    assert layers_report(sections) == {"layers TFLOP/s": 0.5}
    del sections["loss gradient"]
    assert layers_report(sections, 7e9) == {"layers TFLOP/s": 0.5}


@pytest.mark.parametrize(
    "changes",
    [{"num_flops": None}, {"sections": {"replay": 9.0}}, {"sections": {"forward": 9.0}}, {"statistic_ms": 11.9}],
    ids=["no flops", "replay", "no backward", "overlap"],
)
def test_no_rate_where_the_layers_time_is_not_known(changes):
    sections = {"forward": 4.0, "backward": 10.0, "loss gradient": 2.0}
    assert layers_report(**({"sections": sections} | changes)) is None


def test_other_reports_stay():
    record = records.blank(device="cuda", statistic_ms=20.0)
    record["extra"] |= {"sections_ms": {"forward": 4.0, "backward": 8.0}, "report": {"padding %": 1.0}}
    passes.report_layers(record, 6e9)
    assert record["extra"]["report"] == {"padding %": 1.0, "layers TFLOP/s": 0.5}
