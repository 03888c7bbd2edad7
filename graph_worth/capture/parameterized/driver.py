"""The calls of CUDA's driver that parameterized launches need, by the package cuda-bindings.

torch's CUDA wheels bring it.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from graph_worth.capture.graph_error import RegionRefused

try:
    from cuda.bindings import driver as cu
except ImportError:
    cu: Any = None  # type: ignore[no-redef]

_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
_MAX_PARAMETERS = 1 << 12


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


def require() -> None:
    """RegionRefused without cuda-bindings, or with those of another CUDA than 13."""
    if cu is None or cu.CUDA_VERSION // 1000 != 13:
        raise RegionRefused("parameterized launches need cuda-bindings: pip install 'cuda-bindings==13.*'")


def call(name: str, *args) -> Any:
    """Call a function of the driver; return its result, a list where there are several, or raise a DriverError."""
    error, *results = getattr(cu, name)(*args)
    check(name, error)
    return results[0] if len(results) == 1 else results


def check(name: str, error) -> None:
    """Raise a DriverError for a CUresult of the function `name`, unless it is CUDA_SUCCESS."""
    if error:
        raise DriverError(f"{name}: {getattr(error, 'name', error)}")


def kernel_arguments(params) -> list[tuple[int, bytes]]:
    """Return (offset in the kernel's parameter space, bytes) of each parameter, or of the packed buffer as one."""
    if params.kernelParams:
        pointers = (ctypes.c_void_p * _MAX_PARAMETERS).from_address(params.kernelParams)
        return [(offset, ctypes.string_at(pointers[i] or 0, size)) for i, (offset, size) in enumerate(_layout(params))]
    if not params.extra or not ctypes.c_void_p.from_address(params.extra).value:
        return []
    extra = (ctypes.c_void_p * 4).from_address(params.extra)
    options: dict[Any, Any] = {extra[0]: extra[1], extra[2]: extra[3]}
    size = ctypes.c_size_t.from_address(options[_BUFFER_SIZE]).value
    return [(0, ctypes.string_at(options[_BUFFER_POINTER], size))]


def _layout(params):
    """Offset and size of each parameter that a kernel declares."""
    function, name = (params.func, "cuFuncGetParamInfo") if int(params.func) else (params.kern, "cuKernelGetParamInfo")
    for index in range(_MAX_PARAMETERS):
        error, offset, size = getattr(cu, name)(function, index)
        if error == cu.CUresult.CUDA_ERROR_INVALID_VALUE:
            return
        check(name, error)
        yield offset, size


def memory_type(address: int) -> int | None:
    """Return the CUmemorytype of the memory at an 8-byte value; None where the driver knows none there."""
    error, kind = cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    return None if error else int(kind)


@cache
def _graph_launch():
    # The runtime's: Kineto leaves out launches by the driver's. ctypes does not hold Python's lock meanwhile.
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGraphLaunch


def launch(executable, stream: int) -> None:
    """Launch a CUgraphExec on a CUstream; DriverError where that fails."""
    check("launching a graph", _graph_launch()(ctypes.c_void_p(int(executable)), ctypes.c_void_p(stream)))
