"""Triton kernels in tests: on the GPU as they are, without one through Triton's interpreter in a process of its own.

A file of kernel tests marks its tests with `on_device`, puts its tensors on DEVICE and ends with

    def test_in_the_interpreter():
        run_interpreted(__file__)
"""

import importlib.util
import os

import numpy as np
import pytest
import torch

from tests.helpers import forked

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    from triton.runtime.interpreter import InterpreterBuilder

    # A GPU's max and min drop NaN; the interpreter's keep it.
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def on_device(test):
    return test if INTERPRETED else pytest.mark.gpu(test)


def run_interpreted(path: str) -> None:
    """Run the file's tests again where kernels are NumPy code."""
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernels")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton==3.7.1")
    # Triton decides when it is imported, so another process.
    result = forked.run("pytest", ["-q", "-rN", path], os.environ | {"TRITON_INTERPRET": "1"}, timeout_s=600)
    assert result.returncode == 0, result.stdout[-6000:]
