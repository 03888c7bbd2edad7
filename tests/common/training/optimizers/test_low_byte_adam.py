"""common/low_byte_adam against AdamW with FP32 masters, its rounding, and its kernels through Triton's interpreter."""

import pytest
import torch

from common.training.optimizers import low_byte_format
from common.training.optimizers.adam import MasterAdam
from common.training.optimizers.hyperparameters import Hyperparameters
from common.training.optimizers.low_byte_adam import LowByteAdam
from common.training.optimizers.low_byte_format import BLOCK, decode, encode_, rounded_to_bf16
from tests.helpers.triton_interpreter import DEVICE, INTERPRETED, on_device, run_interpreted

NUMBERS = Hyperparameters(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0)
# Two whole chunks of the kernels and a rest of more than a block, less than a block, one number.
SHAPES = [(2 * 8192 + BLOCK + 40, 1), (17,), (1,)]
CPU = torch.device("cpu")


def make(device=CPU, dtype=torch.bfloat16, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    adam = LowByteAdam(params, [torch.zeros_like(param) for param in params], NUMBERS)
    adam.reset()
    return adam


def fill(grads, step, size=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for grad in grads:
        # Of very different sizes, as gradients are.
        numbers = torch.randn(grad.shape, generator=generator)
        grad.copy_(numbers.sign() * numbers.abs() ** 3 * size)


def bits_of(count):
    return torch.arange(256).repeat(count // 256)


# --- rounding


def test_codes_hold_what_torchs_e4m3_holds():
    codes = torch.arange(256, dtype=torch.uint8)
    scale = torch.tensor([2.0])
    expected = 2 * codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(decode(codes, scale), expected, rtol=0, atol=0, equal_nan=True)
    finite = codes[~expected.isnan()]
    again, scales = torch.zeros_like(finite), torch.zeros(1)
    encode_(again, scales, decode(finite, scale), torch.full_like(finite, 255))  # what fits is not moved up
    assert float(scales) == 2.0 and torch.equal(again & 0x7F, finite & 0x7F)


@pytest.mark.parametrize("value", [300.7, 3.3, 2.0**-6 * 1.01, 2.0**-8 * 1.3, -17.1])
def test_moments_are_right_on_average(value):
    values = torch.full((BLOCK,), value)
    values[0] = 448.0  # the scale is 1
    codes, scales = torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(1)
    encode_(codes, scales, values, bits_of(BLOCK))
    rounded = decode(codes, scales)[256:]
    nearest = torch.tensor(value).to(torch.float8_e4m3fn).float()
    assert len(rounded.unique()) == 2 and nearest in rounded
    assert float(rounded.mean()) == pytest.approx(value, rel=2e-3)


def test_weights_are_right_on_average():
    value = torch.tensor(1.0 + 2.0**-7 / 3)
    rounded = rounded_to_bf16(value.expand(65536).contiguous(), torch.arange(65536))
    assert rounded.unique().tolist() == [1.0, 1.0 + 2.0**-7]
    assert float(rounded.double().mean()) == pytest.approx(float(value), rel=1e-6)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(rounded_to_bf16(odd, torch.full((3,), 0xFFFF)).nan_to_num(), odd.nan_to_num())


def test_random_bits_are_uniform_and_new_in_each_step_and_tensor():
    like = torch.zeros(1 << 16)
    drawn = [
        low_byte_format.random_bits(torch.tensor(float(step)), number, like)
        for step, number in ((1, 0), (2, 0), (1, 1))
    ]
    for each in drawn:
        # 32 bits, each of them set in half of the draws: within five standard deviations.
        means = torch.stack([(each >> bit & 1).double().mean() for bit in range(32)])
        assert (means - 0.5).abs().max() < 5 * 0.5 / 256
    for other in drawn[1:]:
        alike = ((drawn[0] >> 16) == (other >> 16)).double().mean()
        assert alike < 1e-3


# --- training


def test_it_trains_as_adamw_on_fp32_masters_does():
    """200 small steps, each of a fraction of bf16's spacing: on average weights go where masters go."""
    numbers = Hyperparameters(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    ours = LowByteAdam([torch.ones(4096, dtype=torch.bfloat16)], [torch.zeros(4096)], numbers)
    exact = MasterAdam([torch.ones(4096, dtype=torch.bfloat16)], [torch.zeros(4096)], numbers)
    for adam in (ours, exact):
        adam.reset()
        for step in range(200):
            adam.grads[0].copy_(1.0 + 0.1 * torch.randn(4096, generator=torch.Generator().manual_seed(step)))
            adam.step()
    moved, expected = (1.0 - adam.params[0].double().mean() for adam in (ours, exact))
    assert float(exact.masters[0].mean()) == pytest.approx(0.98, abs=1e-3)
    assert float(moved) == pytest.approx(0.02, rel=0.03) == float(expected)


def test_a_root_decays_by_less_than_its_spacing_and_is_never_zero():
    adam = LowByteAdam([torch.ones(BLOCK)], [torch.zeros(BLOCK)], NUMBERS)
    adam.grads[0].fill_(1e-3)
    adam.grads[0][0] = 1.0
    adam.grads[0][1] = 1e-12  # far below the block's least code
    adam.step()
    first = decode(adam.exp_avg_root[0], adam.exp_avg_root_scale[0])[2:].mean()
    for _ in range(8):
        adam.grads[0].zero_()
        adam.step()
    last = decode(adam.exp_avg_root[0], adam.exp_avg_root_scale[0])
    assert float(last[2:].mean() / first) == pytest.approx(0.95**4, rel=0.05)
    assert float(last[1]) > 0 and adam.params[0].isfinite().all()


def test_gradients_are_clipped():
    """As if they had been scaled before."""
    ours, scaled = make(dtype=torch.float32), make(dtype=torch.float32)
    fill(ours.grads, 0)
    for grad, own in zip(scaled.grads, ours.grads, strict=True):
        grad.copy_(own * 0.5 / torch.cat([each.flatten() for each in ours.grads]).norm())
    scaled.clip.fill_(0.25)
    ours.clip.fill_(0.25)
    for adam in (ours, scaled):
        adam.step()
    for (name, a), (_, b) in zip(ours.named_state(), scaled.named_state(), strict=True):
        if "scale" in name:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=0)


def test_a_gradient_that_is_not_finite_shows():
    adam = make()
    fill(adam.grads, 0)
    adam.grads[1][3] = torch.nan
    adam.step()
    assert adam.grad_norm.isnan() and adam.params[0].isnan().all()


def test_a_reset_trains_the_same_again():
    adam, results = make(), []
    start = [param.clone() for param in adam.params]
    for _ in range(2):
        torch._foreach_copy_(adam.params, start)
        adam.reset()
        for step in range(3):
            fill(adam.grads, step)
            adam.step()
        results.append([tensor.clone() for _, tensor in adam.named_state()] + [param.clone() for param in adam.params])
    assert all(map(torch.equal, *results))


# --- kernels


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_are_torchs(dtype):
    ours, torchs = make(torch.device(DEVICE), dtype), make(CPU, dtype)
    if ours._fused is None:
        ours._fused = ours._make_kernels()
    for step, size in enumerate([1.0, 1e-4, 1.0]):
        for adam in (ours, torchs):
            fill(adam.grads, step, size)
            adam.step()
        torch.testing.assert_close(ours.grad_norm.cpu(), torchs.grad_norm, rtol=1e-5, atol=0)
    assert ours.step_count.item() == 3
    # An FP32 sum that differs in its last bit may round otherwise: seldom, and by one code.
    for (name, a), (_, b) in zip(ours.named_state(), torchs.named_state(), strict=True):
        if a.dtype == torch.uint8:
            apart = (a.cpu().int() - b.int()).abs()
            assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3, name
        else:
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=0, msg=name)
    for a, b in zip(ours.params, torchs.params, strict=True):
        apart = ~torch.isclose(a.cpu().float(), b.float(), rtol=1e-6, atol=1e-6)
        assert apart.float().mean() < 1e-3
        # One code of both moments, an eighth each, is a quarter of an update; updates of three steps are about lr each.
        torch.testing.assert_close(a.cpu().float(), b.float(), rtol=1e-2, atol=0.25 * 3 * NUMBERS.lr)


@pytest.mark.gpu
def test_replays_round_as_eager_steps_do():
    from common.capture.pool import Pool

    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed, eager = make(device), make(device)
        for adam in (graphed, eager):
            fill(adam.grads, 0)
            adam.step()
        pool = Pool(device)
        graph, _ = pool.capture(graphed.step)
        for step in range(5):
            for adam in (graphed, eager):
                fill(adam.grads, step)
            graph.replay()
            eager.step()
        assert all(map(torch.equal, graphed.params, eager.params))
        for (name, a), (_, b) in zip(graphed.named_state(), eager.named_state(), strict=True):
            assert torch.equal(a, b), name
        pool.release()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
def test_the_kernel_compiles_for_hopper_without_spills(monkeypatch):
    from common.training.optimizers import fused_adam, low_byte_kernels
    from tests.helpers.triton_compiling import Compiling, resources, wide_accesses

    for module in (fused_adam, low_byte_kernels):
        monkeypatch.setattr(module, "Launch", Compiling)
    monkeypatch.setattr(Compiling, "compiled", {})
    adam = make(shapes=[(8, 8), (8, 8)])
    adam._make_kernels().step(adam.grads, [torch.zeros(()) for _ in range(6)])
    kernel = next(kernel for key, kernel in Compiling.compiled.items() if key[0] == "_update")
    used = resources(kernel)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128, used
    # Whole chunks: gradient and parameter 16 bytes at a time, moments 8.
    loads, stores = wide_accesses(kernel)
    assert loads >= 2 and stores >= 1, (loads, stores)


def test_in_the_interpreter():
    run_interpreted(__file__)
