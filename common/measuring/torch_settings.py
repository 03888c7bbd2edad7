"""Settings of torch for a process that trains, whoever started it."""

import contextlib
import re
import warnings

import torch

# torch tells it in words alone.
_OTHER_KERNEL = ".*deterministic"


def prepare(device: torch.device) -> None:
    """Seed, kernel choice and stream, before anything is built.

    On a GPU everything runs on a side stream: captures need one, eager must not differ.
    """
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


@contextlib.contextmanager
def deterministic_kernels(where_there_are: bool = False):
    """Within it, kernels give the same bits each time; RuntimeError where an operator has no such kernel.

    where_there_are: such an operator runs, see `noting_other_kernels`.
    """
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    # As torch.use_deterministic_algorithms, which besides imports the compiler: seconds.
    torch.set_deterministic_debug_mode("warn" if where_there_are else "error")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _OTHER_KERNEL)
            yield
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def noting_other_kernels():
    """Yield a list that gets the warnings of operators within it that have no deterministic kernel."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in seen if re.match(_OTHER_KERNEL, str(each.message))]


def current() -> dict:
    """Settings of torch that change what later steps compute or how fast they are; text, to be compared."""
    backends = torch.backends
    flags = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cudnn.deterministic": backends.cudnn.deterministic,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        "reduced precision in bf16": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "threads": torch.get_num_threads(),
        "flash attention": backends.cuda.flash_sdp_enabled(),
        "efficient attention": backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": backends.cuda.math_sdp_enabled(),
        "cudnn attention": backends.cuda.cudnn_sdp_enabled(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        flags["stream"] = torch.cuda.current_stream().cuda_stream
    return {name: str(value) for name, value in flags.items()}


def changes(before: dict, after: dict) -> str:
    """The settings that differ, in words, or ""."""
    return ", ".join(
        f"{name} {value} -> {after.get(name)}" for name, value in before.items() if after.get(name) != value
    )
