"""A region on a GPU: captured twice, explained, copied to an executable of its own, launched on any memory."""

import contextlib
import functools
import gc
import operator
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from common.capture.checks import CaptureError
from common.capture.parameterized import driver, memory, random_state, words
from common.capture.parameterized.errors import RegionRefused
from common.capture.parameterized.nodes import Node, Setters, check_alike, read_nodes

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
        outputs: flattened results: a Found for a tensor, anything else as it is.
        structure: of the results.
        static: results that are neither inputs nor in the pool, by index.
    """

    graph: torch.cuda.CUDAGraph
    nodes: list[Node]
    inputs: list[torch.Tensor]
    segments: list[tuple[int, int]]
    outputs: list[Any]
    structure: TreeSpec
    static: dict[int, torch.Tensor]


@dataclass
class Analysis:
    """What two captures say about a region.

    Attributes:
        first: the capture that is launched.
        second: the other one.
        chunks: layout of the parameters.
        blob: parameters of the first capture.
        allocations: (base in the first, base in the second, bytes), the inputs first.
        slots: the addresses.
        unexplained: words that differ and are no address.
        increment: what an eager run adds to the generator's offset.
        written: indices of the inputs that an eager run writes.
        build_s: seconds by phase.
    """

    first: Captured
    second: Captured
    chunks: list[words.Chunk]
    blob: np.ndarray
    allocations: list[tuple[int, int, int]]
    slots: words.Slots
    unexplained: list[words.Unexplained]
    increment: int
    written: list[int]
    build_s: dict[str, float] = field(default_factory=dict)

    def release(self) -> None:
        """Drop both captures with their pools."""
        for captured in (self.first, self.second):
            captured.graph.reset()
            captured.inputs.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def check(self) -> None:
        """Check that every word that differs is an address.

        Raises:
            RegionRefused: some are not; the message names their nodes.
        """
        if not self.unexplained:
            return
        named = [
            f"node {word.node} ({self.first.nodes[word.node].name}) byte {word.offset}: "
            f"{word.first:#x} and {word.second:#x}"
            for word in self.unexplained[:_MAX_NAMED]
        ]
        raise RegionRefused(
            f"{len(self.unexplained)} words of parameters differ between two captures and are no address: "
            + "; ".join(named)
        )


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
        the comparison. Both captures are alive until `release`.

    Raises:
        RegionRefused: a node cannot be launched on other memory, or the captures differ.
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
        analysis = _compare(*captures, increment, written)
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
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    result = _record(graph, fn, inputs)
    torch._C._cuda_clearCublasWorkspaces()
    leaves, structure = tree_flatten(result)
    segments = [(part["address"], part["total_size"]) for part in _snapshot(graph)]
    known = [(tensor.data_ptr(), memory.extent(tensor)) for tensor in inputs] + segments
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
    del result, leaves
    _check_kept(graph)
    return Captured(graph, read_nodes(graph.raw_cuda_graph()), inputs, segments, outputs, structure, static)


def _record(graph, fn, inputs):
    """Run fn under capture and return its result; any failure of the capture is a refusal."""
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = fn(*inputs)
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RegionRefused(f"the capture failed: {str(error).splitlines()[0]}") from error
    finally:
        if collects:
            gc.enable()
    return result


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
    chunks, blob = words.layout([node.parameters for node in first.nodes])
    _, other = words.layout([node.parameters for node in second.nodes])
    both = words.differing(blob, other)
    addresses = [
        np.concatenate([values, np.array(_addresses(captured), np.uint64)])
        for values, captured in zip(both, (first, second), strict=True)
    ]
    inputs = [(a.data_ptr(), b.data_ptr(), memory.extent(a)) for a, b in zip(first.inputs, second.inputs, strict=True)]
    segments = words.pair_segments(first.segments, second.segments, (addresses[0], addresses[1]))
    allocations = inputs + segments
    slots, unexplained = words.explain(chunks, (blob, other), allocations)
    return Analysis(first, second, chunks, blob, allocations, slots, unexplained, increment, written)


def _addresses(captured) -> list[int]:
    """Addresses of the results in the pool."""
    return [
        output.address
        for index, output in enumerate(captured.outputs)
        if isinstance(output, memory.Found) and index not in captured.static and output.address
    ]


class GpuRegion:
    """A captured region that is launched on any inputs.

    Args:
        analysis: the comparison of two captures, both alive.
        device: the GPU.
    """

    def __init__(self, analysis: Analysis, device: torch.device):
        self.device = device
        first = analysis.first
        self._num_inputs = len(first.inputs)
        self._written = analysis.written
        self._sizes = [size for _, _, size in analysis.allocations[self._num_inputs :]]
        self._increment = analysis.increment
        self._structure = first.structure
        self._results = [_place(index, first, analysis.allocations) for index in range(len(first.outputs))]
        self._executable: driver.Executable | None = driver.Executable(
            first.graph.raw_cuda_graph(), [node.handle for node in first.nodes]
        )
        self._patcher = words.Patcher(analysis.blob, analysis.slots, len(analysis.allocations))
        self._setters = Setters(self._executable, first.nodes, analysis.chunks, analysis.blob)
        self._lock = threading.Lock()
        self.num_launches = 0
        self.num_patched = 0
        self.report = {
            "nodes": {
                name: sum(driver.NODE_KINDS[node.kind] == name for node in first.nodes)
                for name in dict.fromkeys(driver.NODE_KINDS[node.kind] for node in first.nodes)
            },
            "slots": len(analysis.slots),
            "arena_bytes": sum(self._sizes),
            "random_increment": self._increment,
            "build_s": analysis.build_s,
        }

    def launch(self, inputs: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Launch on inputs that are known to be like the examples.

        Args:
            inputs: tensors of the GPU.

        Returns:
            the flat results, and the arenas that hold them and everything between.

        Raises:
            CaptureError: the region was released.
        """
        if self._executable is None:
            raise CaptureError("call of a parameterized region that was released")
        bases = [tensor.data_ptr() for tensor in inputs]
        aligned = inputs
        if functools.reduce(operator.or_, bases, 0) & 15:
            # Kernels were chosen for aligned addresses.
            aligned = [memory.clone(t) if base & 15 else t for t, base in zip(inputs, bases, strict=True)]
            bases = [tensor.data_ptr() for tensor in aligned]
        arenas = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self._sizes]
        bases += [arena.data_ptr() for arena in arenas]
        with self._lock:
            try:
                changed = self._patcher.patch(bases)
                self._setters.apply(changed)
            except BaseException:
                self._patcher.forget()
                raise
            if self._increment:
                random_state.advance(self.device, self._increment)
            self._executable.launch(torch.cuda.current_stream(self.device).cuda_stream)
            self.num_launches += 1
            self.num_patched += len(changed)
        if aligned is not inputs:
            for index in self._written:
                if aligned[index] is not inputs[index]:
                    inputs[index].detach().copy_(aligned[index].detach())
        return self._outputs(aligned, arenas), arenas

    def unflatten(self, results: list[Any]):
        """Return flat results in the structure that the function returned.

        Args:
            results: of `launch`.

        Returns:
            tensors and other values in that structure.
        """
        return tree_unflatten(results, self._structure)

    def release(self) -> None:
        """Free the graph. Results of earlier calls stay."""
        if self._executable is not None:
            self._executable.destroy()
        self._executable = None

    def _outputs(self, inputs, arenas) -> list[Any]:
        storages: dict[int, Any] = {}
        outputs = []
        for result in self._results:
            if not isinstance(result, memory.Place):
                outputs.append(result)
                continue
            index = result.allocation
            if index < 0:
                meta = result.metadata
                empty = torch.empty_strided(meta["size"], meta["stride"], dtype=meta["dtype"], device=self.device)
                outputs.append(empty)
                continue
            metadata = result.metadata
            if index < self._num_inputs:
                source = inputs[index]
                view = source.detach()
                at = source.storage_offset() * source.element_size() + result.offset
                metadata = {**metadata, "storage_offset": at // metadata["dtype"].itemsize}
                storage = view.untyped_storage()
            else:
                storage = storages.get(index)
                if storage is None:
                    storage = storages[index] = arenas[index - self._num_inputs].untyped_storage()
            outputs.append(torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage))
        return outputs


def _place(index, captured, allocations):
    """A result as a place in an allocation, a static tensor, or the value itself."""
    output = captured.outputs[index]
    if index in captured.static:
        return captured.static[index]
    if not isinstance(output, memory.Found):
        return output
    address, metadata = output.address, output.metadata
    if 0 in metadata["size"]:
        return memory.Place(-1, 0, metadata)
    allocation = memory.find(address, [(base, size) for base, _, size in allocations])
    assert allocation >= 0, "a result in the pool whose segment has no pair"
    offset = address - allocations[allocation][0]
    return memory.Place(allocation, offset, {**metadata, "storage_offset": offset // metadata["dtype"].itemsize})
