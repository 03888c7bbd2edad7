"""low_byte_adam.py's update in one pass over memory, for a GPU: 12 bytes a parameter with the norm's pass."""

import triton
import triton.language as tl

from common.training.optimizers.fused_adam import TRITON_DTYPES, FusedUpdate
from common.training.optimizers.hyperparameters import Hyperparameters
from common.training.optimizers.low_byte_format import BIAS, BLOCK, LARGEST, MIX, SMALLEST_NORMAL, SPREAD
from common.training.triton_launch import Launch

NUM_WARPS = 4


class LowByteUpdate(FusedUpdate):
    """Norm and update of many tensors, one launch each.

    Args:
        states: Lists of parameters, codes of both moments, and their scales.
        hyperparameters: Of all tensors.
        grads: Buffers of one dtype, in the parameters' shapes and strides.
    """

    def __init__(self, states, hyperparameters: Hyperparameters, grads):
        params = states[0]
        # The parameters are their own masters.
        super().__init__((params, params, *states[1:]), hyperparameters, grads)
        assert self.chunk % BLOCK == 0
        dtypes = [TRITON_DTYPES[tensor.dtype] for tensor in (grads[0], params[0])]
        fixed = (len(params), *hyperparameters.betas, hyperparameters.eps, self.chunk, BLOCK, *dtypes)
        self._update = Launch(_update, *fixed, num_warps=NUM_WARPS)

    def step(self, grads, scalars) -> None:
        """As `FusedUpdate.step`; the count of steps is a seed as well."""
        self._prepare((1, 1, 1), (self.scalars, *scalars))
        self._update(self.grid, (self.table, self._pointed[1], *self.chunks, self.scalars, scalars[0]))


@triton.jit
def _update(  # noqa: PLR0913
    table, grads, tensors, starts, sizes, scalars, count, num_tensors,
    beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr,
    grad_dtype: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Update a chunk of parameters, moments and scales. Rows of the table: params, params, codes, codes, scales."""
    tensor = tl.load(tensors + tl.program_id(0))
    # In 64 bits up to here; what follows counts from the chunk's start.
    start = tl.multiple_of(tl.load(starts + tl.program_id(0)), 16)
    left = tl.load(sizes + tensor) - start
    grad = tl.multiple_of(tl.load(grads + tensor).to(tl.pointer_type(grad_dtype)), 16) + start
    param = tl.multiple_of(tl.load(table + tensor).to(tl.pointer_type(dtype)), 16) + start
    first = tl.multiple_of(tl.load(table + 2 * num_tensors + tensor).to(tl.pointer_type(tl.uint8)), 16) + start
    root = tl.multiple_of(tl.load(table + 3 * num_tensors + tensor).to(tl.pointer_type(tl.uint8)), 16) + start
    first_scale = tl.load(table + 4 * num_tensors + tensor).to(tl.pointer_type(tl.float32)) + start // block
    root_scale = tl.load(table + 5 * num_tensors + tensor).to(tl.pointer_type(tl.float32)) + start // block
    key = _mixed(tl.load(count).to(tl.uint32) * _SPREAD0 + tensor.to(tl.uint32) * _SPREAD1)
    numbers = (tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3))
    # Whole chunks have no mask, which would keep accesses from being wide.
    if left >= chunk:
        for step in range(chunk // block):
            offset = step * block + tl.arange(0, block)
            bits = _mixed((start + offset).to(tl.uint32) ^ key)
            pointers = (grad + offset, param + offset, first + offset, root + offset)
            _update_block(
                pointers, first_scale + step, root_scale + step, numbers, bits, None, beta1, beta2, eps, dtype
            )  # fmt: skip
    else:
        for step in range(tl.cdiv(left.to(tl.int32), block)):
            offset = step * block + tl.arange(0, block)
            bits = _mixed((start + offset).to(tl.uint32) ^ key)
            pointers = (grad + offset, param + offset, first + offset, root + offset)
            _update_block(
                pointers, first_scale + step, root_scale + step, numbers, bits, offset < left, beta1, beta2, eps, dtype
            )  # fmt: skip


@triton.jit
def _update_block(  # noqa: PLR0913
    pointers, first_scale, root_scale, numbers, bits, inside,
    beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    grad, param, first, root = pointers
    factor, step_size, decay, root_bias2 = numbers
    g = _load(grad, inside).to(tl.float32) * factor
    p = _load(param, inside).to(tl.float32)
    m = _decoded(_load(first, inside)) * tl.load(first_scale)
    r = _decoded(_load(root, inside)) * tl.load(root_scale)
    m += (1.0 - beta1) * (g - m)
    r = tl.sqrt(beta2 * r * r + (1.0 - beta2) * g * g)
    p = p * decay - step_size * m / (r / root_bias2 + eps)
    if dtype == tl.bfloat16:
        p = _rounded(p, (bits & 0xFFFF).to(tl.int32))
    tl.store(param, p.to(dtype), mask=inside, eviction_policy="evict_first")
    scale = tl.max(tl.abs(m)) / _LARGEST
    code = _encoded(tl.abs(m), scale, ((bits >> 16) & 0xFF).to(tl.int32))
    tl.store(first, (code | tl.where(m < 0, 0x80, 0)).to(tl.uint8), mask=inside, eviction_policy="evict_first")
    tl.store(first_scale, scale)
    scale = tl.max(r) / _LARGEST
    code = _encoded(r, scale, (bits >> 24).to(tl.int32))
    # Rounded to zero, though it is none.
    code = tl.where((r > 0) & (code == 0), 1, code)
    tl.store(root, code.to(tl.uint8), mask=inside, eviction_policy="evict_first")
    tl.store(root_scale, scale)


@triton.jit
def _load(pointer, inside):
    if inside is None:
        return tl.load(pointer, eviction_policy="evict_first")
    else:
        return tl.load(pointer, mask=inside, other=0, eviction_policy="evict_first")


_SPREAD0, _SPREAD1 = (tl.constexpr(number) for number in SPREAD)
_MIX0, _MIX1 = (tl.constexpr(number) for number in MIX)
_BIAS, _LARGEST, _SMALLEST = (tl.constexpr(number) for number in (BIAS, LARGEST, SMALLEST_NORMAL))


@triton.jit
def _mixed(x):
    """32 random bits of uint32 x."""
    x ^= x >> 16
    x = (x * _MIX0).to(tl.uint32)
    x ^= x >> 15
    x = (x * _MIX1).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, bits):
    """FP32 x with the bits that bf16 has, up where `bits` carry over. Inf and NaN stay."""
    rounded = ((x.to(tl.int32, bitcast=True) + bits) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def _decoded(codes):
    magnitude = (codes & 0x7F).to(tl.int32)
    small = magnitude < 8
    raw = (magnitude + _BIAS + tl.where(small, 8, 0)) << 20
    value = raw.to(tl.float32, bitcast=True) - tl.where(small, _SMALLEST, 0.0)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(codes > 0x7F, -value, value)


@triton.jit
def _encoded(magnitude, scale, bits):
    """E4M3 code of magnitude / scale, int32 from 0 to 127."""
    scaled = tl.where(scale == 0.0, 0.0, magnitude / scale)
    is_number = scaled == scaled
    scaled = tl.minimum(scaled, _LARGEST)
    small = scaled < _SMALLEST
    raw = (scaled + tl.where(small, _SMALLEST, 0.0)).to(tl.int32, bitcast=True) + (bits << 12) + 0x800
    return tl.where(is_number, (raw >> 20) - _BIAS - tl.where(small, 8, 0), 0x7F)
