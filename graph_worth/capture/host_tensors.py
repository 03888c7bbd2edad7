"""Tensors that a step on a CPU makes and that would stay on the CPU beside a GPU: nothing waits for a read of them.

`torch.arange(1, 3).tolist()` is such a read. A factory without a device gives one, and so does an operator on such
tensors alone, until `.to`, `.cuda`, a device argument or an operator with a tensor of the model takes it to the GPU.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable

import torch
from torch.utils import _device
from torch.utils._pytree import tree_leaves


class HostTensors:
    """Tensors of the host that a step has made.

    Args:
        refuse: refuse(*call) of a call that has made one which the step then takes to the GPU.
    """

    def __init__(self, refuse: Callable):
        self._refuse, self.in_factory = refuse, False
        # Storage -> the call that has made it, or None, and whether of host data.
        self._storages: dict[int, tuple[tuple | None, bool]] = {}

    def are_host(self, values: Iterable) -> bool:
        """Return whether there are tensors among these values, and all of them are of the host."""
        tensors = _strided(values)
        return bool(tensors) and all(_address(tensor) in self._storages for tensor in tensors)

    @contextlib.contextmanager
    def calling(self, func, args, kwargs):
        """Within it a function of torch's API runs."""
        before, tensors = self.in_factory, _strided(tree_leaves((args, kwargs)))
        to_device = kwargs.get("device") is not None or (func is torch.Tensor.cuda)
        if func is torch.Tensor.to:
            to_device |= any(isinstance(value, (torch.device, str, torch.Tensor)) for value in args[1:])
        if to_device:
            self._meet(tensors, is_copy=True)
        is_factory = func in _device._device_constructors() and _device.CURRENT_DEVICE is None
        self.in_factory = is_factory and not to_device and not tensors
        try:
            yield
        finally:
            self.in_factory = before

    def makes(self, func) -> bool:
        """Return whether an operator puts host data into a tensor of the host."""
        return self.in_factory and func._schema.name == "aten::lift_fresh"

    def before(self, leaves: list) -> None:
        """Look at the arguments of an operator: a tensor of the host beside one of the model goes to the GPU."""
        tensors = _strided(leaves)
        if not (self.in_factory or self.are_host(tensors)):
            self._meet(tensors)

    def after(self, func, leaves: list, result, *call) -> None:
        """Note what an operator has made; call: where it did in a factory."""
        is_host = self.in_factory or self.are_host(leaves)
        calls = [(call or None, self.makes(func)), *map(self._call_of, _strided(leaves))]
        maker = max(calls, key=lambda known: (known[0] is not None, known[1]))
        for tensor in _strided(tree_leaves(result)):
            if is_host:
                self._storages[_address(tensor)] = maker if tensor.numel() else (None, False)
            else:
                # Perhaps where an earlier storage was.
                self._storages.pop(_address(tensor), None)

    def _call_of(self, tensor):
        return self._storages.get(_address(tensor), (None, False))

    def _meet(self, tensors, is_copy=False):
        for call, of_data in [self._storages.pop(_address(tensor), (None, False)) for tensor in tensors]:
            # Without host data it becomes no tensor of the GPU but by a copy: a number beside it is an argument.
            if call and (of_data or is_copy):
                self._refuse(*call)


def _address(tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


def _strided(values):
    return [value for value in values if isinstance(value, torch.Tensor) and value.layout == torch.strided]


# The library whose one_hot stands in, where one does.
_REPLACED: list[torch.library.Library] = []


@contextlib.contextmanager
def one_hot_as_on_gpu():
    """Within it, one_hot with a number of classes reads nothing on the host, in the backward pass neither."""

    def one_hot(values, num_classes=-1):
        number = int(values.max()) + 1 if num_classes == -1 else num_classes
        zeros = torch.zeros(*values.shape, number, dtype=torch.long, device=values.device)
        return zeros.scatter_(-1, values.unsqueeze(-1), 1)

    if _REPLACED:
        # The doctor's look around a capture's: torch 2.11 refuses a second kernel.
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        _REPLACED.append(library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for key in ("CPU", "AutogradCPU"):
                library.impl("one_hot", one_hot, key)
        try:
            yield
        finally:
            _REPLACED.clear()
