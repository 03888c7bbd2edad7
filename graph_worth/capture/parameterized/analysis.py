"""A region captured twice over other memory, and every word that differs explained."""

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_worth.capture import tensor_places
from graph_worth.capture.cuda_graph import CudaGraph, new_workspaces
from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.parameterized import arenas, driver, random_state, words
from graph_worth.capture.parameterized.nodes import Node, check_alike, read_nodes

_NUM_WARM_UPS = 2
# Of each of the two tensors that torch keeps in no graph's pool for seed and offset.
_SEED_BYTES = 8


@dataclass
class Captured:
    """One capture, alive with its pool.

    Attributes:
        inputs: clones that it reads.
        given: (address, bytes) of the inputs, then of seed and offset where it draws random numbers.
        segments: (address, bytes) of its pool.
        blocks: every tensor that it made there.
        outputs: results: a Place in an input or, behind these, in a block; anything but a tensor as it is.
    """

    graph: torch.cuda.CUDAGraph
    nodes: list[Node]
    inputs: list[torch.Tensor]
    given: list[tuple[int, int]]
    segments: list[tuple[int, int]]
    blocks: list[arenas.Block]
    outputs: list[Any]

    def release(self) -> None:
        """Drop the capture with its pool."""
        self.graph.reset()
        self.inputs.clear()
        torch.cuda.empty_cache()


@dataclass
class Analysis:
    """The result of comparing two captures of a region.

    Attributes:
        first: the capture that is launched.
        chunks, blob: its parameters.
        plan: allocations of a launch for the tensors of the pool.
        results: like `first.outputs`, in allocations of the plan.
        slots: the addresses. The allocations are the inputs, seed and offset where they are drawn, then the plan's.
        unexplained: words that differ and are no such address.
        increment: what an eager run adds to the generator's offset.
        written: indices of the inputs that an eager run writes.
    """

    first: Captured
    chunks: list[words.Chunk]
    blob: np.ndarray
    plan: arenas.ArenaPlan
    results: list[Any]
    slots: words.Slots
    unexplained: list[words.Unexplained]
    increment: int
    written: list[int]

    def largest(self) -> int:
        """Return the bytes of the largest input or tensor in between."""
        return max((int(item[1]) for item in (*self.first.given, *self.first.blocks)), default=0)

    def name(self) -> str:
        """Name the first unexplained word by node, kernel and place."""
        word, node = self.unexplained[0], self.first.nodes[self.unexplained[0].node]
        return f"{len(self.unexplained)} words, the first in node {word.node} ({node.name}) at byte {word.offset}"


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One stream for all captures of a device: libraries keep a workspace for each stream that they see."""
    return torch.cuda.Stream(torch.device("cuda", index))


def analyse(fn, example_inputs: list[torch.Tensor], device: torch.device) -> Analysis:
    """Warm a region up, capture it twice over other memory and compare.

    The examples are copied and stay as they are. The device is the current GPU, its generator is `random_state.aside`.
    The first capture is alive until it is released; the second one has gone.
    """
    side, caller = _side_stream(device.index), torch.cuda.current_stream(device)
    side.wait_stream(caller)
    captures: list[Captured] = []
    try:
        with torch.cuda.stream(side):
            increment, written = _warm_up(fn, example_inputs, device)
            # No pool can use what the warm-up has cached.
            torch.cuda.empty_cache()
            # The first capture runs as it is launched. In the second one no two tensors have the same memory.
            for holds in (False, True):
                captures.append(_capture(fn, example_inputs, device, holds, increment > 0))
        return _compare(captures[0], captures[1], increment, written)
    except BaseException:
        for captured in captures:
            captured.graph.reset()
        raise
    finally:
        caller.wait_stream(side)


def _warm_up(fn, example_inputs, device) -> tuple[int, list[int]]:
    """Run the region eagerly; the generator's increment and the inputs that were written."""
    draws = random_state.generator(device)
    for _ in range(_NUM_WARM_UPS):
        inputs = [tensor_places.clone(tensor) for tensor in example_inputs]
        versions = [tensor._version for tensor in inputs]
        before = draws.get_offset()
        fn(*inputs)
        increment = draws.get_offset() - before
    torch.cuda.synchronize(device)
    written = [index for index, tensor in enumerate(inputs) if tensor._version != versions[index]]
    return increment, written


