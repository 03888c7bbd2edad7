"""What graphs of both devices share: their error, and the check that static inputs are as they were captured."""

import torch


class CaptureError(RuntimeError):
    """What no graph can hold, or a replay that would not be right; names the operator and the user's file:line."""


def signature(tensor: torch.Tensor) -> tuple:
    """What a graph has fixed of a tensor: shape, stride, dtype and address."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr()


def check_static_inputs(captured: list[tuple[torch.Tensor, tuple]]) -> None:
    """CaptureError where one of these (tensor, signature at the capture) has another signature now."""
    for index, (tensor, before) in enumerate(captured):
        now = signature(tensor)
        if now != before:
            names = ("shape", "stride", "dtype", "data_ptr")
            changes = [f"{name} {a} -> {b}" for name, a, b in zip(names, before, now, strict=True) if a != b]
            raise CaptureError(f"static input {index} is not as captured: {', '.join(changes)}")
