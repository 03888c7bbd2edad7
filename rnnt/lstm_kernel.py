"""rnnt/lstm_kernel.cu on CUDA: compiled by NVRTC at its first use, launched cooperatively, which a graph can hold.

With cuda-bindings, which torch brings: torch's own torch.cuda._compile_kernel is private and launches no cooperative
kernels, and Triton has neither mma operands that stay in registers from step to step nor a cooperative grid of its own.
"""

import ctypes
import functools
import struct
from pathlib import Path

import torch

from common.announce import announced
from common.source import note_compiled
from rnnt.config import LSTM_BATCH

SOURCE = Path(__file__).with_name("lstm_kernel.cu")
THREADS = 256
# Hidden units of a block. Forwards few blocks read less, many multiply faster; backwards 16 are one operand's rows.
FORWARD_UNITS = 16
BACKWARD_UNITS = 16
# Blocks that share out what is exchanged backwards: 1, 2 or 4; fewer where a GPU has no places for so many together.
CLUSTER = 4
# Reads in vain, of about 0.5 us each: half a second, where a time step takes 2 us.
PATIENCE = 2**20


# Layer and Work of the source: a layer's tensors, its first time step and end; two of them, and what they share.
LAYER, COMMON = "12P2i", "2Pf2i4x"
WORK = struct.Struct("@" + LAYER + LAYER + COMMON)


def require(device: torch.device, which: str, *widths: int) -> None:
    """ValueError with the flag, --lstm `which`, where layers of these widths cannot run side by side.

    All their blocks must be on the GPU at once.
    """
    gpu = torch.cuda.get_device_properties(device)
    need = sum(widths) // min(FORWARD_UNITS, BACKWARD_UNITS)
    if gpu.major < 9 or gpu.multi_processor_count < need:
        raise ValueError(
            f"--lstm {which}: takes a GPU of compute capability 9.0 or later and {need} multiprocessors, "
            f"{gpu.name} has {gpu.major}.{gpu.minor} and {gpu.multi_processor_count}: take cudnn"
        )


def prepare(exchanged):
    """As rnnt.lstm.Steps.prepare: EMPTY in the kernels' words."""
    exchanged.view(torch.int16).fill_(-1)


def bind(layers, common):
    """As rnnt.lstm.Steps.bind."""
    for layer in layers:
        # What comes from elsewhere; the rest is made by rnnt/lstm.py.
        for tensor in (layer.given, layer.weights, *([] if layer.bias is None else [layer.bias])):
            assert tensor.is_contiguous() and tensor.dtype == torch.float16
        assert layer.weights.data_ptr() % 16 == 0
    hidden, device = layers[0].weights.shape[1], _Device.of(layers[0].weights.device)
    # One for all turns, so that sums have one order.
    cluster = _cluster(device.index, hidden, FORWARD_UNITS, CLUSTER, common.at_once)
    kernels = _kernels(device.index, hidden, FORWARD_UNITS, cluster)
    return hidden, device, kernels, [pointers(layer) for layer in layers], shared(common, device.status)


def forward(stack, turn):
    """As rnnt.lstm.Steps.forward."""
    hidden, device, (kernel, _), layers, common = stack
    device.launch(kernel, len(turn) * hidden // FORWARD_UNITS, pack(layers, common, turn))


def backward(stack, turn):
    """As rnnt.lstm.Steps.backward."""
    hidden, device, (_, kernel), layers, common = stack
    device.launch(kernel, len(turn) * hidden // BACKWARD_UNITS, pack(layers, common, turn))


def pointers(layer):
    """A layer's addresses, 0 for what is not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in layer.tensors()]


def shared(common, status):
    lengths = common.lengths
    if lengths is not None:
        assert lengths.dtype == torch.int32 and lengths.shape == (LSTM_BATCH,) and lengths.is_contiguous()
    address = 0 if lengths is None else lengths.data_ptr()
    return address, status.data_ptr(), common.scale, common.extra, common.num_steps


def pack(layers, common, turn):
    """Work of the source, in bytes."""
    index, first, end = turn[0]
    other, other_first, other_end = turn[-1]
    return WORK.pack(*layers[index], first, end, *layers[other], other_first, other_end, *common)


def check(device: torch.device) -> None:
    """Waits for the current stream. RuntimeError where a block waited in vain for another one, which made NaN."""
    if _Device.of(device).status.item():
        raise RuntimeError("rnnt/lstm_kernel.cu: a block waited in vain for another one, all results are void")


def forget(device: torch.device) -> None:
    """That a block waited in vain, for who tries something else then."""
    _Device.of(device).status.zero_()


class _Device:
    """Kernels and the status word of one GPU."""

    def __init__(self, index):
        self.index = index
        # Outside of any graph's pool: the first use is before a capture.
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
def _kernels(index, hidden, forward_units, cluster):
    """(forward, backward) for layers of this width."""
    from cuda.bindings import driver

    image = compile_source(hidden, forward_units, cluster, torch.cuda.get_device_capability(index))
    with torch.cuda.device(index):
        module = _checked(driver.cuModuleLoadData(image))
        return [_checked(driver.cuModuleGetFunction(module, name)) for name in (b"lstm_forward", b"lstm_backward")]


@functools.cache
def _cluster(index, hidden, forward_units, cluster, num_layers):
    """The largest size of cluster, `cluster` at most, of which the blocks of so many layers fit on the GPU at once."""
    from cuda.bindings import driver

    num_blocks = num_layers * hidden // BACKWARD_UNITS
    while cluster > 1:
        _, kernel = _kernels(index, hidden, forward_units, cluster)
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


def compile_source(hidden: int, forward_units: int, cluster: int, capability: tuple[int, int]) -> bytes:
    """Machine code for GPUs of this compute capability. RuntimeError with the compiler's words where it fails."""
    from cuda.bindings import nvrtc

    options = ["--std=c++17", f"--gpu-architecture=sm_{capability[0]}{capability[1]}"]
    options += [f"-DHIDDEN={hidden}", f"-DUNITS={forward_units}", f"-DCLUSTER={cluster}"]
    options += [f"-DPATIENCE={PATIENCE}u"]
    source = SOURCE.read_bytes()
    note_compiled(SOURCE)
    program = _checked(nvrtc.nvrtcCreateProgram(source, SOURCE.name.encode(), 0, [], []))
    with announced(f"compiles rnnt/{SOURCE.name}"):
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
    """What a call of cuda-bindings gave besides its status."""
    status, *values = result
    if status:
        raise RuntimeError(f"{SOURCE.name}: {status.name}")
    return values[0] if values else None
