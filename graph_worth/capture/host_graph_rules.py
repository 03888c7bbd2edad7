"""The calls that a host graph refuses because a CUDA capture could not hold them, each with the reason."""

import os
import sys
from types import FrameType
from typing import Any

import torch

# Reasons: code compares them as they are, and errors carry them beside their text.
READS = "reads a value on the host, a CUDA capture cannot wait for it"
LENGTHS = "reads the lengths on the host, its shape depends on them"
SHAPE = "has a shape that depends on values, a graph's shapes are fixed"
NEW = "makes a tensor from host data: make it before the capture and copy into it"
RANDOM = "reads or sets the random state on the host: do it before the capture"
RESIZES = "moves a tensor's memory, a graph's addresses are fixed"
COLLECTIVE = "is a collective of torch.distributed, which a host graph cannot record: NCCL's are captured on a GPU"
UNKNOWN_GENERATOR = "draws from a generator that is unknown to the pool: call register_generator"
# Of a tensor of the host: nothing waits for the GPU.
NO_MATTER_ON_HOST = (READS, SHAPE)
# Of a replay.
GONE = "reads a tensor that is gone: its memory was freed after the capture"
MOVED = "reads a tensor whose memory moved after the capture"

# Seen as calls of the Python API, before or instead of an operator.
CONVERSIONS = ("item", "__bool__", "__int__", "__index__", "__float__", "__complex__", "__format__")
FORBIDDEN_FUNCTIONS = {
    **{getattr(torch.Tensor, name): (f"Tensor.{name}", READS) for name in (*CONVERSIONS, "cpu")},
    torch.equal: ("torch.equal", READS),
    torch.allclose: ("torch.allclose", READS),
}
SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)

_FORBIDDEN_OPERATORS = {
    "aten::_local_scalar_dense": READS,
    "aten::item": READS,
    "aten::is_nonzero": READS,
    "aten::equal": READS,
    "aten::allclose": READS,
    # On a GPU they look whether the solver has failed.
    **{f"aten::{name}": READS for name in ("_linalg_check_errors", "_linalg_eigh", "_linalg_svd")},
    "aten::_coalesce": SHAPE,
    "aten::_pack_padded_sequence": LENGTHS,
    "aten::lift_fresh": NEW,
    "aten::resize_": RESIZES,
    "aten::resize_as_": RESIZES,
    "aten::set_": RESIZES,
}

# Replaced in their modules or classes while a capture runs: no operator, and the function mode is off inside of
# a function that it has seen, such as torch.autograd.grad with the Python code of a custom backward.
_READERS = ("tolist", "numpy", "__array__", "__dlpack__", "__repr__")
_RANDOM_NAMES = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
PATCHED: list[tuple[Any, str, str]] = [
    *((torch.Tensor, name, READS) for name in _READERS),
    *((module, name, RANDOM) for module in (torch, torch.random) for name in _RANDOM_NAMES),
    *((module, "to_dlpack", READS) for module in (torch, torch.utils.dlpack)),
    (torch, "frombuffer", NEW),
]

# Their results hold nothing until a later operator writes it.
_ALLOCATION_NAMES = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
ALLOCATIONS = {f"aten::{name}" for name in _ALLOCATION_NAMES}

# They change the shape that a tensor object has, not what is in memory.
IN_PLACE_VIEWS = {f"aten::{name}" for name in ("as_strided_", "detach_", "squeeze_", "t_", "transpose_", "unsqueeze_")}


def reason_against(func, args, kwargs) -> str | None:
    """Return the reason why a graph cannot hold this call of an operator, or None."""
    name = func._schema.name
    if name == "aten::lift_fresh" and not args[0].numel():
        return None  # nothing is copied
    if name in _FORBIDDEN_OPERATORS:
        return _FORBIDDEN_OPERATORS[name]
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        return COLLECTIVE
    if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # One number stored through a mask is a masked_fill on the GPU, which waits for nothing.
        fills = name != "aten::index" and args[2].dim() == 0
        return SHAPE if masked and not fills else None
    if name == "aten::repeat_interleave":
        return None if kwargs.get("output_size") is not None else SHAPE
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        return READS
    return SHAPE if torch.Tag.dynamic_output_shape in tags else None


_LIBRARY = (os.path.dirname(os.__file__) + os.sep,)
_INVISIBLE = (
    os.path.dirname(__file__) + os.sep + "host_graph",
    os.path.dirname(__file__) + os.sep + "dispatch_modes",
    os.path.join(os.path.dirname(__file__), "parameterized") + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "your_step") + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
)


def is_of_library(path: str) -> bool:
    """Return whether a file is one of Python's own library, and of no installed package."""
    return path.startswith(_LIBRARY) and not any(part in path for part in ("site-packages", "dist-packages"))


def user_line() -> str:
    """file:line of the innermost frame that is neither in torch or Python's library nor in a module of host graphs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_INVISIBLE) and not is_of_library(path):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
