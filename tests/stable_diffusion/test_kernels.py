"""stable_diffusion/kernels against torch: on a GPU, and through Triton's interpreter without one."""

import runpy

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted

# (N, C, H, W, groups): tiles cut by the rows' end and by the columns' end; groups of sizes that are no power of two.
SHAPES = [(2, 320, 12, 8, 16), (1, 96, 8, 8, 32), (3, 40, 5, 3, 8)]


def relative(ours, theirs):
    return ((ours.float() - theirs).abs().max() / theirs.abs().max()).item()


def gradients(fn, inputs, grad):
    inputs = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs]
    y = fn(*inputs)
    return [y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


def check_group_norm(device, shape, silu, apply):
    n, c, h, w, groups = shape
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(n, c, h, w, generator=generator) + 5).half().to(device, memory_format=torch.channels_last)
    weight, bias = ((torch.randn(c, generator=generator)).half().to(device) for _ in range(2))
    grad = torch.randn(n, c, h, w, generator=generator).to(device, memory_format=torch.channels_last)

    def reference(x, weight, bias):
        y = F.group_norm(x, groups, weight, bias, 1e-5)
        return F.silu(y) if silu else y

    ours = gradients(lambda *inputs: apply(inputs[0], groups, *inputs[1:], 1e-5, silu), (x, weight, bias), grad)
    theirs = gradients(reference, [tensor.double() for tensor in (x, weight, bias)], grad.double())
    for name, a, b in zip(("y", "grad_x", "grad_weight", "grad_bias"), ours, theirs, strict=True):
        assert relative(a, b.float()) < 1.5e-3, (name, relative(a, b.float()))
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    assert ours[1].is_contiguous(memory_format=torch.channels_last)


def check_geglu(device, apply):
    """More rows than a block has, columns cut by the tile's end."""
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(3, 25, 2 * 300, generator=generator)).half().to(device)
    bias = torch.randn(2 * 300, generator=generator).half().to(device)
    grad = torch.randn(3, 25, 300, generator=generator).to(device)

    def reference(x, bias):
        value, gate = (x + bias).chunk(2, -1)
        return value * F.gelu(gate)

    ours = gradients(apply, (x, bias), grad)
    theirs = gradients(reference, (x.double(), bias.double()), grad.double())
    for name, a, b in zip(("y", "grad_x", "grad_bias"), ours, theirs, strict=True):
        assert relative(a, b.float()) < 1e-3, name


@on_device
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_group_norm_is_torchs_to_rounding(shape, silu):
    from stable_diffusion.kernels import _GroupNorm

    check_group_norm(DEVICE, shape, silu, _GroupNorm.apply)


@on_device
def test_geglu_is_torchs_to_rounding():
    from stable_diffusion.kernels import _Geglu

    check_geglu(DEVICE, _Geglu.apply)


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)


def test_without_a_gpu_they_are_torchs():
    from stable_diffusion.kernels import geglu, group_norm

    for shape in SHAPES:
        check_group_norm("cpu", shape, True, group_norm)
    check_geglu("cpu", geglu)


class TracedError(Exception):
    """A traced program cannot run here."""


def both_kernels(x, weight, bias, z, both):
    from stable_diffusion.kernels import _Geglu, _GroupNorm

    return _GroupNorm.apply(x, 8, weight, bias, 1e-5, True), _Geglu.apply(z, both)


def run_with_gradients(function):
    x = torch.randn(2, 32, 12, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias, both = (torch.ones(size, requires_grad=True) for size in (32, 32, 64))
    z = torch.randn(3, 10, 64, requires_grad=True)
    for y in function(x, weight, bias, z, both):
        y.sum().backward()


def traced_launches(function):
    """(name, grid, constants) of each kernel that torch.compile sees, forward and backward."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    traced = []

    def partition(graph, inputs, **options):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
                traced.append((kernel.fn.__name__, node.kwargs["grid"][0], constants))
        return min_cut_rematerialization_partition(graph, inputs, **options)

    def not_run(*inputs):
        raise TracedError

    backend = aot_autograd(fw_compiler=lambda graph, inputs: not_run, partition_fn=partition)
    with pytest.raises(TracedError):
        run_with_gradients(torch.compile(function, backend=backend))
    return traced


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_torch_compile_sees_each_kernel_as_eager_launches_it(monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")
    from graph_worth.capture import triton_launch
    from tests.helpers import triton_driver

    driver, eager = triton_driver.Driver(), []
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton_launch, "_current_device", driver.get_current_device)
    monkeypatch.setattr(triton_launch, "_current_stream", driver.get_current_stream)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)

    def noted(self, grid, tensors):
        names = self.kernel.arg_names[len(tensors) :]
        eager.append((self.kernel.fn.__name__, grid, dict(zip(names, self.fixed, strict=True))))

    with monkeypatch.context() as patched:
        patched.setattr(triton_launch.Launch, "__call__", noted)
        run_with_gradients(both_kernels)
    traced = traced_launches(both_kernels)
    assert len(eager) == 9 and not driver.launches
    assert sorted(map(str, traced)) == sorted(map(str, eager))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_the_source_that_torch_compile_copies_stands_alone(tmp_path):
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied

    from stable_diffusion import kernels

    own = {name: value for name, value in vars(kernels).items() if isinstance(value, triton.JITFunction)}
    assert len(own) > 9
    for name, kernel in own.items():
        path = tmp_path / f"{name}.py"
        # What torch's module for a user's kernel begins with, and its decorator, which stands in front of the source.
        path.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{copied(kernel)}")
        assert runpy.run_path(str(path))[name].arg_names == kernel.arg_names
