"""common/console: what is printed of a run's time."""

from types import SimpleNamespace

import pytest

from common import console
from common import record as records

WORKLOAD = SimpleNamespace(card=[], notes=[], peak_flops=None)


def printed(batch, capsys):
    record = records.blank(model="fake", variant="eager", status="pass", device="cpu", message="", statistic_ms=2.0)
    record["steps"].update(gpu_ms=[2.0] * len(batch), batch=batch)
    record["extra"]["items_per_s"] = 1.0
    console.print_end(record, WORKLOAD)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "said"),
    [([0] * 6, "2.00 ms  median of 6\n"), ([0, 1, 2] * 2, "2.00 ms  mean of 3 kinds' medians, 6 steps\n")],
)
def test_the_statistic_is_named_for_what_it_is(capsys, batch, said):
    assert said in printed(batch, capsys)
