"""New addresses written by the GPU: one kernel changes the parameters of many nodes.

Only kernel nodes take part, marked before their graph is instantiated; the host sets the others as always. CUDA lets
such a graph be instantiated once (CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE in cuda.h). That a host's change may
bring back what the GPU wrote is not said there, so it is taken for possible.
"""

import ctypes
import functools
from ctypes import byref, c_int, c_uint, c_void_p

import numpy as np
import torch

from common.capture.parameterized import device_program, driver
from common.capture.parameterized.nodes import Node, Setters
from common.capture.parameterized.words import Chunk, Slots

# CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, and the size of CUlaunchAttributeValue.
_UPDATABLE, _VALUE_BYTES = 13, 64


class _Rows(ctypes.Structure):
    _fields_ = (("count", c_uint), ("row", ctypes.c_ulonglong * 3 * device_program.MAX_ROWS))


@functools.cache
def _function(index: int) -> c_void_p:
    """The kernel, loaded on a GPU whose context is current."""
    major, minor = torch.cuda.get_device_capability(index)
    module, function = c_void_p(), c_void_p()
    driver.call("cuModuleLoadData", byref(module), device_program.build(f"sm_{major}{minor}"))
    driver.call("cuModuleGetFunction", byref(function), module, device_program.NAME)
    return function


