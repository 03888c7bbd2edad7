"""graph_worth/capture/parameterized/nodes: two captures of one function that launch other work."""

from dataclasses import replace

import pytest

from graph_worth.capture.graph_error import RegionRefused
from graph_worth.capture.parameterized.nodes import Node, check_alike

FIRST = [Node(1, "kernel", "plain", (0, 0, 8, 256), [(0, b"1234")]), Node(2, "memset", "memset", (9, 1))]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (FIRST[:1], "two captures differ: 2 and 1 nodes"),
        ([replace(FIRST[0], name="vectorized"), FIRST[1]], "in node 0: plain (8, 256), vectorized (8, 256)"),
        ([FIRST[0], replace(FIRST[1], shape=(10, 1))], "in node 1: memset"),
    ],
)
def test_two_captures_that_launch_other_work_are_refused(second, message):
    with pytest.raises(RegionRefused) as refused:
        check_alike(FIRST, second)
    assert message in str(refused.value)
