"""The nodes of a captured CUDA graph as bytes that can be compared, patched and handed back."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graph_worth.capture.graph_error import RegionRefused
from graph_worth.capture.parameterized import driver, words
from graph_worth.capture.parameterized.words import Chunk, Slots, Unexplained

_COLLECTIVES = ("nccl", "nvshmem")
# Structure of cuda.h by kind, and its bytes.
_STRUCTURES = {"memcpy": ("CUDA_MEMCPY3D", 200), "memset": ("CUDA_MEMSET_NODE_PARAMS", 40)}
# Of a region.
_MAX_EXECUTABLES = 64
# CU_MEMORYTYPE_DEVICE and CU_MEMORYTYPE_UNIFIED.
_DEVICE, _UNIFIED = 2, 4


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        kind: kernel, memcpy, memset or empty.
        name: the kernel's name, or the kind.
        shape: everything that must be the same in two captures: function, grid, block, shared memory.
        parameters: (offset, bytes) of each parameter.
        packed: the kernel takes one buffer instead of an array of pointers.
    """

    handle: Any
    kind: str
    name: str
    shape: tuple = ()
    parameters: list[tuple[int, bytes]] = field(default_factory=list)
    packed: bool = False


def read_nodes(graph) -> list[Node]:
    """Read all nodes of a CUgraph in the order in which they were made. RegionRefused names a node that cannot move."""
    _, count = driver.call("cuGraphGetNodes", graph, 0)
    handles, _ = driver.call("cuGraphGetNodes", graph, count)
    return [_read(index, handle) for index, handle in enumerate(handles)]


def _read(index, handle) -> Node:
    kind = driver.call("cuGraphNodeGetType", handle).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    if kind == "empty":
        return Node(handle, kind, kind)
    if kind not in ("kernel", *_STRUCTURES):
        raise RegionRefused(f"node {index} is a {kind} node, which cannot be launched on other memory")
    # What a kernel's structure points to belongs to the node.
    params = driver.call(f"cuGraph{kind.capitalize()}NodeGetParams", handle)
    if kind == "kernel":
        of_kernel = ("cuFuncGetName", params.func) if int(params.func) else ("cuKernelGetName", params.kern)
        name = (driver.call(*of_kernel) or b"?").decode()
        if name.lower().startswith(_COLLECTIVES):
            raise RegionRefused(f"node {index} is a collective, {name}: leave it outside the region")
        sizes = [getattr(params, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ"]
        shape = (int(params.func), int(params.kern), *sizes, params.sharedMemBytes)
        return Node(handle, kind, name, shape, driver.kernel_arguments(params), not params.kernelParams)
    if kind == "memcpy":
        sides = ("from", params.srcMemoryType, params.srcDevice), ("to", params.dstMemoryType, params.dstDevice)
        for side, memory, address in sides:
            unified = int(memory) == _UNIFIED and driver.memory_type(int(address)) == _DEVICE
            if int(memory) != _DEVICE and not unified:
                raise RegionRefused(f"node {index} copies {side} memory of the host: make the copy before the region")
        shape = (params.WidthInBytes, params.Height, params.Depth)
    else:
        shape = (params.width, params.height)
    return Node(handle, kind, kind, shape, [(0, ctypes.string_at(params.getPtr(), _STRUCTURES[kind][1]))])


def check_alike(first: list[Node], second: list[Node]) -> None:
    """Refuse two captures of one function that launch different work; the message names the node."""
    if len(first) != len(second):
        raise RegionRefused(f"two captures differ: {len(first)} and {len(second)} nodes")
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        sizes = [[(offset, len(data)) for offset, data in node.parameters] for node in (a, b)]
        if (a.kind, a.name, a.shape, sizes[0]) != (b.kind, b.name, b.shape, sizes[1]):
            raise RegionRefused(f"two captures differ in node {index}: {a.name} {a.shape[2:]}, {b.name} {b.shape[2:]}")


class Graph:
    """A copy of a captured CUgraph whose nodes take other addresses, and the executables made of the copy.

    nodes: as read from the capture. chunks, blob: their parameters, which are changed in place. slots: the addresses.
    """

    def __init__(self, graph: int, nodes: list[Node], chunks: list[Chunk], blob: np.ndarray, slots: Slots):
        self._copy, self._blob, self._slots = driver.call("cuGraphClone", graph), blob, slots
        # By addresses.
        self.executables: dict[tuple[int, ...], Any] = {}
        self._keep: list = []
        parts: list[list[Chunk]] = [[] for _ in nodes]
        for chunk in chunks:
            parts[chunk.node].append(chunk)
        # Calls that set the parameters of nodes in the copy: name and arguments.
        self.setters = []
        for node, part in zip(nodes, parts, strict=True):
            if part:
                handle = driver.call("cuGraphNodeFindInClone", node.handle, self._copy)
                name = f"cuGraph{node.kind.capitalize()}NodeSetParams"
                self.setters.append((name, handle, self._structure(node, handle, part)))

    def make(self, bases: tuple[int, ...]) -> Any:
        """Make a CUgraphExec with these addresses, in the place of the oldest one where there are many.

        All nodes are set each time. The driver looks up memory where a copy is set, and that may have been freed and be
        at the same address again: an executable made with the older memory ends the process, or its launch fails.
        """
        while len(self.executables) >= _MAX_EXECUTABLES:
            self._drop(next(iter(self.executables)))
        words.place(self._blob, self._slots, np.array(bases, np.int64))
        for setter in self.setters:
            driver.call(*setter)
        self.executables[bases] = driver.call("cuGraphInstantiate", self._copy, 0)
        return self.executables[bases]

    def overwrite(self, unexplained: list[Unexplained], values: list[int]) -> None:
        """Write other values in the place of words that are no address, and drop the executables made before."""
        for word, value in zip(unexplained, values, strict=True):
            self._blob.view(np.uint64)[word.position] = value
        self._drop(*self.executables)

    def destroy(self) -> None:
        """Free the executables and the copy."""
        self._drop(*self.executables)
        driver.cu.cuGraphDestroy(self._copy)

    def _drop(self, *keys):
        """Free executables. The driver finishes launches under way; it may have failed before."""
        for bases in keys:
            driver.cu.cuGraphExecDestroy(self.executables.pop(bases))

    def _structure(self, node, handle, chunks):
        """The driver's structure of a node, over bytes of the blob."""
        starts = [self._blob.ctypes.data + chunk.start for chunk in chunks]
        if node.kind != "kernel":
            return getattr(driver.cu, _STRUCTURES[node.kind][0])(_ptr=starts[0])
        params = driver.call("cuGraphKernelNodeGetParams", handle)
        if node.packed:
            size = ctypes.c_size_t(chunks[0].size)
            extra = (ctypes.c_void_p * 5)(1, starts[0], 2, ctypes.addressof(size), None)
            params.extra = ctypes.addressof(extra)
            self._keep += [size, extra]
        else:
            pointers = (ctypes.c_void_p * len(starts))(*starts)
            params.kernelParams = ctypes.addressof(pointers)
            self._keep.append(pointers)
        return params
