"""common/measure's canary where the GPU has no memory for eager steps beside the graphs."""

import pytest
import torch

from common import measure, memory
from tests.measured import DECAY, Graphed, eager_step, measuring


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    return measuring(tmp_path, capsys)


class StaleWeights(Graphed):
    def captured(self, state):
        self.cache = torch.ones(8)

        def compute():
            state.loss.copy_((self.cache * state.input).square().sum())
            state.weight.mul_(DECAY)

        return compute


def test_eager_steps_follow_when_the_variant_is_closed(run):
    made, closed = [], []

    def make(state):
        made.append(Graphed(state))
        return made[-1]

    def reference(state, index):
        closed.append(made[0].closed)
        eager_step(state, index)

    record = run(make, reference=reference).record
    assert record["status"] == "pass" and record["statistic_ms"] is not None
    assert closed == [1, 1] and made[0].closed == 1
    # What was measured is the graphs', which are gone by then.
    assert record["capture"]["num_graphs"] == 1 and record["memory"]["graph_pool_bytes"] > 0


def test_a_wrong_replay_is_found_after_the_passes(run):
    result = run(StaleWeights)
    assert result.record["status"] == "capture_failed" and "canary: step 1 " in result.record["message"]
    assert result.variant.closed == 1


def test_eager_steps_come_first_where_they_fit(run, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**40)
    state = run().states[0]
    assert measure._canary(state, Graphed(state), eager_step, torch.device("cpu")) is None
