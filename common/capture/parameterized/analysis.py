"""A region captured twice over other memory, and every word that differs explained."""

import contextlib
import functools
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from common.capture import memory
from common.capture.checks import RegionRefused
from common.capture.parameterized import arenas, driver, random_state, words
from common.capture.parameterized.nodes import Node, check_alike, read_nodes
from common.capture.pool import new_workspaces

_NUM_WARM_UPS = 2
_MAX_NAMED = 5


@dataclass
class Captured:
    """One capture, alive with its pool.

    Attributes:
        graph: torch's object.
        nodes: its nodes.
        inputs: clones that it reads.
        segments: (address, bytes) of its pool.
        blocks: (address, requested bytes) of every tensor that it made there.
        outputs: flattened results: a Found for a tensor, anything else as it is.
        structure: of the results.
        static: results that are neither inputs nor in the pool, by index.
    """

    graph: torch.cuda.CUDAGraph
    nodes: list[Node]
    inputs: list[torch.Tensor]
    segments: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    outputs: list[Any]
    structure: TreeSpec
    static: dict[int, torch.Tensor]


@dataclass
class Analysis:
    """The result of comparing two captures of a region.

    Attributes:
        first: the capture that is launched.
        chunks: layout of the parameters.
        blob: parameters of the first capture.
        allocations: (base in the first, base in the second, bytes), the inputs, then the tensors of the pool.
        plan: where the parts of the pool go in a launch.
        slots: the addresses.
        unexplained: words that differ and are no address of the inputs or the pool.
        suspects: those that look like addresses of other memory.
        tied: those that look so, and share 8 bytes with a slot.
        increment: what an eager run adds to the generator's offset.
        written: indices of the inputs that an eager run writes.
        build_s: seconds by phase.
    """

    first: Captured
    chunks: list[words.Chunk]
    blob: np.ndarray
    allocations: list[tuple[int, int, int]]
    plan: arenas.Plan
    slots: words.Slots
    unexplained: list[words.Unexplained]
    suspects: list[words.Suspect]
    tied: list[words.Unexplained]
    increment: int
    written: list[int]
    build_s: dict[str, float] = field(default_factory=dict)

    def release(self) -> None:
        """Drop the capture with its pool."""
        _drop(self.first)

    def all_bytes(self) -> list[torch.Tensor]:
        """Return all bytes of the first capture, of its pool and of its inputs, as tensors that do not own them."""
        device = torch.device("cuda", torch.cuda.current_device())
        inputs = [(tensor.data_ptr(), memory.extent(tensor)) for tensor in self.first.inputs]
        return [memory.bytes_at(address, size, device) for address, size in (*self.first.segments, *inputs) if size]

    def check(self) -> None:
        """RegionRefused where an 8-byte word holds half of an address of the region and may be another address too."""
        if self.tied:
            raise RegionRefused(f"words may be of two addresses at once: {self.name(self.tied)}")

    def largest(self) -> int:
        """Return the bytes of the largest input or tensor in between."""
        return max((size for _, _, size in self.allocations), default=0)

    def name(self, unexplained: list[words.Unexplained]) -> str:
        """Name the first few words by node, kernel and place."""
        named = [
            f"node {word.node} ({self.first.nodes[word.node].name}) byte {word.offset}: "
            f"{word.first:#x} and {word.second:#x}"
            for word in unexplained[:_MAX_NAMED]
        ]
        more = len(unexplained) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One stream for all captures of a device: libraries keep a workspace for each stream that they see."""
    return torch.cuda.Stream(torch.device("cuda", index))


def analyse(fn, example_inputs: list[torch.Tensor], device: torch.device) -> Analysis:
    """Warm a region up, capture it twice over other memory and compare.

    Args:
        fn: the region.
        example_inputs: its inputs; they are copied and stay as they are.
        device: the GPU, with an index.

    Returns:
        the comparison. The first capture is alive until `release`; the second one has gone.
    """
    random_state.anchor(device)
    state = torch.cuda.get_rng_state(device)
    side, caller = _side_stream(device.index), torch.cuda.current_stream(device)
    side.wait_stream(caller)
    captures: list[Captured] = []
    start = time.perf_counter()
    try:
        with torch.cuda.stream(side):
            increment, written = _warm_up(fn, example_inputs, device)
            warmed = time.perf_counter()
            for _ in range(2):
                captures.append(_capture(fn, example_inputs))
        captured = time.perf_counter()
        analysis = _compare(captures[0], captures[1], increment, written)
    except BaseException:
        for one in captures:
            one.graph.reset()
        raise
    finally:
        caller.wait_stream(side)
        torch.cuda.set_rng_state(state, device)
    analysis.build_s = {
        "warm_up": warmed - start,
        "capture": captured - warmed,
        "compare": time.perf_counter() - captured,
    }
    return analysis


def _warm_up(fn, example_inputs, device) -> tuple[int, list[int]]:
    """Run the region eagerly; the generator's increment and the inputs that were written."""
    draws = random_state.generator(device)
    for _ in range(_NUM_WARM_UPS):
        inputs = [memory.clone(tensor) for tensor in example_inputs]
        versions = [tensor._version for tensor in inputs]
        before = draws.get_offset()
        fn(*inputs)
        increment = draws.get_offset() - before
    torch.cuda.synchronize(device)
    written = [index for index, tensor in enumerate(inputs) if tensor._version != versions[index]]
    return increment, written


