"""CUDA's driver by ctypes: the calls on graphs that parameterized launches need, with parameters as raw bytes.

The bindings of cuda-python copy each parameter into Python objects. A launch here changes words in place and hands the
driver the same structures again.
"""

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache

import torch

KERNEL, MEMCPY, MEMSET, EMPTY = 0, 1, 2, 5
NODE_KINDS = {
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host function",
    4: "child graph",
    5: "empty",
    6: "event wait",
    7: "event record",
    8: "semaphore signal",
    9: "semaphore wait",
    10: "memory allocation",
    11: "memory free",
    12: "batched memory operation",
    13: "conditional",
}
_INVALID_VALUE = 1
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("kernel_params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS of cuda.h."""

    _fields_ = (
        ("dst", c_ulonglong),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def _side(name):
    return [
        *((f"{name}_{axis}", c_size_t) for axis in ("x", "y", "z", "lod")),
        (f"{name}_type", c_uint),
        *((f"{name}_{place}", c_void_p) for place in ("host", "device", "array", "reserved")),
        (f"{name}_pitch", c_size_t),
        (f"{name}_height", c_size_t),
    ]


class MemcpyParams(ctypes.Structure):
    """CUDA_MEMCPY3D of cuda.h."""

    _fields_ = (
        *_side("src"),
        *_side("dst"),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


_PARAMS = {
    KERNEL: (KernelParams, "cuGraphKernelNodeGetParams_v2"),
    MEMCPY: (MemcpyParams, "cuGraphMemcpyNodeGetParams"),
    MEMSET: (MemsetParams, "cuGraphMemsetNodeGetParams"),
}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


@cache
def library() -> ctypes.CDLL:
    """Return libcuda, loaded so that a call keeps Python's lock: each takes about a microsecond."""
    return ctypes.PyDLL("libcuda.so.1")


def call(name: str, *args) -> None:
    """Call a function of the driver by its name in libcuda, with the version suffix; DriverError where it refuses."""
    check(name, getattr(library(), name)(*args))


def check(name: str, error: int) -> None:
    """Raise a DriverError for an error code that the function `name` returned, unless it is 0."""
    if error:
        text = c_char_p()
        library().cuGetErrorName(error, byref(text))
        raise DriverError(f"{name}: {text.value.decode() if text.value else error}")


def graph_nodes(graph: int) -> list[int]:
    """Return the CUgraphNode handles of a CUgraph's nodes, in the order in which they were made."""
    count = c_size_t()
    call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
    nodes = (c_void_p * count.value)()
    call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
    return list(nodes)


def node_kind(node: int) -> int:
    """Return the CUgraphNodeType of a node, a key of NODE_KINDS."""
    kind = c_int()
    call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    return kind.value


def params_of(node: int, kind: int):
    """Return the parameters of a kernel, copy or memset. The memory that a kernel's point to belongs to the node."""
    make, name = _PARAMS[kind]
    params = make()
    call(name, c_void_p(node), byref(params))
    return params


def kernel_name(params: KernelParams) -> str:
    """Return the mangled name of a kernel."""
    name = c_char_p()
    if params.func:
        call("cuFuncGetName", byref(name), c_void_p(params.func))
    else:
        call("cuKernelGetName", byref(name), c_void_p(params.kern))
    return (name.value or b"?").decode()


def kernel_arguments(params: KernelParams) -> list[tuple[int, bytes]]:
    """Return (offset in the kernel's parameter space, bytes) of each parameter, or of the packed buffer as one."""
    if params.kernel_params:
        pointers = (c_void_p * (1 << 12)).from_address(params.kernel_params)
        return [
            (offset, ctypes.string_at(pointers[index] or 0, size))
            for index, (offset, size) in enumerate(_layout(params))
        ]
    if not params.extra:
        return []
    options: dict[int, int] = {}
    place = params.extra
    while key := c_void_p.from_address(place).value:
        options[key] = c_void_p.from_address(place + 8).value or 0
        place += 16
    if _BUFFER_POINTER not in options:
        return []
    size = c_size_t.from_address(options[_BUFFER_SIZE]).value
    return [(0, ctypes.string_at(options[_BUFFER_POINTER], size))]


def _layout(params) -> list[tuple[int, int]]:
    """Offset and size of each parameter that a kernel declares."""
    name = "cuFuncGetParamInfo" if params.func else "cuKernelGetParamInfo"
    function = c_void_p(params.func or params.kern)
    offset, size = c_size_t(), c_size_t()
    layout: list[tuple[int, int]] = []
    while True:
        error = getattr(library(), name)(function, c_size_t(len(layout)), byref(offset), byref(size))
        if error == _INVALID_VALUE:
            return layout
        check(name, error)
        layout.append((offset.value, size.value))


def is_device_memory(kind: int, address: int | None) -> bool:
    """Return whether one side of a copy is device memory, not of the host or an array.

    kind: CUmemorytype of the side. address: the device or unified address.
    """
    if kind == 2:
        return True
    if kind != 4 or not address:
        return False
    memory_type = c_uint()
    error = library().cuPointerGetAttribute(byref(memory_type), c_int(2), c_ulonglong(address))
    return error == 0 and memory_type.value == 2


def is_address(value: int) -> bool:
    """Return whether the driver knows memory, of a device or pinned, at an 8-byte value."""
    memory_type = c_uint()
    return library().cuPointerGetAttribute(byref(memory_type), c_int(2), c_ulonglong(value)) == 0


def current_context() -> int:
    """Return the CUcontext of the calling thread."""
    context = c_void_p()
    call("cuCtxGetCurrent", byref(context))
    return context.value or 0


@cache
def _graph_launch():
    """A launch may wait for room in the queue, and does not hold Python's lock meanwhile.

    Kineto shows the runtime's launches and leaves out the driver's; the handles are the same. torch has loaded the
    runtime, but where it is linked into torch.
    """
    try:
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGraphLaunch
    except OSError:
        return ctypes.CDLL("libcuda.so.1").cuGraphLaunch


class Executable:
    """An instantiated copy of a CUgraph, which may be destroyed then; the copy's nodes are in the order of `nodes`."""

    def __init__(self, graph: int, nodes: list[int]):
        self._launch = _graph_launch()
        copy, handle = c_void_p(), c_void_p()
        call("cuGraphClone", byref(copy), c_void_p(graph))
        self._copy = copy
        self.nodes = []
        for node in nodes:
            found = c_void_p()
            call("cuGraphNodeFindInClone", byref(found), c_void_p(node), copy)
            self.nodes.append(found)
        try:
            call("cuGraphInstantiateWithFlags", byref(handle), copy, c_ulonglong(0))
        except BaseException:
            library().cuGraphDestroy(copy)
            raise
        self.handle = handle

    def launch(self, stream: int) -> None:
        """Launch on a CUstream; DriverError where that fails."""
        error = self._launch(self.handle, c_void_p(stream))
        if error:
            check("launching a graph", error)

    def destroy(self) -> None:
        """Free the executable and the copy. A launch under way is finished by the driver first."""
        if self.handle:
            call("cuGraphExecDestroy", self.handle)
            call("cuGraphDestroy", self._copy)
        self.handle = c_void_p()
