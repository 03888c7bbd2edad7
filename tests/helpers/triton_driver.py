"""A driver of Triton for tests without a GPU: kernels are compiled for one, and launches are noted instead of made.

Compiling, specialising and the launcher's Python are Triton's own; only what is in C, and needs libcuda, is not.
"""

import types

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher


class Launcher:
    """The launcher of a compiled kernel: it calls `launch` where Triton would call C."""

    def __init__(self, metadata, launch):
        self.metadata, self.launch = metadata, launch


class Spliced(Launcher):
    """In the order of Triton 3.5 and 3.6."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)


class InTuple(Launcher):
    """In the order of Triton 3.7."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        hooks = (launch_metadata, enter, leave)
        self.launch(
            x, y, z, stream, function, False, False, metadata, *hooks, None, None, "annotations", b"types", arguments
        )


class Reversed(Launcher):
    """In no version's order."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.launch(x, y, z, stream, function, metadata, *arguments[::-1])


class Installed(CudaLauncher):
    """The installed version's own, as its constructor leaves it, which would compile."""

    scratch = 0

    def __init__(self, metadata, launch):
        for name in ("profile_scratch_size", "profile_scratch_align", "launch_cooperative_grid", "launch_pdl"):
            setattr(self, name, getattr(metadata, name))
        self.num_ctas, self.global_scratch_size, self.global_scratch_align = 1, self.scratch, 1
        self.arg_annotations, self.kernel_signature, self.launch = "annotations", b"types", launch


class WithScratch(Installed):
    scratch = 16


class Driver:
    """form: one of the above. launches: the arguments that C would have got, in order."""

    def __init__(self, form=Installed):
        # Numbers that no real device has: kernels keep what they know by device.
        self.device, self.stream = 64, 7
        self.launches, self.num_loaded = [], 0
        self.launcher_cls = lambda src, metadata: form(metadata, lambda *order: self.launches.append(order))
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**20}, load_binary=self._load
        )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        assert device == self.device
        return self.stream

    def _load(self, name, kernel, shared, device):
        self.num_loaded += 1
        return object(), 1000 + self.num_loaded, 0, 0, 1024


def plain(order):
    """A launch without hooks, tensors as their addresses."""
    if isinstance(order, tuple):
        return tuple(map(plain, order))
    if isinstance(order, torch.Tensor):
        return order.data_ptr()
    return order if isinstance(order, int | float | str | bytes) else None
