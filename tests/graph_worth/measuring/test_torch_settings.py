"""Settings of a worker on a GPU: cuBLAS is deterministic, and eager steps pay nothing for it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, torch
from graph_worth.measuring.torch_settings import WORKSPACE, deterministic_kernels, prepare
device = torch.device("cuda", 0)
prepare(device)
assert WORKSPACE not in os.environ
matrix = torch.ones(64, 64, device=device)
with deterministic_kernels():
    matrix @ matrix
"""


@pytest.mark.gpu
def test_products_are_deterministic_and_parse_no_variable():
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
