"""A region on a GPU: an executable for each set of addresses."""

import time
import weakref
from collections import Counter
from typing import Any

import torch

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.parameterized import driver, random_state, words
from graph_worth.capture.parameterized.analysis import Analysis
from graph_worth.capture.parameterized.nodes import Graph


class GpuRegion:
    """A captured region that is launched on any inputs.

    It holds fn until `release`: the graph has the addresses of its constants.
    analysis: the comparison of two captures; the first one is alive.
    """

    def __init__(self, fn, analysis: Analysis, device: torch.device):
        first, plan = analysis.first, analysis.plan
        self.device = device
        self._fn = fn
        self._written = analysis.written
        self._num_inputs = len(first.inputs)
        self._sizes, self._copies = plan.sizes, plan.copies
        self._increment = analysis.increment
        self._results = analysis.results
        graph = first.graph.raw_cuda_graph()
        self._graph = Graph(graph, first.nodes, analysis.chunks, analysis.blob, analysis.slots)
        self._free = weakref.finalize(self, self._graph.destroy)
        self._free.atexit = False
        self.report: dict[str, Any] = {
            "nodes": dict(Counter(node.kind for node in first.nodes)),
            "arena_bytes": sum(self._sizes),
            "copied_results": len(self._copies),
            "random_increment": self._increment,
            "launches": 0,
            "executables": 0,
            # Nodes that were set for them, and the host's seconds for it.
            "patched": 0,
            "patch_s": 0.0,
        }

    def launch(self, inputs: list[torch.Tensor], fill: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        """Launch on inputs that are known to be like the examples; `fill` is a byte that new memory holds before.

        Returns:
            the results, and the memory that holds them and everything between.

        Raises:
            CaptureError: the region was released, or runs inside a capture.
            driver.DriverError, RegionRefused: nothing was launched.
        """
        if not self._free.alive:
            raise CaptureError("call of a parameterized region that was released")
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("a parameterized region runs inside a capture: leave it outside")
            if not all(tensor.is_cuda for tensor in inputs):
                raise RegionRefused("an input is on another device than before")
            # Kernels were chosen for aligned addresses.
            aligned = [tensor_places.clone(tensor) if tensor.data_ptr() & 15 else tensor for tensor in inputs]
            arenas = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self._sizes]
            for arena in [] if fill is None else arenas:
                arena.fill_(fill)  # type: ignore[arg-type]
            self._launch(aligned, arenas)
            for to, source, offset in self._copies:
                arenas[to].copy_(arenas[source][offset : offset + self._sizes[to]])
            for index in self._written:
                if aligned[index] is not inputs[index]:
                    inputs[index].detach().copy_(aligned[index].detach())
                torch.autograd.graph.increment_version(inputs[index])
            return [self._result(result, inputs, arenas) for result in self._results], arenas

    def _launch(self, inputs, arenas):
        """Launch an executable with these addresses, or leave the generator as it was."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with random_state.drawn(self.device, self._increment) as seeds:
            bases = tuple(tensor.data_ptr() for tensor in (*inputs, *seeds, *arenas))
            executable = self._graph.executables.get(bases)
            driver.launch(self._make(bases) if executable is None else executable, stream)
            self.report["launches"] += 1

    def _make(self, bases):
        start = time.perf_counter()
        executable = self._graph.make(bases)
        self.report["executables"] += 1
        self.report["patched"] += len(self._graph.setters)
        self.report["patch_s"] += time.perf_counter() - start
        return executable

    def overwrite(self, unexplained: list[words.Unexplained], values: list[int]) -> None:
        """Write other values in the place of words that are no address, and drop the executables made before."""
        self._graph.overwrite(unexplained, values)

    def release(self) -> None:
        """Free the graph. Results of earlier calls stay."""
        self._free()
        self._fn = None

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