class Updater:
    """Queues updates of one graph.

    Args:
        device: the GPU.

    Raises:
        device_program.Unavailable: the kernel cannot be built.
        driver.DriverError: the driver does not take it.
    """

    def __init__(self, device: torch.device):
        self._device, self._function = device, _function(device.index)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows, self._address = _Rows(), c_void_p(self._status.data_ptr())
        self._arguments = (c_void_p * 2)(ctypes.addressof(self._rows), ctypes.addressof(self._address))

    def update(self, executable: driver.Executable, rows: np.ndarray, uploads: bool) -> None:
        """Queue updates on the current stream, behind the last launch of the graph.

        Args:
            executable: the graph.
            rows: of `Records.rows`.
            uploads: the host has changed nodes since the last updates.

        Raises:
            driver.DriverError: the driver refused.
        """
        stream = torch.cuda.current_stream(self._device)
        if executable.last_stream not in (None, stream.cuda_stream):
            stream.wait_stream(torch.cuda.ExternalStream(executable.last_stream, self._device))
        handle, one, threads = c_void_p(stream.cuda_stream), c_uint(1), c_uint(device_program.THREADS)
        if uploads:
            driver.call("cuGraphUpload", executable.handle, handle)
        for start in range(0, len(rows), device_program.MAX_ROWS):
            part = rows[start : start + device_program.MAX_ROWS]
            self._rows.count = len(part)
            ctypes.memmove(self._rows.row, part.ctypes.data, part.nbytes)
            grid = c_uint(-(-len(part) // device_program.THREADS))
            sizes = (grid, one, one, threads, one, one, c_uint(0))
            driver.call("cuLaunchKernel", self._function, *sizes, handle, self._arguments, None)

    def check(self) -> None:
        """Wait for all updates so far.

        Raises:
            driver.DriverError: the GPU refused one.
        """
        status = int(self._status.item())
        if status:
            raise driver.DriverError(f"the GPU could not change a node: cudaError {status}")


def mark(nodes: list[Node], copies: list[c_void_p], with_slots: set[int]) -> dict[int, int]:
    """Let the GPU change kernel nodes of a graph that is not instantiated yet.

    Args:
        nodes: as read from the capture.
        copies: the graph's nodes, in the same order.
        with_slots: indices of the nodes that hold addresses.

    Returns:
        handles for the GPU, by index of the node.

    Raises:
        driver.DriverError: the driver refuses a node.
    """
    handles = {}
    for index in sorted(with_slots):
        if nodes[index].kind != driver.KERNEL:
            continue
        value = (c_void_p * (_VALUE_BYTES // 8))(1)
        driver.call("cuGraphKernelNodeSetAttribute", copies[index], c_int(_UPDATABLE), value)
        if not value[1]:
            raise driver.DriverError(f"the driver gave no handle of node {index}")
        handles[index] = value[1]
    return handles


class Records:
    """The rows of node, place and value that bring nodes up to date.

    Args:
        chunks: layout of the blob.
        blob: parameters.
        slots: its addresses.
        handles: of `mark`.
    """

    def __init__(self, chunks: list[Chunk], blob: np.ndarray, slots: Slots, handles: dict[int, int]):
        self.chunks, self.blob, self.handles = chunks, blob, handles
        own = np.isin(slots.node, list(handles))
        self._node, self._position, width = slots.node[own], slots.position[own], slots.width[own]
        self._words, self._wide = blob.view(np.uint32), width == 8
        self._is_chosen = np.zeros(int(slots.node.max(initial=0)) + 1, bool)
        starts = np.array([chunk.start for chunk in chunks])
        offsets = np.array([chunk.offset for chunk in chunks])
        chunk = np.searchsorted(starts, self._position * 4, side="right") - 1
        self._fixed = np.zeros((len(self._node), 3), np.uint64)
        self._fixed[:, 0] = [handles[node] for node in self._node.tolist()]
        self._fixed[:, 1] = offsets[chunk] + self._position * 4 - starts[chunk] + (width.astype(np.int64) << 32)

    def rows(self, nodes: list[int]) -> np.ndarray:
        """Return the rows of some nodes, with the values that the blob holds now.

        Args:
            nodes: their indices.

        Returns:
            n x 3, uint64: handle; offset in the parameters + bytes << 32; value.
        """
        self._is_chosen[:] = False
        self._is_chosen[nodes] = True
        which = self._is_chosen[self._node]
        rows, position, wide = self._fixed[which], self._position[which], self._wide[which]
        rows[:, 2] = self._words[position]
        rows[wide, 2] |= self._words[position[wide] + 1].astype(np.uint64) << np.uint64(32)
        return rows


class DeviceSetters(Setters):
    """Hands changed parameters to an executable graph: those of many kernels by the GPU, of few by the host.

    A host's change may bring back what the graph held before the GPU's, so from the first update on the GPU changes all
    kernels, and those that it changed before once more after the host changed another node.

    Args:
        executable: the graph that is launched.
        nodes: as read from the capture.
        records: of the nodes that the GPU can change, by `mark`.
        updater: of the GPU.
        threshold: changed kernels up to which the host sets them.
    """

    def __init__(self, executable: driver.Executable, nodes: list[Node], records: Records, updater, threshold: int):
        super().__init__(executable, nodes, records.chunks, records.blob)
        self._executable, self._records, self._updater = executable, records, updater
        self._threshold = threshold
        # Nodes that the GPU has changed.
        self._changed: set[int] = set()

    def apply(self, changed: list[int]) -> None:
        """Set the parameters of some nodes for all later launches.

        Args:
            changed: indices of the nodes.

        Raises:
            driver.DriverError: the driver refused a node's parameters.
        """
        handles = self._records.handles
        kernels = [index for index in changed if index in handles]
        if not self._changed and len(kernels) <= self._threshold:
            super().apply(changed)
            return
        others = [index for index in changed if index not in handles]
        super().apply(others)
        uploads = bool(others) or not self._changed
        if others:
            kernels = sorted(self._changed.union(kernels))
        self._changed.update(kernels)
        self._updater.update(self._executable, self._records.rows(kernels), uploads)

    def settle(self, threshold: int) -> None:
        """Wait for all updates so far and let the host make the same, so that it sets few kernels from now on.

        Args:
            threshold: changed kernels up to which it does.

        Raises:
            driver.DriverError: the GPU refused an update, or the driver a node's parameters.
        """
        self._updater.check()
        super().apply(sorted(self._changed))
        self._changed.clear()
        self._threshold = threshold
