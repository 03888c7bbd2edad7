"""The nodes of a captured CUDA graph as bytes that can be compared, patched and handed back."""

import ctypes
import operator
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from common.capture.checks import RegionRefused
from common.capture.parameterized import driver
from common.capture.parameterized.words import Chunk

_COLLECTIVES = ("nccl", "nvshmem")


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        handle: CUgraphNode.
        kind: CUgraphNodeType.
        name: the kernel's name, or the kind in words.
        shape: everything that must be the same in two captures: function, grid, block, shared memory.
        parameters: (offset, bytes) of each parameter.
        packed: the kernel takes one buffer instead of an array of pointers.
    """

    handle: int
    kind: int
    name: str
    shape: tuple = ()
    parameters: list[tuple[int, bytes]] = field(default_factory=list)
    packed: bool = False


def read_nodes(graph: int) -> list[Node]:
    """Read all nodes of a CUgraph in the order in which they were made. RegionRefused names a node that cannot move."""
    return [_read(index, handle) for index, handle in enumerate(driver.graph_nodes(graph))]


def _read(index, handle) -> Node:
    kind = driver.node_kind(handle)
    name = driver.NODE_KINDS.get(kind, f"type {kind}")
    if kind == driver.EMPTY:
        return Node(handle, kind, name)
    if kind == driver.KERNEL:
        params = driver.params_of(handle, kind)
        name = driver.kernel_name(params)
        if name.lower().startswith(_COLLECTIVES):
            raise RegionRefused(f"node {index} is a collective, {name}: leave it outside the region")
        shape = (params.func, params.kern, tuple(params.grid), tuple(params.block), params.shared_bytes)
        return Node(handle, kind, name, shape, driver.kernel_arguments(params), not params.kernel_params)
    if kind == driver.MEMSET:
        memset = driver.params_of(handle, kind)
        return Node(handle, kind, name, (memset.width, memset.height), [(0, bytes(memset))])
    if kind == driver.MEMCPY:
        copy = driver.params_of(handle, kind)
        for side, memory, address in (
            ("from", copy.src_type, copy.src_device),
            ("to", copy.dst_type, copy.dst_device),
        ):
            if not driver.is_device_memory(memory, address):
                raise RegionRefused(f"node {index} copies {side} memory of the host: make the copy before the region")
        return Node(handle, kind, name, (copy.width, copy.height, copy.depth), [(0, bytes(copy))])
    raise RegionRefused(f"node {index} is a {name} node, which cannot be launched on other memory")


def check_alike(first: list[Node], second: list[Node]) -> None:
    """Refuse two captures of one function that launch different work; the message names the node."""
    if len(first) != len(second):
        raise RegionRefused(f"two captures differ: {len(first)} and {len(second)} nodes")
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        sizes = [[(offset, len(data)) for offset, data in node.parameters] for node in (a, b)]
        if (a.kind, a.name, a.shape, sizes[0]) != (b.kind, b.name, b.shape, sizes[1]):
            raise RegionRefused(
                f"two captures differ in node {index}: {a.name} {a.shape[2:]} and {b.name} {b.shape[2:]} "
                "(kernels chosen by address or alignment)"
            )


class Setters:
    """Hands changed parameters to an executable graph, each node by a call made ready before.

    nodes: as read from the capture. blob: parameters, laid out as `chunks` says; the driver copies from its memory.
    """

    def __init__(self, executable: driver.Executable, nodes: list[Node], chunks: list[Chunk], blob: np.ndarray):
        self._keep: list = [blob]
        self._calls: list[partial] = []
        places: list[list[Chunk]] = [[] for _ in nodes]
        for chunk in chunks:
            places[chunk.node].append(chunk)
        address = blob.ctypes.data
        for node, handle, its_chunks in zip(nodes, executable.nodes, places, strict=True):
            starts = [address + chunk.start for chunk in its_chunks]
            self._calls.append(self._setter(executable.handle, node, handle, (starts, its_chunks)))

    def apply(self, changed: list[int]) -> None:
        """Set the parameters of some nodes, by index, for all later launches. DriverError names the node."""
        calls = self._calls
        errors = list(map(operator.call, [calls[index] for index in changed]))
        if any(errors):
            index, error = next(pair for pair in zip(changed, errors, strict=True) if pair[1])
            driver.check(f"setting the parameters of node {index}", error)

    def _setter(self, executable, node, handle, places) -> partial:
        starts, chunks = places
        library = driver.library()
        if not starts:
            # There is nothing to set: 0, as the driver returns it.
            return partial(int)
        # ctypes converts values of its types in each call, what from_param and byref return in none.
        target = c_void_p.from_param(executable.value), c_void_p.from_param(handle.value)
        if node.kind != driver.KERNEL:
            name = "cuGraphExecMemsetNodeSetParams" if node.kind == driver.MEMSET else "cuGraphExecMemcpyNodeSetParams"
            rest = c_void_p.from_param(starts[0]), c_void_p.from_param(driver.current_context())
            return partial(getattr(library, name), *target, *rest)
        params = driver.params_of(node.handle, node.kind)
        if node.packed:
            size = c_size_t(chunks[0].size)
            extra = (c_void_p * 5)(1, starts[0], 2, ctypes.addressof(size), None)
            params.kernel_params, params.extra = None, ctypes.addressof(extra)
            self._keep.append((size, extra))
        else:
            pointers = (c_void_p * len(starts))(*starts)
            params.kernel_params, params.extra = ctypes.addressof(pointers), None
            self._keep.append(pointers)
        self._keep.append(params)
        return partial(library.cuGraphExecKernelNodeSetParams_v2, *target, byref(params))
