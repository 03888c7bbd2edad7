"""`parameterize`: a captured function that runs on any tensors like its examples."""

import warnings
from collections.abc import Collection
from typing import Any

import torch

from common.capture.checks import CaptureError
from common.capture.parameterized import checks
from common.capture.parameterized.errors import RegionRefused
from common.capture.parameterized.host import HostRegion

# (torch, CUDA) with which launches were verified on a GPU.
_TESTED = (("2.11", "13.0"),)
_told: set[str] = set()


class Parameterized:
    """A captured function. Call it with tensors like the examples; the results belong to the caller.

    Made by `parameterize`. `report` says what was captured.

    Args:
        region: the captured region of a device.
        example_inputs: the inputs that it was captured with.
    """

    def __init__(self, region, example_inputs: list[torch.Tensor]):
        self._region = region
        self._signatures = [checks.signature(tensor) for tensor in example_inputs]
        self._last: list[int] = []

    @property
    def report(self) -> dict[str, Any]:
        """Nodes, addresses, bytes and build times; launches so far, nodes patched in them and host seconds for it."""
        region = self._region
        return {
            **region.report,
            "launches": region.num_launches,
            "patched": region.num_patched,
            "patch_s": region.patch_s,
        }

    def __call__(self, *inputs):
        """Run the region.

        Args:
            *inputs: tensors of the shapes, strides, dtypes and devices of the examples.

        Returns:
            new tensors in the structure that the function returned. They carry no autograd history.

        Raises:
            ValueError: an input is not like its example, two inputs overlap, or one that is written requires a
                gradient; nothing is launched.
            CaptureError: the region was released.
        """
        self._check(inputs)
        results, _ = self._region.launch(list(inputs))
        return self._region.unflatten(results)

    def __reduce_ex__(self, protocol):
        """Refuse copies and pickles: two objects would launch, and free, one graph."""
        raise TypeError("a captured region cannot be copied or pickled: parameterize its function again")

    def release(self) -> None:
        """Free the graph. Results of earlier calls stay; later calls raise a CaptureError."""
        self._region.release()

    def _check(self, inputs):
        if len(inputs) != len(self._signatures):
            raise ValueError(f"{len(inputs)} inputs where the region was captured with {len(self._signatures)}")
        for index, (tensor, before) in enumerate(zip(inputs, self._signatures, strict=True)):
            reason = checks.reason_against(tensor)
            if reason:
                raise ValueError(f"input {index} {reason}")
            now = checks.signature(tensor)
            if now != before:
                names = ("shape", "strides", "dtype", "device")
                changes = [f"{name} {a} -> {b}" for name, a, b in zip(names, before, now, strict=True) if a != b]
                raise ValueError(f"input {index} is not as captured: {', '.join(changes)}")
        bases = [tensor.data_ptr() for tensor in inputs]
        if bases != self._last:
            checks.check_separate(inputs)
            self._last = bases
        if torch.is_grad_enabled():
            for index in self._region.written:
                if inputs[index].requires_grad:
                    raise ValueError(
                        f"input {index} requires a gradient and the region writes it, which autograd would not see: "
                        "pass it detached, or call under torch.no_grad()"
                    )


def parameterize(fn, example_inputs, verify: int = 2) -> Parameterized:
    """Capture a function once and launch it on other memory from then on.

    On a GPU the launch is a CUDA graph whose addresses are patched: no input is copied, results and everything between
    come from the caching allocator in each call, and the pools of the captures are dropped. On the CPU the recorded
    operators run on the new tensors (common/capture/host_graph.py), so that the logic around it can be tested.

    Args:
        fn: takes tensors and returns tensors in any structure. It runs a few times here on copies of the examples; what
            it does to memory besides its arguments happens then too. A backward pass inside is fine
            (torch.autograd.grad).
        example_inputs: tensors of one device that do not overlap.
        verify: launches that are compared with eager runs, bit for bit, before this returns.

    Returns:
        the callable.

    Raises:
        ValueError: an example is not a strided tensor of one device, two overlap, or another argument is none.
        RegionRefused: the region cannot be launched on other memory; the message names the node and its kernel.
    """
    inputs = checks.check_arguments(fn, example_inputs, verify)
    if inputs[0].device.type == "cuda":
        verify = max(verify, untested())
    return Parameterized(capture(fn, inputs, verify), inputs)


def capture(fn, inputs: list[torch.Tensor], verify: int, unwritten: Collection[int] = ()):
    """Capture a region; on a GPU explain and verify it.

    Args:
        fn: the region.
        inputs: examples on one device.
        verify: launches to compare with eager, on a GPU.
        unwritten: indices of results that eager leaves unwritten.

    Returns:
        the region.

    Raises:
        RegionRefused: with the node and its kernel.
    """
    if torch.is_inference_mode_enabled():
        # Inference tensors count no versions, by which writes to inputs are found.
        with torch.inference_mode(False), torch.no_grad():
            return capture(fn, inputs, verify, unwritten)
    device, fn = inputs[0].device, checks.checked(fn)
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
            _prove(check, analysis, inputs, verify)
            region.report["inexact"] = sorted(check.inexact)
        except BaseException:
            region.release()
            raise
    finally:
        analysis.release()
    return region


def _prove(check, analysis, inputs, verify):
    """Compare launches with eager: as many as are asked for, and what addresses in a code and other words need."""
    if analysis.encoded:
        verify = max(verify, 2)
    if verify or analysis.unexplained:
        check.spoil(analysis.all_bytes())
    try:
        for _ in range(verify):
            check.run(inputs)
    except RegionRefused as error:
        raise (_with_words(error, analysis) if analysis.unexplained else error) from None
    check.prove_unread(analysis, inputs)


def _with_words(error, analysis) -> RegionRefused:
    """The refusal with the words that may be its cause, named by node and kernel."""
    words = f"words of parameters differ between two captures and are no address: {analysis.name(analysis.unexplained)}"
    return RegionRefused(f"{error}; {words}")


def untested() -> int:
    """Return the launches to verify because this torch or CUDA was not tested; says so once.

    Returns:
        0 where it was tested.
    """
    torch_version = ".".join(torch.__version__.split(".")[:2])
    if (torch_version, str(torch.version.cuda)) in _TESTED:
        return 0
    if "versions" not in _told:
        _told.add("versions")
        warnings.warn(
            f"parameterized launches were not tested with torch {torch_version} and CUDA {torch.version.cuda}: "
            "the first launches of each region are compared with eager",
            stacklevel=3,
        )
    return 2


__all__ = ["CaptureError", "Parameterized", "parameterize"]
