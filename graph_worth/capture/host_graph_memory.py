"""The storages that host graphs read and write: where a tensor lies, who keeps it, and what spoils it."""

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graph_worth.capture import host_graph_rules as rules
from graph_worth.capture.graph_error import CaptureError


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as its place in a storage, hashable. `storage` is the address of the StorageImpl."""

    storage: int
    offset: int
    shape: tuple
    stride: tuple
    dtype: torch.dtype

    def over(self, storage) -> torch.Tensor:
        """A plain tensor of this view, with a version counter of its own: replays are not seen by autograd."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


# Private, and the only way to see saved tensors of autograd.
_use_count = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def _wrapper_references() -> int:
    """References that the Python object of a storage itself holds once it was made; differs between versions."""
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    return _use_count(address) - 1


_WRAPPER_REFERENCES = _wrapper_references()


class OwnedStorage:
    """A storage that a graph of the pool produced. The pool refers to it by the tensors in here and no others."""

    def __init__(self, storage, dtype, constant):
        self.address = storage._cdata
        self.num_bytes = storage.nbytes()
        self.owner = None
        self.poisoned = False
        self.constant = constant
        # All bits set is NaN in every IEEE format and in the FP8 formats with NaN.
        self._pattern = 0xFF if dtype.is_floating_point or dtype.is_complex else 1 if dtype is torch.bool else 0x5A
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.num_bytes,), (1,))
        self._tensors = {}

    def tensor(self, view: View) -> torch.Tensor:
        """Return the tensor of this view, the same one at each call."""
        if view not in self._tensors:
            self._tensors[view] = view.over(self.bytes.untyped_storage())
        return self._tensors[view]

    def held_outside(self) -> bool:
        """Return whether a tensor outside the pool keeps the storage: a user's, or one that autograd saved."""
        return _use_count(self.address) > 1 + len(self._tensors) + _WRAPPER_REFERENCES

    def poison(self) -> None:
        """Fill the storage with NaN, or with 0x5A bytes or true by its dtype; not twice, and not what is constant."""
        if not (self.poisoned or self.constant):
            self.bytes.fill_(self._pattern)
            self.poisoned = True


class ExternalStorage:
    """A storage from outside the pool, not kept alive: read through its bare address after a check."""

    def __init__(self, storage, operator, line):
        self._reference = StorageWeakRef(storage)
        self._pointer, self._is_empty = storage.data_ptr(), not storage.nbytes()
        self._reader, self._line = f"{operator} at {line}", line
        # Owns no memory, so that the owner's memory is freed when the owner drops it.
        self._shell = torch._C._construct_storage_from_data_pointer(self._pointer, storage.device, storage.nbytes())
        self._tensors = {}

    def tensor(self, view: View) -> torch.Tensor:
        """Return the tensor of this view, the same one at each call."""
        if view not in self._tensors:
            self._tensors[view] = view.over(self._shell)
        return self._tensors[view]

    def check(self) -> None:
        """Raise a CaptureError where the storage was freed, or its memory has moved."""
        if self._is_empty:
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            why = "an input or parameter was replaced, copy into it instead"
            raise CaptureError(f"{self._reader} {rules.GONE} ({why})", rules.GONE, self._line)
        if storage.data_ptr() != self._pointer:
            raise CaptureError(f"{self._reader} {rules.MOVED} (resize_, .data)", rules.MOVED, self._line)
