"""Capture of a region: a function that is then launched on any tensors like its examples."""

from typing import Any

import torch

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import CaptureError, RegionRefused
from graph_worth.capture.host_graph import HostPool
from graph_worth.capture.host_graph_recorder import refuse_inside_capture
from graph_worth.capture.parameterized import driver, random_state
from graph_worth.capture.parameterized.analysis import analyse
from graph_worth.capture.parameterized.gpu import GpuRegion
from graph_worth.capture.parameterized.verify import Verification


def capture(fn, inputs: list[torch.Tensor]):
    """Capture a region once, with `launch` and `release`; on a GPU compare its first launches with eager.

    On a GPU a launch is a CUDA graph with the addresses of this call. On the CPU it is a host graph, so that the logic
    around it can be tested.

    Args:
        fn: a graph of AOTAutograd, which takes tensors and returns a flat sequence of tensors and Python values. It
            writes to its arguments alone, and runs a few times here on copies of the examples.
        inputs: examples on one device, strided and neither conjugated nor negated.

    Raises:
        RegionRefused: the region cannot be launched on other memory.
        CaptureError: a capture of this thread is under way.
    """
    device = inputs[0].device
    if device.type == "cpu":
        return HostRegion(fn, inputs)
    driver.require()
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("the capture of a region runs inside a capture: call the region once before")
        with random_state.aside(device):
            return _capture(fn, inputs, device)


def _capture(fn, inputs, device):
    analysis = analyse(fn, inputs, device)
    try:
        region = GpuRegion(fn, analysis, device)
        try:
            region.report["inexact"] = Verification(region, fn, inputs).prove(analysis)
        except BaseException:
            region.release()
            raise
    finally:
        # The verification has gone: its memory is given back, too.
        analysis.first.release()
    return region


class HostRegion:
    """A host graph of a function, which copies inputs in and results out. It holds fn, whose constants it reads."""

    def __init__(self, fn, example_inputs: list[torch.Tensor]):
        refuse_inside_capture("the capture of a region", "runs inside a capture")
        self._static = [tensor_places.clone(tensor) for tensor in example_inputs]
        versions = [tensor._version for tensor in self._static]
        state = torch.get_rng_state()
        self._pool, self._fn = HostPool(), fn
        try:
            self._graph, self._results = self._pool.capture(lambda: fn(*self._static), self._static)
        except CaptureError as error:
            raise RegionRefused(str(error)) from error
        finally:
            torch.set_rng_state(state)
        self._written = [index for index, tensor in enumerate(self._static) if tensor._version != versions[index]]
        # There is no node to patch.
        self.report: dict[str, Any] = {"nodes": self._graph.nodes(), "launches": 0, "patched": 0, "patch_s": 0.0}

    @torch.no_grad()
    def launch(self, inputs: list[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Replay on inputs that are known to be like the examples; return the results, and no memory of its own.

        CaptureError where the region was released or runs inside a capture.
        """
        refuse_inside_capture("a parameterized region", "runs inside a capture")
        for static, tensor in zip(self._static, inputs, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        self.report["launches"] += 1
        for index in self._written:
            inputs[index].copy_(self._static[index])
        return [self._result(result, inputs) for result in self._results], []

    def release(self) -> None:
        """Drop the graph. Results of earlier calls stay."""
        self._pool.release()

    def _result(self, result, inputs):
        """A result over the memory of the input that it is a view of, else a copy; a Python value as it is."""
        if not isinstance(result, torch.Tensor):
            return result
        for static, tensor in zip(self._static, inputs, strict=True):
            if static.untyped_storage()._cdata == result.untyped_storage()._cdata:
                offset = tensor.storage_offset() + result.storage_offset()
                return tensor.detach().as_strided(result.shape, result.stride(), offset)
        return tensor_places.clone(result.detach())
