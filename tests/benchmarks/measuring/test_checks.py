"""Checks of a variant's blocks: each names its fault, and none accuses a sound variant on a busy CPU."""

import pytest

from benchmarks.measuring import checks
from tests.helpers.made_run import made_run


@pytest.fixture
def build():
    return made_run(gpus=(), cycles=3).builds[""]


def fault(build, device="cpu", ranks=1):
    return checks.fault_of("graph_layer", build, device, promised=(1, 1), ranks=ranks)


def change(build, name="graph_layer", cycles=(0, 1, 2), **values):
    for block in build.variants[name].blocks:
        if block.cycle in cycles:
            vars(block).update(values)
    return build


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replays": 99}, "99 replays in 100 steps of cycle 2, 100 promised"),
        ({"losses": [1.0, 0.6]}, "losses in cycle 2 differ"),
        ({"losses": [1.0]}, "not those of as many steps"),
        ({"moved": [0.5]}, "0.50 times as far"),
        ({"moved": [None]}, "values that are not finite"),
        ({"late_change": True}, "still changed"),
    ],
)
def test_one_block_that_did_other_work_fails_its_variant(build, values, said):
    assert fault(build) == ""
    assert said in fault(change(build, cycles=(2,), **values))


def test_where_the_bases_blocks_part_a_single_block_may_and_most_may_not(build):
    """Kernels that are not deterministic: in one cycle the base has another loss in its last digits."""
    change(build, "eager", cycles=(1,), losses=[1.0, 0.5001])
    assert 1e-4 < checks.scatter_of_losses(build) < 3e-4
    assert fault(change(build, cycles=(2,), losses=[1.0, 0.503])) == ""
    assert "by 1.4e-02, two eager blocks" in fault(change(build, cycles=(2,), losses=[1.0, 0.507]))
    assert "in most cycles" in fault(change(build, cycles=(0, 2), losses=[1.0, 0.503]))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"growth_bytes": 70 * 2**20}, "memory grew"),
        ({"threads": 5}, "2 threads more"),
        ({"parent_s": 2.0}, "another process saw 2.000 s"),
        ({"late_ms": 30.0}, "30 ms of work went on"),
        ({"mean_ms": 20.0, "parent_s": 2.0}, "times their median"),
    ],
)
def test_a_fault_of_all_blocks_fails_the_variant(build, values, said):
    assert said in fault(change(build, **values))


def test_a_busy_cpu_accuses_nobody(build):
    """Another process may hear of a block late, in some blocks or in the base's too; steps may wait for a core."""
    assert fault(change(build, cycles=(0, 1), parent_s=2.0)) == ""
    assert "another process" in fault(build, "cuda")
    assert fault(change(change(build, parent_s=2.0), "eager", cycles=(0,), parent_s=1.6)) == ""
    waiting = change(change(build, "eager", parent_s=1.0), mean_ms=20.0, parent_s=2.0, cpu_ms=10.0)
    assert fault(waiting) == "" and "times their median" in fault(waiting, "cuda")
    # Two cores work on each step of the base.
    assert fault(change(change(waiting, cpu_ms=20.0), "eager", cpu_ms=19.0)) == ""


@pytest.mark.parametrize(("parent_s", "one", "two"), [(0.5, True, False), (2.0, True, True), (0.96, False, False)])
def test_the_slowest_steps_of_ranks_may_sum_to_more_than_any_rank_took(build, parent_s, one, two):
    """100 steps of 10 ms: a shorter time on the other clock accuses one rank only, a longer one any number."""
    change(build, parent_s=parent_s)
    assert [fault(build, ranks=ranks) != "" for ranks in (1, 2)] == [one, two]
