"""common/nvfp4: E2M1 against its table, blocks by hand and against FP8 casts, error bounds, capture."""

import math

import pytest
import torch

from common.precision import nvfp4
from graph_worth.capture.pool import Pool
from graph_worth.made_variant import Unsupported

# OCP Microscaling Formats 1.0, table of E2M1: codes 0 to 7, the eighth bit is the sign.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_e2m1(value):
    """By search over all codes: the nearest number, of two equally near ones that with an even code."""
    code = min(range(8), key=lambda code: (abs(abs(value) - E2M1[code]), code % 2))
    return -E2M1[code] if value < 0 else E2M1[code]


def test_rounding_agrees_with_a_search_over_all_numbers():
    values = [step / 64 for step in range(-8 * 64, 8 * 64 + 1)]
    rounded = nvfp4.round_to_e2m1(torch.tensor(values)).tolist()
    assert rounded == [nearest_e2m1(value) for value in values]


def test_rounding_keeps_signs_saturates_and_passes_nan():
    rounded = nvfp4.round_to_e2m1(torch.tensor([-0.0, -0.1, 1e9, float("-inf"), float("nan")]))
    assert torch.signbit(rounded)[:2].all() and rounded[:2].tolist() == [0, 0]
    assert rounded[2:4].tolist() == [6, -6] and rounded[4].isnan()


def test_blocks_computed_by_hand():
    # The tensor's amax is 2688 = 6 * 448, so its scale is 1 and block scales are amax / 6 in E4M3.
    tensor = torch.zeros(1, 48)
    tensor[0, :4] = torch.tensor([2688.0, 1344.0, -112.0, 1119.0])  # scale 448: 6, 3, -0.25 to -0, 2.498 to 2
    tensor[0, 16:19] = torch.tensor([6.0, -5.0, 3.5])  # scale 1: 6, tie to -4, tie to 4
    tensor[0, 32:35] = torch.tensor([6.3, 1.0, 0.27])  # scale 1.05 lies between 1 and 1.125: 1. 6.3 saturates
    quantized = nvfp4.quantize(tensor)
    assert quantized.tensor_scale == 1
    assert quantized.block_scales.float().tolist() == [[448.0, 1.0, 1.0]]
    assert quantized.values[0, :4].tolist() == [6, 3, 0, 2]
    assert quantized.values[0, 16:19].tolist() == [6, -4, 4]
    assert quantized.values[0, 32:35].tolist() == [6, 1, 0.5]
    expected = torch.zeros(1, 48)
    expected[0, :4] = torch.tensor([2688.0, 1344.0, 0.0, 896.0])
    expected[0, 16:19] = torch.tensor([6.0, -4.0, 4.0])
    expected[0, 32:35] = torch.tensor([6.0, 1.0, 0.5])
    assert torch.equal(quantized.dequantize(), expected)


# Positive numbers of E4M3 by their codes: below 2^-6 they are 2^-9 apart; 448 is the largest.
E4M3 = [2.0**-9 * mantissa for mantissa in range(8)]
E4M3 += [2.0 ** (exponent - 7) * (1 + mantissa / 8) for exponent in range(1, 16) for mantissa in range(8)][:-1]


def nearest(value, numbers):
    """By search: the nearest number, of two equally near ones that with an even code."""
    return min(enumerate(numbers), key=lambda each: (abs(value - each[1]), each[0] % 2))[1]


def block_scaled(rows):
    """NVFP4 of a list of lists by its definition, in FP64: E2M1 x E4M3 of each 16 x amax / (6 x 448) of all."""
    scale, result = max(abs(value) for row in rows for value in row) / (6 * 448), []
    for row in rows:
        result.append([])
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            own = nearest(max(map(abs, block)) / 6 / scale, E4M3) * scale
            result[-1] += [math.copysign(nearest(abs(value) / own, E2M1) * own, value) for value in block]
    return result


@pytest.mark.parametrize("spread", [0.0, 2.0], ids=["normal", "blocks of other sizes"])
def test_random_tensors_are_scaled_as_the_format_is_defined(spread):
    torch.manual_seed(0)
    tensor = torch.randn(16, 64) * torch.exp(spread * torch.randn(16, 4)).repeat_interleave(16, 1)
    expected = torch.tensor(block_scaled(tensor.double().tolist()))
    torch.testing.assert_close(nvfp4.quantize(tensor).dequantize(), expected, rtol=1e-6, atol=0)


