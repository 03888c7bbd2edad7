"""graph_worth/measuring/block.py: what a block says of memory."""

from types import SimpleNamespace

import pytest
import torch

from graph_worth.measuring import block


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


def test_a_seed_scales_large_floating_tensors_alike_wherever_it_is_drawn():
    def state(dtype=torch.float32):
        big, small, whole = torch.ones(4, 4, dtype=dtype), torch.ones(4), torch.ones(16, dtype=torch.int64)
        return [("weight", torch.nn.Parameter(big)), ("other", big.clone()), ("rate", small), ("count", whole)]

    first, again, otherwise = state(), state(), state(torch.bfloat16)
    for own, seed in ((first, 1), (again, 1), (otherwise, 2)):
        block.scale_state(own, seed)
    scales = [tensor.unique().item() for _, tensor in first]
    assert scales[2:] == [1.0, 1] and all(0.024 < abs(scale - 1) < 0.051 for scale in scales[:2])
    assert scales[0] != scales[1] and scales == [tensor.unique().item() for _, tensor in again]
    assert otherwise[0][1].unique().item() not in (1.0, scales[0])


def test_a_state_of_small_tensors_is_watched_and_scaled_without_its_counter_and_its_rate():
    """A line that is fitted has a slope and an offset."""
    slope, counter = torch.nn.Parameter(torch.ones(1, 1)), torch.zeros(())
    state = [("slope", slope), ("steps", counter), ("rate", torch.ones(1))]
    watched = block.Watched(state, torch.device("cpu"))
    before = watched.values()
    counter.add_(1)
    assert watched.moved(before, watched.values()) == [0.0]
    with torch.no_grad():
        slope.add_(2)
    assert watched.moved(before, watched.values()) == [2.0]
    block.scale_state(state, 1)
    assert slope.item() not in (1.0, 3.0) and [state[1][1].item(), state[2][1].item()] == [1.0, 1.0]
    # Where there is a large one the small ones do not count.
    assert len(block.Watched([*state, ("weight", torch.ones(9))], torch.device("cpu")).values()) == 1


@pytest.mark.parametrize("told", [{}, {"steps": 0, "reruns": 0, "rerun_ms": None}], ids=str)
def test_a_count_of_steps_that_tells_none_is_the_variants_fault(told, monkeypatch):
    training = Training(0)
    training.counted = lambda: told
    watched = SimpleNamespace(device=torch.device("cpu"), values=list, moved=lambda before, after: [])
    monkeypatch.setattr(block, "held_bytes", lambda device: 0)
    with pytest.raises(ValueError, match="tells no steps"):
        block.run(training, training, watched, block.Steps(2, 4, 1), lambda text: None)
