"""The kernels of the experts: Triton's, and beside each plain torch for a machine without a GPU."""

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # a machine without a GPU
    triton = tl = None


def in_triton(tensor) -> bool:
    """Return whether kernels run: on a GPU, and in tests under Triton's interpreter (TRITON_INTERPRET=1)."""
    return tensor.is_cuda or (triton is not None and triton.knobs.runtime.interpret)
