"""Adam on masters that the caller fills: moments and parameters in other formats, kernels in Triton's interpreter."""

import pytest
import torch

from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted

NUMBERS = Hyperparameters(lr=0.01, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, clip=1.0)
SHAPES = [(300, 33), (17,), (8, 16), (1,)]
CPU = torch.device("cpu")
# The interpreter cuts bits off where a GPU rounds to bf16.
LOW_PRECISION = torch.float16 if INTERPRETED else torch.bfloat16


def values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(device=CPU, grads=torch.float32, moments=torch.float32, write=False, **options):
    params = [torch.zeros(shape, dtype=LOW_PRECISION, device=device) for shape in SHAPES]
    writes = [param.copy_ if write else None for param in params]
    buffers = [torch.zeros(shape, dtype=grads, device=device) for shape in SHAPES]
    adam = Adam(params, NUMBERS, buffers, writes=writes, moments=moments, **options)
    begin(adam, values())
    return adam


def begin(adam, masters):
    for master, value in zip(adam.masters, masters, strict=True):
        master.copy_(value)
    adam.reset()


def fill(grads, step, size=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for grad in grads:
        grad.copy_(torch.randn(grad.shape, generator=generator) * size)


def test_with_fp32_gradients_and_moments_it_is_master_adam():
    ours = make()
    params = [torch.nn.Parameter(value.to(LOW_PRECISION)) for value in values()]
    torchs = Adam(params, NUMBERS, [torch.zeros(shape) for shape in SHAPES])
    for master, value in zip(torchs.masters, values(), strict=True):
        master.copy_(value)
    for step, size in enumerate([1.0, 1e-4, 0.01, 1.0]):
        for adam in (ours, torchs):
            adam.lr.fill_(0.01 * 0.7**step)
            fill(adam.grads, step, size)
            adam.step()
        torch.testing.assert_close(ours.grad_norm, torchs.grad_norm)
    for (name, a), (_, b) in zip(ours.named_state(), torchs.named_state(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    for param, master in zip(ours.params, ours.masters, strict=True):
        assert torch.equal(param, master.to(LOW_PRECISION))


def test_bf16_moments_are_fp32_ones_rounded():
    exact, rounded = make(), make(moments=torch.bfloat16, grads=torch.bfloat16)
    for adam in (exact, rounded):
        fill(adam.grads, 0)
        adam.step()
    for a, b in zip(rounded.exp_avg_sq, exact.exp_avg_sq, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=1e-7)
    assert all(master.dtype == torch.float32 for master in rounded.masters)


def test_weights_are_written_by_who_knows_their_format():
    written = []
    adam = Adam([torch.empty(0)], NUMBERS, [torch.ones(4)], writes=[written.append])
    begin(adam, [torch.full((4,), 2.0)])
    adam.step()
    assert len(written) == 2 and written[1] is adam.masters[0] and float(written[1][0]) < 2.0


def test_clipping_on_the_host_scales_the_gradients():
    host, device = make(clip_on_host=True), make()
    for adam in (host, device):
        fill(adam.grads, 0)
        adam.step()
    norm = torch.cat([grad.flatten() for grad in host.grads]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-4)
    for a, b in zip(host.masters, device.masters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@on_device
@pytest.mark.parametrize("grads, moments, write", [
    (torch.float32, torch.float32, False),
    (LOW_PRECISION, LOW_PRECISION, False),
    (LOW_PRECISION, LOW_PRECISION, True),
])  # fmt: skip
def test_the_kernels_are_torchs(grads, moments, write):
    ours, torchs = make(DEVICE, grads, moments, write), make(CPU, grads, moments, write)
    if ours._fused is None:
        from common.optimizers.fused_adam import FusedUpdate

        params = ours.masters if write else ours.params
        states = (params, ours.masters, ours.exp_avg, ours.exp_avg_sq)
        ours._fused = FusedUpdate(states, NUMBERS, ours.grads)
    for step, size in enumerate([1.0, 1e-2, 1.0]):
        for adam in (ours, torchs):
            fill(adam.grads, step, size)
            adam.step()
        torch.testing.assert_close(ours.grad_norm.cpu(), torchs.grad_norm, rtol=1e-5, atol=0)
    for (name, a), (_, b) in zip(ours.named_state(), torchs.named_state(), strict=True):
        low = a.dtype != torch.float32
        tolerance = {"rtol": 2e-2, "atol": 1e-4} if low or grads != torch.float32 else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(a.cpu().float(), b.float(), **tolerance, msg=name)
    for a, b in zip(ours.params, torchs.params, strict=True):
        torch.testing.assert_close(a.cpu().float(), b.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
