"""The plan of a build's blocks: which eager variant is the base."""

import pytest

from benchmarks.measuring.block_plan import choose_base


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
