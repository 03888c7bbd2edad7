"""The format of 8-bit moments, and how it and bf16 weights are rounded, in plain torch.

low_byte_kernels.py has the same in Triton.
"""

import torch

# Elements that share a scale. A chunk of the kernels (fused_adam.TILES) has several.
BLOCK = 1024
LARGEST = 448.0  # of E4M3
SMALLEST_NORMAL = 2.0**-6
# The exponent's bias of FP32 less that of E4M3, in units of E4M3's last bit.
BIAS = (127 - 7) << 3
# Multipliers of the hash "lowbias32" (Chris Wellons, hash-prospector), and of what goes into it.
MIX = (0x7FEB352D, 0x846CA68B)
SPREAD = (0x9E3779B1, 0x85EBCA77)


def random_bits(step_count, number: int, like):
    """int64 with 32 random bits for each element of `like`, tensor `number`, in a step."""
    key = _mixed(step_count.long() * SPREAD[0] + number * SPREAD[1])
    return _mixed(torch.arange(like.numel(), device=like.device).view(like.shape) ^ key)


def _mixed(x):
    x = x & 0xFFFFFFFF
    for multiplier in MIX:
        x = x ^ (x >> (16 if multiplier == MIX[0] else 15))
        x = (x * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rounded_to_bf16(x, bits):
    """FP32 x with the bits that bf16 has, up where `bits`, 0 to 0xFFFF, carry over. Inf and NaN stay."""
    rounded = (x.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def decode(codes, scales):
    """FP32 values of uint8 codes."""
    magnitude = (codes & 0x7F).to(torch.int32)
    small = (magnitude < 8).to(torch.int32)
    value = ((magnitude + BIAS + small * 8) << 20).view(torch.float32) - small * SMALLEST_NORMAL
    value = torch.where(magnitude == 0x7F, torch.nan, value) * torch.where(codes > 0x7F, -1.0, 1.0)
    return (_in_blocks(value) * scales[:, None]).flatten()[: codes.numel()].view(codes.shape)


def encode_(codes, scales, values, bits):
    """Fill codes and scales from FP32 values; bits: 0 to 0xFF, random."""
    blocks = _in_blocks(values)
    torch.div(blocks.abs().amax(1), LARGEST, out=scales)
    scaled = torch.where(scales[:, None] == 0, 0.0, blocks.abs() / scales[:, None]).clamp(max=LARGEST)
    scaled = scaled.flatten()[: values.numel()].view(values.shape)
    # Below the normal numbers the spacing is that of the smallest ones.
    small = (scaled < SMALLEST_NORMAL).to(torch.int32)
    raw = (scaled + small * SMALLEST_NORMAL).view(torch.int32) + (bits.to(torch.int32) << 12) + 0x800
    magnitude = torch.where(scaled.isnan(), 0x7F, (raw >> 20) - BIAS - small * 8)
    codes.copy_(magnitude | torch.where(values < 0, 0x80, 0))


def _in_blocks(values):
    """[blocks, BLOCK] with zeros at the end."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
