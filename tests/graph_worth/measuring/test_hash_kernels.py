"""common/hash_kernels against the sum in plain torch: on a GPU, and through Triton's interpreter without one."""

import pytest
import torch

from tests.helpers.triton_interpreter import DEVICE, on_device, run_interpreted

pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.7.1")

CHUNK = 1 << 17


@on_device
@pytest.mark.parametrize("count", [0, 1, 37, 2049, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_the_sum_is_that_of_plain_torch(dtype, count):
    from graph_worth.measuring import hash_kernels, tensor_hash

    assert hash_kernels.CHUNK == CHUNK
    torch.manual_seed(count)
    bits = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1, (count,), dtype=dtype)
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)
    hash_kernels.add_hash_(total, bits.to(DEVICE), tensor_hash._ODD)
    assert total.item() == tensor_hash.tensor_hash(bits).item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_gpus_hash_is_the_hosts(dtype):
    from graph_worth.measuring.tensor_hash import tensor_hash

    for tensor in (torch.randn(3, 5, 7, 11), torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)):
        tensor = tensor.to(dtype)
        assert tensor_hash(tensor.cuda()).item() == tensor_hash(tensor).item()


@pytest.mark.gpu
def test_more_elements_than_an_int_counts():
    from graph_worth.measuring.tensor_hash import tensor_hash

    tensor = torch.zeros(2**31 + 5, dtype=torch.uint8, device="cuda")
    before = tensor_hash(tensor).item()
    tensor[-1] = 1
    # One more at the last place: its weight.
    weight = (2**31 + 5) * 0x1E3779B97F4A7C15 | 1
    assert (tensor_hash(tensor).item() - before - weight) % 2**64 == 0


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted(__file__)
