"""Settings of torch's allocator and of NCCL that stand against captures of several ranks (no torch here)."""

from collections.abc import Mapping


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Return whether torch's allocator may move the memory behind addresses. environment: such as os.environ."""
    settings = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:True" in settings


def nccl_registers(environment: Mapping[str, str]) -> bool:
    """Return whether NCCL registers buffers in captures, which is its default. environment: such as os.environ."""
    return environment.get("NCCL_GRAPH_REGISTER", "") != "0"
