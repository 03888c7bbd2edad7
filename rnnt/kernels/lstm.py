"""Launches of rnnt/kernels/lstm.cu: compiled by NVRTC at first use, launched cooperatively, which a graph can hold.

It uses cuda-bindings, which torch brings. torch.cuda._compile_kernel is private and launches no cooperative kernels;
Triton can neither keep mma operands in registers from step to step nor launch a cooperative grid.
"""

import ctypes
import functools
import struct
from pathlib import Path

import torch

from rnnt.config import LSTM_BATCH

SOURCE = Path(__file__).with_name("lstm.cu")
THREADS = 256
# Layers of a launch at most, and hidden units of a block, as in the source.
NUM_LAYERS, UNITS = 2, 16
# Blocks of a cluster backwards: 4, or fewer where a GPU has no room for so many together.
CLUSTER = 4
# Reads of about 0.5 us each, half a second in all; a time step takes 2 us.
PATIENCE = 2**20


# Layer and Work of the source: a layer's tensors, first time step and end; two layers and their common numbers.
LAYER, COMMON = "12P2i", "2Pf2i4x"
WORK = struct.Struct("@" + LAYER + LAYER + COMMON)


def require(device: torch.device, width: int) -> None:
    """Raises ValueError with the flag, --lstm, where the blocks of two layers cannot be on the GPU at once."""
    gpu = torch.cuda.get_device_properties(device)
    need = NUM_LAYERS * width // UNITS
    if gpu.major < 9 or gpu.multi_processor_count < need:
        raise ValueError(
            f"--lstm wavefront: takes a GPU of compute capability 9.0 or later and {need} multiprocessors, "
            f"{gpu.name} has {gpu.major}.{gpu.minor} and {gpu.multi_processor_count}: take cudnn"
        )


def prepare(exchanged):
    """Fill with EMPTY what blocks exchange: h before the forward, grad_gates before the backward, of all layers."""
    exchanged.view(torch.int16).fill_(-1)


def bind(layers, common):
    """The layers of a stack as `forward` and `backward` take them, once for all turns."""
    for layer in layers:
        # rnnt/lstm.py makes the other tensors.
        for tensor in filter(torch.is_tensor, (layer.given, layer.weights, layer.bias)):
            assert tensor.is_contiguous() and tensor.dtype == torch.float16
        assert layer.weights.data_ptr() % 16 == 0
    hidden, device = layers[0].weights.shape[1], _Device.of(layers[0].weights.device)
    # One size of cluster for all turns, so that sums have one order.
    cluster = _cluster(device.index, hidden)
    kernels = _kernels(device.index, hidden, cluster)
    return hidden, device, kernels, [pointers(layer) for layer in layers], shared(common, device.status)


def forward(stack, turn):
    """turn: (index, first time step, end) of each layer that runs side by side."""
    hidden, device, (kernel, _), layers, common = stack
    device.launch(kernel, len(turn) * hidden // UNITS, pack(layers, common, turn))


def backward(stack, turn):
    """turn: as in `forward`."""
    hidden, device, (_, kernel), layers, common = stack
    device.launch(kernel, len(turn) * hidden // UNITS, pack(layers, common, turn))


def pointers(layer):
    """Addresses of a layer's tensors, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in layer]


def shared(common, status):
    """The layers' common numbers, in the order of Work."""
    lengths = common.lengths
    if lengths is not None:
        assert lengths.dtype == torch.int32 and lengths.shape == (LSTM_BATCH,) and lengths.is_contiguous()
    address = 0 if lengths is None else lengths.data_ptr()
    return address, status.data_ptr(), common.scale, common.extra, common.num_steps


def pack(layers, common, turn):
    """The bytes of Work."""
    index, first, end = turn[0]
    other, other_first, other_end = turn[-1]
    return WORK.pack(*layers[index], first, end, *layers[other], other_first, other_end, *common)


def check(device: torch.device) -> None:
    """Wait for the current stream. Raises RuntimeError where a block waited in vain for another one, which made NaN."""
    if _Device.of(device).status.item():
        raise RuntimeError("rnnt/kernels/lstm.cu: a block waited in vain for another one, all results are void")


class _Device:
    """Kernels and the status word of one GPU."""

    def __init__(self, index):
        self.index = index
        # The first use is before a capture, so this is outside of a graph's pool.
        self.status = torch.zeros((), dtype=torch.int32, device=f"cuda:{index}")

    @staticmethod
    def of(device):
        return _device(torch.cuda.current_device() if device.index is None else device.index)

    def launch(self, kernel, num_blocks, work):
        from cuda.bindings import driver

        # One parameter; the driver copies it before it returns.
        held = ctypes.create_string_buffer(work, len(work))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        stream = driver.CUstream(torch.cuda.current_stream(self.index).cuda_stream)
        with torch.cuda.device(self.index):
            # Refused with an error where not all blocks fit on the GPU at once.
            _checked(
                driver.cuLaunchCooperativeKernel(
                    kernel, num_blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(parameters)
                )
            )


@functools.cache
def _device(index):
    return _Device(index)


@functools.cache
def _kernels(index, hidden, cluster):
    """(forward, backward) for layers of this width."""
    from cuda.bindings import driver

    image = compile_source(hidden, cluster, torch.cuda.get_device_capability(index))
    with torch.cuda.device(index):
        module = _checked(driver.cuModuleLoadData(image))
        return [_checked(driver.cuModuleGetFunction(module, name)) for name in (b"lstm_forward", b"lstm_backward")]


@functools.cache
def _cluster(index, hidden):
    """The largest size of cluster with which the blocks of two layers fit on the GPU at once."""
    from cuda.bindings import driver

    num_blocks, cluster = NUM_LAYERS * hidden // UNITS, CLUSTER
    while cluster > 1:
        _, kernel = _kernels(index, hidden, cluster)
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = num_blocks, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = THREADS, 1, 1
        launch.attrs, launch.numAttrs = [size], 1
        with torch.cuda.device(index):
            if _checked(driver.cuOccupancyMaxActiveClusters(kernel, launch)) * cluster >= num_blocks:
                break
        cluster //= 2
    return cluster


def compile_source(hidden: int, cluster: int, capability: tuple[int, int]) -> bytes:
    """Machine code for GPUs of this compute capability. Raises RuntimeError with the compiler's message."""
    from cuda.bindings import nvrtc

    options = ["--std=c++17", f"--gpu-architecture=sm_{capability[0]}{capability[1]}"]
    options += [f"-DHIDDEN={hidden}", f"-DCLUSTER={cluster}", f"-DPATIENCE={PATIENCE}u"]
    source = SOURCE.read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, SOURCE.name.encode(), 0, [], []))
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if failed:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{SOURCE.name}: {log.decode(errors='replace')}")
    image = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return image


def _checked(result):
    """The result of a call of cuda-bindings, without its status."""
    status, *values = result
    if status:
        raise RuntimeError(f"{SOURCE.name}: {status.name}")
    return values[0] if values else None
