"""Operators of handwritten layers, in plain PyTorch and in Triton."""
