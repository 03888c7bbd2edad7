"""moe trained by hand: what cannot run is refused before the build, and reruns are the run's own."""

import pytest

from tests.helpers import contracts
from tests.helpers.by_hand import trained as trained_by_hand

STEPS = 3


def trained(name, *flags):
    """The result of a variant's run."""
    fixed = ("--steps", str(STEPS), "--layers", "1", "--microbatches", "1")
    return trained_by_hand(contracts.model("moe", "--variant", name, *fixed, *flags))


def test_scores_that_a_host_cannot_hold_are_refused_before_the_build(monkeypatch):
    """Their bytes grow with the square of the tokens, those of all else with the tokens."""
    monkeypatch.setattr("moe.state.host_state.available_host_bytes", lambda: 24 * 2**30)
    with pytest.raises(ValueError, match="--sequence 65536 is too large: .* --sequence 64, as in preset tiny, fits"):
        trained("eager", "--sequence", str(2**16))


def test_ranks_that_nobody_started_are_refused_before_the_build():
    with pytest.raises(ValueError, match="--ep 2 needs as many ranks, this run has 1"):
        trained("eager", "--ep", "2")


def test_steps_that_check_the_graphs_are_not_counted(capsys):
    result = trained("graph_static")
    assert result["closing"]["steps"] == STEPS and result["closing"]["reruns"] == 0
    assert (
        "reruns                    0  of 3 steps; the fullest buffer needed 67 % of its rows" in capsys.readouterr().out
    )
