"""Settings of torch for a process that trains, whoever started it."""

import contextlib

import torch


def prepare(device: torch.device) -> None:
    """Seed, kernel choice and stream, before anything is built.

    Args:
        device: of this process. On a GPU everything runs on a side stream: captures need one, eager must not differ.
    """
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


@contextlib.contextmanager
def deterministic_kernels():
    """Within it, kernels give the same bits each time.

    Raises:
        RuntimeError: in the block, where an operator has no such kernel.
    """
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    # As torch.use_deterministic_algorithms, which besides imports the compiler: seconds.
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.benchmark = benchmark
