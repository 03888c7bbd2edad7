"""common/console: what is printed of a run's time."""

from types import SimpleNamespace

import pytest

from common import console
from common import record as records

WORKLOAD = SimpleNamespace(card=[], notes=[], peak_flops=None)


def printed(batch, capsys, ms=2.0, **conditions):
    record = records.blank(model="fake", variant="eager", status="pass", device="cpu", message="", statistic_ms=ms)
    record["steps"].update(gpu_ms=[ms] * len(batch), batch=batch)
    record["conditions"].update(conditions)
    record["extra"]["items_per_s"] = 1.0
    console.print_end(record, WORKLOAD)
    return capsys.readouterr().out


@pytest.mark.parametrize(("settled", "note"), [(True, ""), (False, "  steps or clock had not settled"), (None, "")])
def test_a_window_says_how_long_it_was_and_whether_it_had_settled(capsys, settled, note):
    assert f"window               5.20 s{note}\n" in printed([0] * 6, capsys, settled=settled, window_s=5.2)


def test_long_steps_have_no_tail(capsys):
    assert "tail" in printed([0] * 6, capsys) and "tail" not in printed([0] * 6, capsys, ms=401.0)


@pytest.mark.parametrize(
    ("batch", "said"),
    [([0] * 6, "2.00 ms  median of 6\n"), ([0, 1, 2] * 2, "2.00 ms  mean of 3 kinds' medians, 6 steps\n")],
)
def test_the_statistic_is_named_for_what_it_is(capsys, batch, said):
    assert said in printed(batch, capsys)
