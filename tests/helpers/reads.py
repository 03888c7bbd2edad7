"""Counts of values that Python reads from tensors, each of which waits for a GPU."""

from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
# No operator is called for these where a tensor lies on the host.
_METHODS = "tolist", "numpy", "cpu"


class Reads(TorchDispatchMode):
    """`count`: the reads while this is entered."""

    def __init__(self):
        super().__init__()
        self.count, self._patches = 0, ExitStack()

    def __enter__(self):
        for name in _METHODS:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._counting(name)))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _counting(self, name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            self.count += 1
            return original(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in _READS
        return func(*args, **kwargs or {})
