"""NVFP4: Transformer Engine's recipe, and quantise-dequantise, the numerics of 4-bit GEMMs on any device.

Format of NVIDIA's NVFP4 (Transformer Engine 2.20, quantization_ref_nvfp4.py, 1 x 16 blocks, without Hadamard transform
and stochastic rounding, as MLPerf v5.1's llama2_70b_lora runs it): E2M1 values, one E4M3 scale for each 16 neighbours
along the dimension that a GEMM sums over, one FP32 scale a tensor, amax / (6 * 448), with which the largest block has
the scale 448. Rounding is to nearest, ties to even, in values and in scales.

    forward_weight, backward_weight = frozen_weight(weight)      once for each value of the weight
    y = F.linear(emulate(x), forward_weight)                     a GEMM in the dtype of x

That is as slow as it is exact. --precision nvfp4 computes in FP4 on compute capability 10.0; nvfp4_emulated has its
numbers. No emulating function reads a number on the host, so all of them can be captured.
"""

import math
from typing import NamedTuple

import torch

from graph_worth.made_variant import Unsupported

BLOCK = 16
CAPABILITY = (10, 0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# Elements that `emulate` rounds at a time: their FP32 copies are the memory that it needs besides.
CHUNK = 2**24
_FP32_MAX = torch.finfo(torch.float32).max


def require(device: torch.device, no_gemm: str = "") -> None:
    """Unsupported, in one line, where --precision nvfp4 cannot be computed.

    no_gemm: why it cannot be where the GPU could, or empty.
    """
    reason = "NVFP4 needs a GPU of compute capability 10.0 or higher"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY:
        from common.precision.transformer_engine import usable_transformer_engine

        available, te_reason = usable_transformer_engine().is_nvfp4_available(return_reason=True)
        if available and not no_gemm:
            return
        reason = no_gemm if available else te_reason
    raise Unsupported(f"--precision nvfp4: {reason}; nvfp4_emulated has its numbers")


def require_asked(precision: str) -> None:
    """Raise Unsupported if graph_step_nvfp4 is requested in another precision."""
    if not precision.startswith("nvfp4"):
        raise Unsupported("graph_step_nvfp4 needs --precision nvfp4_emulated, or nvfp4 on compute capability 10.0")


def recipe():
    """Transformer Engine's: no Hadamard transform, stochastic rounding or two-dimensional blocks, as in MLPerf v5.1."""
    from transformer_engine.common.recipe import NVFP4BlockScaling

    return NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)


class Quantized(NamedTuple):
    """values: FP32 [..., n], numbers of E2M1. block_scales: float8_e4m3fn [..., n / 16]. tensor_scale: FP32, 0-d."""

    values: torch.Tensor
    block_scales: torch.Tensor
    tensor_scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """FP32 [..., n]: value * block scale * tensor scale."""
        blocks = self.values.unflatten(-1, (-1, BLOCK))
        return (blocks * self.block_scales.float().unsqueeze(-1) * self.tensor_scale).flatten(-2)


def round_to_e2m1(tensor: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of each element, FP32 in and out.

    A tie goes to the number whose last bit is 0 (0, 1, 2, 4). Beyond 6 it is 6; NaN stays.
    """
    magnitude = tensor.abs().clamp(max=E2M1_MAX)
    # Numbers are 0.5 apart up to 2, then 1 up to 4, then 2. torch.round takes ties to even multiples of the step.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, tensor)


@torch.no_grad()
def quantize(tensor: torch.Tensor, amax: torch.Tensor | None = None) -> Quantized:
    """NVFP4 of a tensor [..., n] in blocks of 16 along the last dimension. ValueError where 16 does not divide n.

    amax: FP32, 0-d, of the tensor that this one is a part of, from which the tensor scale comes; default: its own.
    Blocks whose amax is at most 2^-10 / 448 of the tensor's become zero, since their E4M3 scale does. One element that
    is not finite makes all of the tensor NaN when it is dequantised.
    """
    if tensor.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 takes a multiple of {BLOCK} as last dimension, not the shape {tuple(tensor.shape)}")
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(-1, keepdim=True)
    amax = block_amax.amax() if amax is None else amax
    encode = (E2M1_MAX * E4M3_MAX / amax).clamp(max=_FP32_MAX)
    tensor_scale = 1.0 / encode
    # Multiplied, not divided by 6: CUDA divides by a number as it multiplies with its inverse, a CPU does not. What
    # rounding lifts above 448 would become NaN in a cast that does not saturate.
    block_scales = (block_amax * (encode * (1 / E2M1_MAX))).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    block_encode = (1.0 / (block_scales.float() * tensor_scale)).clamp(max=_FP32_MAX)
    values = round_to_e2m1(blocks * block_encode).flatten(-2)
    return Quantized(values, block_scales.squeeze(-1), tensor_scale)


@torch.no_grad()
def emulate(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` [..., n] rounded to NVFP4, in its own dtype (in bf16 the scaled value is rounded once more)."""
    out = torch.empty_like(tensor)
    amax = torch.linalg.vector_norm(tensor, math.inf).float()
    rows, out_rows = torch.atleast_2d(tensor), torch.atleast_2d(out)
    num_rows = max(1, CHUNK * len(rows) // max(1, rows.numel()))
    for part, out_part in zip(rows.split(num_rows), out_rows.split(num_rows), strict=True):
        out_part.copy_(quantize(part, amax).dequantize())
    return out


def frozen_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] rounded for y = x W^T, in blocks along `in`, and for dx = dy W, in blocks along `out`."""
    return emulate(weight), emulate(weight.t()).t()