def test_fp4_on_hopper_is_refused_in_one_line_without_transformer_engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(Unsupported) as refused:
        nvfp4.require(torch.device("cuda"))
    assert str(refused.value) == (
        "--precision nvfp4: NVFP4 needs a GPU of compute capability 10.0 or higher; nvfp4_emulated has its numbers"
    )


def test_block_scales_are_those_of_torchs_e4m3_cast():
    """All 126 positive finite E4M3 scales occur, and the midpoints between them, which go to the even neighbour."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    asked = torch.cat([scales, (scales[1:] + scales[:-1]) / 2])
    quantized = nvfp4.quantize((6 * asked)[:, None] * torch.ones(16))
    assert quantized.tensor_scale == 1
    assert torch.equal(quantized.block_scales[:, 0].float(), asked.to(torch.float8_e4m3fn).float())
    even = quantized.block_scales[126:, 0].view(torch.uint8) % 2 == 0
    assert even.all()


def test_what_is_a_number_of_the_format_stays_as_it_is():
    numbers = torch.tensor(E2M1 + [-number for number in E2M1])
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    tensor = scales[:, None] * numbers
    assert torch.equal(nvfp4.quantize(tensor).dequantize(), tensor)
    assert torch.equal(nvfp4.emulate(tensor.bfloat16()), tensor.bfloat16())


def test_error_of_random_numbers():
    tensor = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    emulated = nvfp4.emulate(tensor)
    assert emulated.dtype == torch.bfloat16
    # It does not depend on their magnitude.
    assert torch.equal(nvfp4.emulate(tensor * 2.0**-100), emulated * 2.0**-100)
    error = (emulated.float() - tensor.float()).abs().view(256, -1, 16)
    block_amax = tensor.float().abs().view(256, -1, 16).amax(-1, keepdim=True)
    # The widest gap of E2M1 is 2 of 6; a scale that is 2^-4 too small cuts as much off the largest.
    assert (error <= block_amax * (1 / 6) * (1 + 2**-4) * 1.01).all()
    relative = (error.norm() / tensor.float().norm()).item()
    # 0.095 of a million normal numbers; one scale for the whole tensor, without blocks, leaves 0.13.
    assert 0.085 < relative < 0.105
    scale = tensor.float().abs().amax() / 6
    without_blocks = nvfp4.round_to_e2m1(tensor.float() / scale) * scale - tensor.float()
    assert relative < 0.85 * without_blocks.norm() / tensor.float().norm()


def test_zeros_stay_zero_and_small_blocks_vanish():
    assert torch.equal(nvfp4.emulate(torch.zeros(2, 32)), torch.zeros(2, 32))
    tensor = torch.cat([torch.full((16,), 2688.0), torch.full((16,), 6 * 2.0**-10)])
    assert torch.equal(nvfp4.emulate(tensor)[16:], torch.zeros(16))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_shows_in_all_elements(bad):
    tensor = torch.ones(4, 32)
    tensor[1, 3] = bad
    assert nvfp4.emulate(tensor).isnan().all()


def test_a_dimension_that_16_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"a multiple of 16 as last dimension, not the shape \(4, 24\)"):
        nvfp4.quantize(torch.ones(4, 24))


def test_a_weight_is_rounded_along_the_dimension_that_each_gemm_sums_over():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    forward, backward = nvfp4.frozen_weight(weight)
    assert torch.equal(forward, nvfp4.emulate(weight)) and not torch.equal(forward, backward)
    assert torch.equal(backward, nvfp4.emulate(weight.t().contiguous()).t())


@pytest.mark.parametrize("shape", [(40, 64), (5, 6, 64)])
def test_a_chunk_of_rows_is_rounded_as_in_the_whole_tensor(monkeypatch, shape):
    """The largest element is in the last chunk."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    tensor.view(-1)[-1] = 50.0
    whole = nvfp4.quantize(tensor).dequantize().bfloat16()
    monkeypatch.setattr(nvfp4, "CHUNK", 3 * 64)
    assert torch.equal(nvfp4.emulate(tensor), whole)


def test_it_can_be_captured_and_replayed():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    graph, y = Pool(torch.device("cpu")).capture(lambda: nvfp4.emulate(x), (x,))
    x.mul_(torch.linspace(0.1, 9, 64))
    graph.replay()
    assert torch.equal(y, nvfp4.emulate(x))


@pytest.mark.gpu
def test_a_gpu_rounds_as_the_cpu_does_and_without_a_host_read():
    tensor = torch.randn(512, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    on_gpu, mode = tensor.cuda(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        emulated = nvfp4.emulate(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(emulated.cpu(), nvfp4.emulate(tensor))
