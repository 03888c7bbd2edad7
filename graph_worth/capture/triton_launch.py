"""Launches of Triton kernels at the host cost of an eager operator.

    scale = Launch(_scale, factor, BLOCK, num_warps=4)
    scale((num_blocks, 1, 1), (x, y))                      # _scale[num_blocks, 1, 1](x, y, factor, BLOCK, num_warps=4)

`kernel[grid](...)` binds its arguments, specialises each and looks the kernel up by all of them, at every call: 20 to
50 us of host time, where an eager operator costs 3.4 to 7.1. A Launch goes that way once, and then hands the addresses
to the launcher that belongs to the compiled kernel. The kernel, its arguments and so its results are the same.

What Triton compiles for must be the same, too. Numbers, constexprs and options are fixed in a Launch, the device and
which addresses are divisible by 16 are looked at in each call, and the dtypes are the caller's: one Launch for each.

`kernel[grid](...)` stays the way while torch.compile traces, since it must see the kernel, under TRITON_INTERPRET=1,
and where Triton launches in a way that is not known here, which a warning says once. Hooks that are called at Triton's
launches see only those that go this way.
"""

import copy
import warnings
from typing import Any

import torch

try:
    from triton.runtime.jit import JITFunction
except ModuleNotFoundError:  # a machine without a GPU
    JITFunction = ()

UNKNOWN = (
    "Triton launches a kernel in a way that graph_worth/capture/triton_launch.py does not know: "
    "through kernel[grid], at more cost"
)
_is_compiling = torch.compiler.is_compiling
# None where torch was built without CUDA; then no Launch is direct, and none is called.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Launch:
    """kernel[grid](*tensors, *numbers, *fixed, **options), on the current device and stream, also while capturing.

    kernel: of @triton.jit; its parameters are pointers, then numbers, then what is fixed: numbers that do not change,
    and constexprs. options: further constexprs by name, and num_warps and the like. Make a Launch once for each set of
    these and of the tensors' dtypes, and keep it: it keeps what it has prepared.
    """

    def __init__(self, kernel, *fixed, **options):
        self.kernel, self.fixed, self.options = kernel, fixed, options
        # Before anything that torch.compile cannot trace: torch 2.11 cannot tell the type of a kernel.
        self.direct = not _is_compiling() and isinstance(kernel, JITFunction) and _current_stream is not None
        self.prepared = {}

    def __call__(self, grid, tensors, numbers=()) -> None:
        """grid: three numbers. tensors: on the current device, one for each pointer, of the same dtypes in each call.

        numbers: ints from 0 on, which the kernel names in do_not_specialize: they may differ from call to call.
        """
        if _is_compiling() or not self.direct:
            self.kernel[grid](*tensors, *numbers, *self.fixed, **self.options)
            return
        device = _current_device()
        pointers = [tensor.data_ptr() for tensor in tensors]
        key = _key(device, pointers)
        launch = self.prepared.get(key)
        # A number of more than 31 bits would have another type.
        wide = numbers and max(numbers) >> 31
        if launch and not wide:
            launch(grid, _current_stream(device), pointers, numbers)
            return
        compiled = self.kernel[grid](*tensors, *numbers, *self.fixed, **self.options)
        if not wide:
            self._prepare(key, compiled, len(tensors), len(numbers))

    def bound(self, grid, tensors, numbers=(), num_fresh: int = 0):
        """Return launch(*fresh) of these arguments, which costs the host half of a call; None if nothing is prepared.

        The first num_fresh tensors are each launch's own, with the dtypes of those here. All others keep their
        addresses: the caller keeps them alive. As after a call with the same arguments, which prepares the launch.
        """
        if not self.direct or (numbers and max(numbers) >> 31):
            return None
        device = _current_device()
        pointers = [tensor.data_ptr() for tensor in tensors]
        launch, kept = self.prepared.get(_key(device, pointers)), tensors[num_fresh:]
        if launch is None:
            return None
        places = range(num_fresh)

        def again(*fresh):
            for place in places:
                pointers[place] = pointer = fresh[place].data_ptr()
                if pointer & 15:
                    self(grid, (*fresh, *kept), numbers)
                    return
            launch(grid, _current_stream(device), pointers, numbers)

        return again

    def _prepare(self, key, compiled, num_tensors, num_numbers):
        num_given = num_tensors + num_numbers
        assert all(parameter.do_not_specialize for parameter in self.kernel.params[num_tensors:num_given])
        named = self.kernel.arg_names[num_given + len(self.fixed) :]
        launch = _direct(compiled, num_given, (*self.fixed, *[self.options[name] for name in named]))
        if launch:
            self.prepared[key] = launch
        else:
            self.direct = False
            # One text and one place: printed once, however many kernels there are.
            warnings.warn(UNKNOWN, stacklevel=1)


def _key(device, pointers):
    """Key of a prepared launch: the device, and which addresses are divisible by 16 unless all are."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return (device, *[pointer & 15 == 0 for pointer in pointers]) if together & 15 else device


def _direct(compiled, num_given, fixed):
    """launch(grid, stream, pointers, numbers) of Triton's compiled kernel, whose further arguments are fixed; or None.

    Triton itself calls compiled.run(x, y, z, stream, function, metadata, three of hooks, *arguments), with constexprs
    among the arguments (3.5 to 3.7, triton/runtime/jit.py). That adds what belongs to the kernel and calls run.launch,
    which is in C, takes addresses for pointers, and wants another order in each version. So a copy of run is called
    with placeholders, and its launch is a function that notes the order. None where anything is not as expected, and
    for kernels with scratch memory, which run allocates at each launch.
    """
    grid, stream = (object(), object(), object()), object()
    given, calls = tuple(object() for _ in range(num_given)), []
    arguments = (*given, *fixed)
    try:
        run = copy.copy(compiled.run)
        in_c, run.launch = run.launch, lambda *order: calls.append(order)
        run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        (order,) = calls
    except (AttributeError, TypeError, ValueError):
        return None
    as_tuple = order[-1] == arguments  # since 3.7
    leading, rest = (order[:-1], order[-1]) if as_tuple else (order[: -len(arguments)], order[-len(arguments) :])
    start, between = leading[:4], leading[4:]
    # A placeholder anywhere else would be launched as what it is.
    if start != (*grid, stream) or rest != arguments or any(value in (*grid, stream, *given) for value in between):
        return None
    if as_tuple:
        return lambda grid, stream, pointers, numbers: in_c(*grid, stream, *between, (*pointers, *numbers, *fixed))
    return lambda grid, stream, pointers, numbers: in_c(*grid, stream, *between, *pointers, *numbers, *fixed)
