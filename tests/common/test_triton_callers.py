"""Whoever uses capture/triton_launch.py: each launch is the one that Triton would make, whatever came before it.

Kernels are compiled, and launches noted instead of made: tests/helpers/triton_driver.py.
"""

import types

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")

from graph_worth.capture import triton_launch  # noqa: E402
from tests.helpers import triton_driver  # noqa: E402
from tests.helpers.lamb_cases import optimizer, parameters  # noqa: E402
from tests.helpers.triton_interpreter import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
devices = iter(range(100))
F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32


def norm(shape, groups, eps, silu, dtype, of_weight):
    from stable_diffusion.kernels import _GroupNorm

    x = torch.randn(shape).to(dtype, memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.ones(shape[1], dtype=of_weight, requires_grad=True) for _ in range(2))
    _GroupNorm.apply(x, groups, weight, bias, eps, silu).sum().backward()


def geglu(shape, dtype):
    from stable_diffusion.kernels import _Geglu

    x, bias = (torch.randn(size).to(dtype).requires_grad_() for size in (shape, shape[-1:]))
    _Geglu.apply(x, bias).sum().backward()


def joint(frames, symbols, size, dropout, dtype):
    from rnnt.kernels.joint import JointHidden

    f, g = (torch.randn(2, length, size).to(dtype).requires_grad_() for length in (frames, symbols))
    JointHidden.apply(f, g, dropout).sum().backward()


def loss(frames, symbols, classes, dtype, blank=0):
    from rnnt.kernels.loss import TransducerLoss

    logits = torch.randn(2, frames, symbols, classes).to(dtype).requires_grad_()
    lengths = (torch.full((2,), length, dtype=torch.int32) for length in (frames, symbols - 1))
    TransducerLoss.apply(logits, torch.ones(2, symbols - 1, dtype=torch.int64), *lengths, blank).sum().backward()


def lamb(dtype, options):
    from rnnt.kernels import lamb as lamb_kernels

    one = optimizer(parameters(dtype))
    one.__dict__.update(options)
    lamb_kernels.moments(one)
    lamb_kernels.update(one)


# Calls of one function one after the other, each of which Triton compiles anew at least in part; and the number of
# launches of a call.
SHAPE = (2, 32, 8, 8)
CALLS = {
    "norm": (
        norm,
        6,
        [
            (SHAPE, 8, 1e-5, True, F16, F16),
            (SHAPE, 8, 1e-5, True, F32, F16),
            (SHAPE, 8, 1e-5, True, F16, F32),
            (SHAPE, 8, 1e-5, False, F16, F16),
            ((1, 24, 9, 8), 8, 1e-5, True, F16, F16),
        ],
    ),
    "geglu": (geglu, 3, [((2, 5, 64), F16), ((2, 5, 64), F32), ((10, 64), F16), ((2, 8, 40), F16)]),
    "joint": (joint, 2, [(5, 3, 64, 0.3, F16), (16, 16, 64, 0.0, F16), (1, 1, 64, 0.0, F32), (5, 3, 64, 0, F16)]),
    "loss": (loss, 3, [(5, 3, 16, F16), (16, 16, 16, F16), (2, 2, 16, F16), (5, 3, 16, F32), (5, 3, 24, F16, 1)]),
    "lamb": (lamb, 3, [(F16, {}), (B16, {}), (F16, {"eps": 1.0}), (F16, {"weight_decay": 0})]),
}


@pytest.fixture
def driver(monkeypatch):
    fake = triton_driver.Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    monkeypatch.setattr(triton_launch, "_current_device", fake.get_current_device)
    monkeypatch.setattr(triton_launch, "_current_stream", fake.get_current_stream)
    # What is kept from test to test is kept by device.
    fake.device += next(devices)
    return fake


@pytest.mark.parametrize(("function", "num_launches", "calls"), CALLS.values(), ids=CALLS)
def test_each_launch_is_tritons(driver, monkeypatch, function, num_launches, calls):
    seen = types.SimpleNamespace(prepared=0, through_triton=0)
    call, run = triton_launch.Launch.__call__, triton_launch.JITFunction.run

    def counted(self, *args, **kwargs):
        seen.through_triton += 1
        return run(self, *args, **kwargs)

    def compared(self, grid, tensors, numbers=()):
        before = seen.through_triton
        call(self, grid, tensors, numbers)
        seen.prepared += seen.through_triton == before
        self.kernel[grid](*tensors, *numbers, *self.fixed, **self.options)
        ours, theirs = map(triton_driver.plain, driver.launches[-2:])
        assert ours == theirs, (self.kernel, tensors, numbers)

    monkeypatch.setattr(triton_launch.JITFunction, "run", counted)
    monkeypatch.setattr(triton_launch.Launch, "__call__", compared)
    for arguments in 2 * calls:
        function(*arguments)
    assert len(driver.launches) == 2 * 2 * num_launches * len(calls)
    # The second time, all are prepared.
    assert seen.prepared >= num_launches * len(calls)
