"""Capture of a region: a function that is then launched on any tensors like its examples."""

from collections.abc import Collection

import torch

from common.capture.checks import RegionRefused, signature
from common.capture.parameterized.host import HostRegion

# Launches that are compared with eager runs, on a GPU.
_NUM_COMPARED = 2


def capture(fn, inputs: list[torch.Tensor], unwritten: Collection[int] = ()):
    """Capture a region once; on a GPU explain its words and compare its first launches with eager.

    On a GPU a launch is a CUDA graph whose addresses are patched: no input is copied, results and everything between
    come from the caching allocator in each call, and the pools of the captures are dropped. On the CPU the recorded
    operators run on the new tensors (common/capture/host_graph.py), so that the logic around it can be tested.

    Args:
        fn: takes tensors and returns tensors in any structure. It runs a few times here on copies of the examples; what
            it does to memory besides its arguments happens then too.
        inputs: examples on one device, strided and neither conjugated nor negated.
        unwritten: indices of results that eager leaves unwritten.

    Returns:
        the region, with `launch`, `unflatten` and `release`.

    Raises:
        RegionRefused: the region cannot be launched on other memory; the message names the node and its kernel.
    """
    if torch.is_inference_mode_enabled():
        # Inference tensors count no versions, by which writes to inputs are found.
        with torch.inference_mode(False), torch.no_grad():
            return capture(fn, inputs, unwritten)
    device, fn = inputs[0].device, _checked(fn)
    if device.type == "cpu":
        return HostRegion(fn, inputs)
    from common.capture.parameterized.analysis import analyse
    from common.capture.parameterized.gpu import GpuRegion
    from common.capture.parameterized.verify import Verification

    analysis = analyse(fn, inputs, device)
    try:
        analysis.check()
        region = GpuRegion(fn, analysis, device)
        try:
            check = Verification(region, fn, device, unwritten)
            _prove(check, analysis, inputs)
            region.report["inexact"] = sorted(check.inexact)
        except BaseException:
            region.release()
            raise
    finally:
        analysis.release()
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


def _prove(check, analysis, inputs):
    """Compare launches with eager, then those that have other words in the place of unexplained ones."""
    check.spoil(analysis.all_bytes())
    try:
        for _ in range(_NUM_COMPARED):
            check.run(inputs)
    except RegionRefused as error:
        if not analysis.unexplained:
            raise
        words = analysis.name(analysis.unexplained)
        raise RegionRefused(
            f"{error}; words of parameters differ between two captures and are no address: {words}"
        ) from None
    check.prove_unread(analysis, inputs)
