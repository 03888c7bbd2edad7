"""moe trained by hand: graphs are compared with the eager steps they stand for, reruns are the run's own."""

from dataclasses import replace

import pytest

from common.config import Arguments, Run
from common.script import by_hand
from moe import train
from moe.config import PRESETS
from moe.workload import workload
from tests.helpers.moe_case import CPU

STEPS = 3


def trained(name, **changes):
    """The result of a variant's run."""
    config = replace(PRESETS["tiny"], layers=1, microbatches=1, **changes)
    run = Run(preset="tiny", variant=name, steps=STEPS)
    args, made = workload(Arguments(config=config, run=run), CPU, 0, 1, train.eager_step)
    return by_hand.run(made, args, CPU, 0)


def test_scores_that_a_host_cannot_hold_are_refused_before_the_build(monkeypatch):
    """Their bytes grow with the square of the tokens, those of all else with the tokens."""
    monkeypatch.setattr("moe.workload.host_state.available_host_bytes", lambda: 24 * 2**30)
    with pytest.raises(ValueError, match="--sequence 65536 is too large: .* --sequence 64, as in preset tiny, fits"):
        trained("eager", sequence=2**16)


@pytest.mark.parametrize("name", ["graph_moe_padded", "graph_layer"])
def test_graphs_are_compared_with_eager_steps_of_the_same_model(name):
    result = trained(name, capacity_factor=1.0)
    assert (result["status"], result["message"]) == ("pass", "")


def test_steps_that_check_the_graphs_are_not_counted(capsys):
    result = trained("graph_static")
    assert result["closing"]["steps"] == STEPS and result["closing"]["reruns"] == 0
    assert (
        "reruns                    0  of 3 steps; the fullest buffer needed 67 % of its rows" in capsys.readouterr().out
    )
