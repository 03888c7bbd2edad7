"""The error of graphs on both devices, and the check that static inputs are as they were captured."""

from collections.abc import Sequence

import torch


class CaptureError(RuntimeError):
    """A graph cannot hold an operator, or a replay would be wrong; it names the operator and the user's file:line.

    reason: a constant of host_graph_rules, where one of them says why. place: file:line, where known.
    log: lines of CUDA's error log, of calls that failed in the capture.
    """

    def __init__(self, message: str, reason: str = "", place: str = "", log: Sequence[str] = ()):
        super().__init__(message)
        self.reason, self.place, self.log = reason, place, list(log)


class RegionRefused(CaptureError):
    """A region cannot be launched on other memory: the message names the node and the reason."""


def signature(tensor: torch.Tensor) -> tuple:
    """Return the properties of a tensor that a graph fixes: shape, stride, dtype and address."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr()


def check_static_inputs(captured: list[tuple[torch.Tensor, tuple]]) -> None:
    """CaptureError where one of these (tensor, signature at the capture) has another signature now."""
    for index, (tensor, before) in enumerate(captured):
        now = signature(tensor)
        if now != before:
            names = ("shape", "stride", "dtype", "data_ptr")
            changes = [f"{name} {a} -> {b}" for name, a, b in zip(names, before, now, strict=True) if a != b]
            raise CaptureError(f"static input {index} is not as captured: {', '.join(changes)}")
