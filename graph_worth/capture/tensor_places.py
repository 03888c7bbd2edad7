"""Places of tensors: ranges of bytes, tensors over ranges, and outputs as places in an allocation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class _Range:
    """Bytes of the device for torch.as_tensor."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return memory of a GPU as a uint8 tensor that does not own it."""
    return torch.as_tensor(_Range(address, size), device=device)


def fill_inactive(segments: list[dict], value: int, device: torch.device) -> None:
    """Fill each byte of a GPU's allocator segments that no tensor has."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                bytes_at(address, block["size"], device).fill_(value)
            address += block["size"]


def fill_free(device: torch.device, value: int) -> None:
    """Fill each byte that the allocator of a device with an index holds free for new tensors; nothing without a GPU."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    # Other pools are those of graphs.
    pool = (device.index, (0, 0))
    segments = torch.cuda.memory.memory_snapshot()
    fill_inactive([part for part in segments if (part["device"], part["segment_pool_id"]) == pool], value, device)


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a strided tensor's first to its last element, 0 for one without elements."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a strided tensor to memory of its own with the same strides; elements that overlap stay so.

    The copy is a leaf, and requires a gradient where `tensor` does.
    """
    source = tensor.detach()
    memory = torch.empty(extent(source) // source.element_size(), dtype=source.dtype, device=source.device)
    copy = memory.as_strided(source.shape, source.stride())
    flat = source.as_strided(memory.shape, (1,)) if source.numel() else source.reshape(-1)
    memory.copy_(flat)
    return copy.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Place:
    """A tensor that a region returns, as a place in one of its allocations.

    Attributes:
        allocation: index of the allocation; the inputs come first. -1 for a tensor without elements.
        offset: bytes from the allocation's base.
        metadata: size, stride, dtype and device.
    """

    allocation: int
    offset: int
    metadata: dict[str, Any]


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what makes a strided tensor besides its memory: size, stride, dtype and device."""
    return {"size": tuple(tensor.shape), "stride": tensor.stride(), "dtype": tensor.dtype, "device": tensor.device}


def find(address: int, allocations: Sequence[tuple]) -> int:
    """Return the index of the allocation (base, bytes and more) that holds a byte, -1 for none."""
    for index, (base, size, *_) in enumerate(allocations):
        if base <= address < base + size:
            return index
    return -1
