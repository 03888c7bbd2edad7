"""Seed and offset of torch's generator for regions that draw random numbers.

torch's kernels in a capture read both from two tensors that belong to the generator's state and the graph. A launch
gives them tensors of its own instead, with the numbers that eager's kernels would be passed at that time.
"""

import contextlib
import threading

import torch

from graph_worth.capture.graph_error import CaptureError

# Thread whose capture has put the generator's state aside.
_captures_in: int | None = None


def generator(device: torch.device) -> torch.Generator:
    """Return torch's own generator of a GPU, which has an index."""
    return torch.cuda.default_generators[device.index]


@contextlib.contextmanager
def aside(device: torch.device):
    """Let torch's generator of a GPU draw from another seed in this block, and leave its state as it was.

    Other threads draw from that seed too, so that nothing comes again.
    """
    global _captures_in
    draws, before = generator(device), _captures_in
    state = draws.graphsafe_get_state()
    reseeded = draws.clone_state()
    reseeded.manual_seed((draws.initial_seed() + 0x9E3779B97F4A7C15 * (draws.get_offset() + 1)) % (1 << 63))
    draws.graphsafe_set_state(reseeded)
    _captures_in = threading.get_ident()
    try:
        yield
    finally:
        _captures_in = before
        draws.graphsafe_set_state(state)


@contextlib.contextmanager
def drawn(device: torch.device, increment: int):
    """Give seed and offset for a launch in this block, tensors of one int64, and advance like eager if it succeeds.

    increment: of the offset by an eager run; with 0 there are no tensors. CaptureError while another thread captures.
    """
    if not increment:
        yield []
        return
    if _captures_in not in (None, threading.get_ident()):
        raise CaptureError("a region draws random numbers while another thread captures one: capture before")
    draws = generator(device)
    seed, offset = draws.initial_seed(), draws.get_offset()
    # torch keeps a seed as uint64.
    signed = seed - (seed >> 63 << 64)
    yield [torch.full((1,), value, dtype=torch.int64, device=device) for value in (signed, offset)]
    draws.set_offset(offset + increment)
