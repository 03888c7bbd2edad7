"""Capture of a region: a function that is then launched on any tensors like its examples."""

import threading
import time

import torch

from graph_worth.capture.graph_error import CaptureError, RegionRefused, signature
from graph_worth.capture.parameterized import driver, random_state
from graph_worth.capture.parameterized.host_region import HostRegion

_one_capture = threading.RLock()


def capture(fn, inputs: list[torch.Tensor]):
    """Capture a region once, with `launch` and `release`; on a GPU compare its first launches with eager.

    On a GPU a launch is a CUDA graph with the addresses of this call. On the CPU the recorded operators run on the new
    tensors (graph_worth/capture/host_graph.py), so that the logic around it can be tested.

    Args:
        fn: takes tensors and returns a flat sequence of tensors and Python values. It is held, and runs a few times
            here on copies of the examples: what it does to memory besides its arguments happens then too.
        inputs: examples on one device, strided and neither conjugated nor negated.

    Raises:
        RegionRefused: the region cannot be launched on other memory.
        CaptureError: a capture of this thread is under way.
    """
    if torch.is_inference_mode_enabled():
        # Inference tensors count no versions, by which writes to inputs are found.
        with torch.inference_mode(False), torch.no_grad():
            return capture(fn, inputs)
    device, fn = inputs[0].device, _checked(fn)
    if device.type == "cpu":
        return HostRegion(fn, inputs)
    driver.require()
    with _one_capture, torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("the capture of a region runs inside a capture: call the region once before")
        with random_state.aside(device):
            return _capture(fn, inputs, device)


def _capture(fn, inputs, device):
    from graph_worth.capture.parameterized.analysis import analyse
    from graph_worth.capture.parameterized.gpu import GpuRegion
    from graph_worth.capture.parameterized.verify import Verification

    start = time.perf_counter()
    analysis = analyse(fn, inputs, device)
    try:
        region = GpuRegion(fn, analysis, device)
        try:
            check = Verification(region, fn, inputs)
            check.prove(analysis)
            region.start()
        except BaseException:
            region.release()
            raise
    finally:
        analysis.first.release()
    region.report |= {"inexact": sorted(check.inexact), "build_s": time.perf_counter() - start}
    return region


def _checked(fn):
    """`fn`, which raises RegionRefused where an input has another shape or other memory after it."""

    def run(*inputs):
        before = [signature(tensor) for tensor in inputs]
        result = fn(*inputs)
        for index, tensor in enumerate(inputs):
            if before[index] != signature(tensor):
                raise RegionRefused(f"the region gives input {index} another shape or other memory in place")
        return result

    return run
