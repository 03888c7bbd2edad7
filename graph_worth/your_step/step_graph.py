"""A graph of a step for batches of one shape, and the stream that it runs on. `measure` and `graphed` both use it."""

import copy
import os
import warnings
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map

from graph_worth.capture.pool import Pool
from graph_worth.your_step.host_values import attributes_of
from graph_worth.your_step.parts import copy_batch, register_nests, static_copy, tensors_in


class StepGraph:
    """The step captured on a copy of a batch, which lies at a fixed place on the device.

    Args:
        pool: where the graph has its memory.
        step: step(batch), the whole step.
        batch: of the shape; a nest of tensors on the host or the device.
        device: where the graph reads its batch.

    Attributes:
        static: the batch that the graph reads.
        result: what the step returned in the capture, which each replay overwrites.
        graph: see `Pool.capture`.

    Raises:
        CaptureError: a graph cannot hold the step.
    """

    def __init__(self, pool: Pool, step: Callable, batch, device: torch.device):
        self.static = static_copy(batch, device)
        self.graph, self.result = pool.capture(lambda: step(self.static), tensors_in(self.static))

    def replay(self, batch):
        """Copy a batch of the same shape into the static one, replay, and return `result`."""
        copy_batch(self.static, batch)
        self.graph.replay()
        return self.result


def kept_result(result):
    """Return the result of a step with copies of its tensors, without their history, which are the caller's to keep."""
    register_nests(result)
    return tree_map(_kept_leaf, result)


def _kept_leaf(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if not tensors_in(leaves_of(leaf)):
        return leaf
    kept = copy.copy(leaf)
    for name, value in attributes_of(leaf).items():
        object.__setattr__(kept, name, tree_map(_kept_leaf, value) if value is not leaf else kept)
    return kept


def leaves_of(tree, holders=()) -> list:
    """Return the leaves of a nest, and those of the objects in it."""
    leaves = []
    for leaf in tree_leaves(tree):
        values = {} if id(leaf) in holders else attributes_of(leaf)
        leaves += leaves_of(list(values.values()), (*holders, id(leaf))) if values else [leaf]
    return leaves


def one_stream(device: torch.device | int | str | None = None) -> "torch.cuda.Stream | None":
    """Let this process launch all its work on one stream that is not the default one: a program's first line.

    A graph cannot be captured on the default stream. Once a process has launched kernels on two streams, replays are
    slower for good: by 4 to 9 % where kernels take 2 to 4 us (docs/one_stream.md).

    Args:
        device: by default that of torchrun's LOCAL_RANK, else the current one.

    Returns:
        The current stream from now on; None without a GPU, where there is nothing to do.
    """
    if not torch.cuda.is_available():
        warnings.warn("graph_worth.one_stream(): torch sees no GPU, so there is no stream to set", stacklevel=2)
        return None
    if device is None and "LOCAL_RANK" in os.environ:
        # A launcher may show a single GPU to each rank.
        device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    if device is not None:
        torch.cuda.set_device(device)
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.Stream())
    return torch.cuda.current_stream()
