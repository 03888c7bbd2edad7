"""Seed and offset of torch's generator for regions that draw random numbers.

torch's kernels in a capture read both from two tensors that belong to the generator's state and the graph. A launch
gives them tensors of its own instead, with the numbers that eager's kernels would be passed at that time.
"""

import contextlib

import torch


def generator(device: torch.device) -> torch.Generator:
    """Return torch's own generator of a GPU, which has an index."""
    return torch.cuda.default_generators[device.index]


@contextlib.contextmanager
def aside(device: torch.device):
    """Let torch's generator of a GPU draw from a copy of its state in this block, and leave its state as it was."""
    draws = generator(device)
    state = draws.graphsafe_get_state()
    draws.graphsafe_set_state(draws.clone_state())
    try:
        yield
    finally:
        draws.graphsafe_set_state(state)


@contextlib.contextmanager
def drawn(device: torch.device, increment: int):
    """Give seed and offset for a launch in this block, tensors of one int64, and advance like eager if it succeeds.

    increment: of the offset by an eager run; with 0 there are no tensors.
    """
    if not increment:
        yield []
        return
    draws = generator(device)
    seed, offset = draws.initial_seed(), draws.get_offset()
    # torch keeps a seed as uint64.
    signed = seed - (seed >> 63 << 64)
    yield [torch.full((1,), value, dtype=torch.int64, device=device) for value in (signed, offset)]
    draws.set_offset(offset + increment)
