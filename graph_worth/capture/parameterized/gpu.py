"""A region on a GPU: an executable for each set of addresses, or where there are many the nearest one, set anew."""

import threading
import time
import weakref
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.host_graph_memory import held_outside
from graph_worth.capture.parameterized import driver, random_state, words
from graph_worth.capture.parameterized.analysis import Analysis
from graph_worth.capture.parameterized.nodes import Graph

# Of a region. Where more sets of addresses take turns, the nearest executable gets the addresses that differ.
_MAX_EXECUTABLES = 64
# Counts of a region's report: nodes that were set, the host's seconds for it, and the driver's memory.
_NO_EXECUTABLES = {"patched": 0, "patch_s": 0.0, "executables": 0, "driver_bytes": 0}
# Of all regions: a launch reads the generator's offset and moves it.
_launching = threading.Lock()


class _Executable(NamedTuple):
    """A CUgraphExec, the addresses of its allocations, and `_num_frees` when it was made.

    is_moved: they are others than it was made with. Where that memory has gone, CUPTI 13.0 ends the process at a
    launch, once a profiler has used it.
    """

    handle: Any
    bases: np.ndarray
    num_frees: int
    is_moved: bool = False


def _num_frees(device) -> int:
    """How often torch's allocator gave memory back to the driver."""
    return torch.cuda.memory_stats_as_nested_dict(device)["num_device_free"]


