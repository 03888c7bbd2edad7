"""common/measuring/block.py: what a block says of memory."""

from types import SimpleNamespace

import pytest
import torch

from common.measuring import block


class Training:
    """Live bytes of a training: gradients come with the first step after a reset, `leak` bytes with each step."""

    capture = SimpleNamespace(num_replays=0)

    def __init__(self, leak):
        self.bytes, self.leak, self.gradients = 100, leak, 0

    def step(self, index):
        self.gradients = 50
        self.bytes += self.leak

    def replays_of(self, index):
        return 0

    def batch_class(self, index):
        return 0


@pytest.mark.parametrize("leak", [0, 7])
def test_growth_is_what_steps_leave_and_not_the_gradients_that_a_reset_had_dropped(monkeypatch, leak):
    training = Training(leak)
    monkeypatch.setattr(block, "held_bytes", lambda device: training.bytes + training.gradients)
    monkeypatch.setattr(block, "_afterwards", lambda *args: {})
    watched = SimpleNamespace(device=torch.device("cpu"), values=list, moved=lambda before, after: [])
    facts = block.run(training, training, watched, block.Steps(2, 4, 1), lambda text: None)
    assert facts["growth_bytes"] == leak * 6


@pytest.mark.parametrize("told", [{}, {"steps": 0, "reruns": 0, "rerun_ms": None}], ids=str)
def test_a_count_of_steps_that_tells_none_is_the_variants_fault(told, monkeypatch):
    training = Training(0)
    training.counted = lambda: told
    watched = SimpleNamespace(device=torch.device("cpu"), values=list, moved=lambda before, after: [])
    monkeypatch.setattr(block, "held_bytes", lambda device: 0)
    with pytest.raises(ValueError, match="tells no steps"):
        block.run(training, training, watched, block.Steps(2, 4, 1), lambda text: None)
