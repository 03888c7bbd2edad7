"""Philox state of regions that draw random numbers.

torch's kernels in a capture read seed and offset from two tensors of the generator, which `CUDAGraph.replay` fills. A
parameterized graph is launched without that object, so a tiny graph of the same generator is replayed before it: its
replay fills the tensors, and keeps them alive at their addresses.
"""

import contextlib
from functools import cache

import torch


def generator(device: torch.device) -> torch.Generator:
    """Return torch's own generator of a GPU, which has an index."""
    return torch.cuda.default_generators[device.index]


def _draw(buffer) -> torch.cuda.CUDAGraph:
    """Capture a draw into a buffer outside of any pool. The current stream is not the default one."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    buffer.uniform_()
    graph.capture_end()
    return graph


@cache
def _anchor(index: int) -> tuple:
    with torch.cuda.device(index):
        buffer, side = torch.empty(1, device="cuda"), torch.cuda.Stream()
        state = torch.cuda.get_rng_state(index)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            buffer.uniform_()
            torch.cuda.synchronize()
            graph = _draw(buffer)
        torch.cuda.set_rng_state(state, index)
    return graph, buffer


def recover(device: torch.device) -> None:
    """Let the generator draw again after a capture that failed: for torch it goes on until another one ends.

    The current stream is not the default one.
    """
    _draw(_anchor(device.index)[1])


def anchor(device: torch.device) -> None:
    """Hold the generator's tensors at their addresses from now on. Call it before captures."""
    _anchor(device.index)


@contextlib.contextmanager
def advanced(device: torch.device, increment: int):
    """Fill the tensors with the current state, for a launch in this block, and advance like eager if it succeeds.

    increment: what the region's eager run adds to the generator's offset; with 0 nothing is done. The current stream is
    that of the launch.
    """
    if not increment:
        yield
        return
    draws = generator(device)
    offset = draws.get_offset()
    _anchor(device.index)[0].replay()
    # The replay has advanced the generator by the tiny graph's own draw.
    draws.set_offset(offset)
    yield
    draws.set_offset(offset + increment)
