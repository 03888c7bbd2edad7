"""The plan of a build's blocks: which eager variant is the base, and the order of a cycle."""

import pytest

from graph_worth.harness.builds import block_plan
from graph_worth.harness.builds.block_plan import choose_base, order_of_cycle


@pytest.mark.parametrize(
    ("eager", "other", "base"),
    [
        ([10.0, 10.0], [9.9, 9.95], "eager"),
        ([10.0, 10.2], [9.5, 9.6], "eager_torch"),
        # A host that wanders: the mean of the other is 8 % lower, and one of its blocks is slower than one of eager's.
        ([100.0, 130.0], [90.0, 120.0], "eager"),
    ],
)
def test_another_eager_is_the_base_if_all_its_blocks_are_faster(eager, other, base):
    assert choose_base({"eager": eager, "eager_torch": other}) == base
    assert choose_base({"eager_te": eager}) == "eager_te"


def test_the_order_of_a_cycle_is_drawn_between_two_blocks_of_the_base():
    others = ["a", "b", "c", "control"]
    orders = [order_of_cycle("eager", others, f"run {cycle}") for cycle in range(60)]
    assert all(order[0] == order[-1] == "eager" and sorted(order[1:-1]) == others for order in orders)
    # Each stands at each place, and nearly all of the 24 orders come up.
    assert all({order[place] for order in orders} == set(others) for place in range(1, 5))
    assert len(set(map(tuple, orders))) > 15 and others == ["a", "b", "c", "control"]
    assert order_of_cycle("eager", others, "run 7") == orders[7]


@pytest.mark.parametrize(("period", "most"), [(1, 64), (8, 64), (50, 50), (200, 200), (None, 0)])
def test_the_first_step_of_a_cycle_is_drawn_in_whole_periods(period, most):
    drawn = [block_plan.first_step(period, f"run {cycle}") for cycle in range(2000)]
    assert drawn == [block_plan.first_step(period, f"run {cycle}") for cycle in range(2000)]
    assert min(drawn) == 0 and max(drawn) == most and all(first % (period or 1) == 0 for first in drawn)
    assert len(set(drawn)) == (most // period + 1 if period else 1)