def _capture(fn, example_inputs) -> Captured:
    inputs = [memory.clone(tensor) for tensor in example_inputs]
    gc.collect()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with new_workspaces():
        result, made = _record(graph, fn, inputs)
    leaves, structure = tree_flatten(result)
    segments = [(part["address"], part["total_size"]) for part in _snapshot(graph)]
    blocks = [(address, size) for address, size in made if memory.find(address, segments) >= 0]
    known = [(tensor.data_ptr(), memory.extent(tensor)) for tensor in inputs] + segments
    outputs, static = _describe(leaves, known)
    del result, leaves
    _check_kept(graph)
    return Captured(graph, read_nodes(graph.raw_cuda_graph()), inputs, segments, blocks, outputs, structure, static)


def _describe(leaves, known):
    """The results as places, and those in memory that the capture does not know. It leaves no reference behind."""
    outputs: list[Any] = []
    static: dict[int, torch.Tensor] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            outputs.append(leaf)
            continue
        if leaf.layout != torch.strided or leaf.device.type != "cuda":
            raise RegionRefused(f"result {index} is not a strided tensor of the GPU")
        if leaf.numel() and memory.find(leaf.data_ptr(), known) < 0:
            static[index] = leaf.detach()
        outputs.append(memory.Found(leaf.data_ptr(), memory.describe(leaf)))
    return outputs, static


def _record(graph, fn, inputs):
    """Run fn under capture; its result and the tensors that it made. Any failure of the capture is a refusal."""
    collects, history = gc.isenabled(), torch._C._cuda_isHistoryEnabled()
    gc.disable()
    if not history:
        torch.cuda.memory._record_memory_history("all", context=None)
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = fn(*inputs)
        except BaseException:
            _give_up(graph)
            raise
        graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RegionRefused(f"the capture failed: {str(error).splitlines()[0]}") from error
    finally:
        if collects:
            gc.enable()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        if not history:
            torch.cuda.memory._record_memory_history(None)
    return result, [(event["addr"], event["size"]) for event in events if event["action"] == "alloc"]


def _give_up(graph):
    """End a capture that failed. torch would leave its pool and its generator as if it went on."""
    with contextlib.suppress(Exception):
        graph.capture_end()
    device = torch.cuda.current_device()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, graph.pool())
        torch._C._cuda_releasePool(device, graph.pool())
    with contextlib.suppress(RuntimeError):
        random_state.recover(torch.device("cuda", device))


def _snapshot(graph) -> list[dict]:
    return torch.cuda.memory.memory_snapshot(mempool_id=graph.pool())


def _check_kept(graph):
    """Refuse a region that keeps a tensor besides its results: no launch would write that one again."""
    gc.collect()
    kept = [block for part in _snapshot(graph) for block in part["blocks"] if block["state"] == "active_allocated"]
    if kept:
        total = sum(block["size"] for block in kept)
        raise RegionRefused(
            f"the region keeps {len(kept)} tensors of its own beyond its end ({total} bytes), such as gradients that "
            "it set or a cache: return them, or make them before"
        )


def _compare(first, second, increment, written) -> Analysis:
    check_alike(first.nodes, second.nodes)
    if first.structure != second.structure:
        raise RegionRefused("two runs return results of different structure")
    if [size for _, size in first.blocks] != [size for _, size in second.blocks]:
        raise RegionRefused("two captures allocate different tensors")
    chunks, blob = words.layout([node.parameters for node in first.nodes])
    _, other = words.layout([node.parameters for node in second.nodes])
    allocations = [
        (a.data_ptr(), b.data_ptr(), memory.extent(a)) for a, b in zip(first.inputs, second.inputs, strict=True)
    ]
    # The n-th tensor of one capture is the n-th of the other, wherever their allocators put it.
    pairs = [(a, b, size) for (a, size), (b, _) in zip(first.blocks, second.blocks, strict=True)]
    allocations += dict.fromkeys(pairs)
    slots, unexplained = words.explain(chunks, (blob, other), allocations)
    suspects, tied = words.suspects(unexplained, (blob, other), slots, driver.is_address)
    plan = arenas.plan(first.segments, first.blocks, _addresses(first))
    # No launch knows the second one's memory, and the first launches need as much.
    _drop(second)
    found = (slots, unexplained, suspects, tied)
    return Analysis(first, chunks, blob, allocations, plan, *found, increment, written)


def _drop(captured):
    captured.graph.reset()
    captured.inputs.clear()
    captured.static.clear()
    gc.collect()
    torch.cuda.empty_cache()


def _addresses(captured) -> list[int]:
    """Addresses of the results in the pool."""
    return [
        output.address
        for index, output in enumerate(captured.outputs)
        if isinstance(output, memory.Found) and index not in captured.static and output.address
    ]
