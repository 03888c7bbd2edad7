"""Steps of models with a loss scale, of which some overflow."""

import itertools

import torch

from tests.helpers import contracts


def steps_of(model, name, state, source, make_infinite, num_steps, overflow_at=()):
    """The whole state after each step of a variant; batches of `source` are made infinite at `overflow_at`."""
    variant = contracts.made(model, name, state)
    original, numbers = source.next, itertools.count()

    def next_batch():
        batch = original()
        return make_infinite(batch) if next(numbers) in overflow_at else batch

    state.reset()
    source.next = next_batch
    before, states = variant.capture.num_replays, []
    for index in range(num_steps):
        variant.step(index)
        states.append({key: tensor.detach().clone() for key, tensor in state.named_state()})
    expected = sum(variant.replays_of(index) for index in range(num_steps))
    assert variant.capture.num_replays - before == expected
    variant.close()
    state.close()
    return states


def assert_equal(ours, eager):
    for step, (a, b) in enumerate(zip(ours, eager, strict=True)):
        differing = [name for name in b if not torch.equal(a[name], b[name])]
        assert not differing, (step, differing[:3])
