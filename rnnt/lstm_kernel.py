"""rnnt/lstm_kernel.cu on CUDA: compiled by NVRTC at its first use, launched cooperatively, which a graph can hold.

With cuda-bindings, which torch brings: torch's own torch.cuda._compile_kernel is private and launches no cooperative
kernels, and Triton has neither mma operands that stay in registers from step to step nor a cooperative grid of its own.
"""

import ctypes
import functools
from pathlib import Path

import torch

from rnnt.config import LSTM_BATCH

SOURCE = Path(__file__).with_name("lstm_kernel.cu")
THREADS = 256
# Hidden units of a block. Forwards few blocks read less, many multiply faster; backwards 16 are one operand's rows.
FORWARD_UNITS = 16
BACKWARD_UNITS = 16
# Blocks that share out what is exchanged backwards: 1, 2 or 4.
CLUSTER = 4
# Reads in vain, of about 0.5 us each: half a second, where a time step takes 2 us.
PATIENCE = 2**20


def require(device: torch.device, *widths: int) -> None:
    """ValueError where layers of these widths cannot run side by side: all blocks must be on the GPU at once."""
    gpu = torch.cuda.get_device_properties(device)
    need = sum(widths) // min(FORWARD_UNITS, BACKWARD_UNITS)
    if gpu.major < 9 or gpu.multi_processor_count < need:
        raise ValueError(
            f"--lstm persistent: takes a GPU of compute capability 9.0 or later and {need} multiprocessors, "
            f"{gpu.name} has {gpu.major}.{gpu.minor} and {gpu.multi_processor_count}: take cudnn"
        )


def forward(inputs, w_hh, b_hh, lengths=None, extra=0):
    """As rnnt.lstm.Steps.forward."""
    steps, hidden = len(inputs), w_hh.shape[1]
    h, cells, gates = (_unwritten(inputs, (steps, LSTM_BATCH, *shape)) for shape in ((hidden,), (hidden,), (hidden, 4)))
    _fill(h)
    device = _Device.of(inputs.device)
    kernel, _ = _kernels(device.index, hidden, FORWARD_UNITS, CLUSTER)
    tensors = inputs.contiguous(), w_hh, b_hh, h, cells, gates
    device.launch(kernel, hidden // FORWARD_UNITS, tensors, lengths, extra, steps)
    return h, cells, gates


def backward(grad, w_hh, cells, gates, lengths=None, extra=0):
    """As rnnt.lstm.Steps.backward."""
    steps, hidden = len(grad), w_hh.shape[1]
    grad_gates, grad_bias = (_unwritten(grad, (*shape, 4 * hidden)) for shape in ((steps, LSTM_BATCH), ()))
    _fill(grad_gates)
    device = _Device.of(grad.device)
    _, kernel = _kernels(device.index, hidden, FORWARD_UNITS, CLUSTER)
    tensors = grad, w_hh, cells, gates, grad_gates, grad_bias
    device.launch(kernel, hidden // BACKWARD_UNITS, tensors, lengths, extra, steps)
    return grad_gates, grad_bias


def check(device: torch.device) -> None:
    """Waits for the device. RuntimeError where a block has waited in vain for another one, which made results NaN."""
    if _Device.of(device).status.item():
        raise RuntimeError("rnnt/lstm_kernel.cu: a block waited in vain for another one, all results are void")


def _unwritten(like, shape):
    return torch.empty(shape, dtype=torch.float16, device=like.device)


def _fill(exchanged):
    """EMPTY in the kernel's words."""
    exchanged.view(torch.int16).fill_(-1)


class _Device:
    """Kernels and the status word of one GPU."""

    def __init__(self, index):
        self.index = index
        # Outside of any graph's pool: the first use is before a capture.
        self.status = torch.zeros((), dtype=torch.int32, device=f"cuda:{index}")

    @staticmethod
    def of(device):
        return _device(torch.cuda.current_device() if device.index is None else device.index)

    def launch(self, kernel, num_blocks, tensors, lengths, extra, steps):
        from cuda.bindings import driver

        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.dtype == torch.float16 and tensor.data_ptr() % 16 == 0
        if lengths is not None:
            assert lengths.dtype == torch.int32 and lengths.shape == (LSTM_BATCH,) and lengths.is_contiguous()
        pointers = *(tensor.data_ptr() for tensor in tensors), 0 if lengths is None else lengths.data_ptr()
        values = (*pointers, extra, steps, self.status.data_ptr())
        kinds = (*(ctypes.c_void_p for _ in pointers), ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
        stream = torch.cuda.current_stream(self.index).cuda_stream
        with torch.cuda.device(self.index):
            # Refused with an error where not all blocks fit on the GPU at once.
            _checked(
                driver.cuLaunchCooperativeKernel(
                    kernel, num_blocks, 1, 1, THREADS, 1, 1, 0, driver.CUstream(stream), (values, kinds)
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


def compile_source(hidden: int, forward_units: int, cluster: int, capability: tuple[int, int]) -> bytes:
    """Machine code for GPUs of this compute capability. RuntimeError with the compiler's words where it fails."""
    from cuda.bindings import nvrtc

    options = ["--std=c++17", f"--gpu-architecture=sm_{capability[0]}{capability[1]}"]
    options += [f"-DHIDDEN={hidden}", f"-DUNITS={forward_units}", f"-DCLUSTER={cluster}"]
    options += [f"-DPATIENCE={PATIENCE}u"]
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
    """What a call of cuda-bindings gave besides its status."""
    status, *values = result
    if status:
        raise RuntimeError(f"{SOURCE.name}: {status.name}")
    return values[0] if values else None
