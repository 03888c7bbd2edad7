"""A region on a GPU: an executable of its own, launched on any memory."""

import functools
import operator
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_unflatten

from common.capture import memory
from common.capture.checks import CaptureError
from common.capture.parameterized import driver, random_state, words
from common.capture.parameterized.analysis import Analysis
from common.capture.parameterized.nodes import Setters


class GpuRegion:
    """A captured region that is launched on any inputs.

    Args:
        fn: the function that was captured. It is held until `release`, with all that its closure holds: the graph reads
            those tensors at their addresses.
        analysis: the comparison of two captures; the first one is alive.
        device: the GPU.
    """

    def __init__(self, fn, analysis: Analysis, device: torch.device):
        self._fn = fn
        self.device = device
        first = analysis.first
        self._num_inputs = len(first.inputs)
        self.written = analysis.written
        self._sizes = analysis.plan.sizes
        self._increment = analysis.increment
        self._structure = first.structure
        self._results = [_place(index, analysis) for index in range(len(first.outputs))]
        self._patcher = words.Patcher(analysis.blob, _in_arenas(analysis), self._num_inputs + len(self._sizes))
        executable = driver.Executable(first.graph.raw_cuda_graph(), [node.handle for node in first.nodes])
        self._executable: driver.Executable | None = executable
        self._setters = Setters(executable, first.nodes, analysis.chunks, analysis.blob)
        self._lock = threading.Lock()
        self.num_launches = 0
        self.num_patched = 0
        self.patch_s = 0.0
        self.report: dict[str, Any] = {
            "nodes": dict(Counter(driver.NODE_KINDS[node.kind] for node in first.nodes)),
            "slots": len(analysis.slots),
            "arena_bytes": sum(self._sizes),
            "unread": len(analysis.unexplained),
            "unread_like_addresses": len(analysis.suspects),
            "random_increment": self._increment,
            "build_s": analysis.build_s,
        }

    def launch(self, inputs: list[torch.Tensor], fill: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        """Launch on inputs that are known to be like the examples.

        Args:
            inputs: tensors of the GPU.
            fill: byte that new memory holds before; None for whatever it holds.

        Returns:
            the flat results, and the arenas that hold them and everything between.

        Raises:
            CaptureError: the region was released.
            driver.DriverError: the driver refused a node's parameters or the launch; nothing was launched.
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
        if fill is not None:
            for arena in arenas:
                arena.fill_(fill)
        bases += [arena.data_ptr() for arena in arenas]
        with self._lock:
            try:
                changed = self._patch(bases)
            except BaseException:
                self._patcher.forget()
                raise
            with random_state.advanced(self.device, self._increment):
                self._executable.launch(torch.cuda.current_stream(self.device).cuda_stream)
            self.num_launches += 1
            self.num_patched += changed
        if aligned is not inputs:
            for index in self.written:
                inputs[index].detach().copy_(aligned[index].detach())
        for index in self.written:
            torch.autograd.graph.increment_version(inputs[index])
        return self._outputs(inputs, arenas), arenas

    def _patch(self, bases) -> int:
        """Set the parameters that change; returns the number of their nodes."""
        start = time.perf_counter()
        changed = self._patcher.patch(bases)
        if changed:
            self._setters.apply(changed)
            self.patch_s += time.perf_counter() - start
        return len(changed)

    def overwrite(self, unexplained: list[words.Unexplained], values: list[int]) -> None:
        """Write other values in the place of words that are no address, for all later launches."""
        self._setters.apply(self._patcher.overwrite(unexplained, values))

    def unflatten(self, results: list[Any]):
        """Return flat results of `launch` in the structure that the function returned."""
        return tree_unflatten(results, self._structure)

    def release(self) -> None:
        """Free the graph. Results of earlier calls stay."""
        executable, self._executable, self._fn = self._executable, None, None
        if executable is not None:
            executable.destroy()

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
                if result.offset == 0 and memory.describe(source).items() <= metadata.items():
                    # With the input's own count of versions: autograd sees where it is overwritten.
                    outputs.append(view)
                    continue
                at = source.storage_offset() * source.element_size() + result.offset
                metadata = {**metadata, "storage_offset": at // metadata["dtype"].itemsize}
                storage = view.untyped_storage()
            else:
                storage = storages.get(index)
                if storage is None:
                    storage = storages[index] = arenas[index - self._num_inputs].untyped_storage()
            outputs.append(torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage))
        return outputs


def _in_arenas(analysis) -> words.Slots:
    """The slots with an arena in the place of each tensor of the pool."""
    num_inputs, slots = len(analysis.first.inputs), analysis.slots
    places = [(index, 0) for index in range(num_inputs)]
    for base, _, _ in analysis.allocations[num_inputs:]:
        arena, offset = analysis.plan.place(base)
        places.append((num_inputs + arena, offset))
    table = np.array(places, np.int64).reshape(-1, 2)[slots.allocation]
    return replace(slots, allocation=table[:, 0], offset=slots.offset + table[:, 1])


def _place(index, analysis):
    """A result as a place in an input or an arena, a static tensor, or the value itself."""
    captured = analysis.first
    output = captured.outputs[index]
    if index in captured.static:
        return captured.static[index]
    if not isinstance(output, memory.Found):
        return output
    address, metadata = output.address, output.metadata
    if 0 in metadata["size"]:
        return memory.Place(-1, 0, metadata)
    num_inputs = len(captured.inputs)
    allocation = memory.find(address, [(base, size) for base, _, size in analysis.allocations[:num_inputs]])
    if allocation >= 0:
        offset = address - analysis.allocations[allocation][0]
    else:
        arena, offset = analysis.plan.place(address)
        allocation = num_inputs + arena
    return memory.Place(allocation, offset, {**metadata, "storage_offset": offset // metadata["dtype"].itemsize})
