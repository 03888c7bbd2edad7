"""Handwritten layers as a GPU runs them, without one: tensors without memory, Triton kernels compiled and not launched.

Shapes, dtypes and layouts are checked by torch's meta kernels, launches by Triton's compiler. Nothing is computed.
"""

import contextlib
import itertools
import types
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")

from graph_worth.capture import triton_launch  # noqa: E402
from llama2_lora import state as states  # noqa: E402
from llama2_lora import train  # noqa: E402
from llama2_lora.config import PRESETS  # noqa: E402
from llama2_lora.kernels import triton_operators  # noqa: E402
from llama2_lora.kernels.attention import CudnnAttention, FlashAttention  # noqa: E402
from llama2_lora.kernels.triton_operators import TritonOperators  # noqa: E402
from tests.helpers import triton_driver  # noqa: E402
from tests.helpers.contracts import made  # noqa: E402
from tests.helpers.llama2_lora_case import all_ways  # noqa: E402
from tests.helpers.triton_interpreter import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
DEVICE = torch.device("meta")
devices = itertools.count(200)
# Heads as wide as flash attention takes them, weights that the transpose's tiles divide.
SMALL = replace(PRESETS["tiny"], hidden=256, head_dim=64, heads=4, kv_heads=2, ffn=512, vocab=512, sequence=128)


class Anything:
    """In place of a stream, an event or a graph: takes all calls and does nothing."""

    def __init__(self, *args, **options):
        """Ignore all arguments."""

    def __getattr__(self, name):
        return lambda *args, **options: None


class CpuGenerator(torch.Generator):
    """A generator of the CPU, for whichever device it is asked: tensors without memory draw nothing from it."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class ScaledMatrixProducts(TorchDispatchMode):
    """torch has a meta kernel for the FP8 GEMM that returns its result, and none for the one that is given a place."""

    num_calls = 0

    def __torch_dispatch__(self, func, types_, args=(), kwargs=None):
        options = dict(kwargs or {})
        if func is not torch.ops.aten._scaled_mm.out:
            return func(*args, **options)
        out = options.pop("out")
        result = torch.ops.aten._scaled_mm.default(*args, **options)
        assert (result.shape, result.dtype, result.stride()) == (out.shape, out.dtype, out.stride())
        # A scale for all of a matrix.
        assert all((scale.numel(), scale.dtype) == (1, torch.float32) for scale in args[2:4])
        self.num_calls += 1
        return out


@pytest.fixture
def gpu(monkeypatch):
    """Fake a GPU and return the recorded calls: `gemms`, `through_triton`, and `launches` of the driver."""
    driver, seen = triton_driver.Driver(), types.SimpleNamespace(through_triton=0, gemms=ScaledMatrixProducts())
    seen.launches, stream, default = driver.launches, Anything(), Anything()
    # Triton keeps kernels, with the driver that launches them, by device.
    driver.device = next(devices)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton_launch, "_current_device", driver.get_current_device)
    monkeypatch.setattr(triton_launch, "_current_stream", driver.get_current_stream)
    replaced = {"Stream": Anything, "Event": Anything, "CUDAGraph": Anything, "graph_pool_handle": lambda: (0, 1)}
    replaced |= {"synchronize": lambda: None, "empty_cache": lambda: None, "stream": contextlib.nullcontext}
    replaced |= {"current_stream": lambda: stream, "default_stream": lambda: default}
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", CpuGenerator)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(states, "operators_for", lambda device: TritonOperators)
    call, run, dtypes = triton_launch.Launch.__call__, triton_launch.JITFunction.run, {}

    def checked(self, grid, tensors, numbers=()):
        assert all(tensor.device == DEVICE for tensor in tensors)
        # A Launch does not look at them.
        own = [tensor.dtype for tensor in tensors]
        assert dtypes.setdefault(self, own) == own
        call(self, grid, tensors, numbers)

    def counted(self, *args, **options):
        seen.through_triton += 1
        return run(self, *args, **options)

    monkeypatch.setattr(triton_launch.Launch, "__call__", checked)
    monkeypatch.setattr(triton_launch.JITFunction, "run", counted)
    return seen


def make_state(config, monkeypatch):
    """Its layers keep as little as they can, something between, and everything."""
    between = " ".join(all_ways(config)[5])
    state = states.State(replace(config, keep=f"1 {between}, 1 all"), DEVICE, "handwritten")
    # tests/common/optimizers/test_fused_adam.py has it.
    monkeypatch.setattr(state.adam, "step", lambda: None)
    return state


@pytest.mark.parametrize(
    "changes",
    [{}, {"documents": "separate"}, {"precision": "bf16"}],
    ids=["fp8", "separate", "bf16"],
)
def test_steps_call_torch_and_triton_as_they_want_it(gpu, monkeypatch, changes):
    config = replace(SMALL, **changes)
    with gpu.gemms:
        state = make_state(config, monkeypatch)
        expected = FlashAttention if config.documents == "separate" else CudnnAttention
        assert isinstance(state.stack.attention, expected)
        train.eager_step(state, 0)
        first, gpu.through_triton = len(gpu.launches), 0
        bound = dict(state.stack.operators.bound)
        train.eager_step(state, 1)
        # All are prepared, and go the short way. No call has a tensor that the one in the step before had not.
        assert gpu.through_triton == 0 and first > 25 and len(gpu.launches) > 1.5 * first
        assert state.stack.operators.bound == bound and len(bound) > 25
        assert (gpu.gemms.num_calls > 40) == (config.precision != "bf16")
        for name in ("graph_layer", "graph_step"):
            variant = made("llama2_lora", name, state)
            assert len(variant.capture.pools[0].graphs) == variant.replays_of(0)
            variant.step(0)
            # As the canary does beside a graph.
            train.eager_step(state, 0)
            variant.close()
        assert gpu.through_triton == 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_kernels_compiled_for_hopper_have_wide_loads(gpu, monkeypatch, precision):
    """At the widths of the whole model: no kernel reads single numbers of 16 bits or less."""
    from tests.helpers.triton_compiling import Compiling, narrow_loads

    monkeypatch.setattr(triton_operators, "Launch", Compiling)
    monkeypatch.setattr(Compiling, "compiled", {})
    with gpu.gemms:
        train.eager_step(make_state(replace(PRESETS["bench"], layers=3, precision=precision), monkeypatch), 0)
    assert len({key[0] for key in Compiling.compiled}) == (10 if precision == "fp8" else 9)
    for key, compiled in Compiling.compiled.items():
        assert not narrow_loads(compiled), key
