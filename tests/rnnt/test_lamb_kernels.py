"""rnnt/kernels/lamb against plain torch: on a GPU, and through Triton's interpreter without one."""

import pytest
import torch

from tests.helpers.lamb_cases import equal, gradients, optimizer, parameters, state
from tests.helpers.triton_interpreter import DEVICE, on_device, run_interpreted


def with_kernels(dtype):
    from rnnt.kernels import lamb as lamb_kernels

    lamb = optimizer(parameters(dtype, DEVICE))
    lamb.moments, lamb.update = lamb_kernels.moments, lamb_kernels.update
    return lamb


# The interpreter cuts bfloat16 where a GPU rounds.
@on_device
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_against_plain_torch(dtype):
    host, device, again = optimizer(parameters(dtype)), with_kernels(dtype), with_kernels(dtype)
    for step in range(8):
        grads = gradients(step, size=3e-3 if step % 2 else 1.0, dtype=dtype)
        if step == 5:
            grads[1][77] = float("inf")
        before = state(device)
        host.step(grads)
        device.step([grad.to(DEVICE) for grad in grads])
        again.step([grad.to(DEVICE) for grad in grads])
        assert equal(state(device), state(again))
        assert equal(before, state(device)) == (step == 5)
        expected = state(host)
        for name, tensor in state(device).items():
            tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5} if name.startswith("param") else {}
            torch.testing.assert_close(
                tensor.cpu(), expected[name], **(tolerance or {"rtol": 1e-5, "atol": 1e-6}), msg=lambda m, n=name: n + m
            )


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
