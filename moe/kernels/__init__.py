"""Triton kernels of the mixture of experts, each with plain torch beside it for a machine without a GPU."""
