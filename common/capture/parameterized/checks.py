"""Arguments and results of a region: checks of examples, of the inputs of a call, and of results."""

import enum
import itertools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from common.capture.parameterized import memory
from common.capture.parameterized.errors import RegionRefused

# Results that are no tensor and come back as they were captured.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_RETURN = "which may hold tensors: return tensors in lists, tuples and dicts"


def check_arguments(fn, example_inputs, verify: int) -> list[Any]:
    """Check the arguments of `parameterize`.

    Args:
        fn: the function.
        example_inputs: its inputs.
        verify: launches to compare with eager.

    Returns:
        the examples as a list.

    Raises:
        ValueError: fn cannot be called, or the examples or `verify` cannot be used.
    """
    if not callable(fn):
        raise ValueError(f"fn is a {type(fn).__name__}, which cannot be called")
    if isinstance(example_inputs, (torch.Tensor, dict, str)) or not hasattr(example_inputs, "__iter__"):
        raise ValueError(f"example_inputs is a {type(example_inputs).__name__}: pass a list of tensors")
    check_verify(verify)
    inputs = list(example_inputs)
    check_examples(inputs)
    return inputs


def check_verify(verify: Any) -> None:
    """Check a number of launches.

    Args:
        verify: any object.

    Raises:
        ValueError: it is no number of launches.
    """
    if not isinstance(verify, int) or verify < 0:
        raise ValueError(f"verify is {verify!r}: it is a number of launches, 0 or more")


def reason_against(tensor: Any) -> str:
    """Return the reason why a region cannot take a tensor, whatever its shape.

    Args:
        tensor: any object.

    Returns:
        the reason; empty where a region can take it.
    """
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}: a region takes tensors alone"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "is inside a transform of torch.func: a region takes tensors with memory of their own"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}: a region takes tensors with memory of their own"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is {'nested' if tensor.is_nested else tensor.layout}: a region takes strided tensors"
    if tensor.is_conj() or tensor.is_neg():
        return "is lazily conjugated or negated: call tensor.resolve_conj().resolve_neg()"
    return ""


def check_examples(inputs: list[Any]) -> None:
    """Check that examples can be captured.

    Args:
        inputs: the examples.

    Raises:
        ValueError: there are none, one is not a strided tensor of the first one's device, or two overlap.
    """
    if not inputs:
        raise ValueError("a region needs at least one input tensor")
    for index, tensor in enumerate(inputs):
        reason = reason_against(tensor)
        if reason:
            raise ValueError(f"example {index} {reason}")
        if tensor.device.type not in ("cuda", "cpu"):
            raise ValueError(f"example {index} is on {tensor.device}: a region runs on a GPU or on the CPU")
        if tensor.device != inputs[0].device:
            raise ValueError(f"example {index} is on {tensor.device}, example 0 on {inputs[0].device}")
    check_separate(inputs)


def check_separate(inputs) -> None:
    """Check that no two tensors overlap: a launch moves each by itself.

    Args:
        inputs: tensors of one device.

    Raises:
        ValueError: two overlap.
    """
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + memory.extent(tensor), index)
        for index, tensor in enumerate(inputs)
        if tensor.numel()
    )
    for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise ValueError(f"inputs {min(one, other)} and {max(one, other)} share memory: pass one, or a copy")


def signature(tensor: torch.Tensor) -> tuple:
    """Return what a region fixes of an input: shape, strides, dtype and device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def checked(fn):
    """Wrap a function that is captured, to check what no launch could do again.

    Args:
        fn: the region.

    Returns:
        the function. It raises RegionRefused where a result is neither a tensor nor a plain value, or an input has
        another shape or other memory after it.
    """

    def run(*inputs):
        before = [(signature(tensor), tensor.data_ptr()) for tensor in inputs]
        result = fn(*inputs)
        for index, tensor in enumerate(inputs):
            if before[index] != (signature(tensor), tensor.data_ptr()):
                raise RegionRefused(f"the region gives input {index} another shape or other memory in place")
        for index, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                reason = reason_against(leaf)
            else:
                reason = (
                    "" if isinstance(leaf, _PLAIN) else f"is a {type(leaf).__name__}, which may hold tensors: {_RETURN}"
                )
            if reason:
                raise RegionRefused(f"result {index} {reason}")
        return result

    return run
