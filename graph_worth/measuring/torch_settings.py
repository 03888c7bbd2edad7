"""Settings of torch for a process that trains, whoever started it."""

import contextlib
import os
import warnings

import torch

# With it cuBLAS is deterministic. torch asks for it once, at the first matrix product.
WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
# torch tells it in words alone.
OTHER_KERNEL = ".*deterministic"


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
        if os.environ.get(WORKSPACE) == DETERMINISTIC:
            # torch 2.11 parses it again at each later product, which took an H200's host 65 to 81 us, and eager steps
            # would pay it. A workspace has 32 MiB on a Hopper GPU with and without it.
            torch.mm(*torch.ones(2, 16, 16, device=device))
            del os.environ[WORKSPACE]


@contextlib.contextmanager
def deterministic_kernels(where_there_are: bool = False):
    """Within it, kernels give the same bits each time; RuntimeError where an operator has no such kernel.

    where_there_are: such an operator runs, see `graph_worth.your_step.trial`.
    """
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    # As torch.use_deterministic_algorithms, which besides imports the compiler: seconds.
    torch.set_deterministic_debug_mode("warn" if where_there_are else "error")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", OTHER_KERNEL)
            yield
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.benchmark = benchmark
