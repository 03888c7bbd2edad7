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
@pytest.mark.parametrize("value", [":4096:8", None])
def test_products_are_deterministic_and_parse_no_variable(value):
    environment = {name: text for name, text in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    environment |= {"CUBLAS_WORKSPACE_CONFIG": value} if value else {}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == bool(value), done.stderr
    assert value or "deterministic" in done.stderr