class _Watch(TorchDispatchMode):
    """Holds the memory of operators' results, where asked, until it is let go.

    It looks on in both captures, since operators made of others choose them otherwise where no mode does
    (`isTensorSubclassLike`). Both captures shall allocate alike.
    """

    def __init__(self, holds: bool):
        super().__init__()
        self._holds = holds
        self.held: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._holds:
            tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self.held += [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
        return result


def _capture(fn, example_inputs, device, holds: bool, draws: bool) -> Captured:
    inputs = [tensor_places.clone(tensor) for tensor in example_inputs]
    # With a state of its own, seed and offset of the two captures have different addresses.
    with new_workspaces(), random_state.aside(device):
        graph, result, allocated, segments = _record(fn, inputs, _Watch(holds), device)
    blocks = [block for block in allocated if tensor_places.find(block.address, segments) >= 0]
    given = [(tensor.data_ptr(), tensor_places.extent(tensor)) for tensor in inputs]
    outputs = [_place(index, leaf, given, blocks) for index, leaf in enumerate(result)]
    # Some versions of torch make seed and offset for every capture, others where one draws.
    outside = [block for block in allocated if tensor_places.find(block.address, segments) < 0]
    seeds = [block[:2] for block in outside if block.size == _SEED_BYTES]
    if draws and len(seeds) != 2:
        raise RegionRefused("random numbers are drawn from another state of a generator than torch's own")
    given += seeds if draws else []
    return Captured(graph, read_nodes(graph.raw_cuda_graph()), inputs, given, segments, blocks, outputs)


def _place(index, leaf, given, blocks):
    """A result as its place, which holds no reference; a Python value as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.numel():
        return tensor_places.Place(-1, 0, tensor_places.describe(leaf))
    address, owner = leaf.data_ptr(), tensor_places.find(leaf.data_ptr(), given)
    if owner < 0:
        # Of all tensors that had these bytes the last one is alive.
        last = tensor_places.find(address, blocks[::-1])
        if last < 0:
            raise RegionRefused(f"result {index} was made before the region: pass it as an input")
        owner = len(given) + len(blocks) - 1 - last
    return tensor_places.Place(owner, address - (given + blocks)[owner][0], tensor_places.describe(leaf))


def _record(fn, inputs, mode, device):
    """Capture fn; the graph, what fn returned, what was allocated, and (address, bytes) of the pool's segments."""
    captured, pool = CudaGraph(()), torch.cuda.graph_pool_handle()
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        with mode:
            result = captured.capture(lambda: fn(*inputs), pool)
        events = torch.cuda.memory._snapshot()["device_traces"][device.index]
    except BaseException as error:
        # torch would leave the pool as if the capture went on.
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        if isinstance(error, CaptureError):
            raise RegionRefused(f"the capture failed: {error}") from error
        raise
    finally:
        torch.cuda.memory._record_memory_history(None)
    segments = [(part["address"], part["total_size"]) for part in torch.cuda.memory.memory_snapshot(mempool_id=pool)]
    return captured.graph, result, arenas.read(events), segments


def _compare(first, second, increment, written) -> Analysis:
    check_alike(first.nodes, second.nodes)
    if [block.size for block in first.blocks] != [block.size for block in second.blocks]:
        raise RegionRefused("two captures allocate different tensors")
    chunks, blob = words.layout([node.parameters for node in first.nodes])
    _, second_blob = words.layout([node.parameters for node in second.nodes])
    # The n-th tensor of one capture is the n-th of the other, wherever their allocators put it.
    given, blocks = (
        [(a, b, size) for (a, size, *_), (b, *_) in zip(*both, strict=True)]
        for both in ((first.given, second.given), (first.blocks, second.blocks))
    )
    slots, unexplained = words.explain(chunks, (blob, second_blob), given + blocks, driver.memory_type)
    # No launch knows the second one's memory, and the first launches need as much.
    second.release()
    num_inputs = len(first.inputs)
    in_pool = [p for p in first.outputs if isinstance(p, tensor_places.Place) and p.allocation >= num_inputs]
    others = [block.address for block in second.blocks]
    plan = arenas.plan(first.blocks, others, {place.allocation - num_inputs for place in in_pool})
    results = [
        replace(p, allocation=num_inputs + plan.results[p.allocation - num_inputs]) if p in in_pool else p
        for p in first.outputs
    ]
    table = [(index, 0) for index in range(len(given))]
    table += [(len(given) + arena, offset) for arena, offset in plan.places]
    moved = np.array(table, np.int64).reshape(-1, 2)[slots.allocation]
    slots = slots._replace(allocation=moved[:, 0], offset=slots.offset + moved[:, 1])
    return Analysis(first, chunks, blob, plan, results, slots, unexplained, increment, written)