class GpuRegion:
    """A captured region that is launched on any inputs.

    It holds fn, and the tensors that a capture read besides its inputs, until `release`: the graph has their addresses.
    analysis: the comparison of two captures; the first one is alive.
    """

    def __init__(self, fn, analysis: Analysis, device: torch.device):
        first, plan = analysis.first, analysis.plan
        self.device, self._on_gpu = device, device.type == "cuda"
        self.written = analysis.written
        self._fn = fn
        self._read = [(storage, storage.data_ptr()) for storage in analysis.read]
        self._num_inputs = len(first.inputs)
        self._sizes, self._copies = plan.sizes, plan.copies
        self._increment = analysis.increment
        self._results = analysis.results
        graph = first.graph.raw_cuda_graph()
        self._graph = Graph(graph, first.nodes, analysis.chunks, analysis.blob, analysis.slots)
        # By addresses.
        self._executables: dict[tuple[int, ...], _Executable] = {}
        self._free = weakref.finalize(self, self._graph.destroy)
        self._free.atexit = False
        self.report: dict[str, Any] = {
            "nodes": dict(Counter(node.kind for node in first.nodes)),
            "arena_bytes": sum(self._sizes),
            "copied_results": len(self._copies),
            "unread": len(analysis.unexplained),
            "random_increment": self._increment,
            "launches": 0,
            **_NO_EXECUTABLES,
        }

    def launch(self, inputs: list[torch.Tensor], fill: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        """Launch on inputs that are known to be like the examples; `fill` is a byte that new memory holds before.

        Returns:
            the results, and the memory that holds them and everything between.

        Raises:
            CaptureError: the region was released, runs inside a capture, or reads a tensor that was replaced.
            driver.DriverError, RegionRefused: nothing was launched.
        """
        if not self._free.alive:
            raise CaptureError("call of a parameterized region that was released")
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("a parameterized region runs inside a capture: leave it outside")
            for storage, address in self._read:
                if storage.data_ptr() != address or not held_outside(storage):
                    raise CaptureError("a tensor that a parameterized region reads besides its inputs was replaced")
            if any(tensor.is_cuda is not self._on_gpu for tensor in inputs):
                raise RegionRefused("an input is on another device than before")
            # Kernels were chosen for aligned addresses.
            aligned = [tensor_places.clone(tensor) if tensor.data_ptr() & 15 else tensor for tensor in inputs]
            arenas = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self._sizes]
            for arena in [] if fill is None else arenas:
                arena.fill_(fill)  # type: ignore[arg-type]
            self._launch(aligned, arenas)
            for to, source, offset in self._copies:
                arenas[to].copy_(arenas[source][offset : offset + self._sizes[to]])
            for index in self.written:
                if aligned[index] is not inputs[index]:
                    inputs[index].detach().copy_(aligned[index].detach())
                torch.autograd.graph.increment_version(inputs[index])
            return [self._result(result, inputs, arenas) for result in self._results], arenas

    def _launch(self, inputs, arenas):
        """Launch an executable with these addresses, or leave the generator as it was."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with _launching, random_state.drawn(self.device, self._increment) as seeds:
            bases = tuple(tensor.data_ptr() for tensor in (*inputs, *seeds, *arenas))
            executable = self._executables.get(bases)
            if executable is None or (executable.is_moved and executable.num_frees != _num_frees(self.device)):
                executable = self._with(bases)
            driver.launch(executable.handle, stream)
            self.report["launches"] += 1

    def _with(self, key):
        """An executable with these addresses: a new one, or the nearest where there are many, with nodes set."""
        start, bases, num_frees = time.perf_counter(), np.array(key, np.int64), _num_frees(self.device)
        nearest = self._executables.pop(self._nearest(key, bases), None)
        try:
            if nearest is None or nearest.num_frees != num_frees:
                free = torch.cuda.mem_get_info(self.device)[0]
                handle, num_set = self._graph.executable(bases)
                # Memory that the driver takes for it.
                self.report["driver_bytes"] += max(free - torch.cuda.mem_get_info(self.device)[0], 0)
                self.report["executables"] += 1
                executable = _Executable(handle, bases, num_frees)
            else:
                num_set = self._graph.move(nearest.handle, nearest.bases, bases)
                executable, nearest = _Executable(nearest.handle, bases, num_frees, is_moved=True), None
        finally:
            if nearest is not None:
                self._graph.drop(nearest.handle)
        self._executables[key] = executable
        self.report["patched"] += num_set
        self.report["patch_s"] += time.perf_counter() - start
        return executable

    def _nearest(self, key, bases):
        """The addresses of the executable with the fewest others, once there are enough."""
        if key in self._executables or len(self._executables) < _MAX_EXECUTABLES:
            return key
        others = np.array([executable.bases for executable in self._executables.values()]) != bases
        return list(self._executables)[int(others.sum(axis=1).argmin())]

    def start(self) -> None:
        """Drop the executables made so far, whose addresses come no more, and count from here."""
        self.overwrite([], [])
        self.report |= _NO_EXECUTABLES

    def overwrite(self, unexplained: list[words.Unexplained], values: list[int]) -> None:
        """Write other values in the place of words that are no address, and drop the executables made before."""
        self._graph.overwrite(unexplained, values)
        while self._executables:
            self._graph.drop(self._executables.popitem()[1].handle)

    def release(self) -> None:
        """Free the graph and what it read. Results of earlier calls stay."""
        self._free()
        self._executables.clear()
        self._fn, self._read = None, []

    def _result(self, result, inputs, arenas):
        """A result as a tensor over memory of the launch; a Python value as it is."""
        if not isinstance(result, tensor_places.Place):
            return result
        index, offset, metadata = result.allocation, result.offset, result.metadata
        size, stride, dtype = metadata["size"], metadata["stride"], metadata["dtype"]
        if index < 0:
            return torch.empty_strided(size, stride, dtype=dtype, device=self.device)
        if index >= self._num_inputs:
            storage = arenas[index - self._num_inputs].untyped_storage()
        elif offset == 0 and tensor_places.describe(inputs[index]) == metadata:
            # With the input's own count of versions: autograd sees where it is overwritten.
            return inputs[index].detach()
        else:
            storage = inputs[index].untyped_storage()
            offset += inputs[index].storage_offset() * inputs[index].element_size()
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset // dtype.itemsize, size, stride)
