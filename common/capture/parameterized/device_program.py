"""The kernel that changes parameters of graphs on the GPU, built without a compiler on the machine.

NVRTC compiles it, nvJitLink links it with the device runtime (libcudadevrt.a). torch depends on all three wheels.
"""

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

# Types of input of nvJitLink.
_CUBIN, _LIBRARY = 1, 6
# A kernel takes 32,764 bytes of parameters: the count, rows of a node, a place and a value, and the status.
MAX_ROWS = 1364
THREADS = 64
NAME = b"apply_updates"
_SOURCE = """
struct Rows { unsigned count; unsigned long long row[MAX_ROWS][3]; };
extern "C" __global__ void apply_updates(const __grid_constant__ Rows rows, int* status) {
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= rows.count) return;
    unsigned long long place = rows.row[index][1], value = rows.row[index][2];
    alignas(cudaGraphKernelNodeUpdate) unsigned char memory[sizeof(cudaGraphKernelNodeUpdate)];
    cudaGraphKernelNodeUpdate& update = *reinterpret_cast<cudaGraphKernelNodeUpdate*>(memory);
    update.node = reinterpret_cast<cudaGraphDeviceNode_t>(rows.row[index][0]);
    update.field = cudaGraphKernelNodeFieldParam;
    update.updateData.param.pValue = &value;
    update.updateData.param.offset = place & 0xffffffffu;
    update.updateData.param.size = place >> 32;
    int error = static_cast<int>(cudaGraphKernelNodeUpdatesApply(&update, 1));
    if (error) atomicCAS(status, 0, error);
}
"""


class Unavailable(RuntimeError):
    """The GPU cannot write addresses here; the message says what is missing."""


def _folders() -> list[Path]:
    """Return the folders in which pip puts the libraries of CUDA's wheels."""
    try:
        import nvidia
    except ImportError:
        return []
    return [folder for root in nvidia.__path__ for folder in sorted(Path(root).glob("*/lib"))]


def _find(pattern) -> Path:
    for folder in _folders():
        for found in sorted(folder.glob(pattern)):
            return found
    raise Unavailable(f"no {pattern} in the wheels of CUDA")


@functools.cache
def build(architecture: str) -> bytes:
    """Build the kernel.

    Args:
        architecture: of the GPU, such as sm_90.

    Returns:
        a cubin.

    Raises:
        Unavailable: a library is missing or refuses.
    """
    runtime = _find("libcudadevrt.a")
    linker = ctypes.CDLL(str(_find("libnvJitLink.so.*")))
    handle, option = c_void_p(), (c_char_p * 1)(f"-arch={architecture}".encode())
    compiled = _compile(architecture)
    _expect("nvJitLinkCreate", linker.nvJitLinkCreate(byref(handle), c_uint(1), option))
    try:
        data = (handle, c_int(_CUBIN), compiled, c_size_t(len(compiled)), b"updates")
        _expect("nvJitLinkAddData", linker.nvJitLinkAddData(*data))
        _expect("nvJitLinkAddFile", linker.nvJitLinkAddFile(handle, c_int(_LIBRARY), str(runtime).encode()))
        _expect("nvJitLinkComplete", linker.nvJitLinkComplete(handle))
        return _bytes(linker, "nvJitLinkGetLinkedCubin", handle)
    finally:
        linker.nvJitLinkDestroy(byref(handle))


def _compile(architecture) -> bytes:
    # NVRTC loads its own part by name, which works once it is loaded.
    ctypes.CDLL(str(_find("libnvrtc-builtins.so.*")), ctypes.RTLD_GLOBAL)
    compiler = ctypes.CDLL(str(_find("libnvrtc.so.*")))
    handle = c_void_p()
    options = (c_char_p * 3)(
        f"--gpu-architecture={architecture}".encode(),
        b"--relocatable-device-code=true",
        f"-DMAX_ROWS={MAX_ROWS}".encode(),
    )
    source = (byref(handle), _SOURCE.encode(), b"updates.cu", 0, None, None)
    _expect("nvrtcCreateProgram", compiler.nvrtcCreateProgram(*source))
    try:
        _expect("nvrtcCompileProgram", compiler.nvrtcCompileProgram(handle, c_int(len(options)), options))
        return _bytes(compiler, "nvrtcGetCUBIN", handle)
    finally:
        compiler.nvrtcDestroyProgram(byref(handle))


def _bytes(library, name, handle):
    """What a function of a library writes; another one, named so with Size, tells how long it is."""
    size = c_size_t()
    _expect(f"{name}Size", getattr(library, f"{name}Size")(handle, byref(size)))
    written = ctypes.create_string_buffer(size.value)
    _expect(name, getattr(library, name)(handle, written))
    return written.raw


def _expect(name, error):
    if error:
        raise Unavailable(f"{name} returned {error}")
