"""A hash of a tensor: a position-weighted sum of its raw bits in 64-bit integers that wrap around.

It is exact, independent of the order of summation, different when one bit or two elements' places differ, and the same
on every device.
"""

import torch

CHUNK = 1 << 24
NUM_KEPT_WEIGHTS = 1 << 19
_ODD = 0x1E3779B97F4A7C15  # an odd multiplier spreads neighbouring positions over all 64 bits
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # narrower than the sum: .to() below copies


def tensor_hash(tensor: torch.Tensor) -> torch.Tensor:
    """0-d int64 tensor on the tensor's device; no host read. Bits are hashed, so -0.0 differs from 0.0."""
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_cuda:
        # Triton is imported where there is a GPU, and not where nothing needs it.
        from graph_worth.measuring.hash_kernels import add_hash_

        add_hash_(total, bits, _ODD)
        return total
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        if part.is_cpu and start + part.numel() <= NUM_KEPT_WEIGHTS:
            weight = _FIRST_WEIGHTS[start : start + part.numel()]
        else:
            weight = _weights(start, part.numel(), tensor.device)
        total += part.add_(1).mul_(weight).sum()
    return total


def _weights(start, count, device):
    """int64 [count]: the odd weights of positions start, start + 1, ..."""
    weight = torch.arange(start, start + count, device=device, dtype=torch.int64)
    return weight.mul_(_ODD).add_(_ODD).bitwise_or_(1)


# A host spends more time on weights than on the sums of small tensors, of which a state has thousands.
_FIRST_WEIGHTS = _weights(0, NUM_KEPT_WEIGHTS, "cpu")
